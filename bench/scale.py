"""What a large fleet asks of its routers and its bus: 1,000 instances and 10 routers, simulated.

    python -m bench.scale [--instances N] [--routers N] [--rate R] [--seconds S] [--json]

Chats arrive at a steady rate and are replayed in simulated time (`lab.replay`): production planes
decide, emulated engines cache and evict, block events and the routers' own messages reach every
router late. Once at each lag. What is counted:

- event volume: messages and bytes a second that reach one router, by kind, encoded as on the bus;
- CPU of one router: what it takes to hear all that, and to decide and book a request, measured
  while the simulation runs, beside whatever else this machine does: medians are printed;
- staleness: how many of the tokens that routers promise the engines do not have, how evenly they
  spread, and what users see, against the same fleet with routers that know everything at once;
- what one decision's record weighs on the bus, with every candidate in it and with none.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from time import perf_counter_ns
from typing import Any

import msgspec
import numpy as np

from controlplane.core.decision import RouteRequest
from controlplane.core.dispatch import Ticket
from controlplane.core.events import Event
from controlplane.core.plane import Plane, PlaneConfig
from lab.generators import generate
from lab.replay import Replay
from lab.replay_config import PolicySpec, ReplayConfig
from lab.replay_instance import MODEL
from lab.replay_result import Result
from lab.replay_router import SimRouter
from lab.traces import Trace
from schemas import subjects
from schemas.bus import InstanceRecord, KvBatch, KvRemoved, KvStored, LoadReport, RouteBatch
from schemas.codec import encode

LAGS_S = (0.0, 0.005, 0.5)
LAG_USUAL_S = 0.005
KV_TOKENS = 65_536  # of each engine; what a GPU of 80 GB has beside a model of 8 B is twice that
PROMPT_TOKENS_MAX = 8192
WARM_SHARE = 0.5  # of the time: caches fill, and nothing is counted
_NATS_BYTES = 16  # of the line before a payload, beside its subject


class Heard(msgspec.Struct):
    """Messages of one kind that reached a router.

    Attributes:
        bytes: as NATS delivers them.
        blocks: changes of block sets in them.
        took_ns: how long each kept the router busy.
    """

    bytes: int = 0
    blocks: int = 0
    took_ns: list[int] = []


class Watched(SimRouter):
    """A router whose messages are weighed and whose time is taken."""

    def __init__(self, *args: Any) -> None:
        self.heard = {"kv": Heard(), "load": Heard(), "route": Heard()}
        self.decided_ns: list[int] = []
        super().__init__(*args)

    def hear(self, event: Event) -> None:
        """Take a message, weigh it, and note how long it took."""
        began_ns = perf_counter_ns()
        super().hear(event)
        took_ns = perf_counter_ns() - began_ns
        if isinstance(event, KvBatch):
            heard, subject = self.heard["kv"], subjects.kv(MODEL, event.instance_id)
            ops = [op for op in event.ops if isinstance(op, KvStored | KvRemoved)]
            heard.blocks += sum(len(op.hashes) // 8 for op in ops)
        elif isinstance(event, LoadReport):
            heard, subject = self.heard["load"], subjects.load(MODEL, event.instance_id)
        elif isinstance(event, RouteBatch):
            heard, subject = self.heard["route"], subjects.route(MODEL, event.router_id)
        else:
            return
        heard.took_ns.append(took_ns)
        heard.bytes += len(encode(event)) + len(subject) + _NATS_BYTES

    def route(self, request: RouteRequest, waited_s: float = 0.0) -> Ticket:
        """Decide and book, and note how long that took."""
        began_ns = perf_counter_ns()
        ticket = super().route(request, waited_s)
        self.decided_ns.append(perf_counter_ns() - began_ns)
        return ticket


class WatchedReplay(Replay):
    """A replay that looks at its routers."""

    router_type = Watched


def simulate(trace: Trace, config: ReplayConfig) -> tuple[Result, Watched]:
    """Replay a trace; return what came of it, and its first router."""
    resolved = config.resolved(trace.block_tokens)
    world = WatchedReplay(trace, PolicySpec("multiplicative"), resolved, None)
    world.run()
    router = world.routers[0]
    assert isinstance(router, Watched)
    return world.result(0.0), router


def volumes(router: Watched, seconds: float) -> dict[str, dict[str, float]]:
    """Return what reached a router, a second, by kind."""
    rows = {}
    for kind, heard in router.heard.items():
        took_us = np.array(heard.took_ns or [0]) / 1e3
        rows[kind] = {
            "messages_per_s": len(heard.took_ns) / seconds,
            "bytes_per_s": heard.bytes / seconds,
            "blocks_per_s": heard.blocks / seconds,
            "cpu_us_p50": float(np.median(took_us)),
            "cpu_share": float(np.median(took_us)) * len(took_us) / 1e6 / seconds,
        }
    return rows


def staleness(result: Result, after_s: float) -> dict[str, float]:
    """Return what late knowledge does to the requests that came after `after_s`."""
    counted = result.at_s >= after_s
    promised, cached = result.promised_tokens[counted], result.cached_tokens[counted]
    late = result.sample_s >= after_s
    busy = result.batch[late & (result.sample_s <= result.at_s[-1])]
    mean = busy.mean(axis=1)
    ttft_s = result.ttft_s[counted]
    return {
        "requests": float(counted.sum()),
        "hit_rate": float(cached.sum() / result.prompt_tokens[counted].sum()),
        "broken_share": float(np.maximum(promised - cached, 0).sum() / max(promised.sum(), 1)),
        "unforeseen_share": float(np.maximum(cached - promised, 0).sum() / max(cached.sum(), 1)),
        "batch_spread": float((busy.std(axis=1) / np.maximum(mean, 1e-9)).mean()),
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
    }


def record_bytes(instances: int) -> dict[str, int]:
    """Return what one decision weighs on the bus, with all candidates and with none."""
    weights = {}
    for label, share in (("every_candidate", 1.0), ("no_candidates", 0.0)):
        config = PlaneConfig(audit_candidates=share)
        plane = Plane(MODEL, "router-0", 1, config, random.Random(0))
        for row in range(instances):
            record = InstanceRecord(f"engine-{row}", MODEL, f"http://10.0.0.1:{row + 1}", epoch=1)
            plane.handle(record, 0.0)
        request = RouteRequest(request_id="r", prompt_tokens=4096)
        decision = plane.requests.decide(request, 0.0)
        assert decision is not None
        plane.requests.book(decision, 0.0, 0.0)
        batch = plane.outbox.take(0.0)
        assert batch is not None
        weights[label] = len(encode(batch))
    return weights


def measure(instances: int, routers: int, rate: float, seconds: float) -> dict[str, Any]:
    """Return everything, as numbers by name."""
    trace = generate(
        "chatbot",
        seed=1,
        duration_s=seconds,
        requests_per_s=rate,
        tokens_max=PROMPT_TOKENS_MAX,
    )
    config = ReplayConfig(
        instances=instances,
        routers=routers,
        kv_tokens=KV_TOKENS,
        max_model_len=PROMPT_TOKENS_MAX,
        drain_s_max=60.0,
    )
    found: dict[str, Any] = {"instances": instances, "routers": routers, "requests_per_s": rate}
    found["record_bytes"] = record_bytes(instances)
    found["lags"] = {}
    for lag_s in LAGS_S:
        result, router = simulate(trace, msgspec.structs.replace(config, event_lag_s=lag_s))
        found["lags"][f"{lag_s:g}"] = staleness(result, seconds * WARM_SHARE)
        if lag_s == LAG_USUAL_S:
            found["volume"] = volumes(router, float(result.end_s.max()))
            took_us = np.array(router.decided_ns) / 1e3
            found["decide_us"] = {f"p{p}": float(np.percentile(took_us, p)) for p in (50, 99)}
    return found


def show(found: dict[str, Any]) -> None:
    """Print it for people."""
    write = sys.stdout.write
    write(f"{found['instances']} instances, {found['routers']} routers, ")
    write(f"{found['requests_per_s']:g} requests/s; {platform.processor() or 'this machine'}\n\n")
    write("reaches one router   messages/s     kB/s   blocks/s   CPU p50    of a core\n")
    for kind, row in found["volume"].items():
        write(
            f"{kind:18} {row['messages_per_s']:12,.0f} {row['bytes_per_s'] / 1e3:8,.0f} "
            f"{row['blocks_per_s']:10,.0f} {row['cpu_us_p50']:6.1f} µs {row['cpu_share']:10.1%}\n"
        )
    decide, weight = found["decide_us"], found["record_bytes"]
    write(f"\ndecide and book: p50 {decide['p50']:.0f} µs, p99 {decide['p99']:.0f} µs\n")
    write(f"a decision's record: {weight['every_candidate']:,} bytes with every candidate, ")
    write(f"{weight['no_candidates']:,} with none\n\n")
    write("lag        hits   promised in vain   unforeseen   spread   TTFT mean      p99\n")
    for lag, row in found["lags"].items():
        write(
            f"{float(lag) * 1e3:4.0f} ms {row['hit_rate']:8.1%} {row['broken_share']:18.2%} "
            f"{row['unforeseen_share']:12.2%} {row['batch_spread']:8.2f} "
            f"{row['ttft_mean_s'] * 1e3:8.0f} ms {row['ttft_p99_s'] * 1e3:5.0f} ms\n"
        )


def main() -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--routers", type=int, default=10)
    parser.add_argument("--rate", type=float, default=2000.0, help="requests a second in all")
    parser.add_argument("--seconds", type=float, default=12.0, help="of traffic, simulated")
    parser.add_argument("--json", action="store_true", help="print numbers only")
    options = parser.parse_args()
    found = measure(options.instances, options.routers, options.rate, options.seconds)
    if options.json:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
