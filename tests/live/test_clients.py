"""Real clients against a whole plane of real processes: SDKs, curl, and load."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from controlplane.http_client import HttpClient
from lab.stack import LocalStack, StackOptions

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

TEXT = "one two three four five six seven eight nine ten " * 10
ASKED: Any = [{"role": "user", "content": TEXT}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TENANTS = """
[tenants.acme]
[tenants.narrow]
requests_max = 1
"""


@asynccontextmanager
async def plane(*router_flags: str, speed: float = 50.0) -> AsyncIterator[LocalStack]:
    """Two engines and a router."""
    engine = ("--speed", str(speed))
    options = StackOptions(engines=2, routers=1, engine_flags=engine, router_flags=router_flags)
    async with LocalStack(options) as stack:
        yield stack


async def nothing_running(stack: LocalStack) -> None:
    """Wait until neither the router nor an engine has a request."""

    async def idle(http: HttpClient) -> bool:
        state = await http.get(f"{stack.admin_urls[0]}/debug/state")
        truths = [await http.get(f"{each.url}/debug/blocks") for each in stack.fleet.instances]
        return state["models"]["tiny"]["tickets"] == 0 and not any(
            truth["running"] or truth["waiting"] for truth in truths
        )

    async with HttpClient() as http:
        await until(lambda: idle(http))


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float = 20.0) -> None:
    """Wait until an async condition holds; fail when it does not in time."""
    async with asyncio.timeout(deadline_s):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


async def test_the_openai_sdk_finds_everything_it_knows() -> None:
    """Chats, completions, responses, embeddings and models; whole, streamed, with tools."""
    async with plane() as stack:
        key = {"base_url": f"{stack.url}/v1", "api_key": "sk-any", "max_retries": 0}
        async with openai.AsyncOpenAI(**key) as client:
            await _chats(client)
            await _completions_and_responses(client)
            models = [model.id async for model in client.models.list()]
            assert models == ["tiny"]
            assert (await client.models.retrieve("tiny")).id == "tiny"
            vectors = await client.embeddings.create(
                model="tiny", input=[TEXT, "b"], encoding_format="float"
            )
            assert [item.index for item in vectors.data] == [0, 1]
            with pytest.raises(openai.NotFoundError, match="there is tiny"):
                await client.chat.completions.create(model="nope", messages=ASKED)
            with pytest.raises(openai.BadRequestError, match="context"):
                await client.completions.create(model="tiny", prompt="a b " * 200_000)
        await nothing_running(stack)


async def _chats(client: openai.AsyncOpenAI) -> None:
    chat = await client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=12)
    again = await client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=12)
    assert chat.choices[0].message.content == again.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens
    stream = await client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    called: Any = [
        *ASKED,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    tools = await client.chat.completions.create(
        model="tiny", messages=called, tools=[TOOL], tool_choice="auto", max_tokens=8
    )
    assert tools.choices[0].message.content


async def _completions_and_responses(client: openai.AsyncOpenAI) -> None:
    completion = await client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=5)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 3
    response = await client.responses.create(model="tiny", input=TEXT, max_output_tokens=9)
    assert response.usage is not None
    assert response.usage.output_tokens == 9
    async with client.responses.stream(model="tiny", input=TEXT, max_output_tokens=9) as events:
        kinds = [event.type async for event in events]
        assert (await events.get_final_response()).output_text == response.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


async def test_the_blocking_openai_sdk_works_too() -> None:
    """The client that most scripts use, from several threads at once."""

    def ask(number: int) -> int:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"{number} {TEXT}"}],
                max_tokens=10,
                stream=True,
            )
            return sum(1 for chunk in stream if chunk.choices)

    async with plane() as stack:
        url = stack.url
        counts = await asyncio.gather(*(asyncio.to_thread(ask, n) for n in range(8)))
        assert all(count >= 10 for count in counts)


async def test_a_client_that_stops_in_the_middle_stops_the_engine() -> None:
    """Closing a stream frees the engine, and the booking with it."""
    async with plane(speed=1.0) as stack:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x") as client:
            for _ in range(3):
                stream = await client.chat.completions.create(
                    model="tiny",
                    messages=ASKED,
                    max_tokens=4000,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
                await stream.close()
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.5, max_retries=0).chat.completions.create(
                    model="tiny",
                    messages=ASKED,
                    max_tokens=4000,
                    extra_body={"ignore_eos": True},
                )
        await nothing_running(stack)


async def test_the_anthropic_sdk_speaks_messages() -> None:
    """Whole and streamed messages, tools, token counts, errors."""
    async with plane() as stack:
        key = {"base_url": stack.url, "api_key": "sk-any", "max_retries": 0}
        async with anthropic.AsyncAnthropic(**key) as client:
            asked: Any = {"model": "tiny", "max_tokens": 12, "messages": ASKED}
            message = await client.messages.create(**asked, system="Be brief.")
            assert (message.role, message.stop_reason) == ("assistant", "max_tokens")
            assert message.usage.output_tokens == 12
            async with client.messages.stream(**asked, system="Be brief.") as stream:
                text = "".join([piece async for piece in stream.text_stream])
                final = await stream.get_final_message()
            assert text == message.content[0].text
            assert final.usage.cache_read_input_tokens
            tool = {"name": "weather", "description": "x", "input_schema": {"type": "object"}}
            assert (await client.messages.create(**asked, tools=[tool])).content
            count = await client.messages.count_tokens(model="tiny", messages=ASKED)
            assert count.input_tokens > 20
            with pytest.raises(anthropic.NotFoundError, match="there is tiny"):
                await client.messages.create(**{**asked, "model": "nope"})
        await nothing_running(stack)


async def test_keys_and_limits_as_the_sdks_see_them(tmp_path: Path) -> None:
    """A wrong key is an authentication error, a full tenant a rate limit with its time."""
    (tmp_path / "keys").write_text("sk-acme acme\nsk-narrow narrow\n")
    (tmp_path / "tenants.toml").write_text(TENANTS)
    flags = ("--api-keys", str(tmp_path / "keys"), "--tenants", str(tmp_path / "tenants.toml"))
    async with plane(*flags, speed=1.0) as stack:
        url = f"{stack.url}/v1"
        asked: Any = {"model": "tiny", "messages": ASKED, "max_tokens": 200}
        slow = {"extra_body": {"ignore_eos": True}}
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="sk-wrong", max_retries=0) as stranger,
            openai.AsyncOpenAI(base_url=url, api_key="sk-narrow", max_retries=0) as narrow,
            anthropic.AsyncAnthropic(base_url=stack.url, api_key="sk-acme") as acme,
            anthropic.AsyncAnthropic(base_url=stack.url, api_key="sk-wrong") as other,
        ):
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(**asked)
            with pytest.raises(anthropic.AuthenticationError):
                await other.messages.create(**asked)
            assert (await acme.messages.create(**{**asked, "max_tokens": 3})).content
            stream = await narrow.chat.completions.create(**asked, **slow, stream=True)
            with pytest.raises(openai.RateLimitError) as limited:
                await narrow.chat.completions.create(**asked)
            assert int(limited.value.response.headers["retry-after"]) >= 1
            await stream.close()
            patient = narrow.with_options(max_retries=5)
            few = {**asked, "max_tokens": 3}
            assert (await patient.chat.completions.create(**few)).choices


async def _run(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_curl_gets_plain_answers_and_streams(tmp_path: Path) -> None:
    """Also with `Expect: 100-continue`, as curl sends it for a body from a large file."""
    async with plane() as stack:
        url = f"{stack.url}/v1/chat/completions"
        body = tmp_path / "body.json"
        body.write_text(json.dumps({"model": "tiny", "messages": ASKED, "max_tokens": 5}))
        answer = await _run("curl", "-sS", "--fail", url, "-d", f"@{body}")
        assert json.loads(answer)["usage"]["completion_tokens"] == 5
        chunked = ("-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue")
        answer = await _run("curl", "-sS", "--fail", url, *chunked, "-d", f"@{body}")
        assert json.loads(answer)["usage"]["completion_tokens"] == 5
        old = await _run("curl", "-sS", "--fail", "--http1.0", url, "-d", f"@{body}")
        assert json.loads(old)["usage"]["completion_tokens"] == 5
        body.write_text(json.dumps({**json.loads(body.read_text()), "stream": True}))
        stream = await _run("curl", "-sSN", "--fail", url, "-d", f"@{body}")
        assert stream.endswith("data: [DONE]\n\n")
        head = await _run("curl", "-sS", "--head", f"{stack.url}/health")
        assert "200 OK" in head


async def test_load_over_many_connections_leaves_no_error(tmp_path: Path) -> None:
    """A few seconds of wrk, or of our own load where there is no wrk, are answered in full."""
    async with plane() as stack:
        if shutil.which("wrk"):
            script = tmp_path / "post.lua"
            script.write_text(
                'wrk.method = "POST"\n'
                """wrk.body = '{"model":"tiny","prompt":"one two three","max_tokens":3}'\n"""
            )
            url = f"{stack.url}/v1/completions"
            said = await _run(
                "wrk", "-t1", "-c16", "-d3", "--timeout", "20", "-s", str(script), url
            )
            assert "Non-2xx" not in said, said
            assert "Socket errors" not in said, said
            requests = int(re.search(r"(\d+) requests in", said)[1])  # type: ignore[index]
            assert requests > 50
        else:
            code = (
                "import asyncio, sys\n"
                "from bench.proxy_load import run_load\n"
                'body = b\'{"model":"tiny","prompt":"one two three","max_tokens":3}\'\n'
                "request = b'POST /v1/completions HTTP/1.1\\r\\nHost: t\\r\\nContent-Length: %d"
                "\\r\\n\\r\\n%b' % (len(body), body)\n"
                "load = run_load(int(sys.argv[1]), request, requests=500, concurrency=16)\n"
                "print(asyncio.run(load).errors)\n"
            )
            assert (await _run(sys.executable, "-c", code, str(stack.port))).strip() == "0"
        await nothing_running(stack)
