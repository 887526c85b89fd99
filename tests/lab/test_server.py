"""The emulated server over HTTP, as a client and a sidecar see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from controlplane.core.hashing import Extras, chain, pack_tokens
from tests.lab.server_helpers import Client, eventually, serving

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}]}
PROMPT = list(range(300, 340))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A server with nothing special."""
    async with serving() as made:
        yield made


async def test_chat_answers_in_openai_form(client: Client) -> None:
    """A chat gets one choice, the asked number of tokens and a usage that adds up."""
    answer = await client.ok(CHAT, {**HELLO, "max_tokens": 6})
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = answer["usage"]
    assert usage["completion_tokens"] == 6
    assert usage["total_tokens"] == usage["prompt_tokens"] + 6
    assert answer["object"] == "chat.completion"


async def test_streamed_and_whole_answers_are_the_same(client: Client) -> None:
    """The same prompt gets the same text and tokens, streamed or not."""
    body = {**HELLO, "max_tokens": 8, "return_token_ids": True}
    whole = await client.ok(CHAT, body)
    chunks = await client.stream(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    deltas = [chunk["choices"][0] for chunk in chunks[1:-1]]
    text = "".join(delta["delta"]["content"] for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert [token for delta in deltas for token in delta["token_ids"]] == (
        whole["choices"][0]["token_ids"]
    )
    assert [delta["finish_reason"] for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8


async def test_usage_in_every_chunk_on_request(client: Client) -> None:
    """`continuous_usage_stats` counts up to the end, and without `include_usage` none follows."""
    options = {"stream_options": {"continuous_usage_stats": True}}
    chunks = await client.stream(COMPLETION, {"prompt": PROMPT, "max_tokens": 5, **options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_completion_takes_text_and_token_ids(client: Client) -> None:
    """A text and its token ids are the same prompt; the second one hits the first one's blocks."""
    text = "A prompt of some length. " * 20
    ids = (await client.ok("/tokenize", {"prompt": text}))["tokens"]
    first = await client.ok(COMPLETION, {"prompt": text, "max_tokens": 3})
    second = await client.ok(COMPLETION, {"prompt": ids, "max_tokens": 3})
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert second["usage"]["prompt_tokens"] == len(ids)
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (len(ids) - 1) // 16 * 16


async def test_next_turn_hits_the_generated_answer(client: Client) -> None:
    """An answer that comes back in the next turn's prompt is found cached, block for block."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me a story. " * 8}]
    body = {"messages": messages, "max_tokens": 64, "ignore_eos": True, "return_token_ids": True}
    first = await client.ok(CHAT, body)
    answer = first["choices"][0]
    messages += [answer["message"], {"role": "user", "content": "Go on."}]
    second = await client.ok(CHAT, body)
    held = len(first["prompt_token_ids"]) + len(answer["token_ids"]) - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == held // 16 * 16


async def test_answer_ends_by_itself(client: Client) -> None:
    """Without a limit an answer ends with the end-of-sequence token, which its text leaves out."""
    answer = await client.ok(CHAT, {**HELLO, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] == 2
    assert "<|im_end|>" not in choice["message"]["content"]


async def test_stop_string_ends_the_answer(client: Client) -> None:
    """The text ends before the stop string, which is named as the reason."""
    body = {**HELLO, "max_tokens": 30, "ignore_eos": True}
    text = (await client.ok(CHAT, body))["choices"][0]["message"]["content"]
    stop = text.split()[7]
    (choice,) = (await client.ok(CHAT, {**body, "stop": ["no such", stop]}))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["message"]["content"] == text[: text.find(stop)]


async def test_one_prompt_in_a_list_is_one_prompt(client: Client) -> None:
    """A list that holds one text, or one list of tokens, is taken as that prompt."""
    texts = [
        (await client.ok(COMPLETION, {"prompt": prompt, "max_tokens": 3}))["choices"][0]["text"]
        for prompt in (PROMPT, [PROMPT])
    ]
    assert texts[0] == texts[1]


async def test_streamed_completion_shows_token_ids_on_request(client: Client) -> None:
    """The first chunk has the prompt's tokens, and each chunk its own."""
    body = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
    chunks = [chunk["choices"][0] for chunk in await client.stream(COMPLETION, body)]
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert sum(len(chunk["token_ids"]) for chunk in chunks) == 4


async def test_chat_stream_counts_usage_from_the_opening(client: Client) -> None:
    """With continuous usage a chat's opening chunk counts no token yet."""
    body = {**HELLO, "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}}
    chunks = await client.stream(CHAT, body)
    assert chunks[0]["usage"]["completion_tokens"] == 0
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_stream_interval_sends_several_tokens_at_once() -> None:
    """With an interval of 4 the first token comes alone, then four at a time, then the rest."""
    async with serving(stream_interval=4, speed=5.0) as client:
        body = {"prompt": PROMPT, "max_tokens": 11, "return_token_ids": True}
        chunks = await client.stream(COMPLETION, body)
        sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
        assert sizes == [1, 4, 4, 2]


async def test_request_id_becomes_the_answers_id(client: Client) -> None:
    """X-Request-Id names the answer, and two requests may carry the same."""
    body = {"prompt": PROMPT, "max_tokens": 20}
    header = {"X-Request-Id": "abc-1"}
    pair = [client.ok(COMPLETION, body, **header) for _ in range(2)]
    assert [answer["id"] for answer in await asyncio.gather(*pair)] == ["cmpl-abc-1"] * 2


async def test_openai_client_is_served(client: Client) -> None:
    """OpenAI's own client lists models, chats, streams and maps errors."""
    async with openai.AsyncOpenAI(base_url=f"{client.url}/v1", api_key="none") as real:
        assert [model.id async for model in real.models.list()] == ["tiny"]
        stream = await real.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=4,
            stream=True,
        )
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await real.completions.create(model="other", prompt="hi")


async def test_blocks_are_the_ones_a_router_would_name(client: Client) -> None:
    """The cache's truth, in our hashes, is the chain over the prompt's tokens."""
    await client.ok(COMPLETION, {"prompt": PROMPT, "max_tokens": 1})
    held = await client.get("/debug/blocks")
    assert held["block_hashes"] == sorted(chain(pack_tokens(PROMPT), 16))
    assert not set(held["block_hashes"]) & set(held["engine_hashes"])
    assert held["next_seq"] == 1


async def test_salt_and_adapter_separate_caches() -> None:
    """A cache salt or an adapter makes other blocks of the same tokens."""
    async with serving(loras=["style"]) as client:
        await client.ok(COMPLETION, {"prompt": PROMPT, "max_tokens": 1})
        salted = {"prompt": PROMPT, "max_tokens": 1, "cache_salt": "t"}
        adapted = {"prompt": PROMPT, "max_tokens": 1, "model": "style"}
        for body in (salted, adapted):
            answer = await client.ok(COMPLETION, body)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        held = set((await client.get("/debug/blocks"))["block_hashes"])
        for extras in (Extras(), Extras(salt="t"), Extras(lora="style")):
            assert set(chain(pack_tokens(PROMPT), 16, extras=extras)) <= held
        listed = (await client.get("/v1/models"))["data"]
        assert [(each["id"], each["parent"]) for each in listed] == [
            ("tiny", None),
            ("style", "tiny"),
        ]


async def test_hang_up_frees_the_engine(client: Client) -> None:
    """A client that leaves mid-stream is out of the batch and the load at once."""
    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with client.session.post(client.url + COMPLETION, json=body) as answer:
        await answer.content.readline()
        assert (await client.get("/load")) == {"server_load": 1}
        answer.close()

    async def idle() -> bool:
        held = await client.get("/debug/blocks")
        return held["running"] == 0 and await client.get("/load") == {"server_load": 0}

    await eventually(idle)
    assert await client.metric("vllm:request_success_total", 'finished_reason="length"') == 0


async def test_load_is_immediate_and_gauges_lag_a_step() -> None:
    """`/load` counts a request when it came; the gauges follow when a step's outputs are due."""
    async with serving(speed=0.02) as client:
        body = {"prompt": PROMPT, "max_tokens": 2}
        waiting = asyncio.create_task(client.post(COMPLETION, body))

        async def loaded() -> bool:
            return bool((await client.get("/load"))["server_load"] == 1)

        await eventually(loaded)
        assert await client.metric("vllm:num_requests_running") == 0

        async def shown() -> bool:
            return await client.metric("vllm:num_requests_running") == 1

        await eventually(shown)
        await waiting
        assert await client.metric("vllm:num_requests_running") == 0


async def test_metrics_count_tokens(client: Client) -> None:
    """Prompt, hit and generated tokens are counted once each, and each request's times observed."""
    for _ in range(2):
        await client.ok(COMPLETION, {"prompt": PROMPT, "max_tokens": 4})
    assert await client.metric("vllm:prompt_tokens_total") == 80
    assert await client.metric("vllm:prompt_tokens_cached_total") == 32
    assert await client.metric("vllm:prefix_cache_hits_total") == 32
    assert await client.metric("vllm:generation_tokens_total") == 8
    assert await client.metric("vllm:request_success_total", 'finished_reason="length"') == 2
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert await client.metric(f"vllm:{histogram}_count") == 2
    assert await client.metric("vllm:inter_token_latency_seconds_count") == 6
    assert await client.metric("vllm:cache_config_info", 'num_gpu_blocks="257"') == 1


async def test_queue_limit_answers_503() -> None:
    """Beyond the limit a request is refused at once and counted; below it they are served."""
    async with serving(max_num_queued_reqs=2, speed=1.0) as client:
        body = {"prompt": PROMPT, "max_tokens": 8}
        answers = await asyncio.gather(*(client.post(COMPLETION, body) for _ in range(4)))
        assert sorted(status for status, _ in answers) == [200, 200, 503, 503]
        refused = next(answer for status, answer in answers if status == 503)
        assert refused["error"]["code"] == 503
        assert await client.metric("vllm:admission_rejections_total") == 2


async def test_key_is_asked_for_under_v1_only() -> None:
    """Without the key `/v1` answers 401, while health stays open."""
    async with serving(api_key="secret") as client:
        status, answer = await client.post(CHAT, HELLO)
        assert (status, answer) == (401, {"error": "Unauthorized"})
        bearer = {"Authorization": "Bearer secret"}
        assert (await client.post(CHAT, {**HELLO, "max_tokens": 1}, **bearer))[0] == 200
        async with client.session.get(f"{client.url}/health") as health:
            assert health.status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, b"{", 400, "cannot be read"),
        (CHAT, {"messages": []}, 400, "must not be empty"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "model": "m"}, 404, "`m`"),
        (CHAT, {**HELLO, "n": 2}, 400, "one choice"),
        (CHAT, {**HELLO, "max_tokens": 0}, 400, "max_tokens must be at least 1"),
        (CHAT, {**HELLO, "continue_final_message": True}, 400, "with add_generation_prompt"),
        (CHAT, {**HELLO, "chat_template": "{{ raise_exception('no') }}"}, 400, "template_error"),
        (CHAT, {**HELLO, "chat_template": "{% if %}"}, 400, "does not compile"),
        (COMPLETION, {"prompt": [7] * 5000}, 400, "maximum context length is 4096"),
        (COMPLETION, {"prompt": [7] * 10, "max_tokens": 4090}, 400, "4090 are asked"),
        (COMPLETION, {"prompt": []}, 400, "must not be empty"),
        (COMPLETION, {"prompt": [99999]}, 400, "from 0 to 4095"),
        (COMPLETION, {"prompt": [1, "x"]}, 400, "integers"),
        (COMPLETION, {"prompt": ["a", "b"]}, 400, "one prompt"),
        (COMPLETION, {"prompt": "a", "truncate_prompt_tokens": 5}, 400, "not emulated"),
        ("/tokenize", {}, 400, "prompt or messages"),
        ("/detokenize", {"tokens": [-1]}, 400, "from 0 to 4095"),
        ("/v1/embeddings", {"input": [1.5]}, 400, "texts or lists"),
        ("/v1/embeddings", {"input": [1 << 32]}, 400, "from 0 to 4095"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, 400, "text_1 must have"),
    ],
)
async def test_refusals_say_what_is_wrong(
    client: Client, path: str, body: Any, status: int, says: str
) -> None:
    """Bad requests get vLLM's status and an error in OpenAI's form."""
    got, answer = await client.post(path, body)
    assert got == status
    assert answer["error"]["code"] == status
    assert says in answer["error"]["message"]


async def test_unknown_paths_and_methods_are_refused_as_by_fastapi(client: Client) -> None:
    """Paths and methods that do not exist get FastAPI's body, as from vLLM."""
    assert await client.post("/nowhere", {}) == (404, {"detail": "Not Found"})
    assert await client.post("/version", {}) == (405, {"detail": "Method Not Allowed"})


async def test_tokenize_and_detokenize_are_inverse(client: Client) -> None:
    """Tokens of a chat are those its prompt has, and detokenize gives their text back."""
    chat = await client.ok("/tokenize", {**HELLO, "return_token_strs": True})
    answer = await client.ok(CHAT, {**HELLO, "max_tokens": 1, "return_token_ids": True})
    assert chat["tokens"] == answer["prompt_token_ids"]
    assert chat["count"] == len(chat["token_strs"]) == len(chat["tokens"])
    assert chat["max_model_len"] == 4096
    text = (await client.ok("/detokenize", {"tokens": chat["tokens"]}))["prompt"]
    assert text == "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"


async def test_embeddings_of_one_text_or_token_list(client: Client) -> None:
    """A text, or its tokens, is one input."""
    tokens = (await client.ok("/tokenize", {"prompt": "hello"}))["tokens"]
    text, ids = [
        (await client.ok("/v1/embeddings", {"input": each}))["data"] for each in ("hello", tokens)
    ]
    assert len(text) == 1
    assert text == ids


async def test_many_texts_are_scored_in_pairs(client: Client) -> None:
    """As many first texts as second ones make that many scores."""
    scored = await client.ok("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b"]})
    assert [round(each["score"], 3) for each in scored["data"]] == [1.0, 1.0]


async def test_pooling_routes_answer_the_same_each_time(client: Client) -> None:
    """Embeddings, rerank and score are functions of their input."""
    for _ in range(2):
        embedded = await client.ok("/v1/embeddings", {"input": ["a", "b", "a"]})
        vectors = [each["embedding"] for each in embedded["data"]]
        assert vectors[0] == vectors[2] != vectors[1]
    same = (await client.ok("/score", {"text_1": "a", "text_2": ["a", "b"]}))["data"]
    assert same[0]["score"] == pytest.approx(1.0, abs=1e-4)
    ranked = await client.ok("/v1/rerank", {"query": "a", "documents": ["b", "a"], "top_n": 1})
    assert [each["document"]["text"] for each in ranked["results"]] == ["a"]


async def test_small_routes(client: Client) -> None:
    """Health, ping, version and event sources answer as vLLM's do."""
    for path in ("/health", "/ping"):
        async with client.session.get(client.url + path) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
    assert (await client.get("/version"))["version"].startswith("0.32")
    source = (await client.get("/kv_event_sources"))["0"]
    assert source["endpoint"].startswith("tcp://127.0.0.1:")
    assert source["endpoint"] != source["replay_endpoint"]


async def test_without_events_there_is_no_source() -> None:
    """An engine without KV events says so and still serves."""
    async with serving(kv_port=None) as client:
        assert await client.get("/kv_event_sources") == {}
        await client.ok(CHAT, {**HELLO, "max_tokens": 1})
        assert (await client.get("/debug/blocks"))["next_seq"] == 0


async def test_reset_forgets_blocks_unless_requests_run() -> None:
    """Reset succeeds on an idle engine; beside a running request it needs to be forced."""
    async with serving(speed=1.0) as client:
        await client.ok(COMPLETION, {"prompt": PROMPT, "max_tokens": 1})
        assert await client.ok("/reset_prefix_cache", b"") == {"success": True}
        assert (await client.get("/debug/blocks"))["block_hashes"] == []
        running = asyncio.create_task(
            client.post(COMPLETION, {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True})
        )

        async def runs() -> bool:
            return bool((await client.get("/debug/blocks"))["running"])

        await eventually(runs)
        assert await client.ok("/reset_prefix_cache", b"") == {"success": False}
        forced = "/reset_prefix_cache?reset_running_requests=true"
        assert await client.ok(forced, b"") == {"success": True}
        status, answer = await running
        assert (status, answer["usage"]["completion_tokens"]) == (200, 30)
        assert await client.metric("vllm:num_preemptions_total") == 1


async def test_asked_for_faults_strike_once_each(client: Client) -> None:
    """An error, a lost connection before and within a stream, then service as usual."""
    body = {"prompt": PROMPT, "max_tokens": 5}
    await client.ok("/debug/fault", {"kind": "error", "count": 2, "status": 502})
    assert [(await client.post(COMPLETION, body))[0] for _ in range(3)] == [502, 502, 200]
    await client.ok("/debug/fault", {"kind": "close"})
    with pytest.raises(aiohttp.ClientError):
        await client.post(COMPLETION, body)
    await client.ok("/debug/fault", {"kind": "close", "chunks": 1})
    with pytest.raises(aiohttp.ClientError):
        await client.stream(COMPLETION, {**body, "max_tokens": 400, "ignore_eos": True})
    assert (await client.post(COMPLETION, body))[0] == 200
    assert (await client.get("/load"))["server_load"] == 0


async def test_hang_and_stall_and_mercy(client: Client) -> None:
    """A hung request gets nothing; a stalled engine answers late; `none` forgets what is due."""
    body = {"prompt": PROMPT, "max_tokens": 1}
    await client.ok("/debug/fault", {"kind": "hang"})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.post(COMPLETION, body), 0.1)
    await client.ok("/debug/fault", {"kind": "stall", "seconds": 0.15})
    late = asyncio.create_task(client.post(COMPLETION, body))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(late), 0.05)
    assert (await late)[0] == 200
    await client.ok("/debug/fault", {"kind": "error", "count": 9})
    await client.ok("/debug/fault", {"kind": "none"})
    assert (await client.post(COMPLETION, body))[0] == 200


async def test_engine_that_breaks_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the engine's loop is raised to whoever runs the server; nothing hangs on."""
    async with serving() as client:

        def broken(_: float = 0.0) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(client.server.engine, "step", broken)
        running = asyncio.create_task(client.server.run_until(asyncio.Event()))
        request = asyncio.create_task(client.post(COMPLETION, {"prompt": PROMPT}))
        with pytest.raises(AssertionError, match="a bug"):
            await asyncio.wait_for(running, 5.0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
