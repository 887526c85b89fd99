"""What reading a request yields: a prompt's tokens and block hashes, or why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from controlplane.core.hashing import NO_EXTRAS, BlockHash, Extras

HEAD_TOKENS = 5
"""How many first token ids a prompt carries: what the latency predictor looks at."""


class Reason(StrEnum):
    """Why a prompt's tokens are not known exactly: a bounded set, fit for a metric label."""

    BATCH = "batch"  # several prompts in one request
    BUSY = "busy"  # too many long texts are being tokenized already
    CARD_DIFFERS = "card_differs"  # the engine tokenizes otherwise than its model card says
    CHAT_RULES = "chat_rules"  # the model's chats are rendered by engine code, not by a template
    CLOCK = "clock"  # the template prints the time of day
    FAILED = "failed"  # a fault of this router, which its log describes
    INVALID = "invalid"  # the engine refuses such a request
    MULTIMODAL = "multimodal"  # images, audio, video, embeddings
    NO_TEMPLATE = "no_template"  # the model card has no chat template, or one that cannot be read
    NO_TOKENIZER = "no_tokenizer"  # the model card has no tokenizer, or one that cannot be read
    REQUEST_TEMPLATE = "request_template"  # the request brings its own template
    TEMPLATE_ERROR = "template_error"  # the template refuses this chat
    TOO_LONG = "too_long"  # a text beyond this router's own bound
    TRUNCATION = "truncation"  # the engine is asked to cut the prompt
    UNSUPPORTED = "unsupported"  # a field whose effect on the prompt is not modelled here


class Inexact(msgspec.Struct, frozen=True):
    """The request's tokens cannot be known exactly here; route it by load.

    Attributes:
        reason: what to count it under.
        detail: what it was about, for a debug log; never the text of a prompt.
        tokens_min: how many tokens the prompt has at the least, where that is known.
    """

    reason: Reason
    detail: str = ""
    tokens_min: int = 0


class Prompt(msgspec.Struct, frozen=True):
    """The exact token ids of a request, as its block hashes.

    Attributes:
        tokens: length of the prompt; checks against the model's limit are the caller's.
        hashes: (tokens // block_size,) hashes of the whole blocks, chained from the first one;
            empty where the engine publishes no blocks. Not to be changed.
        extras: LoRA and cache salt that went into the hashes.
        cached_tokens: how many of the tokens came out of the prefix cache.
        head: the first token ids, at most `HEAD_TOKENS` of them.
    """

    tokens: int
    hashes: list[BlockHash]
    extras: Extras = NO_EXTRAS
    cached_tokens: int = 0
    head: tuple[int, ...] = ()


def single(prompt: Any) -> str | Sequence[int] | Inexact:
    """Return the one prompt of a completion request."""
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        return Inexact(Reason.INVALID, "no prompt")
    if isinstance(prompt[0], int):
        ids: Sequence[int] = prompt
        return ids
    if len(prompt) > 1:
        return Inexact(Reason.BATCH)
    only: str | Sequence[int] = prompt[0]
    return only
