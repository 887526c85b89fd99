"""The fields of Anthropic-style requests that routing looks at, as vLLM takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from schemas.openai import body_decoder


class MessagesRequest(msgspec.Struct, frozen=True):
    """`POST /v1/messages` (vLLM: entrypoints/anthropic/protocol.py).

    Attributes:
        messages: roles user, assistant and system; contents are texts or lists of blocks.
        system: a text, or text blocks.
    """

    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


decode_messages: Callable[[bytes], MessagesRequest] = body_decoder(MessagesRequest)
