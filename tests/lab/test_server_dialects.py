"""The emulated server in the form of Anthropic's messages and of OpenAI's responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab.server_helpers import Client, serving

LONG = "one two three four five six seven eight nine ten " * 20
ASKED = [{"role": "user", "content": LONG}]
MESSAGE = {"model": "tiny", "max_tokens": 8, "messages": ASKED}
RESPONSE = {"model": "tiny", "max_output_tokens": 8, "input": ASKED, "ignore_eos": True}
BODIES = {"/v1/messages": MESSAGE, "/v1/responses": RESPONSE}


async def events(client: Client, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The named events of a stream."""
    data = json.dumps({**body, "stream": True}).encode()
    async with client.session.post(client.url + path, data=data) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        *lines, end = (await answer.read()).decode().split("\n\n")
    assert end == ""
    pairs = [line.split("\n") for line in lines]
    return [(name[len("event: ") :], json.loads(told[len("data: ") :])) for name, told in pairs]


async def test_a_message_is_the_chats_answer_in_another_form() -> None:
    """Text, stop reason and usage are those of the chat that it is."""
    async with serving() as client:
        message = await client.ok("/v1/messages", MESSAGE)
        chat = await client.ok("/v1/chat/completions", {**MESSAGE, "ignore_eos": True})
        assert message["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert (message["type"], message["stop_reason"]) == ("message", "max_tokens")
        again = (await client.ok("/v1/messages", MESSAGE))["usage"]
        assert again["cache_read_input_tokens"] > 0
        assert (
            again["input_tokens"] + again["cache_read_input_tokens"]
            == (chat["usage"]["prompt_tokens"])
        )


async def test_a_response_is_the_chats_answer_in_another_form() -> None:
    """Text, status and usage are those of the chat that it is."""
    async with serving() as client:
        response = await client.ok("/v1/responses", RESPONSE)
        chat = await client.ok("/v1/chat/completions", {**MESSAGE, "ignore_eos": True})
        text = response["output"][0]["content"][0]["text"]
        assert text == chat["choices"][0]["message"]["content"]
        assert (response["object"], response["status"]) == ("response", "incomplete")
        assert response["usage"]["output_tokens"] == 8
        again = await client.ok("/v1/responses", RESPONSE)
        assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("path", sorted(BODIES))
async def test_a_stream_adds_up_to_the_whole(path: str) -> None:
    """The deltas are the text, and the last event tells the usage."""
    async with serving() as client:
        whole = await client.ok(path, BODIES[path])
        told = await events(client, path, BODIES[path])
    if path == "/v1/messages":
        text = "".join(e["delta"]["text"] for n, e in told if n == "content_block_delta")
        assert text == whole["content"][0]["text"]
        assert told[-2][1]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    else:
        text = "".join(e["delta"] for n, e in told if n == "response.output_text.delta")
        assert text == whole["output"][0]["content"][0]["text"]
        assert told[-1][1]["response"]["usage"]["output_tokens"] == 8
        assert [e["sequence_number"] for _, e in told] == list(range(len(told)))


async def test_a_stop_sequence_is_told() -> None:
    """An answer that a stop string ends says which."""
    async with serving() as client:
        whole = await client.ok("/v1/messages", {**MESSAGE, "max_tokens": 40})
        word = whole["content"][0]["text"].split()[3]
        cut = await client.ok("/v1/messages", {**MESSAGE, "stop_sequences": [f" {word}"]})
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", f" {word}")


async def test_tokens_are_counted_as_a_message_has_them() -> None:
    """`count_tokens` counts what `/v1/messages` computes."""
    async with serving() as client:
        counted = await client.ok("/v1/messages/count_tokens", {"model": "tiny", "messages": ASKED})
        usage = (await client.ok("/v1/messages", MESSAGE))["usage"]
        assert counted["input_tokens"] == usage["input_tokens"]


async def test_errors_have_each_apis_form() -> None:
    """Anthropic's clients get their kind of error, OpenAI's theirs."""
    async with serving() as client:
        status, error = await client.post("/v1/messages", {**MESSAGE, "model": "nope"})
        assert (status, error["type"], error["error"]["type"]) == (404, "error", "NotFoundError")
        status, error = await client.post("/v1/responses", {**RESPONSE, "model": "nope"})
        assert (status, error["error"]["code"]) == (404, 404)
        status, error = await client.post("/v1/messages", {"messages": ASKED})
        assert (status, "max_tokens" in error["error"]["message"]) == (400, True)
        previous = {**RESPONSE, "previous_response_id": "resp_1"}
        status, error = await client.post("/v1/responses", previous)
        assert (status, "not emulated" in error["error"]["message"]) == (400, True)
