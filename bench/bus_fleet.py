"""The sidecars of `bench.bus`, in a process of their own: production relays on a real bus.

    python -m bench.bus_fleet NATS_URL INSTANCES STEPS BIG_BLOCKS

It does as it is asked by requests on `bench.*`, one answer each:

    hello    answer: it is up
    fill     announce every instance and publish what it has cached
    prepare  make the batches of all steps, ready to be sent
    go       send them as fast as the bus takes them
    gap      lose a batch of the big instance: who follows it must resync
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import uvloop

from controlplane.bus import NatsBus, NatsOptions
from controlplane.core.hashing import ROOT
from schemas import subjects
from schemas.bus import InstanceRecord
from schemas.codec import encode
from sidecar.changes import Change, Gone, Held
from sidecar.relay import Relay

MODEL = "bench"
BIG = "big"
BLOCK_SIZE = 16
SYSTEMS = 16
SYSTEM_BLOCKS = 32
OWN_BLOCKS = 96
CHAINS_HELD = 40
CHAINS_A_STEP = 4
BUFFER_BYTES = 256 << 20


def system_prompts() -> list[list[int]]:
    """Return the block hashes of the prefixes that many chains share."""
    rng = random.Random(1)
    return [[rng.getrandbits(64) or 1 for _ in range(SYSTEM_BLOCKS)] for _ in range(SYSTEMS)]


def instance_names(count: int) -> list[str]:
    """Return the ids of the ordinary instances."""
    return [f"gpu-{number:03}" for number in range(count)]


class Engine:
    """What one instance caches: `CHAINS_HELD` chains, the oldest of which make room for new ones.

    Each step is what a busy engine does between two flushes of its sidecar: a few prompts of about
    2,000 tokens are computed, and as many blocks evicted.
    """

    def __init__(self, name: str, seed: int, systems: list[list[int]]) -> None:
        self.relay = Relay(name, epoch=1)
        self._rng = random.Random(seed)
        self._systems = systems
        self._own: deque[list[int]] = deque()

    def cache(self, chains: int) -> list[Change]:
        """Return the changes of computing new chains, with evictions where it is full."""
        changes: list[Change] = []
        for _ in range(chains):
            system = self._rng.choice(self._systems)
            own = [self._rng.getrandbits(64) or 1 for _ in range(OWN_BLOCKS)]
            changes += [Held(ROOT, system), Held(system[-1], own)]
            self._own.append(own)
            if len(self._own) > CHAINS_HELD:
                changes.append(Gone(self._own.popleft()))
        return changes

    def batches(self, changes: list[Change]) -> list[bytes]:
        """Return the messages that tell of changes."""
        self.relay.apply(changes)
        messages = []
        while (batch := self.relay.flush(0.0, time.time())) is not None:
            messages.append(encode(batch))
        return messages


class Fleet:
    """All instances, on one connection."""

    def __init__(self, bus: NatsBus, instances: int, steps: int, big_blocks: int) -> None:
        systems = system_prompts()
        self._bus = bus
        self._steps = steps
        self._engines = {
            name: Engine(name, seed, systems) for seed, name in enumerate(instance_names(instances))
        }
        self._big = Engine(BIG, -1, systems)
        self._big_blocks = big_blocks
        self._ready: list[tuple[str, bytes]] = []

    async def serve(self) -> None:
        """Begin to answer requests."""
        verbs: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "hello": self._hello,
            "fill": self._fill,
            "prepare": self._prepare,
            "go": self._go,
            "gap": self._gap,
        }
        for verb, work in verbs.items():

            async def answer(_: bytes, work: Any = work) -> AsyncIterator[bytes]:
                await work()
                yield b"done"

            await self._bus.serve(f"bench.{verb}", answer)

    async def _hello(self) -> None:
        """Nothing to do."""

    async def _fill(self) -> None:
        records = await self._bus.bucket(subjects.INSTANCES)
        for name, engine in {**self._engines, BIG: self._big}.items():
            await self._bus.serve(subjects.snapshot(MODEL, name), self._snapshots_of(engine))
            record = InstanceRecord(name, MODEL, f"http://{name}:8000", 1, block_size=BLOCK_SIZE)
            await records.put(subjects.key(MODEL, name), encode(record))
        for name, engine in self._engines.items():
            self._publish(name, engine.batches(engine.cache(CHAINS_HELD)))
        chain = [random.Random(2).getrandbits(64) or 1]
        rng = random.Random(3)
        chain += [rng.getrandbits(64) or 1 for _ in range(self._big_blocks - 1)]
        chains = (chain[at : at + 512] for at in range(0, len(chain), 512))
        self._publish(BIG, self._big.batches([Held(ROOT, part) for part in chains]))
        await self._bus.flush(30.0)

    async def _prepare(self) -> None:
        for _ in range(self._steps):
            for name, engine in self._engines.items():
                messages = engine.batches(engine.cache(CHAINS_A_STEP))
                self._ready += [(subjects.kv(MODEL, name), message) for message in messages]
            await asyncio.sleep(0)

    async def _go(self) -> None:
        for subject, message in self._ready:
            self._bus.publish(subject, message)
        self._ready.clear()
        await self._bus.flush(60.0)

    async def _gap(self) -> None:
        """Make two batches, and publish the second."""
        self._big.batches([Held(ROOT, [random.getrandbits(64) or 1])])
        self._publish(BIG, self._big.batches([Held(ROOT, [random.getrandbits(64) or 1])]))

    def _publish(self, name: str, messages: list[bytes]) -> None:
        for message in messages:
            self._bus.publish(subjects.kv(MODEL, name), message)

    def _snapshots_of(self, engine: Engine) -> Callable[[bytes], AsyncIterator[bytes]]:
        async def answer(_: bytes) -> AsyncIterator[bytes]:
            for chunk in engine.relay.snapshot(time.time()):
                yield encode(chunk)

        return answer


async def main() -> None:
    """Serve until killed."""
    url, instances, steps, big_blocks = sys.argv[1], *map(int, sys.argv[2:5])
    options = NatsOptions(buffer_bytes_max=BUFFER_BYTES, buffer_messages_max=1_000_000)
    bus = await NatsBus.connect(url, name="bench-fleet", options=options)
    await Fleet(bus, instances, steps, big_blocks).serve()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
