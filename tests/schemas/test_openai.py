"""OpenAI's requests as routing reads them, and errors in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.codec import RemoteError
from schemas.openai import decode_chat, decode_completion, error_body

CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 5,
    "n": 2,
    "tools": [{"type": "function", "function": {"name": "add"}}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "cache_salt": "s",
    "user": "u",
    "temperature": 0.5,
    "logit_bias": {"1": -100},
    "vllm_xargs": {"deep": [1, {"er": None}]},
}


def body(value: Any) -> bytes:
    """Returns a value as a client sends it."""
    return json.dumps(value).encode()


def test_a_chat_is_read_and_the_rest_skipped() -> None:
    """What routing needs is there; sampling parameters and vendors' own fields do not matter."""
    request = decode_chat(body(CHAT))
    assert (request.model, request.stream, request.n) == ("m", True, 2)
    assert request.messages == CHAT["messages"]
    assert request.stream_options is not None
    assert request.stream_options.include_usage
    assert (request.max_tokens, request.max_completion_tokens) == (None, 5)
    assert (request.tools, request.tool_choice) == (CHAT["tools"], CHAT["tool_choice"])
    assert (request.cache_salt, request.user) == ("s", "u")
    assert (request.add_generation_prompt, request.add_special_tokens) == (True, False)


def test_fields_may_be_null_where_the_engine_allows_it() -> None:
    """Clients send explicit nulls for what they do not set."""
    nulls = ("stream", "stream_options", "max_tokens", "n", "tools", "tool_choice", "user")
    request = decode_chat(body({"messages": [], **dict.fromkeys(nulls)}))
    assert not any(getattr(request, name) for name in nulls)


@pytest.mark.parametrize(
    "prompt", ["hello", ["hello", "you"], [1, 2, 3], [[1, 2], [3]], [], None, ["hello", [1], 2]]
)
def test_every_form_of_a_prompt_is_read(prompt: Any) -> None:
    """A text, token ids, a list of either; a mixture is left for the engine to refuse."""
    request = decode_completion(body({"model": "m", "prompt": prompt}))
    assert request.prompt == prompt
    assert (request.max_tokens, request.add_special_tokens) == (16, True)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `messages`"),
        (b'{"messages":"hi"}', r"Expected `array`, got `str` - at `\$.messages`"),
        (b'{"messages":["hi"]}', r"Expected `object`, got `str` - at `\$.messages\[0\]`"),
        (b'{"messages":[],"n":"2"}', r"\$.n"),
        (b'{"messages":[]} trailing', "malformed"),
        (b'{"messages":[],"user":"\xff"}', "UTF-8"),
    ],
)
def test_a_bad_chat_says_what_is_wrong(text: bytes, fault: str) -> None:
    """The error is fit for the caller: what was expected, what came, and where."""
    with pytest.raises(RemoteError, match=fault):
        decode_chat(text)


@pytest.mark.parametrize("prompt", [1.5, {"text": "hi"}, True, [1.5], [[["deep"]]], [None]])
def test_a_bad_prompt_is_refused(prompt: Any) -> None:
    """What can be neither text nor token ids never reaches the tokenizer."""
    with pytest.raises(RemoteError, match=r"\$.prompt"):
        decode_completion(body({"prompt": prompt}))


def test_errors_have_openais_form() -> None:
    """Clients find the message, its type, the parameter and the code where they expect them."""
    assert json.loads(error_body("no", "invalid_request_error", param="n", code="bad")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "bad"}
    }
    assert json.loads(error_body("später", "overloaded", code=429))["error"] == {
        "message": "später",
        "type": "overloaded",
        "param": None,
        "code": 429,
    }
