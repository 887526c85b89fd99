"""The Responses API as chats; `tests/vllm/test_dialects.py` compares hundreds with vLLM."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.prompt import Inexact, Reason
from router.responses_chat import chat_of_responses
from schemas.codec import RemoteError
from schemas.openai import ChatRequest, decode_responses
from tests.router.dialect_samples import responses_body
from tests.router.test_messages_chat import JUNK, places_in

CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def chat(asked: Any = "hi", **body: Any) -> ChatRequest | Inexact:
    """Return the chat of a request."""
    return chat_of_responses(decode_responses(json.dumps({"input": asked, **body}).encode()))


def messages(asked: Any, **body: Any) -> list[dict[str, Any]]:
    """Return the chat's messages, which must be known."""
    found = chat(asked, **body)
    assert isinstance(found, ChatRequest), found
    return found.messages


def test_a_text_is_the_users_after_the_instructions() -> None:
    """The simplest request."""
    assert messages("hi", instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_items_of_one_turn_join() -> None:
    """Thoughts, text and calls that follow each other are one message of the assistant's."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
        {"role": "assistant", "content": "done"},
    ]
    found = messages(items)
    assert [m["role"] for m in found] == ["user", "assistant", "tool", "assistant"]
    turn = found[1]
    assert (turn["reasoning"], turn["content"], len(turn["tool_calls"])) == ("hm", "ok", 2)
    assert found[2] == {"role": "tool", "content": "42", "tool_call_id": "c1"}


def test_an_unfinished_last_message_is_continued() -> None:
    """The prompt ends in the middle of it, without a new turn."""
    parts = [{"type": "output_text", "text": "and so"}]
    last = {"type": "message", "role": "assistant", "status": "incomplete", "content": parts}
    found = chat([{"role": "user", "content": "go"}, last])
    assert isinstance(found, ChatRequest)
    assert (found.continue_final_message, found.add_generation_prompt) == (True, False)
    assert found.add_special_tokens


@pytest.mark.parametrize(
    ("asked", "body", "reason"),
    [
        ("hi", {"previous_response_id": "resp_1"}, Reason.UNSUPPORTED),
        ("hi", {"previous_input_messages": [{}]}, Reason.UNSUPPORTED),
        ("hi", {"truncation": "auto"}, Reason.TRUNCATION),
        ("hi", {"tools": [{"type": "web_search"}]}, Reason.UNSUPPORTED),
        ([{"type": "computer_call"}], {}, Reason.UNSUPPORTED),
        ([{"role": "user", "content": [{"type": "input_image"}]}], {}, Reason.MULTIMODAL),
        ([{"type": "reasoning", "encrypted_content": "x"}], {}, Reason.INVALID),
        ([{**CALL, "namespace": "n"}], {}, Reason.UNSUPPORTED),
        ([{"role": "assistant", "content": None}], {}, Reason.UNSUPPORTED),
        ([{"type": "function_call_output", "call_id": "c"}], {}, Reason.UNSUPPORTED),
    ],
)
def test_what_is_not_followed_says_so(asked: Any, body: dict[str, Any], reason: Reason) -> None:
    """Such a request is routed by load, and counted under its reason."""
    found = chat(asked, **body)
    assert isinstance(found, Inexact)
    assert found.reason is reason


@given(seed=st.integers(0, 10_000), where=st.integers(0, 10_000), junk=st.sampled_from(JUNK))
def test_odd_bodies_are_read_or_given_up(seed: int, where: int, junk: Any) -> None:
    """Whatever stands in a field, there is a chat, or a reason; never a traceback."""
    body = responses_body(random.Random(seed))
    places = list(places_in(body))
    owner, key = places[where % len(places)]
    owner[key] = junk
    try:
        request = decode_responses(json.dumps(body).encode())
    except RemoteError:
        return
    assert isinstance(chat_of_responses(request), ChatRequest | Inexact)
