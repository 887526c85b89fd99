"""One engine rank's block stream: from its ZMQ events to the bus, and snapshots on request.

The parts that decide are pure (`engine_stream`, `mirror`, `relay`); this carries out what they say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress

from msgspec import structs

from controlplane.bus.protocol import Bus, Subscription
from schemas import subjects
from schemas.bus import decode_snapshot_request
from schemas.codec import RemoteError, encode
from schemas.vllm_events import decode_batch
from sidecar.config import SidecarConfig
from sidecar.engine_stream import (
    Apply,
    EngineStream,
    EngineStreamConfig,
    NewEpoch,
    RequestReplay,
    StreamEffect,
)
from sidecar.mirror import Mirror
from sidecar.relay import Relay
from sidecar.zmq_source import SourceConfig, SourceError, ZmqSource

logger = logging.getLogger(__name__)

_RETRY_S = 0.1
_SLICE_S = 0.002
_FIRST_PROBE_S = 0.5


class BlockFeed:
    """The block stream of one instance; `start` it, then `close` it.

    Attributes:
        source: the engine's sockets.
        stream: the sequence of the engine's events.
        mirror: the engine's blocks.
        relay: the published set.
        counts: undecodable payloads, unapplied ones, at which all begins anew, replays, failed
            replays, snapshots served, missed_live: messages that only a replay brought.
        changed: called when something changed that is in the instance's record.
    """

    def __init__(
        self,
        bus: Bus,
        model: str,
        instance_id: str,
        source: SourceConfig,
        config: SidecarConfig,
        changed: Callable[[], None],
    ) -> None:
        self.instance_id = instance_id
        self.counts: Counter[str] = Counter()
        self.changed = changed
        self.stream = EngineStream(
            config.stream if source.replay_endpoint else _without_replay(config)
        )
        self.mirror = Mirror(config.mirror)
        self.relay = Relay(instance_id, new_epoch(0), config.relay)
        self._bus = bus
        self._model = model
        self._subject = subjects.kv(model, instance_id)
        self._config = config
        self.source = ZmqSource(source)
        self._loop = asyncio.get_running_loop()
        self._service: Subscription | None = None
        self._replaying: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._flush_due: asyncio.TimerHandle | None = None
        self._probe_due_s = float("inf")
        self._blind = False
        self._replay_answers = True
        self._snapshot: tuple[tuple[int, int], list[bytes]] = ((-1, -1), [])

    @property
    def epoch(self) -> int:
        """Epoch of the published stream."""
        return self.relay.epoch

    async def start(self) -> None:
        """Begin to follow the engine.

        Raises:
            SourceError: the engine's endpoint makes no sense.
        """
        try:
            await self.source.start(self._message)
        except SourceError:
            await self.source.close()
            raise
        self._service = await self._bus.serve(
            subjects.snapshot(self._model, self.instance_id), self._serve_snapshot
        )
        self._ticking = asyncio.create_task(self._tick(), name=f"feed-{self.instance_id}")
        self.restart()

    def restart(self) -> None:
        """Follow the engine from its beginning, as if nothing were known."""
        self._run(self.stream.start())

    def probe_after_outage(self) -> None:
        """Find out whether the engine is still the process that was followed."""
        self._run(self.stream.probe(after_outage=True))

    async def joined(self, timeout_s: float) -> bool:
        """Return whether the stream became live within a time."""
        until_s = time.monotonic() + timeout_s
        while not self.stream.live:
            if time.monotonic() > until_s:
                return False
            await asyncio.sleep(0.01)
        return True

    async def close(self) -> None:
        """Publish what is pending, and end."""
        for task in (self._replaying, self._ticking):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        if self._service is not None:
            await self._service.stop()
        await self.source.close()
        self.flush()

    # --- events in

    def _message(self, seq: int, payload: bytes) -> None:
        self._probe_due_s = time.monotonic() + self._config.probe_s
        self._run(self.stream.message(seq, payload))

    def _run(self, effects: list[StreamEffect]) -> None:
        """Carry out what the sequence logic asks for."""
        for effect in effects:
            if isinstance(effect, Apply):
                self._apply(effect.payload)
            elif isinstance(effect, NewEpoch):
                self._begin_epoch(effect)
            else:
                self._request_replay(effect)
        self._schedule_flush()

    def _apply(self, payload: bytes) -> None:
        before = self._facts()
        try:
            batch = decode_batch(payload)
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.debug("%s: %s", self.instance_id, error)
            return
        try:
            self.relay.apply(self.mirror.apply(batch))
        except Exception:  # a bug: half applied, and raised again it would end the reading for good
            logger.exception("%s: an event batch cannot be applied", self.instance_id)
            self.counts["unapplied"] += 1
            self._begin_epoch(NewEpoch("a batch could not be applied", complete=False))
            return
        if self._facts() != before:
            self.changed()
        if self.mirror.blind != self._blind:
            self._blind = self.mirror.blind
            self._report_blindness()

    def _facts(self) -> tuple[int | None, bool, bool]:
        """What of the mirror is in the instance's record."""
        return self.mirror.block_size, self.mirror.complete, self.mirror.blind

    def _report_blindness(self) -> None:
        outcomes = {str(outcome): count for outcome, count in self.mirror.outcomes.items() if count}
        if self._blind:
            logger.error(
                "%s: KV events arrive and none applies, so its cache is invisible; of all events: "
                "%s. unknown_parent heals with a reset of the engine's prefix cache; sparse means "
                "that the model has no full attention; rejected, an engine too new or too old",
                self.instance_id,
                outcomes,
            )
        else:
            logger.warning("%s: KV events apply again", self.instance_id)

    def _begin_epoch(self, effect: NewEpoch) -> None:
        epoch = new_epoch(self.relay.epoch)
        self.relay.apply(self.mirror.reset(complete=effect.complete))
        self.relay.reset(epoch)
        # A subscription takes a moment; what the engine sends meanwhile only a probe can show.
        self._probe_due_s = time.monotonic() + min(_FIRST_PROBE_S, self._config.probe_s)
        known = "all blocks are known" if effect.complete else "blocks stored before are unknown"
        level = logging.INFO if effect.complete else logging.WARNING
        logger.log(level, "%s: epoch %d: %s; %s", self.instance_id, epoch, effect.reason, known)
        self.changed()

    # --- replays

    def _request_replay(self, effect: RequestReplay) -> None:
        if self._replaying is not None and self._replaying is not asyncio.current_task():
            self._replaying.cancel()
        self.counts["replays"] += 1
        self._replaying = self._loop.create_task(
            self._replay(effect.from_seq), name=f"replay-{self.instance_id}"
        )

    async def _replay(self, from_seq: int) -> None:
        """Feed one replay to the sequence logic; ends early if that asks for another one."""
        task = asyncio.current_task()
        turn_s = time.monotonic()
        brought = 0
        try:
            async with aclosing(self.source.replay(from_seq)) as replay:
                async for seq, payload in replay:
                    effects = self.stream.replayed(seq, payload)
                    brought += sum(isinstance(effect, Apply) for effect in effects)
                    self._run(effects)
                    if self._replaying is not task:
                        return
                    if time.monotonic() - turn_s > _SLICE_S:
                        await asyncio.sleep(0)
                        turn_s = time.monotonic()
        except SourceError as error:
            self.counts["replays_failed"] += 1
            level = logging.WARNING if self._replay_answers else logging.DEBUG
            self._replay_answers = False
            logger.log(level, "%s: replay from %d: %s", self.instance_id, from_seq, error)
            await asyncio.sleep(_RETRY_S)
            self._run(self.stream.replay_failed(str(error)))
            return
        self._replay_answers = True
        if not brought:
            # What was just sent may not be in the engine's buffer yet: do not ask in a tight loop.
            await asyncio.sleep(_RETRY_S / 10)
        self._run(self.stream.replay_ended())

    # --- batches out

    def _schedule_flush(self) -> None:
        if self._flush_due is None:
            self._flush_due = self._loop.call_later(self._config.flush_s, self.flush)

    def flush(self) -> None:
        """Publish what changed, or a heartbeat if one is due."""
        if self._flush_due is not None:
            self._flush_due.cancel()
            self._flush_due = None
        now_s, wall_s = time.monotonic(), time.time()
        while (batch := self.relay.flush(now_s, wall_s)) is not None:
            self._bus.publish(self._subject, encode(batch))

    async def _tick(self) -> None:
        """Keep heartbeats going, and look for what the live stream does not show."""
        while True:
            await asyncio.sleep(self._config.relay.heartbeat_s / 4)
            self.flush()
            now_s = time.monotonic()
            if self.stream.live and self.stream.config.replay and now_s >= self._probe_due_s:
                self._probe_due_s = now_s + self._config.probe_s
                self._probe_silence()

    def _probe_silence(self) -> None:
        """Compare a silent stream with the engine's replay buffer."""
        before, received = self.stream.next_seq, self.source.received
        self._run(self.stream.probe(after_outage=False))
        task = self._replaying

        def look(_: asyncio.Task[None]) -> None:
            after = self.stream.next_seq
            # Where the live stream spoke up too, we were late ourselves: the replay overtook it.
            silent = self.source.received == received
            if silent and before is not None and after is not None and after > before:
                self.counts["missed_live"] += after - before
                logger.warning(
                    "%s: %d events came by replay only; if this goes on, the engine does not "
                    "listen at its endpoint: vLLM binds addresses with *, such as tcp://*:5557, "
                    "and connects to others",
                    self.instance_id,
                    after - before,
                )

        if task is not None:
            task.add_done_callback(look)

    # --- snapshots

    async def _serve_snapshot(self, payload: bytes) -> AsyncIterator[bytes]:
        """Answer one router with the whole set; equal requests share the work."""
        try:
            asked = decode_snapshot_request(payload)
        except RemoteError as error:
            logger.warning("%s: %s", self.instance_id, error)
            raise
        self.flush()
        at = (self.relay.epoch, self.relay.seq)
        if self._snapshot[0] != at or self.relay.seq < 0:
            chunks = self.relay.snapshot(time.time())
            self.flush()
            self._snapshot = ((chunks[0].epoch, chunks[0].seq), [encode(c) for c in chunks])
        self.counts["snapshots"] += 1
        logger.debug("%s: snapshot for %s", self.instance_id, asked.router_id)
        for chunk in self._snapshot[1]:
            yield chunk


def new_epoch(last: int) -> int:
    """Return an epoch larger than `last` and than those of earlier lives of the sidecar."""
    return max(last + 1, time.time_ns())


def _without_replay(config: SidecarConfig) -> EngineStreamConfig:
    return structs.replace(config.stream, replay=False)
