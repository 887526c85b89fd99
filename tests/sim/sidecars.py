"""A sidecar process: the production stream, mirror and relay, driven as the service drives them.

Everything here stands for what surrounds those pure parts: sockets, timers, the engine's health,
the record in the bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from schemas.bus import InstanceRecord, LoadReport, SnapshotChunk
from schemas.codec import encode
from schemas.vllm_events import decode_batch
from sidecar.config import SidecarConfig
from sidecar.engine_stream import (
    Apply,
    EngineStream,
    EngineStreamConfig,
    RequestReplay,
    StreamEffect,
)
from sidecar.mirror import Mirror
from sidecar.relay import Relay, RelayConfig
from tests.sim.bus import Connection
from tests.sim.engines import BLOCK, EngineProcess
from tests.sim.settings import MODEL
from tests.sim.world import Process, World

if TYPE_CHECKING:
    from tests.sim.sites import Site

State = Literal["starting", "ready", "draining", "stopped"]

_CONFIG = SidecarConfig(engine_url="http://engine")
_FIRST_PROBE_S = 0.5
LOAD_EVERY_S = 0.25

# Small, so that changes and snapshots come in several parts.
_RELAY = RelayConfig(heartbeat_s=1.0, batch_hashes_max=24, chunk_hashes_max=24)


class SidecarProcess(Process):
    """One incarnation of a sidecar.

    Attributes:
        stream, mirror, relay: the production parts.
        state: as in its record; `starting` has none.
    """

    def __init__(self, world: World, site: Site, skew_s: float) -> None:
        super().__init__(world, site.name, skew_s)
        self.site = site
        self.stream = EngineStream(EngineStreamConfig(kept_messages_max=200))
        self.mirror = Mirror()
        self.mirror.capacity_blocks = site.settings.engine_blocks - 1
        self.relay = Relay(site.name, self._next_epoch(0), _RELAY)
        self.state: State = "starting"
        self._replay_wanted = 0
        self._flushing = False
        self._engine: EngineProcess | None = None
        self._misses = 0
        self._lost = False
        self._load_seq = 0
        self._probe_due_s = float("inf")

    def start(self, connection: Connection) -> None:
        """Begin to work."""
        self.connection = connection
        connection.service = self._serve
        connection.on_state(self._bus_state)
        self.every(self.site.settings.scrape_s, self._scrape)
        self.every(LOAD_EVERY_S, self._report)
        self.every(_CONFIG.heartbeat_s, self._record)
        self.every(0.25, self._beat)

    def kill(self) -> None:
        """Die."""
        super().kill()
        self.connection.close()

    def _next_epoch(self, last: int) -> int:
        return max(int(self.wall_s * 1e9), last + 1)

    # --- from the engine

    def live(self, seq: int, payload: bytes) -> None:
        """Take a message of the engine's."""
        self._probe_due_s = self.clock_s + _CONFIG.probe_s
        self._take(self.stream.message(seq, payload))

    def _take(self, effects: list[StreamEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Apply):
                self.relay.apply(self.mirror.apply(decode_batch(effect.payload)))
            elif isinstance(effect, RequestReplay):
                self._replay(effect.from_seq)
            else:
                self.world.note(f"sidecar {self.name}: new epoch: {effect.reason}")
                self.relay.reset(self._next_epoch(self.relay.epoch))
                self.relay.apply(self.mirror.reset(complete=effect.complete))
                self._probe_due_s = self.clock_s + min(_FIRST_PROBE_S, _CONFIG.probe_s)
                self._record()
        self._flush_soon()

    def _replay(self, from_seq: int) -> None:
        self._replay_wanted += 1
        wanted = self._replay_wanted

        def message(seq: int, payload: bytes) -> None:
            if wanted == self._replay_wanted:
                self._take(self.stream.replayed(seq, payload))

        def end(error: str) -> None:
            if wanted == self._replay_wanted:
                failed = self.stream.replay_failed
                self._take(failed(error) if error else self.stream.replay_ended())

        self.site.replay(self, from_seq, message, end)

    def _scrape(self) -> None:
        """Look whether the engine answers, and whether it is the one from before."""
        engine = self.site.reachable
        if engine is None:
            self._misses += 1
            if self._misses == _CONFIG.health_failures_max and self.state == "ready":
                self._change("stopped")
                self._lost = True
            return
        if self._engine is None:
            self._take(self.stream.start())
        elif engine is not self._engine or self._lost:
            self._take(self.stream.probe(after_outage=True))
        self._engine, self._misses, self._lost = engine, 0, False
        if self.state in ("starting", "stopped") and self.stream.live:
            self._change("ready")

    def _change(self, state: State) -> None:
        self.world.note(f"sidecar {self.name}: {state}")
        self.state = state
        self._record()

    # --- to the bus

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self.after(_CONFIG.flush_s, self._flush_now)

    def _flush_now(self) -> None:
        self._flushing = False
        self._flush()

    def _beat(self) -> None:
        """Keep heartbeats going, and ask an engine that is silent whether it really is."""
        self._flush()
        if self.stream.live and self.clock_s >= self._probe_due_s:
            self._probe_due_s = self.clock_s + _CONFIG.probe_s
            self._take(self.stream.probe(after_outage=False))

    def _flush(self) -> None:
        while (batch := self.relay.flush(self.clock_s, self.wall_s)) is not None:
            self.site.note_published(batch)
            self.connection.publish("kv", encode(batch))

    def _report(self) -> None:
        engine = self.site.reachable
        if engine is None or self.state not in ("ready", "draining"):
            return
        report = LoadReport(
            self.name,
            self.relay.epoch,
            self._load_seq,
            self.wall_s,
            engine.core.running_count,
            engine.core.waiting_count,
        )
        self._load_seq += 1
        self.connection.publish("load", encode(report))

    def _record(self) -> None:
        if self.state == "starting":
            return
        record = InstanceRecord(
            self.name,
            MODEL,
            f"http://{self.name}",
            self.relay.epoch,
            self.state,
            block_size=BLOCK,
            heartbeat_s=_CONFIG.heartbeat_s,
            sent_wall_s=self.wall_s,
        )
        self.connection.put(f"record {self.name}", encode(record))

    def drain(self) -> None:
        """Ask for no new requests: what SIGTERM does first."""
        self._change("draining")

    def say_goodbye(self) -> None:
        """Leave the fleet: the last thing before the end."""
        if self.state != "starting":
            self._change("stopped")
        self.connection.put(f"record {self.name}", None)

    def _bus_state(self, connected: bool) -> None:
        if connected:
            self._record()

    # --- snapshots

    def _serve(
        self, request: bytes, answer: Callable[[bytes], None], end: Callable[[], None]
    ) -> None:
        """Answer with the whole set, part by part; other things happen in between."""
        chunks = self.relay.snapshot(self.wall_s)
        self._flush()
        if self.world.chance(self.site.snapshot_trouble):
            chunks = self._spoil(chunks)
        delay_s = 0.0
        for chunk in chunks:
            self.after(delay_s, answer, encode(chunk))
            delay_s += self.world.rng.uniform(0.0, 0.01)
        self.after(delay_s, end)

    def _spoil(self, chunks: list[SnapshotChunk]) -> list[SnapshotChunk]:
        """Return an answer with a part missing, repeated, or out of order; or none at all."""
        rng = self.world.rng
        at, kind = rng.randrange(len(chunks)), rng.randrange(4)
        spoilt = list(chunks)
        if kind == 0:
            del spoilt[at]
        elif kind == 1:
            spoilt.insert(at, chunks[at])
        elif kind == 2:
            spoilt[at], spoilt[-1] = spoilt[-1], spoilt[at]
        else:
            spoilt.clear()
        return spoilt
