"""A fleet in simulated time: pure engines, production planes, and the detector's pure parts.

One heap of calls, ordered by time; nothing else advances it. What the bus carries arrives after
`delay_s`. The bucket of verdicts is a dict with revisions, written as a leading detector plans and
read through the routers' own `StandingVerdicts`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from controlplane.core.detector import DetectorConfig
from controlplane.core.dispatch import RouteRequest, Ticket
from controlplane.core.events import Tick
from controlplane.core.hashing import pack_hashes
from controlplane.core.plane import Plane, PlaneConfig
from controlplane.detector.config import DetectorServiceConfig
from controlplane.detector.model import WatchedModel
from lab.engine import Engine
from lab.engine_types import (
    BlocksRemoved,
    BlocksStored,
    EngineConfig,
    EngineEvent,
    Request,
    StepResult,
    chained_id,
    derived_hashes,
)
from lab.profiles import find_profile
from router.standing import StandingVerdicts
from schemas import subjects
from schemas.bus import InstanceRecord, KvBatch, KvOp, KvRemoved, KvStored, RouteBatch
from schemas.codec import encode

MODEL = "m"
BLOCK = 16
PROFILE = "h100/qwen2.5-7b"
TICK_S = 0.25
FLUSH_S = 0.002


class Ended(msgspec.Struct, frozen=True):
    """What became of one request."""

    label: str
    at_s: float
    ttft_s: float
    instance: str
    hit_tokens: int


class Sidecar:
    """One engine's blocks, as its sidecar publishes them: each once, however many copies."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._copies: dict[int, int] = {}
        self._digest = 0
        self._seq = -1

    def batch(self, events: Sequence[EngineEvent]) -> KvBatch:
        """Return what a step's events change; a heartbeat if nothing."""
        ops: list[KvOp] = []
        for event in events:
            if isinstance(event, BlocksStored):
                new = [block for block in event.hashes if self._add(block) == 1]
                ops += [KvStored(pack_hashes(new))] if new else []
            elif isinstance(event, BlocksRemoved):
                gone = [block for block in event.hashes if self._take(block) == 0]
                ops += [KvRemoved(pack_hashes(gone))] if gone else []
        self._seq += 1
        return KvBatch(self.name, 1, self._seq, 0.0, ops, len(self._copies), self._digest)

    def _add(self, block: int) -> int:
        copies = self._copies.get(block, 0) + 1
        self._copies[block] = copies
        if copies == 1:
            self._digest ^= block
        return copies

    def _take(self, block: int) -> int:
        copies = self._copies.pop(block) - 1
        if copies:
            self._copies[block] = copies
        else:
            self._digest ^= block
        return copies


class Fleet:
    """Engines, routers and, if `config` is given, a leading detector.

    Attributes:
        ended: requests that were answered.
        said: (when, raised or cleared, why) of every verdict.
        watched: the detector's side; None without one.
        batch_max: instance → its largest batch, waiting requests included.
    """

    def __init__(
        self,
        instances: int,
        *,
        routers: int = 2,
        config: DetectorConfig | None = None,
        slowness: float = 1.0,
        max_num_seqs: int = 256,
        num_blocks: int = 0,
        delay_s: float = 0.004,
    ) -> None:
        self.now_s = 0.0
        self.ended: list[Ended] = []
        self.said: list[tuple[float, str, str]] = []
        self.watched: WatchedModel | None = None
        if config is not None:
            service = DetectorServiceConfig(detector=config)
            self.watched = WatchedModel(MODEL, service, -config.window_s)
            self.watched.lead({}, 0.0)
        self.planes = [
            Plane(MODEL, f"router-{n}", 1, PlaneConfig(stale_s=1e9, departed_s=1e9))
            for n in range(routers)
        ]
        profile = find_profile(PROFILE)
        engine = EngineConfig(
            num_blocks or profile.num_blocks(BLOCK),
            profile.step_times.scaled(slowness),
            max_num_seqs=max_num_seqs,
            max_model_len=(num_blocks - 1) * BLOCK if num_blocks else 131_072,
        )
        names = [f"i{number}" for number in range(instances)]
        self.engines = {name: Engine(engine) for name in names}
        self.batch_max = dict.fromkeys(names, 0)
        self._sidecars = {name: Sidecar(name) for name in names}
        self._stepping = dict.fromkeys(names, False)
        self._standing = [StandingVerdicts() for _ in self.planes]
        self._delay_s = delay_s
        self._revision = itertools.count(1)
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._open: dict[str, tuple[str, float, Plane, Ticket]] = {}
        self._first: dict[str, float] = {}
        for name in names:
            record = InstanceRecord(name, MODEL, f"http://{name}", 1, block_size=BLOCK)
            beat = self._sidecars[name].batch(())
            for plane in self.planes:
                plane.handle(record, 0.0)
                plane.handle(beat, 0.0)
        self.at(TICK_S, self._tick)

    # --- time

    def at(self, when_s: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call at a time."""
        heapq.heappush(self._heap, (when_s, next(self._numbers), call, args))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, call, args = heapq.heappop(self._heap)
            call(*args)
        self.now_s = until_s

    def _after(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        self.at(self.now_s + delay_s, call, *args)

    def _tick(self) -> None:
        for plane in self.planes:
            plane.handle(Tick(), self.now_s)
        self._flush()
        if self.watched is not None:
            self.watched.tick(self.now_s, self.now_s)
            self._settle()
        self._after(TICK_S, self._tick)

    # --- requests

    def ask(
        self, label: str, hashes: Sequence[int], prompt_tokens: int, output_tokens: int
    ) -> None:
        """Send a request; its answer is nobody else's."""
        number = next(self._numbers)
        request_id = f"{label}-{number}"
        plane = self.planes[number % len(self.planes)]
        decision = plane.requests.decide(
            RouteRequest(request_id, prompt_tokens, hashes, BLOCK), self.now_s
        )
        assert decision is not None
        ticket = plane.requests.book(decision, self.now_s, self.now_s)
        self._open[request_id] = label, self.now_s, plane, ticket
        self._after(FLUSH_S, self._flush)
        whole = (prompt_tokens + output_tokens) // BLOCK - len(hashes)
        own = derived_hashes(chained_id(number, hashes[-1]), whole)
        request = Request(request_id, prompt_tokens, output_tokens, [*hashes, *own])
        self._after(0.0005, self._arrive, decision.instance.record.instance_id, request)

    def _arrive(self, name: str, request: Request) -> None:
        engine = self.engines[name]
        engine.add_request(request)
        batch = engine.running_count + engine.waiting_count
        self.batch_max[name] = max(self.batch_max[name], batch)
        self._wake(name)

    def _wake(self, name: str) -> None:
        if not self._stepping[name] and self.engines[name].has_work:
            self._stepping[name] = True
            result = self.engines[name].step()
            self._after(result.duration_s, self._due, name, result)

    def _due(self, name: str, result: StepResult) -> None:
        self._stepping[name] = False
        if result.events:
            self._after(self._delay_s, self._tell, self._sidecars[name].batch(result.events))
        for output in result.outputs:
            label, began_s, plane, ticket = self._open[output.request_id]
            if output.request_id not in self._first:
                ttft_s = self._first[output.request_id] = self.now_s - began_s
                plane.requests.first_byte(ticket, ttft_s)
            if output.finish_reason is not None:
                del self._open[output.request_id]
                ttft_s = self._first.pop(output.request_id)
                plane.requests.finish(ticket, "ok", 200, self.now_s, self.now_s)
                self.ended.append(Ended(label, began_s, ttft_s, name, ticket.decision.hit))
        self._after(FLUSH_S, self._flush)
        self._wake(name)

    def _tell(self, batch: KvBatch) -> None:
        for plane in self.planes:
            plane.handle(batch, self.now_s)

    # --- the bus

    def _flush(self) -> None:
        for plane in self.planes:
            while (batch := plane.outbox.take(self.now_s)) is not None:
                self._after(self._delay_s, self._hear, plane, batch)

    def _hear(self, sender: Plane, batch: RouteBatch) -> None:
        for plane in self.planes:
            if plane is not sender:
                plane.handle(batch, self.now_s)
        if self.watched is not None and self.watched.batch(batch, self.now_s, self.now_s):
            self._after(self._delay_s, self._settle)

    def _settle(self) -> None:
        """Write what the leader wants into the bucket, and let routers know."""
        assert self.watched is not None
        for write in self.watched.writes(self.now_s, self.now_s):
            revision = next(self._revision)
            self.watched.written(write, revision, self.now_s)
            if write.news:
                verb = "cleared" if write.delete else "raised"
                self.said.append((self.now_s, verb, write.message.reason))
            value = None if write.delete else encode(write.message)
            key = subjects.key(MODEL, write.name)
            self._after(self._delay_s, self._entry, key, value)

    def _entry(self, key: str, value: bytes | None) -> None:
        for plane, standing in zip(self.planes, self._standing, strict=True):
            found = standing.feed(key, value, self.now_s)
            if found is not None:
                plane.handle(found[1], self.now_s)


class Traffic:
    """Plans requests of a fleet from one seed."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._endings = itertools.count(1 << 40)

    def prefix(self, number: int, blocks: int) -> list[int]:
        """Return the hashes of a prefix that has a number."""
        hashes: list[int] = []
        parent = 0
        for block in range(blocks):
            parent = chained_id(number * 100_003 + block, parent)
            hashes.append(parent)
        return hashes

    def poisson(
        self,
        label: str,
        rate: float,
        span_s: tuple[float, float],
        prefix: Callable[[], Sequence[int]],
        ending_blocks: int,
        output_tokens: int,
    ) -> None:
        """Ask at random times for prompts with some prefix and an ending of their own."""
        at_s = span_s[0]
        while (at_s := at_s + self._rng.expovariate(rate)) < span_s[1]:
            start = prefix()
            hashes = [*start]
            for _ in range(ending_blocks):
                hashes.append(chained_id(next(self._endings), hashes[-1] if hashes else 0))
            output = max(1, int(self._rng.expovariate(1 / output_tokens)))
            self._fleet.at(at_s, self._fleet.ask, label, hashes, len(hashes) * BLOCK + 5, output)

    def one_of(self, prefixes: Sequence[Sequence[int]]) -> Callable[[], Sequence[int]]:
        """Return a choice among prefixes, all equally likely."""
        return lambda: self._rng.choice(prefixes)
