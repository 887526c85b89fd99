"""The dashboard's ear on the bus: keeps a picture of every model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from controlplane.audit.heard import understand
from controlplane.audit.source import ROWS_S_MAX, recorded
from controlplane.audit.story import Story, StoryTeller
from controlplane.bus.mailbox import Mailbox
from controlplane.bus.protocol import Bus, BusError, Entry, Record, Subscription
from controlplane.dashboard.picture import Picture, Verdict
from schemas import bus as messages
from schemas import subjects
from schemas.codec import RemoteError

logger = logging.getLogger(__name__)

MODELS_MAX = 64
QUEUE_MAX = 50_000
SLICE_S = 0.01
TICK_S = 0.5
SEARCH_S = 3600.0
SEARCH_TIMEOUT_S = 15.0
SEARCHES_MAX = 4


class DashboardService:
    """Follows the bus.

    Attributes:
        pictures: by model.
        counts: messages by kind, undecodable, overflow, refused models.
    """

    def __init__(self, bus: Bus) -> None:
        self.pictures: dict[str, Picture] = {}
        self.counts: Counter[str] = Counter()
        self._bus = bus
        # Pages have their turn while messages are taken in.
        self._mailbox = Mailbox(self._apply, self.counts, messages_max=QUEUE_MAX, slice_s=SLICE_S)
        self._subscriptions: list[Subscription] = []
        self._ticking: asyncio.Task[None] | None = None
        self._searches = 0
        self._loop = asyncio.get_running_loop()
        self._on: dict[str, Callable[[Picture, bytes, float], None]] = {
            "kv": lambda picture, data, now_s: picture.kv(messages.decode_kv(data), now_s),
            "load": lambda picture, data, now_s: picture.load(messages.decode_load(data), now_s),
            "route": lambda picture, data, now_s: picture.route(messages.decode_route(data), now_s),
        }

    @property
    def connected(self) -> bool:
        """Whether the bus can be heard."""
        return self._bus.connected

    async def start(self) -> None:
        """Subscribe; returns without waiting for the bus."""
        for kind in self._on:
            self._subscriptions.append(
                await self._bus.subscribe(subjects.all_of(kind), self._mailbox.put)
            )
        instances = await self._bus.bucket(subjects.INSTANCES)
        self._subscriptions.append(await instances.watch(self._instance))
        verdicts = await self._bus.bucket(subjects.VERDICTS)
        self._subscriptions.append(await verdicts.watch(self._verdict))
        self._ticking = self._loop.create_task(self._tick())

    async def stop(self) -> None:
        """Follow no more."""
        for subscription in self._subscriptions:
            await subscription.stop()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.wait([self._ticking])

    @property
    def waiting(self) -> int:
        """Messages that are not taken in yet."""
        return len(self._mailbox)

    def picture(self, model: str) -> Picture | None:
        """Return the picture of a model; with no name, of the first."""
        if model:
            return self.pictures.get(model)
        return self.pictures[min(self.pictures)] if self.pictures else None

    async def story(self, model: str, request: str) -> Story | None:
        """Return the story of a request, from memory or from the last hour's record.

        Raises:
            BusError: it is not in memory, and the record cannot be read, not in time, or is being
                read by too many already.
        """
        picture = self.picture(model)
        found = None if picture is None else picture.story(request)
        if found is not None or not request:
            return found
        if self._searches >= SEARCHES_MAX:
            raise BusError(f"{SEARCHES_MAX} searches of the last hour run already; try again")
        teller = StoryTeller(request)
        since_s = time.time() - SEARCH_S - ROWS_S_MAX
        self._searches += 1
        try:
            async with asyncio.timeout(SEARCH_TIMEOUT_S):
                await self._search(teller, model, since_s)
        except TimeoutError as error:
            raise BusError(
                f"the last hour could not be searched within {SEARCH_TIMEOUT_S:g} s; "
                "`multiplane audit show` takes the time it needs"
            ) from error
        finally:
            self._searches -= 1
        return teller.story

    async def _search(self, teller: StoryTeller, model: str, since_s: float) -> None:
        def hear(record: Record) -> bool:
            teller.hear(understand(record))
            return teller.story is not None and teller.story.ended

        records = recorded(self._bus, ("route",), model=model or None, since_wall_s=since_s)
        async for record in records:
            if hear(record):
                return

    # --- what is heard

    def _apply(self, subject: str, payload: bytes) -> None:
        try:
            kind, model, _ = subjects.parse(subject)
            picture = self._of(model)
            if picture is not None:
                self._on[kind](picture, payload, time.monotonic())
                self.counts[kind] += 1
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.debug("undecodable message on %s: %s", subject, error)

    def _instance(self, entry: Entry) -> None:
        try:
            model, instance_id = subjects.parse_key(entry.key)
            record = None if entry.value is None else messages.decode_instance(entry.value)
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.warning("unreadable instance record %s: %s", entry.key, error)
            return
        picture = self._of(model)
        if picture is not None:
            picture.record(instance_id, record)

    def _verdict(self, entry: Entry) -> None:
        try:
            model, name = subjects.parse_key(entry.key)
            verdict = None if entry.value is None else _decode_verdict(name, entry.value)
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.warning("unreadable verdict %s: %s", entry.key, error)
            return
        picture = self._of(model)
        if picture is not None:
            picture.verdict(name, verdict, time.monotonic())

    def _of(self, model: str) -> Picture | None:
        picture = self.pictures.get(model)
        if picture is None:
            if len(self.pictures) >= MODELS_MAX:
                self.counts["models_refused"] += 1
                return None
            picture = self.pictures[model] = Picture(model)
        return picture

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            for picture in self.pictures.values():
                picture.tick(now_s)


def _decode_verdict(name: str, value: bytes) -> Verdict | messages.HotspotCleared:
    if name.startswith("hotspot"):
        return messages.decode_hotspot(value)
    return messages.decode_policy(value)
