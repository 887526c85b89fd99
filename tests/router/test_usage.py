"""Usage read from the end of answers, in each API's form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.usage import COUNT_MAX, NO_USAGE, Usage, estimate_output_tokens, read_usage

CHAT = (
    b'{"id":"c","choices":[{"message":{"content":"hi"}}],"usage":{"prompt_tokens":12,'
    b'"total_tokens":15,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":8}}}'
)
RESPONSES = (
    b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":12,'
    b'"input_tokens_details":{"cached_tokens":8},"output_tokens":3,"total_tokens":15},"user":null}}'
)
MESSAGES = (
    b'event: message_start\ndata: {"usage":{"input_tokens":4,"output_tokens":0}}\n\n'
    b'event: message_delta\ndata: {"usage":{"input_tokens":4,"cache_read_input_tokens":8,'
    b'"output_tokens":3}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
)


@pytest.mark.parametrize("tail", [CHAT, RESPONSES + b"\n\n", MESSAGES])
def test_all_forms_mean_the_same(tail: bytes) -> None:
    """Prompt, cached and generated tokens are found whatever they are called."""
    assert read_usage(tail) == Usage(12, 8, 3, streamed=tail != CHAT)


@pytest.mark.parametrize(
    ("tail", "streamed"),
    [
        (b"data: [DONE]\n\n", True),
        (b"data: [DONE]\n\n\r\n", True),  # the line end of its last chunk
        (b"data: [DONE]\r\n\r\n", True),
        (b"data: [DONE]\r\n\r\n\r\n", True),
        (b'{"usage":null}', False),
        (b'{"text":"data: x\\n\\n"}\r\n', False),
        (b"{\n}\n", False),
        (b"{\n}\n\r\n", False),
        (b"", False),
    ],
)
def test_a_stream_ends_with_an_empty_line(tail: bytes, streamed: bool) -> None:
    """With chunks or without; JSON does not, however it is written."""
    assert read_usage(tail).streamed == streamed


def test_the_last_usage_counts() -> None:
    """A stream with running counts is worth its last one."""
    events = [b'data: {"usage":{"prompt_tokens":9,"completion_tokens":%d}}' % n for n in (1, 2, 3)]
    assert read_usage(b"\n\n".join([*events, b"data: [DONE]"])) == Usage(9, None, 3)


@pytest.mark.parametrize(
    "tail",
    [b"", b"[DONE]", b'{"usage":null}', b'"usage":', b'{"usage":{}}', b'{"error":{"message":"x"}}'],
)
def test_no_usage_is_none(tail: bytes) -> None:
    """What is not told is not made up."""
    assert read_usage(tail) == NO_USAGE


@pytest.mark.parametrize("number", [COUNT_MAX + 1, 10**15 * 10, 10**40])
def test_absurd_numbers_are_no_counts(number: int) -> None:
    """A number that nobody could have counted is ignored, whole."""
    assert read_usage(b'"usage":{"completion_tokens":%d,"prompt_tokens":5}' % number) == (
        Usage(5, None, None)
    )


@given(text=st.text(), tokens=st.integers(0, COUNT_MAX))
def test_a_model_cannot_speak_for_its_engine(text: str, tokens: int) -> None:
    """Whatever an answer's text says, the engine's own usage is what counts."""
    lie = '"usage":{"completion_tokens":999999,"cached_tokens":999999}' + text
    answer = {"choices": [{"text": lie}], "usage": {"completion_tokens": tokens}}
    assert read_usage(json.dumps(answer).encode()) == Usage(None, None, tokens)
    without = {"choices": [{"text": lie}]}
    assert read_usage(json.dumps(without).encode()) == NO_USAGE


@given(st.binary())
def test_any_bytes_give_an_answer(tail: bytes) -> None:
    """Nothing that an engine sends breaks the reader."""
    usage = read_usage(b'"usage":' + tail)
    assert all(count is None or 0 <= count <= 3 * COUNT_MAX for count in _counts(usage))


def _counts(usage: Usage) -> list[int | None]:
    return [usage.prompt_tokens, usage.cached_tokens, usage.output_tokens]


def test_a_stream_without_usage_is_estimated_by_its_events() -> None:
    """About one token an event, over the whole body."""
    event = b'data: {"choices":[{"delta":{"content":" word"}}]}\n\n'
    body = event * 500
    assert estimate_output_tokens(body[-4096:], len(body)) == pytest.approx(500, rel=0.02)
    assert estimate_output_tokens(b'{"object":"list"}', 17) == 0
