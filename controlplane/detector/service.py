"""The detector process: follows every router, keeps a detector a model, and leads if it may.

Theory of operation. Any number of these run; each takes in all route events, so each has the same
counts and streaks, and each mirrors the verdicts in the bucket. One holds the lease and writes.

    standby ── the lease is free, or its holder was silent ──> reads the bucket ──> leader
    leader ── the lease is lost, or could not be renewed in time ──> standby

Verdicts live in the bucket with a time to live that only a leader renews: routers that hear of no
leader any more drop them by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable

from controlplane.bus.mailbox import Mailbox
from controlplane.bus.protocol import Bus, BusError, Entry, Subscription
from controlplane.core.detector import Change
from controlplane.detector.config import DetectorServiceConfig
from controlplane.detector.lease import Lease
from controlplane.detector.model import WatchedModel
from controlplane.detector.registrar import Registrar
from schemas import subjects
from schemas.bus import decode_route
from schemas.codec import RemoteError

logger = logging.getLogger(__name__)

SERVICE = "detector"
"""Key of the lease."""


class DetectorService:
    """Everything that one detector process runs.

    Args:
        clock: monotonic; by it time passes for verdicts and the lease.

    Attributes:
        detector_id: its name.
        models: what it watches, by model id.
        lease: on leading.
        registrar: writes what it decides.
        leading: whether it decides now.
        counts: messages, undecodable, overflow, models_refused, bus_errors.
    """

    def __init__(
        self,
        bus: Bus,
        config: DetectorServiceConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.detector_id = config.detector_id or f"detector-{secrets.token_hex(4)}"
        self.models: dict[str, WatchedModel] = {}
        self.leading = False
        self.counts: Counter[str] = Counter()
        # A name may be used again after a restart; the lease tells one life from another.
        holder = f"{self.detector_id}/{secrets.token_hex(4)}"
        self.lease = Lease(
            bus,
            SERVICE,
            holder,
            ttl_s=config.lease_ttl_s,
            margin_s=config.lease_margin_s,
            clock=clock,
        )
        self.registrar = Registrar(bus, self.lease, clock)
        self._bus = bus
        self._clock = clock
        # The lease has to be renewed while messages are taken in.
        self._mailbox = Mailbox(
            self._take, self.counts, messages_max=config.messages_max, slice_s=config.slice_s
        )
        self._changed = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Subscribe and begin; returns without waiting for the bus."""
        self._bus.on_state(self._bus_state)
        self._subscriptions.append(
            await self._bus.subscribe(subjects.all_of("route"), self._mailbox.put)
        )
        verdicts = await self._bus.bucket(subjects.VERDICTS)
        self._subscriptions.append(await verdicts.watch(self._entry))
        for work in (self._lead, self._settle, self._tick):
            self._tasks.append(self._loop.create_task(work(), name=work.__name__))

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; a bug in a task ends the process rather than half of it."""
        stopping = self._loop.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait(
                [stopping, *self._tasks], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
        finally:
            stopping.cancel()
            await self.stop()

    async def stop(self) -> None:
        """End, and let a standby lead at once; verdicts stay for it to take over."""
        for subscription in self._subscriptions:
            await subscription.stop()
        self._subscriptions.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._follow()
        try:
            await self.lease.release()
        except BusError as error:
            logger.info("the lease is left to run out: %s", error)

    @property
    def waiting(self) -> int:
        """Messages that are queued."""
        return len(self._mailbox)

    # --- what routers say

    def _take(self, subject: str, payload: bytes) -> None:
        try:
            _, name, _ = subjects.parse(subject)
            batch = decode_route(payload)
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.debug("undecodable message on %s: %s", subject, error)
            return
        model = self._model(name)
        if model is not None:
            self.counts["messages"] += 1
            self._note(model.batch(batch, self._clock(), time.time()))

    def _model(self, name: str) -> WatchedModel | None:
        """Return a model, watched from now on if it is new; None at the bound."""
        model = self.models.get(name)
        if model is None:
            if len(self.models) >= self.config.models_max:
                self.counts["models_refused"] += 1
                return None
            model = self.models[name] = WatchedModel(name, self.config, self._clock())
            if self.leading:
                model.lead({}, self._clock())
        return model

    def _note(self, changes: list[Change]) -> None:
        if changes:
            self._changed.set()

    # --- what the bus says

    def _entry(self, entry: Entry) -> None:
        """Follow the bucket."""
        try:
            name, part = subjects.parse_key(entry.key)
            model = self._model(name)
            if model is not None:
                model.entry(part, entry, self._clock())
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.warning("unreadable entry %s: %s", entry.key, error)
        self._changed.set()

    def _bus_state(self, connected: bool) -> None:
        logger.warning("the bus is %s", "connected" if connected else "lost")
        if connected:
            for model in self.models.values():
                model.lost(self._clock())

    # --- leading

    async def _lead(self) -> None:
        """Hold the lease, or wait for it."""
        while True:
            try:
                may = await self.lease.step()
                if may and not self.leading:
                    await self._take_over()
                elif not may:
                    self._follow()
            except BusError as error:
                self.counts["bus_errors"] += 1
                logger.debug("the lease: %s", error)
                if self.lease.left_s <= 0:
                    self._follow()
            held = self.leading or self.lease.left_s > 0
            await asyncio.sleep(self.config.lease_renew_s if held else self.config.lease_poll_s)

    async def _take_over(self) -> None:
        """Read what stands, and decide from now on. Raises BusError."""
        bucket = await self._bus.bucket(subjects.VERDICTS)
        found: dict[str, dict[str, Entry]] = {name: {} for name in self.models}
        for key in await bucket.keys():
            entry = await bucket.get(key)
            try:
                name, part = subjects.parse_key(key)
            except RemoteError:
                continue  # counted when the watch told of it
            if entry is not None and self._model(name) is not None:
                found.setdefault(name, {})[part] = entry
        if self.lease.left_s <= 0:
            return
        for name, entries in found.items():
            self.models[name].lead(entries, self._clock())
        self.leading = True
        standing = sum(len(model.detector.standing) for model in self.models.values())
        logger.info("%s leads; %d verdicts stand", self.detector_id, standing)
        self._changed.set()

    def _follow(self) -> None:
        if self.leading:
            self.leading = False
            logger.warning("%s leads no more", self.detector_id)
            for model in self.models.values():
                model.follow()

    async def _settle(self) -> None:
        """Keep the bucket in line with what is decided."""
        while True:
            self._changed.clear()
            if self.leading:
                try:
                    await self.registrar.settle(list(self.models.values()))
                except BusError as error:
                    self.counts["bus_errors"] += 1
                    logger.debug("the bucket: %s", error)
            try:
                async with asyncio.timeout(self.config.tick_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _tick(self) -> None:
        """Let time pass."""
        while True:
            await asyncio.sleep(self.config.tick_s)
            for model in self.models.values():
                self._note(model.tick(self._clock(), time.time()))
