"""Where an instance lives: one engine, its sidecar, and the links to both, across restarts."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.core.hashing import BlockHash, unpack_hashes
from lab.engine_types import EngineConfig
from schemas.bus import KvBatch, KvCleared, KvStored
from tests.sim.bus import BusServer, Connection
from tests.sim.engines import BLOCK, STEP_TIMES, EngineProcess, Parents
from tests.sim.network import Link
from tests.sim.settings import Settings
from tests.sim.sidecars import SidecarProcess
from tests.sim.world import World


class Site:
    """An instance's place.

    Attributes:
        engine: the engine process that runs now, None while none does.
        sidecar: likewise.
        local: the link between them.
        bus_link: the sidecar's link to the bus.
        replay_trouble: chance that a replay is cut short.
        snapshot_trouble: chance that a snapshot's answer goes wrong.
        gone: whether it has left for good.
        told: the last of `published`.
        published: (epoch, seq) → the set that this batch and those before it amount to.
    """

    def __init__(
        self, world: World, name: str, server: BusServer, settings: Settings, parents: Parents
    ) -> None:
        self.world = world
        self.name = name
        self.server = server
        self.settings = settings
        self.parents = parents
        self.engine: EngineProcess | None = None
        self.sidecar: SidecarProcess | None = None
        self.local = Link(world, f"{name}~local", (0.0002, 0.002))
        self.bus_link = Link(world, f"{name}~bus", settings.delay_s)
        self.replay_trouble = self.snapshot_trouble = 0.0
        self.gone = False
        self.published: dict[tuple[int, int], frozenset[BlockHash]] = {}
        self.told: frozenset[BlockHash] = frozenset()

    # --- the engine

    def start_engine(self) -> None:
        """Start an engine process, unless there is one or the site has left."""
        if self.engine is not None or self.gone:
            return
        settings = self.settings
        config = EngineConfig(
            num_blocks=settings.engine_blocks,
            step_times=STEP_TIMES.scaled(settings.slowness),
            block_size=BLOCK,
            max_num_seqs=settings.engine_seqs,
            max_num_batched_tokens=settings.engine_tokens,
            max_model_len=settings.context_tokens,
        )
        self.engine = EngineProcess(
            self.world, self.name, config, self.parents, settings.replay_max
        )
        # A subscription is only there after a while; what is published before reaches nobody.
        self.world.after(self.world.rng.uniform(0.0, 0.3), self._subscribe, self.engine)
        self.world.note(f"engine {self.name} starts")

    def _subscribe(self, engine: EngineProcess) -> None:
        engine.listener = self._live

    def _live(self, seq: int, payload: bytes) -> None:
        sidecar = self.sidecar
        if sidecar is not None:
            self.local.carry("events", sidecar.do, sidecar.live, seq, payload)

    def kill_engine(self) -> None:
        """Let the engine process die."""
        if self.engine is not None:
            self.world.note(f"engine {self.name} dies")
            engine, self.engine = self.engine, None
            engine.kill()

    # --- the sidecar

    def start_sidecar(self, skew_s: float = 0.0) -> None:
        """Start a sidecar process, unless there is one or the site has left."""
        if self.sidecar is not None or self.gone:
            return
        self.world.note(f"sidecar {self.name} starts, its clock {skew_s:+.3f} s")
        sidecar = SidecarProcess(self.world, self, skew_s)
        self.sidecar = sidecar
        sidecar.start(Connection(self.server, sidecar, self.bus_link))

    def kill_sidecar(self) -> None:
        """Let the sidecar process die."""
        if self.sidecar is not None:
            self.world.note(f"sidecar {self.name} dies")
            sidecar, self.sidecar = self.sidecar, None
            sidecar.kill()

    # --- what the sidecar can do with its engine

    @property
    def reachable(self) -> EngineProcess | None:
        """The engine, if it answers its sidecar."""
        engine = self.engine
        if engine is None or engine.paused or not self.local.up:
            return None
        return engine

    def replay(
        self,
        sidecar: SidecarProcess,
        from_seq: int,
        on_message: Callable[[int, bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Ask the engine for old messages; the end says what was wrong, if anything was."""
        engine, world = self.reachable, self.world
        if engine is None:
            sidecar.after(0.2, on_end, "the engine does not answer")
            return
        messages = engine.messages_from(from_seq)
        if world.chance(self.replay_trouble) and messages:
            messages = messages[: world.rng.randrange(len(messages))]
        delay_s = world.rng.uniform(0.001, 0.02)
        for seq, payload in messages:
            sidecar.after(delay_s, on_message, seq, payload)
            delay_s += world.rng.uniform(0.0, 0.002)
        sidecar.after(delay_s, on_end, "")

    # --- truth

    def note_published(self, batch: KvBatch) -> None:
        """Work out, the simple way, what whoever applies all batches has after this one."""
        told = set(self.told) if batch.seq else set()
        for op in batch.ops:
            if isinstance(op, KvCleared):
                told.clear()
            elif isinstance(op, KvStored):
                told.update(unpack_hashes(op.hashes))
            else:
                told.difference_update(unpack_hashes(op.hashes))
        if batch.ops or not batch.seq:
            self.told = frozenset(told)
        self.published[batch.epoch, batch.seq] = self.told

    def truth(self) -> set[BlockHash]:
        """Return what routers should know of this instance's blocks."""
        return set() if self.engine is None else self.engine.usable()
