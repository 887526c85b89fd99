"""How long a replay takes, beside the peer's replayer in Rust, and what comes out of both.

    python -m bench.replay [--json] [--no-peer] [--trace FILE] [--instances N] [--policies NAME,…]

Replays a trace under each policy, one core, and the same trace with NVIDIA Dynamo's offline
replayer on the same fleet: equal caches, limits and step times (`bench.replay_peer`). What is timed
is CPU, from the trace's file to the last request's end; the least of all rounds counts, for both
alike. A policy that looks at cached blocks is held against the peer's `kv_router`, any other one
against its `round_robin`.

The packaged trace is ten minutes. The whole hour that Mooncake published (12,031 requests, 145
million prompt tokens) is a file of `--trace`.

Exits with 1 if a bar is missed, with 2 if the peer could not be had.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import msgspec

from bench import dynamo_env
from bench.replay_peer import PeerOutcome, peer_config, run_peer
from lab.replay import replay
from lab.replay_config import PolicySpec, ReplayConfig, looks_at_blocks, parse_policy
from lab.replay_metrics import Metrics, measure, spread
from lab.traces import Trace, TraceError, read_trace, sample_trace

POLICIES = "round_robin,least_requests,multiplicative,linear,dynamo_cost,simulated_ttft"
RATIO_MAX = 1.5
"""Our time over the peer's."""

HOUR_S_MAX = 25.0
"""Our time for an hour of the trace, and proportionally less for less of it."""

HOUR_REQUESTS = 12_031
BLOCK_SIZE = 512
BLOCKS = 2_000


class Row(msgspec.Struct, kw_only=True):
    """One policy, ours or the peer's; times in seconds.

    Attributes:
        cpu_s: of one replay.
        peer: what of the peer it is held against.
        ratio: our CPU time over the peer's.
        missed: bars that were missed, in words.
    """

    policy: str
    cpu_s: float
    requests: int
    hit_rate: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    balance: float | None = None
    peer: str | None = None
    ratio: float | None = None
    missed: list[str] = []


def peer_row(router: str, rounds: list[PeerOutcome]) -> Row:
    """Return what the peer came to."""
    outcome = rounds[0]
    ttft, tpot = spread(outcome.ttft_s), spread(outcome.tpot_s)
    return Row(
        policy=router,
        cpu_s=min(each.cpu_s for each in rounds),
        requests=len(outcome.at_s),
        hit_rate=outcome.hit_rate,
        ttft_mean_s=ttft[0],
        ttft_p99_s=ttft[3],
        tpot_mean_s=tpot[0],
        tpot_p99_s=tpot[3],
    )


def our_row(policy: str, cpu_s: float, metrics: Metrics, peer: Row | None) -> Row:
    """Return what a policy came to, and which bars it misses."""
    row = Row(
        policy=policy,
        cpu_s=cpu_s,
        requests=metrics.requests,
        hit_rate=metrics.hit_rate,
        ttft_mean_s=metrics.ttft_s[0],
        ttft_p99_s=metrics.ttft_s[3],
        tpot_mean_s=metrics.tpot_s[0],
        tpot_p99_s=metrics.tpot_s[3],
        balance=metrics.balance,
        peer=None if peer is None else peer.policy,
        ratio=None if peer is None else cpu_s / peer.cpu_s,
    )
    allowed_s = HOUR_S_MAX * row.requests / HOUR_REQUESTS
    if cpu_s > allowed_s:
        row.missed.append(f"{cpu_s:.1f} s > {allowed_s:.1f} s")
    if row.ratio is not None and row.ratio > RATIO_MAX:
        row.missed.append(f"{row.ratio:.2f} of the peer > {RATIO_MAX}")
    return row


def load(path: Path | None) -> Trace:
    """Return the trace: the packaged one, or a file's.

    Raises:
        TraceError: the file cannot be used.
    """
    return sample_trace() if path is None else read_trace(path)


def timed(path: Path | None, spec: PolicySpec, config: ReplayConfig) -> tuple[float, Metrics]:
    """Return the CPU time of a replay from the file on, and what it came to."""
    began_s = time.process_time()
    result = replay(load(path), spec, config)
    return time.process_time() - began_s, measure(result)


def run(
    path: Path | None, specs: list[PolicySpec], instances: int, rounds: int, with_peer: bool
) -> tuple[list[Row], list[Row]]:
    """Return the peer's rows and ours."""
    config = peer_config(instances, BLOCK_SIZE, BLOCKS)
    routers = sorted({_peer_of(spec) for spec in specs}) if with_peer else []
    trace = load(path)
    theirs: dict[str, list[PeerOutcome]] = {router: [] for router in routers}
    ours: dict[str, list[tuple[float, Metrics]]] = {spec.label: [] for spec in specs}
    for _ in range(rounds):
        for router in routers:
            theirs[router].append(run_peer(trace, config, router))
        for spec in specs:
            ours[spec.label].append(timed(path, spec, config))
    peers = {router: peer_row(router, theirs[router]) for router in routers}
    rows = [
        our_row(
            spec.label,
            min(cpu_s for cpu_s, _ in ours[spec.label]),
            ours[spec.label][0][1],
            peers.get(_peer_of(spec)),
        )
        for spec in specs
    ]
    return list(peers.values()), rows


def _peer_of(spec: PolicySpec) -> str:
    return "kv_router" if looks_at_blocks(spec) else "round_robin"


def table(peers: list[Row], rows: list[Row]) -> str:
    """Return the results for people."""
    lines = [
        "                           CPU s  ratio  hit rate    TTFT mean     p99  TPOT mean      p99"
    ]
    for name, part in (("peer", peers), ("ours", rows)):
        for row in part:
            ratio = "     –" if row.ratio is None else f"{row.ratio:6.2f}"
            lines.append(
                f"{name} {row.policy:20} {row.cpu_s:7.2f} {ratio} {row.hit_rate:9.1%} "
                f"{row.ttft_mean_s:10.3f} s {row.ttft_p99_s:5.2f} s "
                f"{row.tpot_mean_s * 1e3:7.2f} ms {row.tpot_p99_s * 1e3:5.1f} ms  "
                f"{'; '.join(row.missed)}"
            )
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--no-peer", action="store_true", help="measure ours alone")
    parser.add_argument("--trace", type=Path, help="a trace file instead of the packaged one")
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    try:
        specs = [parse_policy(name) for name in options.policies.split(",")]
        trace = load(options.trace)
        peers, rows = run(
            options.trace, specs, options.instances, options.rounds, not options.no_peer
        )
    except (TraceError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except dynamo_env.PeerUnavailable as error:
        print(f"{error}\nWithout the peer: --no-peer", file=sys.stderr)
        return 2
    if options.json:
        about = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "trace": trace.name,
            "requests": len(trace.requests),
            "prompt_tokens": trace.input_tokens,
            "instances": options.instances,
            "peer": None if options.no_peer else dynamo_env.PEER,
            "peers": msgspec.to_builtins(peers),
            "rows": msgspec.to_builtins(rows),
        }
        print(json.dumps(about, indent=2))
    else:
        print(table(peers, rows))
    return 1 if any(row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
