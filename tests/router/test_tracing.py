"""Traces as a real collector receives them: OTLP over HTTP, to a receiver made here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import aiohttp
import msgspec
import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from controlplane.core.queue_lines import QueueConfig
from router.access_log import Entry
from router.tracing import Attempt, Trace, Tracer, stages, traces_url
from tests.router.collector import Collector, said
from tests.router.fake_engine import Behaviour, Mode
from tests.router.service_rig import ServiceRig, chat, until

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
LONG = "one two three four five six seven eight nine ten " * 12


async def send(rig: ServiceRig, headers: dict[str, str] | None = None) -> None:
    """Send a streamed chat and read it to its end."""
    body = chat(LONG, stream=True)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{rig.url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        await answer.read()


@pytest.mark.slow
async def test_a_request_becomes_a_trace_that_continues_its_callers() -> None:
    """Every stage is a span in order, and the engine is told to continue this router's span."""
    async with Collector() as collector:
        settings = {"otlp_endpoint": collector.url, "router_id": "router-7"}
        async with ServiceRig(settings) as rig:
            engine = await rig.instance("a", Behaviour(Mode.STREAM, chunks=3, gap_s=0.01))
            await send(rig, {"traceparent": PARENT, "tracestate": "us=1"})
            (own,) = await collector.whole("chat")
            metrics = rig.process.metrics.render().decode()
        headers = engine.received[0].headers
    assert own.trace_id.hex() == PARENT[3:35]
    assert own.parent_span_id.hex() == PARENT[36:52]
    upstream = b"00-%b-%b-01" % (own.trace_id.hex().encode(), own.span_id.hex().encode())
    assert headers[b"traceparent"] == upstream
    assert engine.received[0].head.count(b"traceparent") == 1
    assert headers[b"tracestate"] == b"us=1"
    parts = [span for span in collector.spans if span is not own]
    assert [span.name for span in parts] == ["tokenize", "decide", "upstream wait", "stream"]
    assert {span.parent_span_id for span in parts} == {own.span_id}
    times = [t for span in parts for t in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times)
    assert own.start_time_unix_nano <= times[0]
    assert times[-1] <= own.end_time_unix_nano
    assert abs(own.end_time_unix_nano / 1e9 - time.time()) < 30.0
    assert said(parts[1])["multiplane.instance"] == "a"
    assert said(own)["multiplane.outcome"] == "ok"
    assert said(own)["http.response.status_code"] == 200
    assert collector.resources["service.instance.id"] == "router-7"
    assert 'multiplane_trace_spans_total{outcome="dropped"} 0.0' in metrics


@pytest.mark.slow
async def test_every_attempt_is_told_and_what_fails_is_marked() -> None:
    """Retries show where they went; a caller that is not sampled is not told of."""
    async with Collector() as collector:
        async with ServiceRig({"otlp_endpoint": collector.url}) as rig:
            engine = await rig.instance("a", Behaviour(status=500))
            await send(rig, {"traceparent": PARENT[:-1] + "0"})
            assert engine.received[0].headers[b"traceparent"].startswith(PARENT[:36].encode())
            assert engine.received[0].headers[b"traceparent"].endswith(b"-00")
            await rig.instance("b", Behaviour(status=500))
            await send(rig)
            await until(lambda: len(collector.named("chat")) == 1)
        (own,) = collector.named("chat")
    assert own.parent_span_id == b""
    assert own.status.message == "upstream_error"
    waits = collector.named("upstream wait")
    assert {said(span)["multiplane.instance"] for span in waits} == {"a", "b"}
    assert said(waits[0])["multiplane.outcome"] == "retried"
    assert [said(span)["multiplane.attempt"] for span in waits] == [0, 1]
    assert collector.named("stream")[0].parent_span_id == own.span_id


@pytest.mark.slow
async def test_waiting_for_room_is_a_span_between_reading_and_deciding() -> None:
    """As long as the request ahead of it took; that one has none."""
    async with Collector() as collector:
        settings = {"otlp_endpoint": collector.url, "queue": QueueConfig("fcfs")}
        async with ServiceRig(settings, batch_cap=1) as rig:
            await rig.instance("a", Behaviour(delay_s=0.2))
            await asyncio.gather(send(rig), send(rig))
            await until(lambda: len(collector.named("chat")) == 2)
    (queue,) = collector.named("queue")
    own = next(span for span in collector.named("chat") if span.span_id == queue.parent_span_id)
    assert said(own)["multiplane.outcome"] == "ok"
    assert queue.end_time_unix_nano - queue.start_time_unix_nano > 0.1e9
    (decide,) = (span for span in collector.named("decide") if span.parent_span_id == own.span_id)
    assert decide.start_time_unix_nano >= queue.end_time_unix_nano


@pytest.mark.slow
async def test_without_an_endpoint_nothing_is_imported() -> None:
    """And the caller's header goes to the engine as it is."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        await send(rig, {"traceparent": PARENT})
        assert rig.process.router.tracer is None
        assert engine.received[0].headers[b"traceparent"] == PARENT.encode()
    script = (
        "import asyncio, sys\n"
        "from controlplane.bus import MemoryBroker\n"
        "import controlplane.cli.router_command, router.worker\n"
        "from router.config import RouterConfig\n"
        "from router.main import RouterProcess\n"
        "async def main():\n"
        "    config = RouterConfig('memory://', port=0, admin_port=0, join_s_max=0.0)\n"
        "    process = RouterProcess(config, MemoryBroker().bus())\n"
        "    await process.start(); await process.stop()\n"
        "asyncio.run(main())\n"
        "sys.exit(' '.join(each for each in sys.modules if 'opentelemetry' in each) or 0)\n"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


class Stuck(SpanExporter):
    """An exporter that holds what it gets until it is let go."""

    def __init__(self, *, free: bool = False) -> None:
        self.busy = threading.Event()
        self.free = threading.Event()
        if free:
            self.free.set()
        self.names: list[str] = []

    def export(self, spans: Any) -> SpanExportResult:
        """Wait."""
        self.busy.set()
        self.free.wait(10.0)
        self.names += [span.name for span in spans]
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Let go."""
        self.free.set()


ENTRY = Entry(
    0.0, "r", "", "m", "chat", 200, "ok", instance="a", attempts=1, ttft_s=0.5, duration_s=1.0
)
"""What is told of a request that took a second."""


def entry(**fields: Any) -> Entry:
    """Return it with something else."""
    return msgspec.structs.replace(ENTRY, **fields)


@pytest.mark.slow
async def test_the_buffer_is_bounded_and_what_it_cannot_take_is_counted() -> None:
    """While the collector hangs, requests fill the buffer to its bound and no further."""
    exporter = Stuck()
    tracer = Tracer("", "r", requests_max=3, exporter=exporter)
    tracer.end(tracer.begin(None, 0.0), entry(), 1.0)
    await until(exporter.busy.is_set)
    for _ in range(5):
        tracer.end(tracer.begin(None, 0.0), entry(), 1.0)
    assert tracer.counts == {"sent": 0, "failed": 0, "dropped": 2 * 2}
    exporter.free.set()
    await asyncio.to_thread(tracer.close)
    assert exporter.names == ["chat"] * 4
    assert tracer.counts["sent"] == 4


@pytest.mark.slow
async def test_a_collector_that_refuses_or_is_away_costs_spans_only() -> None:
    """They are counted as failed, and closing does not wait for it."""
    async with Collector() as collector:
        collector.status = 400
        tracer = Tracer(collector.url, "r")
        tracer.end(tracer.begin(None, 0.0), entry(), 1.0)
        await until(lambda: tracer.counts["failed"] == 1)
    tracer.end(tracer.begin(None, 0.0), entry(), 1.0)
    began_s = time.monotonic()
    await asyncio.to_thread(tracer.close)
    assert time.monotonic() - began_s < 8.0
    assert tracer.counts["sent"] == 0


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-" + b"0" * 16 + b"-01",
        b"ff" + PARENT[2:].encode(),
        PARENT.upper().encode(),
    ],
)
async def test_what_is_no_parent_begins_a_trace(header: bytes | None) -> None:
    """Of its own, sampled by this router's share."""
    for share in (0.0, 1.0):
        tracer = Tracer("", "r", share, exporter=Stuck(free=True))
        trace = tracer.begin(header, 0.0)
        assert (trace.parent_id, trace.sampled) == (0, share == 1.0)
        assert trace.trace_id != int(PARENT[3:35], 16)
        tracer.end(trace, entry(), 1.0)
        tracer.close()
        assert tracer.counts["sent"] == share


def attempted(*attempts: tuple[float, str]) -> Trace:
    """Return the trace of a request read in 0.1 s, with attempts by time and instance."""
    trace = Trace(1, 0, 2, 0.0, sampled=True)
    trace.read_s = 0.1
    trace.attempts += [
        Attempt(at_s, 0.01, name, "multiplicative", "exact", 0) for at_s, name in attempts
    ]
    return trace


def lasted(trace: Trace, told: Entry) -> list[tuple[str, float, float]]:
    """Return the stages of a request that began at 0, by name, beginning and end."""
    return [
        (name, round(since_s, 6), round(until_s, 6))
        for name, since_s, until_s, _ in stages(trace, told, told.duration_s)
    ]


Stages = list[tuple[str, float, float]]
TOKENIZED = ("tokenize", 0.0, 0.1)


@pytest.mark.parametrize(
    ("trace", "told", "expected"),
    [
        (attempted(), entry(ttft_s=None), []),
        (
            attempted((0.3, "a")),
            entry(),
            [
                TOKENIZED,
                ("queue", 0.1, 0.3),
                ("decide", 0.3, 0.31),
                ("upstream wait", 0.31, 0.5),
                ("stream", 0.5, 1.0),
            ],
        ),
        (
            attempted((0.1, "a"), (0.4, "b")),
            entry(ttft_s=None),
            [
                TOKENIZED,
                ("decide", 0.1, 0.11),
                ("upstream wait", 0.11, 0.4),
                ("decide", 0.4, 0.41),
                ("upstream wait", 0.41, 1.0),
            ],
        ),
    ],
    ids=["refused", "queued", "retried"],
)
def test_stages_follow_each_other(trace: Trace, told: Entry, expected: Stages) -> None:
    """Each begins where the one before it ended, and there is none that was not gone through."""
    assert lasted(trace, told) == expected


@pytest.mark.parametrize("endpoint", ["http://h:4318", "http://h:4318/", "http://h:4318/v1/traces"])
def test_the_path_of_traces_is_added(endpoint: str) -> None:
    """As the variable's definition asks, but not twice."""
    assert traces_url(endpoint) == "http://h:4318/v1/traces"
