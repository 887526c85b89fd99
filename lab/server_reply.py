"""The bytes of the emulated engine's answers: whole bodies and streamed chunks, in vLLM's form.

A streamed token costs one concatenation: what all chunks of a request share is built once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lab.engine_types import FinishReason
from lab.server_api import ApiError, Plan

_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class Reply:
    """Builds the answer to one plan, in the form of chats and completions.

    Args:
        request_id: as the caller sees it, `chatcmpl-…` or `cmpl-…`.
        created: Unix seconds.
    """

    greeting = b""  # sent before the engine has begun

    def __init__(self, plan: Plan, request_id: str, created: int) -> None:
        self._plan = plan
        self._head: dict[str, Any] = {
            "id": request_id,
            "object": "chat.completion.chunk" if plan.chat else "text_completion",
            "created": created,
            "model": plan.model,
        }
        self._sent = 0
        before, after = _json(self._chunk("\0", None, None)).split(b'"\\u0000"')
        self._before, self._after = b"data: " + before, after + b"\n\n"

    def whole(self, cached_tokens: int) -> bytes:
        """Return the body of an answer that is not streamed."""
        plan, answer = self._plan, self._plan.answer
        text = "".join(answer.texts)
        ids = answer.token_ids if plan.return_token_ids else None
        prompt_ids = plan.prompt_ids if plan.return_token_ids else None
        choice: dict[str, Any] = {
            "index": 0,
            **({"message": _message(text)} if plan.chat else {"text": text}),
            "logprobs": None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": ids,
        }
        body = {
            **self._head,
            "choices": [choice],
            "usage": self._usage(len(answer.token_ids), cached_tokens),
        }
        if plan.chat:
            body["object"] = "chat.completion"
            body["prompt_token_ids"] = prompt_ids
        else:
            choice["prompt_token_ids"] = prompt_ids
        return _json(body)

    def opening(self) -> bytes:
        """Return what a stream begins with, once the first token is there."""
        if not self._plan.chat:
            return b""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = {**self._head, "choices": [choice]}
        if self._plan.return_token_ids:
            chunk["prompt_token_ids"] = self._plan.prompt_ids
        if self._plan.continuous_usage:
            chunk["usage"] = self._usage(0)
        return b"data: " + _json(chunk) + b"\n\n"

    def tokens(self, count: int, finish_reason: FinishReason | None) -> bytes:
        """Return one chunk with the next `count` tokens."""
        plan, start = self._plan, self._sent
        self._sent = end = start + count
        text = "".join(plan.answer.texts[start:end])
        if finish_reason is None and not plan.return_token_ids and not plan.continuous_usage:
            return self._before + _json(text) + self._after
        ids = plan.answer.token_ids[start:end] if plan.return_token_ids else None
        chunk = self._chunk(text, ids, finish_reason)
        if plan.return_token_ids and not plan.chat and start == 0:
            chunk["choices"][0]["prompt_token_ids"] = plan.prompt_ids
        if plan.continuous_usage:
            chunk["usage"] = self._usage(end)
        return b"data: " + _json(chunk) + b"\n\n"

    def closing(self, cached_tokens: int) -> bytes:
        """Return what a stream ends with."""
        if not self._plan.include_usage:
            return DONE
        usage = self._usage(self._sent, cached_tokens)
        return b"data: " + _json({**self._head, "choices": [], "usage": usage}) + b"\n\n" + DONE

    def _chunk(
        self, text: str, ids: list[int] | None, finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            **({"delta": {"content": text}} if self._plan.chat else {"text": text}),
            "logprobs": None,
            "finish_reason": finish_reason,
            "token_ids": ids,
        }
        if finish_reason is not None:
            choice["stop_reason"] = self._plan.answer.stop_reason
        return {**self._head, "choices": [choice]}

    def _usage(self, output_tokens: int, cached_tokens: int | None = None) -> dict[str, Any]:
        prompt_tokens = len(self._plan.prompt_ids)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "completion_tokens": output_tokens,
        }
        if cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
        return usage


def error_body(error: ApiError) -> bytes:
    """Return an error in vLLM's form: OpenAI's, with the status as its code."""
    inner = {
        "message": str(error),
        "type": error.kind,
        "param": error.param,
        "code": error.status,
    }
    return _json({"error": inner})


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
