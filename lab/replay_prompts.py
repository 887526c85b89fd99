"""A trace's requests as engines and routers want them: names of blocks, or tokens that make them.

The names of `DirectFeed` are a trace's own ids, chained. `TokenPrompts` makes up tokens and hashes
them, as production does; whoever shares a prefix in one shares it in the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from controlplane.core.decision import RouteRequest
from controlplane.core.hashing import chain, pack_tokens
from lab.engine_types import Request, digest, engine_hashes
from lab.traces import TINY_VOCABULARY, Trace


class Prompts(Protocol):
    """Makes requests."""

    def make(self, position: int) -> tuple[Request, RouteRequest]:
        """Return a request of the trace for the engine, and for the router."""

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""


class NamedPrompts:
    """Requests by names alone."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        self._trace = trace
        self._block_size = block_size

    def make(self, position: int) -> tuple[Request, RouteRequest]:
        """Return a request of the trace for the engine, and for the router."""
        request = self._trace.engine_request(position, self._block_size)
        whole = request.prompt_tokens // self._block_size
        hashes = request.block_hashes[:whole]
        asked = RouteRequest(request.request_id, request.prompt_tokens, hashes, self._block_size)
        return request, asked

    def forget(self, request_id: str) -> None:
        """Note that a request has ended: nothing is kept of it."""


class TokenPrompts:
    """Requests by tokens, which are kept while the request runs."""

    def __init__(self, trace: Trace, block_size: int) -> None:
        self._trace = trace
        self._block_size = block_size
        self._tokens: dict[str, list[int]] = {}

    def make(self, position: int) -> tuple[Request, RouteRequest]:
        """Return a request of the trace for the engine, and for the router."""
        asked = self._trace.requests[position]
        request_id = f"{position}"
        tokens = self._trace.prompt_ids(asked) + _answer(position, asked.output_tokens)
        self._tokens[request_id] = tokens
        hashes = chain(pack_tokens(tokens), self._block_size)
        names = engine_hashes(hashes)
        prompt, answer = asked.input_tokens, asked.output_tokens
        of_prompt = hashes[: prompt // self._block_size]
        return (
            Request(request_id, prompt, answer, names),
            RouteRequest(request_id, prompt, of_prompt, self._block_size),
        )

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        del self._tokens[request_id]

    def tokens(self, request_id: str) -> Sequence[int]:
        """Return the prompt and answer of a request that has not ended."""
        return self._tokens[request_id]


def _answer(position: int, count: int) -> list[int]:
    """Return tokens that are nobody else's."""
    seed = digest(position.to_bytes(8, "little"))
    return [(seed + 7919 * each) % TINY_VOCABULARY for each in range(count)]
