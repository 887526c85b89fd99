"""What requests to the emulated engine mean: bodies in, plans out, errors in vLLM's manner.

No I/O. Fields that change nothing here (temperature, logprobs …) are ignored; what would change the
answer and is not emulated is refused, so that no test passes by accident.

Source: vllm/entrypoints/openai/{chat_completion,completion}/protocol.py and
entrypoints/serve/tokenize/protocol.py of vLLM 0.32 (fields and statuses).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from controlplane.core.hashing import Extras, pack_tokens
from lab.server_model import Answer, ModelError, ServedModel
from schemas.openai import ChatRequest

T = TypeVar("T")


class ApiError(Exception):
    """A request that is refused with an HTTP status; the message is for the caller's eyes."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and plain completions share."""

    model: str = ""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int | None = 1
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    truncate_prompt_tokens: int | None = None
    vllm_xargs: dict[str, Any] | None = None


class ChatBody(_Body, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    reasoning_effort: str | None = None
    add_special_tokens: bool = False


class CompletionBody(_Body, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[Any] | None = None
    max_tokens: int | None = 16
    add_special_tokens: bool = True


class TokenizeBody(msgspec.Struct, frozen=True):
    """`POST /tokenize`, of a prompt or a chat."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    model: str = ""
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str = ""


class EmbeddingsBody(msgspec.Struct, frozen=True):
    """`POST /v1/embeddings`."""

    input: str | list[Any]
    model: str = ""


class RerankBody(msgspec.Struct, frozen=True):
    """`POST /v1/rerank`."""

    query: str
    documents: list[str]
    model: str = ""
    top_n: int = 0


class ScoreBody(msgspec.Struct, frozen=True):
    """`POST /score`."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str = ""


class Plan(msgspec.Struct, frozen=True):
    """One generation that can start.

    Attributes:
        model: the name the caller used.
        lora_id: from 1, where that names an adapter.
    """

    chat: bool
    model: str
    prompt_ids: list[int]
    answer: Answer
    extras: Extras
    lora_id: int | None
    session_id: str | None
    report_hits: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


class Api:
    """Turns bodies into plans for one served model.

    Args:
        names: served names, the first one canonical.
        loras: adapter names.
    """

    def __init__(
        self,
        model: ServedModel,
        names: Sequence[str],
        loras: Sequence[str],
        max_model_len: int,
    ) -> None:
        self.model = model
        self.names = list(names)
        self.loras = list(loras)
        self.max_model_len = max_model_len

    def plan_chat(self, body: bytes, session_id: str | None = None) -> Plan:
        """Read a chat request. Raises ApiError."""
        chat = decode(body, ChatBody)
        self.check_model(chat.model)
        if not chat.messages:
            raise ApiError(400, "messages must not be empty", param="messages")
        text = self._render(chat)
        prompt_ids = self.model.encode(text, add_special_tokens=chat.add_special_tokens)
        limit = (
            chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
        )
        return self._plan(chat, prompt_ids, limit, session_id)

    def plan_completion(self, body: bytes, session_id: str | None = None) -> Plan:
        """Read a completion request. Raises ApiError."""
        completion = decode(body, CompletionBody)
        self.check_model(completion.model)
        prompt = completion.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            special = completion.add_special_tokens
            prompt_ids = self.model.encode(prompt, add_special_tokens=special)
        elif isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
            prompt_ids = self._checked_ids(prompt)
        else:
            raise ApiError(400, "the emulated engine takes one prompt a request", param="prompt")
        return self._plan(completion, prompt_ids, completion.max_tokens, session_id)

    def plan_rendered(
        self, common: ChatBody, chat: ChatRequest, limit: int | None, session_id: str | None
    ) -> Plan:
        """Return the plan of a chat that another API's request became. Raises ApiError.

        Args:
            common: what the answer depends on beside the prompt.
            chat: what the prompt is made of.
            limit: most tokens of the answer.
            session_id: of the request.
        """
        return self._plan(common, self.render(chat), limit, session_id)

    def render(self, chat: ChatRequest) -> list[int]:
        """Return the token ids of a chat. Raises ApiError."""
        try:
            text = self.model.render(chat)
        except ModelError as error:
            raise ApiError(400, str(error)) from error
        return self.model.encode(text, add_special_tokens=chat.add_special_tokens)

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Answer `POST /tokenize`. Raises ApiError."""
        asked = decode(body, TokenizeBody)
        self.check_model(asked.model)
        if asked.messages is not None:
            special = bool(asked.add_special_tokens)
            ids = self.model.encode(self._render(asked), add_special_tokens=special)
        elif asked.prompt is not None:
            special = asked.add_special_tokens is not False
            ids = self.model.encode(asked.prompt, add_special_tokens=special)
        else:
            raise ApiError(400, "prompt or messages is required")
        strings = self.model.token_strings(ids) if asked.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """Answer `POST /detokenize`. Raises ApiError."""
        asked = decode(body, DetokenizeBody)
        self.check_model(asked.model)
        return {"prompt": self.model.decode(self._checked_ids(asked.tokens))}

    def models(self, created: int) -> dict[str, Any]:
        """Answer `GET /v1/models`."""
        served = [(name, None) for name in self.names] + [
            (lora, self.names[0]) for lora in self.loras
        ]
        return {
            "object": "list",
            "data": [
                {
                    "id": name,
                    "object": "model",
                    "created": created,
                    "owned_by": "vllm",
                    "root": str(self.model.folder) if parent is None else name,
                    "parent": parent,
                    "max_model_len": self.max_model_len if parent is None else None,
                    "permission": [],
                }
                for name, parent in served
            ],
        }

    def check_model(self, name: str) -> None:
        """Raise ApiError unless `name` is served; empty means the canonical one."""
        if name and name not in self.names and name not in self.loras:
            raise ApiError(404, f"The model `{name}` does not exist.", "NotFoundError", "model")

    def _render(self, asked: ChatBody | TokenizeBody) -> str:
        shared = (name for name in ChatRequest.__struct_fields__ if hasattr(asked, name))
        try:
            return self.model.render(ChatRequest(**{name: getattr(asked, name) for name in shared}))
        except ModelError as error:
            raise ApiError(400, str(error)) from error

    def _checked_ids(self, ids: list[Any]) -> list[int]:
        try:
            pack_tokens(ids)
            valid = not ids or max(ids) < self.model.vocabulary_size
        except (TypeError, OverflowError):
            valid = False
        if not valid:
            message = f"token ids must be integers from 0 to {self.model.vocabulary_size - 1}"
            raise ApiError(400, message)
        return ids

    def _plan(
        self, body: _Body, prompt_ids: list[int], limit: int | None, session_id: str | None
    ) -> Plan:
        if body.n not in (None, 1):
            raise ApiError(400, "the emulated engine gives one choice a request", param="n")
        if body.truncate_prompt_tokens is not None:
            raise ApiError(400, "truncate_prompt_tokens is not emulated")
        tokens_max = self._tokens_max(len(prompt_ids), limit)
        stop = [body.stop] if isinstance(body.stop, str) else body.stop
        lora = body.model if body.model in self.loras else None
        options = body.stream_options or StreamOptions()
        return Plan(
            chat=isinstance(body, ChatBody),
            model=body.model or self.names[0],
            prompt_ids=prompt_ids,
            answer=self.model.answer(
                pack_tokens(prompt_ids),
                tokens_max,
                tokens_min=body.min_tokens,
                ignore_eos=body.ignore_eos,
                stop=stop,
            ),
            extras=Extras(lora=lora, salt=body.cache_salt),
            lora_id=None if lora is None else 1 + self.loras.index(lora),
            session_id=body.session_id or session_id,
            report_hits=(body.vllm_xargs or {}).get("kv_cache_report_mode") == "full",
            stream=bool(body.stream),
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage_stats,
            return_token_ids=bool(body.return_token_ids),
        )

    def _tokens_max(self, prompt_tokens: int, limit: int | None) -> int:
        """Return how many tokens the answer may have."""
        if prompt_tokens == 0:
            raise ApiError(400, "the prompt must not be empty", param="prompt")
        if limit is not None and limit < 1:
            raise ApiError(400, f"max_tokens must be at least 1, got {limit}", param="max_tokens")
        if prompt_tokens + (limit or 1) > self.max_model_len:
            message = (
                f"This model's maximum context length is {self.max_model_len} tokens. However, "
                f"the prompt has {prompt_tokens} tokens and {limit or 1} are asked for the answer."
            )
            raise ApiError(400, message, param="input_tokens")
        return limit or self.max_model_len - prompt_tokens


def decode(body: bytes, kind: type[T]) -> T:
    """Read a JSON body. Raises ApiError that names what is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error
