"""A long run of a whole plane with clients that leave and engines that fail; nothing may grow.

    python -m bench.soak --requests 100000 [--seed N] [--queue]

Real processes: NATS, three emulated engines with their sidecars, one router. Clients send requests
of every kind over connections of their own, and many leave at a random moment. Engines answer with
errors, hang, drop connections and stall, as `lab.server_faults` lets them. A tenth of the requests
warms everything up; what the router then holds at rest is compared with what it holds at the end:
memory, file descriptors, threads, tasks, connections, bookings, tenants' places, prefix handles,
and with `--queue`, where requests wait for room and for each other, those that wait.
Prints JSON; how far it is goes to standard error.

Exits with 1 if something has grown, or if requests failed that no fault explains.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.soak_clients import Traffic, visit
from controlplane.http_client import HttpClient, HttpError
from lab.stack import LocalStack, StackOptions

CLIENTS: Final = 24
FAULT_EVERY_S: Final = 0.15
REST_S_MAX: Final = 60.0
MEMORY_GROWTH_MIB: Final = 16.0
"""More is a leak: a hundred thousand requests that leave 100 bytes each are 10 MiB."""

_FAULTS: Final[tuple[dict[str, Any], ...]] = (
    {"kind": "error", "count": 3, "status": 500},
    {"kind": "error", "count": 3, "status": 503},
    {"kind": "hang", "count": 1},
    {"kind": "close", "count": 2, "chunks": 0},
    {"kind": "close", "count": 2, "chunks": 2},
    {"kind": "stall", "seconds": 0.3},
    {"kind": "drop_events", "count": 3},
)
_QUEUE_FLAGS: Final = ("--queue", "edf+klpm", "--batch-cap", "6", "--coalesce")
_QUEUE_GAUGES: Final = {"waiting": "queue_requests", "waiting_bytes": "queue_bytes"}
_GAUGES: Final = {
    "tasks": "asyncio_tasks",
    "connections": "http_connections_open",
    "calls": "upstream_calls_open",
    "tickets": "requests_running",
    "booked": "inflight_requests",
    "queued_tokens": "queued_prefill_tokens",
    "tenants_running": "tenant_requests_running",
    "prefix_handles": "prefix_cache_handles",
}
_MAY_STAY: Final = frozenset({"tasks", "connections"})


class AtRest(msgspec.Struct, frozen=True):
    """What the router holds while nothing happens.

    Fields:
        memory_mib: resident memory.
        descriptors, threads: of its process.
        gauges: sums of its own metrics, by the names of `_GAUGES` and `_QUEUE_GAUGES`.
    """

    memory_mib: float
    descriptors: int
    threads: int
    gauges: dict[str, float]

    @property
    def held(self) -> list[str]:
        """Names of the gauges that are not zero, though nothing happens."""
        return sorted(
            name for name, value in self.gauges.items() if value and name not in _MAY_STAY
        )


class Report(msgspec.Struct, frozen=True):
    """The outcome of a run.

    Fields:
        answers: how many requests ended how, as their clients saw it.
        before, after: the router at rest, after the warm-up and at the end.
        findings: what has grown, or went wrong; empty if all is well.
    """

    requests: int
    seconds: float
    answers: dict[str, int]
    before: AtRest
    after: AtRest
    findings: list[str]


async def run(requests: int, seed: int, progress: Progress, *, queue: bool = False) -> Report:
    """Start a plane, put the requests through it, and compare.

    Args:
        queue: let requests wait, for room and for each other.
    """
    options = StackOptions(
        engines=3,
        routers=1,
        engine_flags=("--speed", "100", "--blocks", "4000"),
        router_flags=("--log-level", "error", *(_QUEUE_FLAGS if queue else ())),
        predictor=queue,
    )
    gauges = {**_GAUGES, **(_QUEUE_GAUGES if queue else {})}
    traffic, counts = Traffic(seed), Counter[str]()
    bar = progress.add_task("requests", total=requests)
    async with LocalStack(options) as stack, HttpClient(timeout_s=10.0) as http:
        began_s = time.monotonic()
        warm_up = requests // 10
        await _traffic(stack, http, traffic, Counter(), warm_up, seed, progress)
        before = await at_rest(stack, gauges)
        await _traffic(stack, http, traffic, counts, requests - warm_up, seed + 1, progress)
        after = await at_rest(stack, gauges)
        seconds = time.monotonic() - began_s
    progress.stop_task(bar)
    findings = list(findings_of(before, after, counts))
    return Report(requests, seconds, dict(counts.most_common()), before, after, findings)


async def _traffic(
    stack: LocalStack,
    http: HttpClient,
    traffic: Traffic,
    counts: Counter[str],
    requests: int,
    seed: int,
    progress: Progress,
) -> None:
    """Put requests through the plane while its engines misbehave."""
    faults = asyncio.create_task(_misbehave(stack, http, random.Random(seed)))
    turns = iter(range(requests))

    async def client() -> None:
        for _ in turns:
            await visit(stack.port, traffic, counts)
            progress.advance(progress.task_ids[0])

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    faults.cancel()
    await asyncio.gather(faults, return_exceptions=True)
    for instance in stack.fleet.instances:
        await http.post(f"{instance.url}/debug/fault", {"kind": "none"})


async def _misbehave(stack: LocalStack, http: HttpClient, chance: random.Random) -> None:
    """Ask one engine after the other for a fault."""
    while True:
        instance = chance.choice(stack.fleet.instances)
        await http.post(f"{instance.url}/debug/fault", chance.choice(_FAULTS))
        await asyncio.sleep(FAULT_EVERY_S)


async def at_rest(stack: LocalStack, gauges: dict[str, str]) -> AtRest:
    """Wait until the router holds nothing any more, and tell what is left.

    Args:
        gauges: what to look at: our name for it, and the metric's.
    """
    process = psutil.Process(stack.routers[0].pid)
    admin = stack.admin_urls[0]
    end_s = time.monotonic() + REST_S_MAX

    async def now() -> AtRest:
        return AtRest(
            round(process.memory_info().rss / 2**20, 1),
            process.num_fds(),
            process.num_threads(),
            await _read(admin, gauges),
        )

    while True:
        if not (await now()).held or time.monotonic() > end_s:
            break
        await asyncio.sleep(0.25)
    await asyncio.sleep(6.0)  # idle connections to engines are kept for 4 s
    return await now()


async def _read(admin_url: str, gauges: dict[str, str]) -> dict[str, float]:
    """Return the sums of the metrics that are looked at."""
    host, _, port = admin_url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    return {name: _sum(page, metric) for name, metric in gauges.items()}


def _sum(page: str, metric: str) -> float:
    samples = re.findall(rf"^multiplane_{metric}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    if not samples:
        raise HttpError(f"the router has no metric {metric}")
    return sum(map(float, samples))


def findings_of(before: AtRest, after: AtRest, counts: Counter[str]) -> Iterator[str]:
    """Yield what is wrong."""
    for name in after.held:
        yield f"{name} is {after.gauges[name]:g} at rest"
    growth = after.memory_mib - before.memory_mib
    if growth > MEMORY_GROWTH_MIB:
        yield f"memory grew by {growth:.1f} MiB"
    for name in ("descriptors", "threads"):
        grown = getattr(after, name) - getattr(before, name)
        if grown > 2:
            yield f"{name} grew by {grown}"
    if after.gauges["tasks"] > before.gauges["tasks"] + 2:
        yield f"tasks grew from {before.gauges['tasks']:g} to {after.gauges['tasks']:g}"
    if counts["not connected"]:
        yield f"{counts['not connected']} clients could not connect"
    if counts["500"] + counts["502"] + counts["503"] > sum(counts.values()) // 20:
        yield "more than one request in twenty failed, in spite of retries"


def main() -> None:
    """Run, report, and exit by the findings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--queue", action="store_true", help="let requests wait")
    options = parser.parse_args()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        report = asyncio.run(run(options.requests, options.seed, progress, queue=options.queue))
    print(json.dumps(msgspec.to_builtins(report), indent=2))
    sys.exit(1 if report.findings else 0)


if __name__ == "__main__":
    main()
