"""Sends planned requests over HTTP at their times, and measures what a client sees.

It uses the router's own upstream pool as its client: the lightest there is here, so that the load
generator takes as little as possible of the machine that it shares with what it measures.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from lab.traces import Trace, TraceRequest
from router.http_head import ResponseHead
from router.limits import UpstreamLimits
from router.upstream import UpstreamPool
from router.upstream_connection import ErrorKind

_CACHED = re.compile(rb'"cached_tokens":\s*(\d+)')
_OUTPUT = re.compile(rb'"completion_tokens":\s*(\d+)')
_TAIL_BYTES = 2048


class Planned(msgspec.Struct, frozen=True):
    """One request to send.

    Attributes:
        at_s: when, from the start of the run.
        path: of the API.
        body: makes the JSON bytes when they are needed: a trace's prompts are too many to keep.
        prompt_tokens: for the report.
    """

    at_s: float
    path: str
    body: Callable[[], bytes]
    prompt_tokens: int


class Answered(msgspec.Struct, frozen=True):
    """What became of one request, as its client saw it.

    Attributes:
        late_s: how much later than planned it was sent: the load generator's own lag.
        status: HTTP status; 0 if there was none.
        error: what went wrong after or instead of a status; empty if nothing did.
        ttft_s: to the first byte of the body; None if none came.
    """

    planned: Planned
    late_s: float
    status: int
    error: str
    ttft_s: float | None
    duration_s: float
    cached_tokens: int | None
    output_tokens: int | None

    @property
    def ok(self) -> bool:
        """Whether it was answered whole."""
        return self.status == 200 and not self.error

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for shorter answers."""
        if self.ttft_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.duration_s - self.ttft_s) / (self.output_tokens - 1)


class _Client:
    """One request under way: the sink of its call."""

    def __init__(self, planned: Planned, late_s: float, done: Callable[[Answered], None]) -> None:
        self._planned = planned
        self._late_s = late_s
        self._done = done
        self._began_s = time.monotonic()
        self._status = 0
        self._ttft_s: float | None = None
        self._tail = b""

    def on_response_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_data(self, data: bytes) -> None:
        if self._ttft_s is None:
            self._ttft_s = time.monotonic() - self._began_s
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def on_end(self) -> None:
        self._end("")

    def on_error(self, kind: ErrorKind) -> None:
        self._end(str(kind))

    def _end(self, error: str) -> None:
        cached, output = _CACHED.findall(self._tail), _OUTPUT.findall(self._tail)
        self._done(
            Answered(
                self._planned,
                self._late_s,
                self._status,
                error,
                self._ttft_s,
                time.monotonic() - self._began_s,
                int(cached[-1]) if cached else None,
                int(output[-1]) if output else None,
            )
        )


async def run_load(
    url: str,
    planned: Sequence[Planned],
    *,
    answered: Callable[[Answered], None] = lambda _: None,
    stop: asyncio.Event | None = None,
    concurrent_max: int = 4096,
) -> list[Answered]:
    """Send requests at their times and return what became of them, in order of their ends.

    Args:
        url: base URL to send to.
        planned: requests, by `at_s`.
        answered: told of each end, for progress.
        stop: ends the run early; what is under way is still waited for.
        concurrent_max: requests under way at once; further ones are late.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    pool = UpstreamPool(UpstreamLimits(connections_max=concurrent_max))
    pool.put("target", parts.hostname, parts.port or 80)
    places = asyncio.Semaphore(concurrent_max)
    results: list[Answered] = []

    def done(result: Answered) -> None:
        results.append(result)
        places.release()
        answered(result)

    stop = stop or asyncio.Event()
    began_s = time.monotonic()
    for request in planned:
        await _until(began_s + request.at_s, stop)
        if stop.is_set():
            break
        await places.acquire()
        late_s = time.monotonic() - began_s - request.at_s
        body = request.body()
        pool.send("target", _head(request, len(body)), body, _Client(request, late_s, done))
    for _ in range(concurrent_max):
        await places.acquire()
    await pool.close()
    return results


def plan(trace: Trace, model: str) -> tuple[Planned, ...]:
    """Return a trace's requests as streamed completions of token ids."""

    def body_of(request: TraceRequest) -> Callable[[], bytes]:
        return lambda: msgspec.json.encode(
            {
                "model": model,
                "prompt": trace.prompt_ids(request),
                "max_tokens": request.output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    return tuple(
        Planned(request.at_s, "/v1/completions", body_of(request), request.input_tokens)
        for request in trace.requests
    )


def _head(request: Planned, body_bytes: int) -> bytes:
    return (
        f"POST {request.path} HTTP/1.1\r\ncontent-type: application/json\r\n"
        f"content-length: {body_bytes}\r\n"
    ).encode()


async def _until(at_s: float, stop: asyncio.Event) -> None:
    """Wait until a moment of the monotonic clock, or until `stop` is set."""
    wait_s = at_s - time.monotonic()
    if wait_s <= 0:
        return
    try:
        await asyncio.wait_for(stop.wait(), wait_s)
    except TimeoutError:
        return
