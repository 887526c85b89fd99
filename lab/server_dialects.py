"""The other APIs of the emulated engine: Anthropic's messages and OpenAI's responses.

As in vLLM, both become chats, and everything after that is the same engine; `lab.server_dialogues`
has the bytes of their answers. What they become is decided by the router's own code, which is
checked against real vLLM: the lab adds no check of it.

Source: vllm/entrypoints/anthropic and entrypoints/openai/responses of vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lab.server_api import Api, ApiError, ChatBody, Plan, decode
from router.messages_chat import chat_of_messages
from router.prompt import Inexact
from router.responses_chat import chat_of_responses
from schemas.anthropic import MessagesRequest
from schemas.openai import ChatRequest, ResponsesRequest


class MessagesBody(MessagesRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`: what routing reads, and what the answer depends on."""

    max_tokens: int
    stream: bool | None = False
    stop_sequences: list[str] | None = None


class ResponsesBody(ResponsesRequest, frozen=True, kw_only=True):
    """`POST /v1/responses`, likewise."""

    max_output_tokens: int | None = None
    stream: bool | None = False
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    session_id: str | None = None


class Dialects:
    """Turns bodies of other APIs into plans."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def plan_messages(self, body: bytes, session_id: str | None = None) -> Plan:
        """Read a request for a message. Raises ApiError."""
        asked = decode(body, MessagesBody)
        chat = self._chat(chat_of_messages(asked, self._api.model.habits))
        common = ChatBody(
            messages=chat.messages,
            model=asked.model,
            stream=asked.stream,
            stop=asked.stop_sequences,
            cache_salt=asked.cache_salt,
        )
        return self._api.plan_rendered(common, chat, asked.max_tokens, session_id)

    def count_tokens(self, body: bytes) -> dict[str, Any]:
        """Answer `POST /v1/messages/count_tokens`. Raises ApiError."""
        asked = decode(body, MessagesRequest)
        count = len(self._api.render(self._chat(chat_of_messages(asked, self._api.model.habits))))
        return {
            "input_tokens": count,
            "context_management": {"original_input_tokens": count},
        }

    def plan_responses(self, body: bytes, session_id: str | None = None) -> Plan:
        """Read a request for a response. Raises ApiError."""
        asked = decode(body, ResponsesBody)
        chat = self._chat(chat_of_responses(asked))
        common = ChatBody(
            messages=chat.messages,
            model=asked.model,
            stream=asked.stream,
            stop=asked.stop,
            ignore_eos=asked.ignore_eos,
            cache_salt=asked.cache_salt,
        )
        session_id = asked.session_id or session_id
        return self._api.plan_rendered(common, chat, asked.max_output_tokens, session_id)

    def _chat(self, chat: ChatRequest | Inexact) -> ChatRequest:
        if isinstance(chat, Inexact):
            raise ApiError(400, f"not emulated: {chat.reason} {chat.detail}".strip())
        self._api.check_model(chat.model)
        return msgspec.structs.replace(chat, kv_transfer_params=None)
