"""The bytes of answers in the form of Anthropic's messages and of OpenAI's responses.

Each class builds the answer to one plan, with the methods of `lab.server_reply.Reply`. A stream in
the Responses API opens before the engine has begun, as vLLM's does: `greeting` is sent then.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import msgspec

from lab.engine_types import FinishReason
from lab.server_api import ApiError, Plan

_json = msgspec.json.Encoder().encode

_STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens"}


def _event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json({"type": name, **data}))


class MessagesReply:
    """Anthropic's form of an answer.

    Args:
        request_id: as the caller sees it.
        created: Unix seconds; not shown.
    """

    greeting = b""

    def __init__(self, plan: Plan, request_id: str, created: int) -> None:
        self._plan = plan
        self._id = request_id
        self._sent = 0
        self._reason: FinishReason = "stop"

    def whole(self, cached_tokens: int) -> bytes:
        """Return the body of an answer that is not streamed."""
        answer = self._plan.answer
        self._reason = answer.finish_reason
        content = [{"type": "text", "text": "".join(answer.texts)}]
        usage = self._usage(len(answer.token_ids), cached_tokens)
        # vLLM leaves out what is null.
        reasons = {name: value for name, value in self._reasons().items() if value is not None}
        return _json({**self._message(content), **reasons, "usage": usage})

    def opening(self) -> bytes:
        """Return what a stream begins with, once the first token is there."""
        empty = {"stop_reason": None, "stop_sequence": None, "usage": self._usage(0, None)}
        start = {"message": {**self._message([]), **empty}}
        block = {"index": 0, "content_block": {"type": "text", "text": ""}}
        return _event("message_start", start) + _event("content_block_start", block)

    def tokens(self, count: int, finish_reason: FinishReason | None) -> bytes:
        """Return one event with the next `count` tokens."""
        start, self._sent = self._sent, self._sent + count
        if finish_reason is not None:
            self._reason = finish_reason
        text = "".join(self._plan.answer.texts[start : self._sent])
        delta = {"index": 0, "delta": {"type": "text_delta", "text": text}}
        return _event("content_block_delta", delta) if text else b""

    def closing(self, cached_tokens: int) -> bytes:
        """Return what a stream ends with."""
        end = {"delta": self._reasons(), "usage": self._usage(self._sent, cached_tokens)}
        stop = _event("content_block_stop", {"index": 0})
        return stop + _event("message_delta", end) + _event("message_stop", {})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._plan.model,
        }

    def _reasons(self) -> dict[str, Any]:
        stopped_by = self._plan.answer.stop_reason
        if stopped_by is not None and self._reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        return {"stop_reason": _STOP_REASONS[self._reason], "stop_sequence": None}

    def _usage(self, output_tokens: int, cached_tokens: int | None) -> dict[str, int]:
        prompt_tokens = len(self._plan.prompt_ids)
        usage = {"input_tokens": prompt_tokens, "output_tokens": output_tokens}
        if cached_tokens is not None:
            usage["input_tokens"] -= cached_tokens
            usage["cache_read_input_tokens"] = cached_tokens
        return usage


class ResponsesReply:
    """The Responses API's form of an answer; arguments as for `MessagesReply`."""

    def __init__(self, plan: Plan, request_id: str, created: int) -> None:
        self._plan = plan
        self._id = request_id
        self._created = created
        self._sent = 0
        self._numbers = itertools.count()
        self._item_id = f"msg_{request_id.removeprefix('resp_')}"
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    @property
    def greeting(self) -> bytes:
        """What a stream begins with, before the engine has begun."""
        response = {"response": self._response("in_progress", [], None)}
        return self._event("created", response) + self._event("in_progress", response)

    def whole(self, cached_tokens: int) -> bytes:
        """Return the body of an answer that is not streamed."""
        answer = self._plan.answer
        usage = self._usage(len(answer.token_ids), cached_tokens)
        return _json(self._response(self._status(), [self._item("completed")], usage))

    def opening(self) -> bytes:
        """Return what announces the first token."""
        item = {"output_index": 0, "item": {**self._item("in_progress"), "content": []}}
        part = {**self._place, "part": _part("")}
        return self._event("output_item.added", item) + self._event("content_part.added", part)

    def tokens(self, count: int, finish_reason: FinishReason | None) -> bytes:
        """Return one event with the next `count` tokens."""
        start, self._sent = self._sent, self._sent + count
        text = "".join(self._plan.answer.texts[start : self._sent])
        delta = {**self._place, "delta": text, "logprobs": []}
        return self._event("output_text.delta", delta) if text else b""

    def closing(self, cached_tokens: int) -> bytes:
        """Return what a stream ends with."""
        text = "".join(self._plan.answer.texts)
        item = self._item("completed")
        usage = self._usage(self._sent, cached_tokens)
        return b"".join(
            (
                self._event("output_text.done", {**self._place, "text": text, "logprobs": []}),
                self._event("content_part.done", {**self._place, "part": _part(text)}),
                self._event("output_item.done", {"output_index": 0, "item": item}),
                self._event(
                    "completed", {"response": self._response(self._status(), [item], usage)}
                ),
            )
        )

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        return _event(f"response.{name}", {"sequence_number": next(self._numbers), **data})

    def _status(self) -> str:
        return "incomplete" if self._plan.answer.finish_reason == "length" else "completed"

    def _item(self, status: str) -> dict[str, Any]:
        content = [_part("".join(self._plan.answer.texts))]
        shared = {"type": "message", "role": "assistant"}
        return {"id": self._item_id, **shared, "status": status, "content": content}

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": cut,
            "instructions": None,
            "metadata": None,
            "model": self._plan.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": len(self._plan.answer.token_ids),
            "previous_response_id": None,
            "service_tier": "auto",
            "status": status,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
        }

    def _usage(self, output_tokens: int, cached_tokens: int) -> dict[str, Any]:
        prompt_tokens = len(self._plan.prompt_ids)
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": prompt_tokens + output_tokens,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def messages_error(error: ApiError) -> bytes:
    """Return an error in Anthropic's form."""
    inner = {"type": error.kind, "message": str(error)}
    return _json({"type": "error", "error": inner})
