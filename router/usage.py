"""What an engine says that a request used, and how it came, read from the end of its answer.

The answer passes through unparsed; its last bytes hold the usage in each form that vLLM speaks:

    chat, completions   "usage":{"prompt_tokens":…,"completion_tokens":…,
                                 "prompt_tokens_details":{"cached_tokens":…}}
    responses           "usage":{"input_tokens":…,"input_tokens_details":{"cached_tokens":…},
                                 "output_tokens":…}
    messages            "usage":{"input_tokens":…,"cache_read_input_tokens":…,"output_tokens":…}

A model that writes such a text is not counted for it: in a JSON string, its quotation marks are
escaped.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

COUNT_MAX: Final = 2**53
"""Larger numbers are nobody's token count, and not every reader of our logs could keep them."""

_USAGE: Final = b'"usage":'
_USAGE_BYTES_MAX: Final = 1024
_COUNT: Final = re.compile(
    rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens|cached_tokens'
    rb'|cache_read_input_tokens|cache_creation_input_tokens)":\s*(\d{1,16})(?!\d)'
)
_EVENT: Final = b"data: "
_DONE: Final = b"data: [DONE]"
_EVENT_ENDS: Final = (b"\n\n", b"\n\n\r\n", b"\r\n\r\n")
"""An empty line ends each event of a stream; the line end of the last chunk may follow it."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request; None where the engine does not say.

    Attributes:
        prompt_tokens: of the whole prompt, cached ones included.
        cached_tokens: of these, the ones that were not computed.
        output_tokens: generated.
        streamed: the answer came as a stream of events.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    streamed: bool = False


NO_USAGE: Final = Usage()
_STREAM_WITHOUT_USAGE: Final = Usage(streamed=True)


def read_usage(tail: bytes) -> Usage:
    """Return the last usage that the end of an answer's body holds."""
    at, streamed = tail.rfind(_USAGE), tail.endswith(_EVENT_ENDS)
    if at < 0:
        return _STREAM_WITHOUT_USAGE if streamed else NO_USAGE
    counts: dict[bytes, int] = {}
    for name, digits in _COUNT.findall(tail, at, at + _USAGE_BYTES_MAX):
        count = int(digits)
        if count <= COUNT_MAX:
            counts[name] = count
    cached = counts.get(b"cached_tokens", counts.get(b"cache_read_input_tokens"))
    prompt = counts.get(b"prompt_tokens", counts.get(b"input_tokens"))
    if prompt is not None and b"cache_read_input_tokens" in counts:
        # The Messages API counts as input only what was neither read from a cache nor written.
        prompt += counts[b"cache_read_input_tokens"] + counts.get(b"cache_creation_input_tokens", 0)
    output = counts.get(b"completion_tokens", counts.get(b"output_tokens"))
    return Usage(prompt, cached, output, streamed)


def estimate_output_tokens(tail: bytes, body_bytes: int) -> int:
    """Return about how many tokens a stream without usage had: each event carries one, or so.

    Args:
        tail: the end of the body.
        body_bytes: length of the whole body.
    """
    events = tail.count(_EVENT) - tail.count(_DONE)
    return 0 if not events else max(events, body_bytes * events // len(tail))
