"""Anthropic's messages as chats; `tests/vllm/test_dialects.py` compares hundreds with vLLM."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.messages_chat import chat_of_messages
from router.prompt import Inexact, Reason
from router.template_habits import Habits, habits_of
from schemas.anthropic import decode_messages
from schemas.bus import ModelCard
from schemas.codec import RemoteError
from schemas.openai import ChatRequest
from tests.router import chat_samples
from tests.router.dialect_samples import messages_body

IMAGE = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
IN_PLACE = Habits(merges_system=False)


def chat(habits: Habits = IN_PLACE, **body: Any) -> ChatRequest | Inexact:
    """Return the chat of a request."""
    full = {"model": "m", "max_tokens": 5, "messages": [], **body}
    return chat_of_messages(decode_messages(json.dumps(full).encode()), habits)


def messages(habits: Habits = IN_PLACE, **body: Any) -> list[dict[str, Any]]:
    """Return the chat's messages, which must be known."""
    found = chat(habits, **body)
    assert isinstance(found, ChatRequest), found
    return found.messages


def test_a_plain_chat_stays_one() -> None:
    """System, user and assistant keep their texts and order."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert messages(system="Be brief.", messages=turns) == [
        {"role": "system", "content": "Be brief."},
        *turns,
    ]


def test_system_blocks_are_joined_without_the_billing_header() -> None:
    """The line that changes with every request is left out, or no prefix would ever match."""
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": "Be "},
        {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
    ]
    assert messages(system=blocks) == [{"role": "system", "content": "Be brief."}]


def test_late_system_messages_go_where_the_template_takes_them() -> None:
    """In place if the template can have them there, else into the first one."""
    turns = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "later"},
        {"role": "user", "content": "b"},
    ]
    assert [m["role"] for m in messages(system="first ", messages=turns)] == [
        *("system", "user", "system", "user")
    ]
    merged = messages(Habits(merges_system=True), system="first ", messages=turns)
    assert merged[0] == {"role": "system", "content": "first later"}
    assert [m["role"] for m in merged] == ["system", "user", "user"]


def test_thoughts_calls_and_results_become_messages_of_a_chat() -> None:
    """A turn with tools: reasoning and calls of the assistant, then the tool's own message."""
    turns = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "w", "input": {"at": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [
                        {"type": "text", "text": "sun"},
                        {"type": "text", "text": "22"},
                    ],
                },
                {"type": "text", "text": "and tomorrow?"},
            ],
        },
    ]
    assert messages(messages=turns)[1:] == [
        {
            "role": "assistant",
            "reasoning": "hm",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "w", "arguments": '{"at": "Rome"}'},
                }
            ],
            "content": "I look.",
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sun\n22"},
        {"role": "user", "content": "and tomorrow?"},
    ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, Reason.MULTIMODAL),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}
                ]
            },
            Reason.MULTIMODAL,
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, Reason.INVALID),
        ({"messages": [{"role": "user", "content": 5}]}, Reason.INVALID),
        ({"messages": [{"role": "user", "content": ["x"]}]}, Reason.INVALID),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
            Reason.CLOCK,
        ),
        (
            {"messages": [{"role": "system", "content": [{"type": "tool_removal"}]}]},
            Reason.UNSUPPORTED,
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, Reason.UNSUPPORTED),
    ],
)
def test_what_is_not_followed_says_so(body: dict[str, Any], reason: Reason) -> None:
    """Such a request is routed by load, and counted under its reason."""
    found = chat(**body)
    assert isinstance(found, Inexact)
    assert found.reason is reason


def test_thinking_and_effort_reach_the_template() -> None:
    """Switched off, thinking is an effort; else the effort that was asked for."""
    for body, effort in (
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"output_config": {"effort": "max"}}, "max"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, "low"),
    ):
        found = chat(Habits(effort_without_thinking="low"), **body)
        assert isinstance(found, ChatRequest)
        assert found.reasoning_effort == effort


@pytest.mark.parametrize(
    ("template", "merges", "effort"),
    [
        ("qwen", False, "none"),
        ("llama", True, "low"),
        ("strict", True, "low"),
        ("parts", True, "low"),
    ],
)
def test_habits_are_what_a_template_does(template: str, merges: bool, effort: str) -> None:
    """Only Jinja's own means count, as in vLLM: `strftime_now` or `generation` fail there."""
    card = ModelCard("m", b"", chat_samples.TEMPLATES[template], {"bos_token": "<s>"})
    assert habits_of(card) == Habits(merges, effort)
    assert habits_of(ModelCard("m", b"", None)) == Habits()
    assert habits_of(ModelCard("m", b"", "{% if %}")) == Habits()


JUNK = (
    *(None, 7, "x", [], {}, [None], [[]], {"type": 5}),
    *([{"type": "text"}], [{"type": "text", "text": 5}]),
)


@given(seed=st.integers(0, 10_000), where=st.integers(0, 10_000), junk=st.sampled_from(JUNK))
def test_odd_bodies_are_read_or_given_up(seed: int, where: int, junk: Any) -> None:
    """Whatever stands in a field, there is a chat, or a reason; never a traceback."""
    body = messages_body(random.Random(seed))
    places = list(places_in(body))
    owner, key = places[where % len(places)]
    owner[key] = junk
    try:
        request = decode_messages(json.dumps(body).encode())
    except RemoteError:
        return
    assert isinstance(chat_of_messages(request, IN_PLACE), ChatRequest | Inexact)


def places_in(value: Any) -> Any:
    """Yield every place inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places_in(inner)
