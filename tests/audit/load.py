"""Chats with long shared beginnings, for tests over a live plane."""

from __future__ import annotations

import random

import msgspec

from lab.load import Planned


def chats(
    count: int, per_s: float, *, seed: int = 1, conversations: int = 12, hot: float = 0.0
) -> tuple[Planned, ...]:
    """Return turns of conversations that share a few system prompts.

    Args:
        hot: share of the requests that have one system prompt and nothing else in common.
    """
    rng = random.Random(seed)
    histories: dict[int, list[dict[str, str]]] = {}
    planned = []
    for number in range(count):
        if rng.random() < hot:
            messages = [_system(99), _user(f"a hot question {number}", 3)]
        else:
            chosen = rng.randrange(conversations)
            messages = histories.setdefault(chosen, [_system(chosen % 3)])
            messages.append(_user(f"question {number}", rng.randrange(5, 40)))
        body = msgspec.json.encode(
            {
                "model": "tiny",
                "messages": messages,
                "max_tokens": rng.randrange(5, 30),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        planned.append(Planned(number / per_s, "/v1/chat/completions", _always(body), 100))
        messages.append({"role": "assistant", "content": "well " * 10})
        if len(messages) > 9:
            histories.clear()
    return tuple(planned)


def _system(number: int) -> dict[str, str]:
    return {"role": "system", "content": f"You are helper {number}. " + "Be kind and exact. " * 60}


def _user(text: str, words: int) -> dict[str, str]:
    return {"role": "user", "content": text + " tell me more" * words}


def _always(body: bytes):  # type: ignore[no-untyped-def]
    return lambda: body
