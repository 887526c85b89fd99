"""What a proxied request costs: our router and its peers, same engines, same load, same run.

    python -m bench.proxy [--json] [--quick] [--rounds N] [--only NAME…] [--targets FILE]

Ours is the full router: policy `multiplicative`, KV index filled, prompts tokenized and hashed,
metrics and route events on, a real NATS server beside it. The data plane alone, which decides
nothing, is measured as well, to tell what the rest costs, and so is the least that Python can do,
to tell what the language costs (`bench.proxy_floor`).

For each target: CPU time per request and per streamed chunk, latency added to a direct call, how
many requests a second this machine got through it, and memory with 2,000 idle connections and with
1,000 streams. Engines, load and target share this machine's cores, so CPU time is what is compared;
requests a second are an indication. Every round runs every target. Of the rounds, the least CPU
time counts, as whatever else the machine does can only add to it, and the median of all else.
Targets are pluggable: see `bench.proxy_targets`.

A request's CPU time depends on how busy a server is: at a steady 400 requests a second, as a router
of a large fleet has them, each one wakes the process and finds its caches cold; in a closed loop
there is always more to do, and the same request costs a half to a fifth. Both are reported; the
bars are about the steady rate.

Exits with 1 if a bar is missed, with 2 if there is nothing to compare with.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from statistics import median
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from bench.proxy_load import Client, Sample, connect, request_bytes, run_load, run_steadily
from bench.proxy_process import Engines, NotReady, Running
from bench.proxy_targets import FULL, Target, built_in_targets, read_targets
from controlplane.bus.embedded import EmbeddedNats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHUNKS: Final = 50
_KIB: Final = 1024


class Load(msgspec.Struct, frozen=True):
    """How much load a round is.

    Fields:
        steady_requests: that are not streamed, `per_s` a second.
        requests: the same over `concurrency` connections, each as soon as it can.
        streams: of `CHUNKS` chunks, over `stream_concurrency` connections.
        gap_ms: between the chunks of a stream.
        probes: requests one after the other, for the latency.
        idle_connections, open_streams: held for the memory.
    """

    steady_requests: int = 1000
    per_s: float = 400.0
    requests: int = 3000
    concurrency: int = 16
    streams: int = 256
    stream_concurrency: int = 128
    gap_ms: int = 10
    probes: int = 400
    idle_connections: int = 2000
    open_streams: int = 1000


QUICK: Final = Load(60, 200.0, 200, 8, 16, 16, 2, 20, 100, 40)
"""Enough to see that it works; its numbers say nothing."""


class Numbers(msgspec.Struct):
    """What one round found of a target.

    Fields:
        request_us: CPU time per request that is not streamed, at a steady rate.
        busy_request_us: the same in a closed loop.
        stream_us: CPU time per streamed request of `CHUNKS` chunks.
        chunk_us: CPU time per chunk: what a stream costs beyond a busy request, over its chunks.
        added_p50_us, added_p99_us: latency beyond that of a direct call.
        requests_per_s: through this machine.
        start_mib: memory once it answers.
        idle_kib: memory per idle connection.
        stream_kib: memory per stream, both connections.
        errors: requests not answered with 200, in full.
    """

    request_us: float
    busy_request_us: float
    stream_us: float
    chunk_us: float
    added_p50_us: float
    added_p99_us: float
    requests_per_s: float
    start_mib: float
    idle_kib: float
    stream_kib: float
    errors: float


_CPU: Final = ("request_us", "busy_request_us", "stream_us", "chunk_us")

# Name of the bar, our number over the peer's, and the most it may be.
_BARS: Final = (
    ("request_us", "vllm-router round_robin", 0.6),
    ("request_us", "vllm-router cache_aware", 0.35),
    ("request_us", "haproxy", 2.5),
    ("stream_us", "haproxy", 2.5),
    ("stream_us", "best Rust LLM router", 0.75),
)


async def measure(running: Running, direct: Sample, load: Load) -> Numbers:
    """Run one round of load through a target."""
    await running.ready()
    port, authority = running.port, f"127.0.0.1:{running.port}"
    plain = request_bytes(authority, stream=False)
    stream = request_bytes(authority, stream=True, chunks=CHUNKS, gap_ms=load.gap_ms)
    await run_load(port, plain, requests=load.requests // 6, concurrency=load.concurrency)
    await run_load(port, stream, requests=load.streams // 8, concurrency=load.streams // 8)
    start_bytes = running.rss_bytes()

    before_s = running.cpu_s()
    steady = await run_steadily(port, plain, requests=load.steady_requests, per_s=load.per_s)
    request_us = (running.cpu_s() - before_s) / load.steady_requests * 1e6

    before_s = running.cpu_s()
    plains = await run_load(port, plain, requests=load.requests, concurrency=load.concurrency)
    busy_request_us = (running.cpu_s() - before_s) / load.requests * 1e6

    before_s = running.cpu_s()
    streams = await run_load(
        port, stream, requests=load.streams, concurrency=load.stream_concurrency
    )
    stream_us = (running.cpu_s() - before_s) / load.streams * 1e6

    probes = await run_load(port, plain, requests=load.probes, concurrency=1)
    idle_bytes = await _memory_idle(running, plain, load.idle_connections)
    stream_bytes = await _memory_streaming(running, load.open_streams)
    return Numbers(
        request_us=request_us,
        busy_request_us=busy_request_us,
        stream_us=stream_us,
        chunk_us=(stream_us - busy_request_us) / CHUNKS,
        added_p50_us=_added_us(probes, direct, 0.5),
        added_p99_us=_added_us(probes, direct, 0.99),
        requests_per_s=plains.requests / plains.wall_s,
        start_mib=start_bytes / _KIB / _KIB,
        idle_kib=idle_bytes / load.idle_connections / _KIB,
        stream_kib=stream_bytes / load.open_streams / _KIB,
        errors=steady.errors + plains.errors + streams.errors + probes.errors,
    )


def _added_us(through: Sample, direct: Sample, q: float) -> float:
    """Return how much later an answer came than without the target, in microseconds."""
    return (through.quantile_s(through.total_s, q) - direct.quantile_s(direct.total_s, q)) * 1e6


async def _memory_idle(running: Running, request: bytes, connections: int) -> int:
    """Return the memory that idle connections add, each after one request."""
    before = running.rss_bytes()
    clients: list[Client] = []
    while len(clients) < connections:
        batch = [await connect(running.port) for _ in range(100)]
        await asyncio.gather(*(client.ask(request) for client in batch))
        clients += batch
    added = running.rss_bytes() - before
    for client in clients:
        client.transport.abort()
    return added


async def _memory_streaming(running: Running, streams: int) -> int:
    """Return the memory that open streams add, once each has had its first chunk."""
    request = request_bytes(f"127.0.0.1:{running.port}", stream=True, chunks=3, gap_ms=1000)
    before = running.rss_bytes()
    clients = [await connect(running.port) for _ in range(streams)]
    answers = [client.ask(request) for client in clients]
    await asyncio.sleep(1.2)  # The first of three chunks comes after a second, the next after two.
    added = running.rss_bytes() - before
    await asyncio.gather(*answers)
    for client in clients:
        client.transport.abort()
    return added


async def run(targets: list[Target], rounds: int, load: Load) -> dict[str, list[Numbers]]:
    """Measure every target in every round, and say so as it goes."""
    found: dict[str, list[Numbers]] = {target.name: [] for target in targets}
    with Engines(2) as engines:
        plain = request_bytes("127.0.0.1", stream=False)
        for number in range(rounds):
            for target in targets:
                print(f"round {number + 1}: {target.name}", file=sys.stderr)
                direct = await run_load(
                    engines.ports[0], plain, requests=load.probes, concurrency=1
                )
                async with _started(target, engines.ports) as running:
                    found[target.name].append(await measure(running, direct, load))
    return found


@asynccontextmanager
async def _started(target: Target, engine_ports: list[int]) -> AsyncIterator[Running]:
    """Start a target, and a NATS server for it if it wants one."""
    async with AsyncExitStack() as stack:
        url = ""
        if target.wants_bus:
            url = (await stack.enter_async_context(EmbeddedNats())).url
        yield stack.enter_context(Running.of(target, engine_ports, url))


def summary(rounds: list[Numbers]) -> Numbers:
    """Return the least CPU times of the rounds, the sum of the errors, and the other medians."""
    fields = Numbers.__struct_fields__
    values = {name: median(getattr(each, name) for each in rounds) for name in fields}
    for name in _CPU:
        values[name] = min(getattr(each, name) for each in rounds)
    values["errors"] = sum(each.errors for each in rounds)
    return Numbers(**values)


def ratios(table: dict[str, Numbers], ours: str) -> list[dict[str, float | str | bool]]:
    """Return our numbers over the peers', beside their bars; bars without a peer are left out."""
    rust = {name: each for name, each in table.items() if "-router" in name}
    lines: list[dict[str, float | str | bool]] = []
    for field, peer, bar in _BARS:
        if peer in table:
            theirs = getattr(table[peer], field)
        elif rust and peer.startswith("best"):
            theirs = min(getattr(each, field) for each in rust.values())
        else:
            continue
        ratio = getattr(table[ours], field) / theirs
        lines.append(
            {"number": field, "peer": peer, "ratio": ratio, "bar": bar, "met": ratio <= bar}
        )
    return lines


def show(table: dict[str, Numbers], bars: list[dict[str, float | str | bool]]) -> None:
    """Print the report for people."""
    print(f"{'':28}{'CPU µs':>8}{'':24}{'added µs':>16}{'':8}{'memory':>8}")
    print(
        f"{'':28}{'request':>8}{'busy':>8}{'stream':>8}{'chunk':>8}{'p50':>8}{'p99':>8}"
        f"{'req/s':>8}{'MiB':>8}{'KiB/idle':>10}{'KiB/stream':>11}{'errors':>8}"
    )
    for name, n in table.items():
        print(
            f"{name:28}{n.request_us:8.0f}{n.busy_request_us:8.0f}{n.stream_us:8.0f}"
            f"{n.chunk_us:8.1f}{n.added_p50_us:8.0f}{n.added_p99_us:8.0f}{n.requests_per_s:8.0f}"
            f"{n.start_mib:8.0f}{n.idle_kib:10.1f}{n.stream_kib:11.1f}{n.errors:8.0f}"
        )
    for line in bars:
        verdict = "met" if line["met"] else "MISSED"
        print(
            f"{line['number']} / {line['peer']}: {line['ratio']:.2f} (bar {line['bar']}) {verdict}"
        )


def main() -> None:
    """Measure, report, and exit by the bars."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quick", action="store_true", help="little load: a check that it works")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], help="targets whose names contain this")
    parser.add_argument("--targets", help="a JSON file with more targets; the first is ours")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    built_in, missing = built_in_targets()
    more = read_targets(options.targets) if options.targets else []
    ours = more[0].name if more else FULL.name
    targets = [
        target
        for target in [*more, *built_in]
        if target.name == ours or not options.only or any(o in target.name for o in options.only)
    ]
    try:
        found = uvloop.run(run(targets, options.rounds, QUICK if options.quick else Load()))
    except NotReady as error:
        sys.exit(str(error))
    table = {name: summary(rounds) for name, rounds in found.items()}
    bars = ratios(table, ours)
    if options.json:
        report = {"ours": ours, "numbers": table, "rounds": found, "bars": bars, "missing": missing}
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        show(table, bars)
        print("\n".join(missing))
    if not bars:
        sys.exit(2)
    sys.exit(0 if all(line["met"] for line in bars) else 1)


if __name__ == "__main__":
    main()
