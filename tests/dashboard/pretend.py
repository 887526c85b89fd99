"""A fleet that is only pretended, on a bus in memory: a real plane decides, nobody computes.

For the page at sizes that no test machine can run, and for its pictures.
"""

from __future__ import annotations

import random
import time

from controlplane.bus.memory_bus import MemoryBroker
from controlplane.bus.protocol import Bus
from controlplane.core.decision import RouteRequest
from controlplane.core.dispatch import Ticket
from controlplane.core.plane import Plane, PlaneConfig
from schemas import subjects
from schemas.bus import (
    Blacklist,
    Drain,
    HotspotRaised,
    InstanceRecord,
    KvBatch,
    LoadReport,
)
from schemas.codec import encode
from tests.core.plane_helpers import BLOCK, Publisher, prompt

MODEL = "Qwen/Qwen3-30B-A3B"


class PretendedFleet:
    """Instances, their sidecars and one router, all in one object; `step` lets time pass.

    Args:
        tenants: who asks.
    """

    def __init__(
        self, broker: MemoryBroker, instances: int, *, seed: int = 1, tenants: tuple[str, ...] = ()
    ) -> None:
        self.rng = random.Random(seed)
        self.bus: Bus = broker.bus()
        self.names = [f"gpu-{number:03d}" for number in range(1, instances + 1)]
        self.plane = Plane(MODEL, "router-1", time.time_ns(), PlaneConfig(batch_cap=64))
        self.publishers = {name: Publisher(name) for name in self.names}
        self.running: list[tuple[float, float, Ticket, int]] = []
        self.now_s = 0.0
        self._tenants = tenants
        self._asked = 0

    async def register(self) -> None:
        """Let every instance announce itself."""
        bucket = await self.bus.bucket(subjects.INSTANCES)
        for name in self.names:
            record = InstanceRecord(
                name,
                MODEL,
                f"http://{name}:8000",
                1,
                block_size=BLOCK,
                num_blocks=27_000,
                max_num_seqs=64,
                engine_version="0.32.0",
            )
            await bucket.put(subjects.key(MODEL, name), encode(record))
            self.plane.handle(record, self.now_s)
            self._kv(self.publishers[name].batch())

    async def verdicts(self) -> None:
        """Let a detector and an operator say something that stands."""
        bucket = await self.bus.bucket(subjects.VERDICTS)
        hot = HotspotRaised(
            prompt(1, 2, 3, 4)[-1],
            4,
            self.names[:2],
            1,
            time.time(),
            15.0,
            share=(312, 480),
            holders=2,
            fleet=len(self.names),
            streak=9,
            reason=(
                f"312 of 480 requests have a prefix (blocks: 4) that 2 of {len(self.names)} "
                "instances hold, and 9 in a row still preferred them"
            ),
        )
        drain = Drain(self.names[-1], True, 2, time.time(), by="ops", reason="driver update")
        barred = Blacklist(self.names[-2], True, 3, time.time(), 600.0, "ops", "slow HBM")
        for name, message in (
            ("hotspot-001", hot),
            (f"drain-{self.names[-1]}", drain),
            (f"blacklist-{self.names[-2]}", barred),
        ):
            await bucket.put(subjects.key(MODEL, name), encode(message))
            self.plane.handle(message, self.now_s)

    def step(self, seconds: float, requests: int) -> None:
        """Let time pass, and so many requests come."""
        self.now_s += seconds
        for _ in range(requests):
            self.ask()
        for entry in [each for each in self.running if each[0] <= self.now_s]:
            self.running.remove(entry)
            self._next(entry)
        self._tell()

    def ask(self) -> None:
        """Send a request: mostly a next turn of one of many conversations."""
        rng = self.rng
        conversation = int(rng.paretovariate(0.7)) % (8 * len(self.names))
        turns = rng.randrange(4, 40)
        hashes = prompt(*(conversation % 5, 1, 2), *(conversation * 100 + n for n in range(turns)))
        hashes = hashes[: max(3, turns)]
        self._asked += 1
        request = RouteRequest(
            f"chatcmpl-{self._asked:06d}",
            len(hashes) * BLOCK + rng.randrange(1, BLOCK),
            hashes,
            BLOCK,
            tenant=rng.choice(self._tenants) if self._tenants else "",
        )
        decision = self.plane.requests.decide(request, self.now_s)
        assert decision is not None
        queue_s = rng.choice((0.0, 0.0, rng.uniform(0.0, 0.2))) if self._tenants else 0.0
        ticket = self.plane.requests.book(
            decision,
            self.now_s,
            time.time(),
            decide_s=rng.uniform(35e-6, 90e-6),
            tokenize_s=rng.uniform(1e-4, 9e-4),
            queue_s=queue_s,
        )
        prefill_s = 0.02 + decision.new_tokens / 16_000 + 0.002 * int(decision.batch_size.mean())
        ttft_s = queue_s + prefill_s * rng.uniform(0.8, 1.4)
        self.running.append((self.now_s + ttft_s, -ttft_s, ticket, rng.randrange(20, 300)))

    def _next(self, entry: tuple[float, float, Ticket, int]) -> None:
        """Let a request get its first token, or end; the time to the first is negative before."""
        at_s, ttft_s, ticket, output = entry
        instance = ticket.decision.instance.record.instance_id
        if ttft_s < 0:
            self.plane.requests.first_byte(ticket, -ttft_s)
            batch = self.publishers[instance].store(ticket.decision.request.hashes)
            self._kv(batch)
            ends_s = at_s + output * self.rng.uniform(0.007, 0.012)
            self.running.append((ends_s, -ttft_s, ticket, output))
            return
        failed = self.rng.random() < 0.004
        self.plane.requests.finish(
            ticket,
            "upstream_error" if failed else "ok",
            502 if failed else 200,
            self.now_s,
            time.time(),
            cached_tokens=ticket.decision.hit,
            output_tokens=output,
            ttft_s=ttft_s,
        )

    def loads(self) -> None:
        """Let every engine say how it is."""
        for instance in self.plane.fleet:
            name = instance.record.instance_id
            batch = int(self.plane.ledger.batch[instance.row])
            report = LoadReport(
                name,
                1,
                0,
                time.time(),
                batch,
                max(batch - 48, 0),
                kv_usage=min(0.03 * batch + 0.002 * (hash(name) % 40), 1.0),
                prefill_tokens_per_s=14_200.0,
                decode_tokens_per_s=90.0 * batch,
            )
            self.bus.publish(subjects.load(MODEL, name), encode(report))

    def heartbeats(self, *silent: str) -> None:
        """Let every sidecar but these say that it lives."""
        for name in self.names:
            if name not in silent:
                self._kv(self.publishers[name].batch())

    def _kv(self, batch: KvBatch) -> None:
        self.plane.handle(batch, self.now_s)
        self.bus.publish(subjects.kv(MODEL, batch.instance_id), encode(batch))

    def _tell(self) -> None:
        self.plane.requests.tell_totals()
        while (batch := self.plane.outbox.take(time.time())) is not None:
            self.bus.publish(subjects.route(MODEL, "router-1"), encode(batch))
