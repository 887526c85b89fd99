"""The sidecar of one engine: registers its instances, streams their blocks and load, drains them.

Theory of operation. The engine's life as the sidecar sees it:

    state      meaning                              leaves it when
    --------   ----------------------------------   -----------------------------------------------
    starting   it has not answered yet              `/health` answers and all facts are known
    ready      instances are registered             `/health` fails several times in a row; or stop
    stopped    it is gone; the record says so       it answers again: the facts are asked anew, and
                                                    each stream finds out if it is the same process
    draining   the sidecar was stopped              nothing runs any more, or the limit has passed

Records are renewed as heartbeats, and at once when anything in them changes or the bus returns. The
bus may be away for any time: mirrors go on, and routers that missed something resync by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from urllib.parse import urlsplit

import msgspec

from controlplane.bus.protocol import Bucket, Bus, BusError
from controlplane.bus.setup import create_missing
from controlplane.reminders import Reminders
from schemas import subjects
from schemas.bus import decode_instance
from schemas.codec import RemoteError, encode
from sidecar.card_upload import CardUpload
from sidecar.config import SidecarConfig
from sidecar.discovery import EngineFacts, RankFacts, discover, names_of, refuse_others
from sidecar.engine_http import EngineError, EngineHttp, NotAnEngine
from sidecar.feed import BlockFeed
from sidecar.instance import Instance, State
from sidecar.load import Load
from sidecar.rivals import LOOK_S, Rivals
from sidecar.zmq_source import SourceError

logger = logging.getLogger(__name__)

_IDLE_REPORT_S = 1.0
_RETRY_S = 0.5
_CREATE_EVERY_S = 3.0
_PROGRESS_S = 10.0
_DRAIN_LOOKS = 2
_NAMES_S = 10.0
_REFUSED_SAID_S = 60.0
_EVENTS = "events"
"""What `_say` calls the trouble with them."""


class SidecarService:
    """Everything that a sidecar does; `run` it.

    Attributes:
        state: see the module's theory of operation.
        instances: one for each rank; empty before the engine's facts are known.
        counts: engine_losses, engine_restarts, engine_stills, engine_errors, not_an_engine,
            rivals, bus_errors, records, loads.
        engine_left: whether the engine ceased to answer while it was drained.
    """

    def __init__(self, config: SidecarConfig, bus: Bus) -> None:
        self.config = config
        self.state: State = "starting"
        self.instances: list[Instance] = []
        self.counts: Counter[str] = Counter()
        self._bus = bus
        self._http = EngineHttp(
            config.engine_url, api_key=config.api_key, timeout_s=config.http_timeout_s
        )
        self.card = CardUpload(config, bus, self._http, self._changed)
        self._facts: EngineFacts | None = None
        self._dirty = asyncio.Event()
        self._started_wall_s: float | None = None
        self._failures = 0
        self.engine_left = False
        self._look_again = self._stopping = self._ended = False
        self._reminders = Reminders()
        self._names_due_s = self._refusal_due_s = self._rivals_due_s = float("-inf")
        self._rivals = Rivals()
        self._create_due_s = float("-inf")
        self._uncreated = ""  # why the bus still lacks something
        bus.on_state(self._bus_state)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then drain and deregister."""
        async with self._http:
            stopping = asyncio.create_task(stop.wait())
            tasks = [
                asyncio.create_task(work(), name=work.__name__)
                for work in (self._watch, self._register, self._watch_load, self._watch_metrics)
            ]
            try:
                done, _ = await asyncio.wait(
                    [stopping, *tasks], return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()  # only a bug ends one of the tasks
                await self._drain()
            finally:
                for task in (stopping, *tasks):
                    task.cancel()
                await asyncio.gather(stopping, *tasks, return_exceptions=True)
                await self._deregister(self.instances)
                self.card.close()
                await self._close()
                self._ended = True

    # --- the engine's life

    async def _watch(self) -> None:
        """Follow the engine's life."""
        waiting_since_s = said_s = time.monotonic()
        while True:
            try:
                await self._http.check_health()
                self._failures = 0
                if self.state in ("starting", "stopped") or self._look_again:
                    await self._recover()
                    self._reminders.over(_EVENTS)
                    self._look_again = False
                elif time.monotonic() >= self._names_due_s:
                    await self._refresh_names()
            except NotAnEngine as error:
                self._refuse(str(error))
            except EngineError as error:
                self.counts["engine_errors"] += 1
                self._failures += 1
                now_s = time.monotonic()
                if self.state == "starting" and now_s - said_s >= _PROGRESS_S:
                    said_s = now_s
                    waited_s = now_s - waiting_since_s
                    logger.info("waiting for the engine for %.0f s: %s", waited_s, error)
                if self.state == "ready" and self._failures >= self.config.health_failures_max:
                    self.lose(str(error))
            except SourceError as error:
                self.counts["engine_errors"] += 1
                text = f"the engine's KV events cannot be followed: {error}"
                self._say(logging.ERROR, _EVENTS, text)
            every_s = self.config.health_s
            away = self.state in ("starting", "stopped")
            await asyncio.sleep(min(every_s, _RETRY_S) if away else every_s)

    def _say(self, level: int, subject: str, text: str) -> None:
        """Log what is found at every look at the engine, ever less often."""
        if self._reminders.due(text, time.monotonic(), subject):
            logger.log(level, "%s", text)

    def _refuse(self, reason: str) -> None:
        """Do not speak for what is no engine, whatever was there before."""
        self.counts["not_an_engine"] += 1
        if self.state == "ready":
            self.lose(reason)
        now_s = time.monotonic()
        if now_s >= self._refusal_due_s:
            self._refusal_due_s = now_s + _REFUSED_SAID_S
            logger.error("not registering: %s", reason)

    def lose(self, reason: str) -> None:
        """Take the instances out: the engine does not serve any more."""
        self.counts["engine_losses"] += 1
        self.state = "stopped"
        logger.error("the engine is lost: %s", reason)
        self._changed()

    async def _recover(self) -> None:
        """Begin with the engine, or go on with it after it was away. Raises EngineError."""
        models, metrics = await self._http.models(), await self._http.metrics()
        refuse_others(self.config.engine_url, models, metrics)
        sources, version = await self._http.kv_sources(), await self._http.version()
        facts = discover(self.config, models, metrics, sources, version)
        self._started_wall_s = metrics.started_wall_s
        if self._facts is None or not _same_streams(self._facts, facts):
            await self._rebuild(facts)
        else:
            for instance, rank in zip(self.instances, facts.ranks, strict=True):
                instance.engine, instance.rank = facts, rank
                instance.load.forget()
                if instance.feed is not None:
                    instance.feed.probe_after_outage()
        self._facts = facts
        for instance in self.instances:
            if instance.feed is not None:
                instance.feed.mirror.capacity_blocks = instance.rank.num_blocks
        await self._joined()
        self.state = "draining" if self._stopping else "ready"
        self.card.want(facts, max((i.block_size for i in self.instances), default=0))
        self._changed()

    async def _refresh_names(self) -> None:
        """Follow adapters that the engine loads and unloads while it runs. Raises EngineError."""
        self._names_due_s = time.monotonic() + _NAMES_S
        facts = self._facts
        assert facts is not None
        aliases, loras = names_of(await self._http.models(), facts.model)
        if (aliases, loras) == (facts.aliases, facts.loras):
            return
        logger.info("the engine's names are now %s, its adapters %s", aliases, loras)
        self._facts = msgspec.structs.replace(facts, aliases=aliases, loras=loras)
        for instance in self.instances:
            instance.engine = self._facts
        self._changed()

    async def _rebuild(self, facts: EngineFacts) -> None:
        """Give every rank of the engine an instance, in place of earlier ones."""
        before = self.instances
        await self._close()
        text = (
            f"engine {self.config.engine_url} serves {facts.model} "
            f"(vLLM {facts.version or 'of unknown version'}) on {len(facts.ranks)} rank(s)"
        )
        self._say(logging.INFO, "engine", text)
        for rank in facts.ranks:
            instance_id = self._instance_id(rank, several=len(facts.ranks) > 1)
            feed = await self._feed(facts, rank, instance_id)
            self.instances.append(Instance(instance_id, facts, rank, feed, self.config))
        keys = {instance.key for instance in self.instances}
        await self._deregister([instance for instance in before if instance.key not in keys])

    async def _feed(
        self, facts: EngineFacts, rank: RankFacts, instance_id: str
    ) -> BlockFeed | None:
        if rank.source is None:
            text = (
                f"{instance_id} publishes no KV events, so its cache is invisible to routers; "
                "start it with --enable-prefix-caching and --kv-events-config "
                '\'{"enable_kv_cache_events": true, "publisher": "zmq", '
                '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
            )
            self._say(logging.WARNING, instance_id, text)
            return None
        if not rank.source.replay_endpoint:
            text = (
                f"{instance_id} has no replay socket: every lost event empties its block set; set "
                '"replay_endpoint" in --kv-events-config'
            )
            self._say(logging.WARNING, instance_id, text)
        feed = BlockFeed(
            self._bus, facts.model, instance_id, rank.source, self.config, self._changed
        )
        await feed.start()
        return feed

    def _instance_id(self, rank: RankFacts, *, several: bool) -> str:
        url = urlsplit(self.config.advertise_url or self.config.engine_url)
        name = self.config.instance_id or f"{url.hostname}-{url.port or 80}".replace(".", "-")
        return f"{name}-dp{rank.rank}" if several else name

    async def _joined(self) -> None:
        """Wait until the streams are live, so that instances do not register empty."""
        for instance in self.instances:
            feed = instance.feed
            if feed is not None and not await feed.joined(self.config.join_s_max):
                logger.warning("%s: the replay is not over yet", instance.instance_id)

    # --- records

    def _changed(self) -> None:
        self._dirty.set()

    def _bus_state(self, connected: bool) -> None:
        if self._ended:
            return
        if connected:
            logger.info("the bus is connected")
            self._changed()
            self.card.upload_again()
        else:
            logger.warning("the bus is lost: routers do not hear of this engine until it is back")

    async def _register(self) -> None:
        """Keep the records of all instances fresh."""
        said = ""
        while True:
            self._dirty.clear()
            wait_s = self.config.heartbeat_s
            try:
                await self._put_records()
                said = self._uncreated = ""
            except BusError as error:
                self.counts["bus_errors"] += 1
                created = await self._create_missing()
                problem = "" if created else f"{error}{self._uncreated}"
                if problem not in ("", said):
                    logger.warning("cannot register: %s", problem)
                said = problem
                wait_s = min(wait_s, _RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._dirty.wait()

    async def _create_missing(self) -> bool:
        """Create what the bus lacks, where anybody may; True if something was created.

        A server that is new, or that lost its files, is useful again without an operator.
        """
        now_s = time.monotonic()
        if now_s < self._create_due_s:
            return False
        self._create_due_s = now_s + _CREATE_EVERY_S
        try:
            created = await create_missing(self._bus)
        except BusError as error:
            self._uncreated = f"; nor create what the bus lacks: {error}"
            return False
        self._uncreated = ""
        if created:
            logger.info("created on the bus: %s", ", ".join(change.name for change in created))
        return bool(created)

    async def _put_records(self) -> None:
        if self.state == "starting":
            return
        bucket = await self._bus.bucket(subjects.INSTANCES)
        if time.monotonic() >= self._rivals_due_s:
            self._rivals_due_s = time.monotonic() + LOOK_S
            await self._look_for_rivals(bucket)
        for instance in self.instances:
            record = instance.record(self.state, self.card.digest)
            self.card.block_size_is(record.block_size)
            await bucket.put(instance.key, encode(record))
            self._rivals.said(record)
            self.counts["records"] += 1

    async def _look_for_rivals(self, bucket: Bucket) -> None:
        """Say it when another sidecar writes our records too. Raises BusError."""
        for instance in self.instances:
            entry = await bucket.get(instance.key)
            try:
                found = decode_instance(entry.value) if entry and entry.value else None
            except RemoteError as error:
                logger.warning("%s: unreadable record: %s", instance.instance_id, error)
                continue
            complaint = "" if found is None else self._rivals.look(found)
            if complaint:
                self.counts["rivals"] += 1
                logger.error("%s", complaint)

    @property
    def contested(self) -> frozenset[str]:
        """The instances that another sidecar speaks for, too."""
        return frozenset(self._rivals.known)

    # --- load

    async def _watch_load(self) -> None:
        """Look at `/load`, and publish what is known of the load."""
        published: dict[str, tuple[Load, float]] = {}
        asked_s = float("-inf")
        while True:
            await asyncio.sleep(self.config.load_s)
            if self.state not in ("ready", "draining") or self._failures:
                continue
            now_s = time.monotonic()
            single = self._single
            every_s = self.config.metrics_s if single and single.load.tracked is False else 0.0
            if single is not None and now_s - asked_s >= every_s:
                asked_s = now_s
                await self._look_at_load(single)
            for instance in self.instances:
                load = instance.load.load()
                last, last_s = published.get(instance.instance_id, (None, float("-inf")))
                if load == last and load.idle and now_s - last_s < _IDLE_REPORT_S:
                    continue
                published[instance.instance_id] = (load, now_s)
                self._bus.publish(instance.load_subject, encode(instance.load_report(load)))
                self.counts["loads"] += 1

    @property
    def _single(self) -> Instance | None:
        """The instance that `/load` speaks of, None if it speaks of none or of several."""
        return self.instances[0] if self.config.server_load and len(self.instances) == 1 else None

    async def _look_at_load(self, instance: Instance) -> None:
        try:
            instance.load.take_server_load(await self._http.server_load())
        except EngineError:
            self.counts["engine_errors"] += 1

    async def _watch_metrics(self) -> None:
        """Read `/metrics`."""
        while True:
            await asyncio.sleep(self.config.metrics_s)
            if self.state in ("ready", "draining"):
                with contextlib.suppress(EngineError):
                    await self._look_at_metrics()

    async def _look_at_metrics(self) -> None:
        """Take the load of every rank from `/metrics`. Raises EngineError."""
        try:
            page = await self._http.metrics()
        except EngineError:
            self.counts["engine_errors"] += 1
            raise
        now_s = time.monotonic()
        for instance in self.instances:
            sample = page.engines.get(instance.rank.rank)
            if sample is not None:
                events = 0 if instance.feed is None else instance.feed.source.received
                instance.load.take_sample(sample, now_s, events=events)
                self._look_for_stillness(instance, now_s)
        if page.started_wall_s != self._started_wall_s and page.started_wall_s is not None:
            if self._started_wall_s is not None:
                self.counts["engine_restarts"] += 1
                logger.warning("the engine's server process is another one; looking at it anew")
            self._started_wall_s = page.started_wall_s
            self._look_again = True

    def _look_for_stillness(self, instance: Instance, now_s: float) -> None:
        """Say it when an engine answers, but hangs; once, and once when it goes on."""
        still_s = instance.load.still_s(now_s)
        if instance.still and not still_s:
            instance.still = False
            logger.warning("%s: the engine computes again", instance.instance_id)
        elif not instance.still and still_s >= self.config.still_s_max:
            instance.still = True
            self.counts["engine_stills"] += 1
            logger.error(
                "%s: requests run, and nothing was computed for %.0f s: the engine hangs, although "
                "it answers. Restart it; `multiplane drain` keeps new requests away until then",
                instance.instance_id,
                still_s,
            )

    # --- the end

    async def _drain(self) -> None:
        """Let routers take the instances out, and wait for what still runs."""
        self._stopping = True
        if self.state != "ready":
            return
        self.state = "draining"
        self._changed()
        logger.info("draining: running requests get up to %.0f s", self.config.drain_s_max)
        await asyncio.sleep(self.config.settle_s)
        try:
            async with asyncio.timeout(self.config.drain_s_max):
                await self._idle()
            logger.info("drained")
        except TimeoutError:
            logger.warning("requests still ran after %.0f s", self.config.drain_s_max)

    async def _deregister(self, instances: list[Instance]) -> None:
        """Delete the records of instances."""
        try:
            bucket = await self._bus.bucket(subjects.INSTANCES)
            for instance in instances:
                await bucket.put(instance.key, encode(instance.record("stopped", "")))
                await bucket.delete(instance.key)
        except BusError as error:
            logger.warning("cannot deregister: %s; the records expire by themselves", error)

    async def _idle(self) -> None:
        """Return once the engine was idle at two looks in a row, or does not answer any more."""
        looks = 0
        while looks < _DRAIN_LOOKS:
            try:
                await self._look_at_metrics()
                if self._single is not None:
                    await self._look_at_load(self._single)
            except EngineError as error:
                if self._failures >= self.config.health_failures_max:
                    logger.warning("the engine does not answer while draining: %s", error)
                    self.engine_left = True
                    return
            idle = all(instance.load.load().idle for instance in self.instances)
            looks = looks + 1 if idle else 0
            await asyncio.sleep(self.config.load_s)

    async def _close(self) -> None:
        """End every feed."""
        for instance in self.instances:
            if instance.feed is not None:
                await instance.feed.close()
        self.instances = []


def _same_streams(old: EngineFacts, new: EngineFacts) -> bool:
    """Whether instances and their event sources are still the same."""
    return old.model == new.model and [(rank.rank, rank.source) for rank in old.ranks] == [
        (rank.rank, rank.source) for rank in new.ranks
    ]
