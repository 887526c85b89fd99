"""Requests as OpenTelemetry traces, sent over OTLP/HTTP; imported only where an endpoint is named.

Theory of operation. A request carries a `Trace`: its ids, which the engine gets in `traceparent`,
and what was decided when. Spans are made of it after its end, by a thread that also sends them, so
that the request path only notes times. A slow or absent collector fills the buffer and nothing
else: what has no room there is dropped and counted.

    request ─┬─ tokenize       from the whole request to its tokens and block hashes
             ├─ queue          until an instance had room; only if it waited
             ├─ decide         match, score and pick        ┐
             ├─ upstream wait  until the first byte         ├ once for each attempt
             └─ stream         until the last byte          ┘ (the last only)

A caller's `traceparent` is continued and its sampling flag obeyed; other requests are sampled here.

Source: W3C Trace Context, level 1; OpenTelemetry's environment variables for headers, resource
attributes, certificates, compression and timeout are read by the library itself.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from controlplane.core.decision import Decision
from router.access_log import Entry

logger = logging.getLogger(__name__)

TRACES_PATH: Final = "/v1/traces"
REQUESTS_MAX: Final = 4096
"""Requests whose spans wait to be sent: four seconds of a router with a thousand a second."""
BATCH_REQUESTS: Final = 128
FLUSH_S: Final = 1.0
CLOSE_S_MAX: Final = 3.0
QUEUE_S_MIN: Final = 1e-5
"""Less than that between reading and deciding is no waiting."""

_TRACEPARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED: Final = 1
_GOOD: Final = frozenset({"ok", "client_gone"})
_SCOPE: Final = InstrumentationScope("multiplane.router")


class Attempt(msgspec.Struct, frozen=True):
    """A decision, and so an attempt at one instance; `at_s` on the monotonic clock."""

    at_s: float
    decide_s: float
    instance: str
    policy: str
    trust: str
    hit_tokens: int


class Trace:
    """What is noted of one request.

    Attributes:
        line: the header line for the engine, whose spans become this request's.
        started_s: when it was whole, monotonic.
        read_s: how long it was read after that.
    """

    __slots__ = (
        *("attempts", "line", "parent_id", "read_s", "sampled", "span_id", "started_s"),
        "trace_id",
    )

    def __init__(
        self, trace_id: int, parent_id: int, span_id: int, started_s: float, *, sampled: bool
    ) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = span_id
        self.started_s = started_s
        self.sampled = sampled
        self.read_s = 0.0
        self.attempts: list[Attempt] = []
        self.line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (trace_id, span_id, sampled)

    def decided(self, now_s: float, decide_s: float, read_s: float, decision: Decision) -> None:
        """Note a decision.

        Args:
            now_s: when it began, monotonic.
            decide_s: how long it took.
            read_s: how long the request had been read before.
            decision: what was decided.
        """
        if self.sampled:
            self.read_s = read_s
            instance, policy = decision.instance.record.instance_id, decision.choice.policy
            attempt = Attempt(now_s, decide_s, instance, policy, decision.trust, decision.hit)
            self.attempts.append(attempt)

    @property
    def spans(self) -> int:
        """How many spans it comes to, give or take those that may be left out."""
        return 2 + 2 * len(self.attempts) + bool(self.attempts)


class Ended(msgspec.Struct, frozen=True):
    """A request that is over, as it waits to be told of.

    Attributes:
        ended_s: when, monotonic; `ended_ns` the same as Unix nanoseconds.
    """

    trace: Trace
    entry: Entry
    ended_s: float
    ended_ns: int

    def wall_ns(self, at_s: float) -> int:
        """Return a monotonic time as Unix nanoseconds."""
        return self.ended_ns - round((self.ended_s - at_s) * 1e9)


class Tracer:
    """Sends the spans of requests; `close` it.

    Args:
        endpoint: of a collector, `http://host:4318`, with or without the path of traces.
        router_id: this router's name on the bus.
        share: of the requests that come without a decision on sampling.
        requests_max: requests that may wait to be sent.

    Attributes:
        counts: spans sent, refused by the collector or lost on the way, and dropped for want of
            room.
    """

    def __init__(
        self,
        endpoint: str,
        router_id: str,
        share: float = 1.0,
        *,
        requests_max: int = REQUESTS_MAX,
        exporter: SpanExporter | None = None,
    ) -> None:
        self.counts = {"sent": 0, "failed": 0, "dropped": 0}
        self._share = share
        self._requests_max = requests_max
        self._random = random.Random()
        self._exporter = exporter or OTLPSpanExporter(traces_url(endpoint))
        self._resource = Resource.create(
            {"service.name": "multiplane-router", "service.instance.id": router_id}
        )
        self._waiting: deque[Ended] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, traceparent: bytes | None, started_s: float) -> Trace:
        """Return the trace of a request.

        Args:
            traceparent: its caller's header; what cannot be read counts as absent.
            started_s: when it was whole, monotonic.
        """
        span_id = self._random.getrandbits(64) or 1
        found = None if traceparent is None else _TRACEPARENT.match(traceparent)
        if found is not None:
            trace_id, parent_id, flags = (int(group, 16) for group in found.groups())
            if trace_id and parent_id:
                sampled = bool(flags & _SAMPLED)
                return Trace(trace_id, parent_id, span_id, started_s, sampled=sampled)
        sampled = self._random.random() < self._share
        trace_id = self._random.getrandbits(128) or 1
        return Trace(trace_id, 0, span_id, started_s, sampled=sampled)

    def end(self, trace: Trace, entry: Entry, now_s: float) -> None:
        """Take a request that is over; its spans are sent within a second or so."""
        if not trace.sampled:
            return
        if len(self._waiting) >= self._requests_max:
            self.counts["dropped"] += trace.spans
            return
        self._waiting.append(Ended(trace, entry, now_s, time.time_ns()))
        if len(self._waiting) >= BATCH_REQUESTS:
            self._wake.set()

    def close(self) -> None:
        """Send what waits, for no longer than `CLOSE_S_MAX`; what is left then is dropped."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S_MAX)
        self._exporter.shutdown()

    def _run(self) -> None:
        """Send batches until the tracer is closed and nothing waits; in the tracer's thread."""
        while not self._closing or self._waiting:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            while self._waiting:
                self._send()

    def _send(self) -> None:
        """Send one batch."""
        batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_REQUESTS))]
        spans = [span for ended in batch for span in self._spans(ended)]
        try:
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # of a library, in a thread that must go on
            logger.exception("spans could not be sent")
            sent = False
        self.counts["sent" if sent else "failed"] += len(spans)

    def _spans(self, ended: Ended) -> Iterator[ReadableSpan]:
        """Yield the spans of a request, its own last."""
        trace, entry = ended.trace, ended.entry
        own = self._context(trace, trace.span_id)
        for name, from_s, until_s, attributes in stages(trace, entry, ended.ended_s):
            yield ReadableSpan(
                name,
                self._context(trace, self._random.getrandbits(64) or 1),
                own,
                self._resource,
                attributes,
                kind=SpanKind.CLIENT if name == "upstream wait" else SpanKind.INTERNAL,
                start_time=ended.wall_ns(from_s),
                end_time=ended.wall_ns(until_s),
                instrumentation_scope=_SCOPE,
            )
        good = entry.outcome in _GOOD or entry.status in range(200, 500)
        yield ReadableSpan(
            entry.endpoint,
            own,
            self._context(trace, trace.parent_id, remote=True) if trace.parent_id else None,
            self._resource,
            told(entry),
            kind=SpanKind.SERVER,
            status=Status() if good else Status(StatusCode.ERROR, entry.outcome),
            start_time=ended.wall_ns(trace.started_s),
            end_time=ended.ended_ns,
            instrumentation_scope=_SCOPE,
        )

    def _context(self, trace: Trace, span_id: int, *, remote: bool = False) -> SpanContext:
        return SpanContext(trace.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))


def traces_url(endpoint: str) -> str:
    """Return where a collector takes traces."""
    bare = endpoint.rstrip("/")
    return bare if bare.endswith(TRACES_PATH) else bare + TRACES_PATH


def stages(
    trace: Trace, entry: Entry, ended_s: float
) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
    """Yield (name, from, until, attributes) of what a request went through, times monotonic."""
    began_s = trace.started_s
    if trace.attempts:
        first_s = trace.attempts[0].at_s
        read_s = min(began_s + trace.read_s, first_s)
        yield "tokenize", began_s, read_s, {"multiplane.exact": entry.exact}
        if first_s - read_s > QUEUE_S_MIN:
            yield "queue", read_s, first_s, {}
    last = len(trace.attempts) - 1
    for number, attempt in enumerate(trace.attempts):
        attributes: dict[str, Any] = {
            "multiplane.attempt": number,
            "multiplane.instance": attempt.instance,
        }
        sent_s = attempt.at_s + attempt.decide_s
        decided = {
            "multiplane.policy": attempt.policy,
            "multiplane.trust": attempt.trust,
            "multiplane.hit_tokens": attempt.hit_tokens,
        }
        yield "decide", attempt.at_s, sent_s, attributes | decided
        if number < last:
            until_s = trace.attempts[number + 1].at_s
            yield "upstream wait", sent_s, until_s, attributes | {"multiplane.outcome": "retried"}
        elif entry.ttft_s is None:
            outcome = {"multiplane.outcome": entry.outcome}
            yield "upstream wait", sent_s, ended_s, attributes | outcome
        else:
            first_byte_s = max(began_s + entry.ttft_s, sent_s)
            yield "upstream wait", sent_s, first_byte_s, attributes
            yield "stream", first_byte_s, ended_s, attributes


def told(entry: Entry) -> dict[str, Any]:
    """Return a request's attributes: its line in the access log, by OpenTelemetry's names."""
    attributes = {
        "http.response.status_code": entry.status,
        "gen_ai.request.model": entry.model,
        "gen_ai.usage.input_tokens": entry.prompt_tokens,
        "gen_ai.usage.output_tokens": entry.output_tokens,
        "multiplane.request_id": entry.request_id,
        "multiplane.tenant": entry.tenant,
        "multiplane.outcome": entry.outcome,
        "multiplane.instance": entry.instance,
        "multiplane.attempts": entry.attempts,
        "multiplane.hit_tokens": entry.hit_tokens,
        "multiplane.cached_tokens": entry.cached_tokens,
    }
    return {name: value for name, value in attributes.items() if value is not None}
