"""The event path: from the bus into the planes, and from the planes to the bus.

Theory of operation. The bus's callbacks only queue; a drain that runs for at most
`events_slice_s` at a time decodes and applies, so that a burst of events never holds up requests
for longer than that. Effects are carried out here: snapshots are fetched, notes are logged and
counted. Nothing on the request path waits for any of this.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from controlplane.bus.mailbox import Mailbox
from controlplane.bus.protocol import Bus, BusError, Entry, Objects, Subscription, Watch
from controlplane.core.effects import Alarm, Effect, FetchSnapshot
from controlplane.core.events import (
    BreakerState,
    BusState,
    Event,
    InstanceGone,
    Paused,
    SnapshotFailed,
    Tick,
)
from controlplane.core.stream import Trust
from router.config import RouterConfig
from router.directory import Directory, ServedModel
from router.engine_address import AddressError, parse_address
from router.standing import StandingVerdicts
from router.template_habits import habits_of
from router.tokens import PromptReader
from schemas import bus as messages
from schemas import subjects
from schemas.codec import RemoteError, encode

logger = logging.getLogger(__name__)

_SUBJECTS_MAX = 65_536  # taken apart once; all are forgotten beyond it
_SWEEPS_MAX = 100  # steps a tick
_LOOK_S = 0.02
_UNUSABLE_MAX = 1024  # the oldest are forgotten beyond it; they are only shown

PAUSE_S = 1.0
"""A tick that comes later than this is no busy loop: the process did not run."""

_DECODERS: dict[str, Callable[[bytes], Event]] = {
    "kv": messages.decode_kv,
    "load": messages.decode_load,
    "route": messages.decode_route,
}


class EventPath:
    """Keeps the planes of a directory equal to what the bus says.

    Attributes:
        counts: what happened, by name: messages, undecodable, overflow, notes and alarms by kind.
        unusable: (model, instance id) → why its record, as it stands, is of no use.
    """

    def __init__(
        self,
        bus: Bus,
        directory: Directory,
        config: RouterConfig,
        router_id: str,
        *,
        make_reader: Callable[[messages.ModelCard], PromptReader],
        instances_changed: Callable[[], None],
        ticked: Callable[[float], None],
        peer_told: Callable[[str, messages.RouteBatch, float], None] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.unusable: dict[tuple[str, str], str] = {}
        self._bus = bus
        self._directory = directory
        self._config = config
        self._router_id = router_id
        self._make_reader = make_reader
        self._instances_changed = instances_changed
        self._ticked = ticked
        self._peer_told = peer_told
        self._standing = StandingVerdicts()
        self._mailbox = Mailbox(
            self._apply,
            self.counts,
            messages_max=config.events_max,
            slice_s=config.events_slice_s,
        )
        self._parsed: dict[str, tuple[str, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._snapshots = asyncio.Semaphore(config.snapshots_at_once)
        self._subscriptions: list[Subscription] = []
        self._watches: list[Watch] = []
        self._flush_due: asyncio.TimerHandle | None = None
        self._cards: Objects | None = None
        self._loading: set[str] = set()
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Subscribe to everything and begin to tick; returns without waiting for the bus."""
        self._bus.on_state(self._bus_state)
        self._cards = await self._bus.objects(subjects.MODELS)
        for kind in _DECODERS:
            self._subscriptions.append(
                await self._bus.subscribe(subjects.all_of(kind), self._mailbox.put)
            )
        instances = await self._bus.bucket(subjects.INSTANCES)
        self._watches.append(await instances.watch(self._instance_entry))
        verdicts = await self._bus.bucket(subjects.VERDICTS)
        self._watches.append(await verdicts.watch(self._verdict_entry))
        self._spawn(self._ticking())

    async def synced(self, within_s: float) -> str:
        """Wait until every record and verdict there is has come; returns what is wrong, if not."""
        try:
            async with asyncio.timeout(within_s):
                for watch in self._watches:
                    await watch.synced(within_s)
        except (BusError, TimeoutError) as error:
            return str(error) or f"not within {within_s:g} s"
        return ""

    async def caught_up(self, within_s: float) -> bool:
        """Wait until this router knows what the others know; False if that took too long.

        That is: every record and verdict there is, every block set, and how to read prompts.
        """
        if await self.synced(within_s):
            return False
        try:
            async with asyncio.timeout(within_s):
                while True:
                    if not self._behind():
                        return True
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            return False

    def _behind(self) -> bool:
        """Whether something that is known to exist has not arrived yet."""
        return bool(self._loading) or any(
            instance.trust is not Trust.EXACT
            for served in self._directory
            for instance in served.plane.fleet
        )

    async def stop(self) -> None:
        """Tell what is left to tell, and end."""
        for subscription in (*self._subscriptions, *self._watches):
            await subscription.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._flush_due is not None:
            self._flush_due.cancel()
        for served in self._directory:
            served.plane.requests.tell_totals()  # the others need not wait for our silence
        self.flush()

    @property
    def waiting(self) -> int:
        """Messages that are queued."""
        return len(self._mailbox)

    # --- messages in

    def _apply(self, subject: str, payload: bytes) -> None:
        """Apply a message to the plane of its model."""
        parsed = self._parsed.get(subject)
        if parsed is None:
            try:
                kind, model, _ = subjects.parse(subject)
            except RemoteError:
                self.counts["unknown_subject"] += 1
                return
            if len(self._parsed) >= _SUBJECTS_MAX:
                self._parsed.clear()
            parsed = self._parsed[subject] = (kind, model)
        kind, model = parsed
        served = self._directory.get(model)
        if served is None:
            self.counts["unknown_model"] += 1
            return
        try:
            event = _DECODERS[kind](payload)
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.debug("undecodable %s message for %s: %s", kind, model, error)
            return
        self.counts[kind] += 1
        now_s = time.monotonic()
        if self._peer_told is not None and isinstance(event, messages.RouteBatch):
            self._peer_told(model, event, now_s)
        self.carry_out(served.plane.handle(event, now_s))

    # --- records

    def _instance_entry(self, entry: Entry) -> None:
        """An instance's record came, changed or went."""
        try:
            model, instance_id = subjects.parse_key(entry.key)
            record = None if entry.value is None else _decode_record(entry.value, entry.key)
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.warning("unreadable instance record %s: %s", entry.key, error)
            return
        if not self._usable(model, instance_id, record):
            record = None
        now_s = time.monotonic()
        served = self._directory.get(model)
        if record is None:
            # An expired record proves nothing: its sidecar may be cut off. Silence decides.
            if served is None or entry.expired:
                return
            effects = served.plane.handle(InstanceGone(instance_id), now_s)
        else:
            served = self._directory.of(record)
            if served is None:
                return
            known = served.plane.fleet.get(instance_id)
            before = None if known is None else known.record
            effects = served.plane.handle(record, now_s)
            if known is None:
                # What stands may concern the newcomer; the rest is known and changes nothing.
                for verdict in self._standing.of(model, now_s):
                    effects += served.plane.handle(verdict, now_s)
            self._want_card(served, record.card)
            if before is not None and _is_renewal(before, record):
                self.carry_out(effects)
                return
        self._directory.rename()
        self._instances_changed()
        self.carry_out(effects)

    def _usable(self, model: str, instance_id: str, record: messages.InstanceRecord | None) -> bool:
        """Say whether requests could be sent to where a record says; keep book of those that not.

        Whatever is wrong with one record concerns nobody but its own instance.
        """
        key = (model, instance_id)
        known = self.unusable.pop(key, None)
        if record is None or record.state == "stopped":
            return True
        try:
            parse_address(record.url)
        except AddressError as error:
            problem = str(error)
        else:
            return True
        if problem != known:
            self.counts["unusable_record"] += 1
            logger.error("instance %s of %s cannot be used: %s", instance_id, model, problem)
        self.unusable[key] = problem
        while len(self.unusable) > _UNUSABLE_MAX:
            del self.unusable[next(iter(self.unusable))]
        return False

    def _want_card(self, served: ServedModel, digest: str) -> None:
        """Fetch a card: one to read prompts by, or one to see that it reads them as the one used.

        The one in use stays as long as any instance has it.
        """
        known = digest in self._loading or (served.card_in_use and digest in served.cards_seen)
        if digest and not known:
            self._loading.add(digest)
            self._spawn(self._read_card(served, digest))

    async def _read_card(self, served: ServedModel, digest: str) -> None:
        """Fetch a model card and read prompts with it from then on; tries until it is there."""
        assert self._cards is not None
        wait_s = 0.2
        try:
            while self._directory.get(served.model) is served:
                try:
                    data = await self._cards.get(digest)
                    if data is not None:
                        await asyncio.to_thread(_check_digest, digest, data)
                        await self._use_card(served, digest, messages.decode_card(data))
                        return
                except BusError as error:
                    logger.debug("model card %s: %s", digest[:12], error)
                except (RemoteError, ValueError) as error:
                    self.counts["bad_card"] += 1
                    served.saw_card(digest, alike=False)
                    logger.error("model card %s of %s: %s", digest[:12], served.model, error)
                    return
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, 5.0)
        finally:
            self._loading.discard(digest)

    async def _use_card(self, served: ServedModel, digest: str, card: messages.ModelCard) -> None:
        """Read prompts by a card from now on; a reader is made only if it would differ."""
        reader = None
        if not served.card_in_use and not served.reads_alike(card):
            reader = await asyncio.to_thread(self._make_reader, card)
            habits = await asyncio.to_thread(habits_of, card)
        alike = served.reads_alike(card)
        served.saw_card(digest, alike=alike)
        if served.card_in_use:  # already, or since a moment ago
            if reader is not None:
                reader.close()
            if not alike:
                self.carry_out(served.card_differs(digest))
            return
        if reader is None:
            served.keep_reader(digest)
        else:
            served.use(digest, card, reader, habits)
            if reader.problem:
                logger.warning(
                    "prompts for %s cannot be read exactly, and are routed by load: %s",
                    served.model,
                    reader.problem,
                )
        logger.info("model card %s of %s is in use", digest[:12], served.model)

    def _verdict_entry(self, entry: Entry) -> None:
        """A verdict was made, changed or lifted."""
        now_s = time.monotonic()
        try:
            found = self._standing.feed(entry.key, entry.value, now_s, entry.age_s)
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.warning("unreadable verdict %s: %s", entry.key, error)
            return
        served = None if found is None else self._directory.get(found[0])
        if found is not None and served is not None:
            self.carry_out(served.plane.handle(found[1], now_s))

    # --- time and state

    def _bus_state(self, connected: bool) -> None:
        if connected:
            logger.info("the bus is connected")
        else:
            logger.warning("the bus is lost: requests are routed by what is known, and by load")
        now_s = time.monotonic()
        event = BusState(connected)
        self.carry_out(self._directory.each(lambda plane: plane.handle(event, now_s)))

    async def _ticking(self) -> None:
        tick = Tick()
        while True:
            due_s = time.monotonic() + self._config.tick_s
            await asyncio.sleep(self._config.tick_s)
            now_s = time.monotonic()
            if now_s - due_s > PAUSE_S:
                self._paused(now_s - due_s, now_s)
            before = sum(len(served.plane.fleet) for served in self._directory)
            effects: list[Effect] = []
            for served in self._directory:
                effects += served.plane.handle(tick, now_s)
            self.carry_out(effects)
            if before != sum(len(served.plane.fleet) for served in self._directory):
                self._directory.rename()
                self._instances_changed()
            self._ticked(now_s)
            self.flush()
            await self._sweep()

    def _paused(self, seconds: float, now_s: float) -> None:
        """Note that this process was frozen, starved or asleep."""
        self.counts["paused"] += 1
        logger.warning("this process stood still for %.1f s; is the machine overloaded?", seconds)
        event = Paused(seconds)
        self.carry_out(self._directory.each(lambda plane: plane.handle(event, now_s)))

    async def _sweep(self) -> None:
        """Erase what departed, in steps between which requests get their turn."""
        for served in list(self._directory):
            for _ in range(_SWEEPS_MAX):
                if not served.plane.sweep():
                    break
                await asyncio.sleep(0)

    def breaker(self, served: ServedModel, instance_id: str, is_open: bool) -> None:
        """Tell a plane what the data plane found."""
        event = BreakerState(instance_id, is_open)
        self.carry_out(served.plane.handle(event, time.monotonic()))

    # --- effects out

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Do what a plane asks for."""
        for effect in effects:
            if isinstance(effect, FetchSnapshot):
                self._spawn(self._fetch(effect))
                continue
            self.counts[effect.kind] += 1
            level = logging.WARNING if isinstance(effect, Alarm) else logging.INFO
            logger.log(level, "%s %s: %s", effect.kind, effect.instance_id, effect.text)

    async def _fetch(self, wanted: FetchSnapshot) -> None:
        """Fetch one snapshot, chunk by chunk; exactly one failure is told if it does not come."""
        await asyncio.sleep(wanted.after_s)
        served = self._directory.get(wanted.model)
        if served is None:
            return  # The model was forgotten meanwhile.
        plane = served.plane
        subject = subjects.snapshot(wanted.model, wanted.instance_id)
        request = encode(messages.SnapshotRequest(self._router_id))
        failure = "the answer ended early"
        async with self._snapshots:
            if not plane.wants(wanted):
                return
            try:
                async for payload in self._bus.request(
                    subject, request, timeout_s=self._config.snapshot_timeout_s
                ):
                    chunk = messages.decode_snapshot_chunk(payload)
                    if plane.wants(wanted):
                        self.carry_out(plane.handle(chunk, time.monotonic()))
                    if not plane.wants(wanted):
                        return
                    await asyncio.sleep(0)
            except (BusError, RemoteError) as error:
                failure = str(error)
        if plane.wants(wanted):
            failed = SnapshotFailed(wanted.instance_id, failure)
            self.carry_out(plane.handle(failed, time.monotonic()))

    def told(self) -> None:
        """Note that a plane has route events to tell: they leave within `flush_s`."""
        if self._flush_due is None:
            self._flush_due = self._loop.call_later(self._config.flush_s, self.flush)

    def flush(self) -> None:
        """Publish all route events that wait."""
        self._flush_due = None
        for served in self._directory:
            outbox = served.plane.outbox
            subject = subjects.route(served.model, self._router_id) if len(outbox) else ""
            while (batch := outbox.take(time.time())) is not None:
                self._bus.publish(subject, encode(batch))

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("a task of the event path failed", exc_info=task.exception())
            self.counts["task_failed"] += 1


def _check_digest(digest: str, data: bytes) -> None:
    """Raise RemoteError if a model card is not the one that its name stands for."""
    if hashlib.sha256(data).hexdigest() != digest:
        raise RemoteError("its bytes are not those that its name is the digest of")


def _decode_record(value: bytes, key: str) -> messages.InstanceRecord:
    """Return the record in an entry of the bucket.

    Raises:
        RemoteError: it cannot be read, or stands under another instance's key.
    """
    record = messages.decode_instance(value)
    if subjects.key(record.model, record.instance_id) != key:
        raise RemoteError("it is about another instance than its key")
    return record


def _is_renewal(before: messages.InstanceRecord, record: messages.InstanceRecord) -> bool:
    """Whether a record says nothing new but that its instance lives."""
    return before == msgspec.structs.replace(record, seq=before.seq, sent_wall_s=before.sent_wall_s)
