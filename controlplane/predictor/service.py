"""The predictor process: follows every router, keeps samples a model, and trains if it leads.

Theory of operation. Any number of these run; each takes in all route and load events, so each has
the same samples and calibration. One holds the lease: it trains, in a thread, and publishes to the
object store, where routers and the other predictors find it. A training that takes long delays the
next one, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable

from controlplane.bus.mailbox import Mailbox
from controlplane.bus.protocol import Bus, BusError, Subscription
from controlplane.detector.lease import Lease
from controlplane.predictor.config import PredictorConfig
from controlplane.predictor.learning import learn
from controlplane.predictor.model import ObservedModel
from controlplane.reminders import Reminders
from schemas import subjects
from schemas.bus import decode_latency_model, decode_load, decode_route
from schemas.codec import RemoteError, encode
from schemas.ids import encode_token

logger = logging.getLogger(__name__)

SERVICE = "predictor"
"""Key of the lease."""

_FOLLOW_EVERY_S = 5.0


class PredictorService:
    """Everything that one predictor process runs.

    Attributes:
        predictor_id: its name.
        models: what it learns of, by model id.
        lease: on training and publishing.
        leading: whether it does.
        counts: messages, undecodable, overflow, models_refused, bus_errors, train_errors.
    """

    def __init__(
        self, bus: Bus, config: PredictorConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.predictor_id = config.predictor_id or f"predictor-{secrets.token_hex(4)}"
        self.models: dict[str, ObservedModel] = {}
        self.leading = False
        self.counts: Counter[str] = Counter()
        self.lease = Lease(
            bus,
            SERVICE,
            f"{self.predictor_id}/{secrets.token_hex(4)}",
            ttl_s=config.lease_ttl_s,
            margin_s=config.lease_margin_s,
            clock=clock,
        )
        self._bus = bus
        self._reminders = Reminders()
        self._mailbox = Mailbox(
            self._take_in, self.counts, messages_max=config.messages_max, slice_s=config.slice_s
        )
        self._subscriptions: list[Subscription] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def waiting(self) -> int:
        """Messages that are not taken in yet."""
        return len(self._mailbox)

    async def start(self) -> None:
        """Subscribe and begin; returns without waiting for the bus."""
        for kind in ("route", "load"):
            self._subscriptions.append(
                await self._bus.subscribe(subjects.all_of(kind), self._mailbox.put)
            )
        self._tasks = [
            asyncio.create_task(each) for each in (self._lead(), self._train(), self._follow())
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then end in order."""
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await self.stop()

    async def stop(self) -> None:
        """End; somebody else may lead at once. Raises what ended a task of this service."""
        for subscription in self._subscriptions:
            await subscription.stop()
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.lease.release()
        except BusError as error:
            logger.debug("the lease could not be released: %s", error)
        for each in ended:
            if isinstance(each, Exception):
                raise each

    # --- messages in

    def _take_in(self, subject: str, payload: bytes) -> None:
        try:
            kind, name, _ = subjects.parse(subject)
            message = decode_route(payload) if kind == "route" else decode_load(payload)
        except RemoteError as error:
            self.counts["undecodable"] += 1
            logger.debug("undecodable message on %s: %s", subject, error)
            return
        self.counts["messages"] += 1
        model = self._model(name)
        if model is None:
            return
        if kind == "route":
            model.batch(message)  # type: ignore[arg-type]
        else:
            model.load(message)  # type: ignore[arg-type]

    def _model(self, name: str) -> ObservedModel | None:
        """Return a model, learnt of from now on if it is new; None at the bound."""
        model = self.models.get(name)
        if model is None:
            if len(self.models) >= self.config.models_max:
                self.counts["models_refused"] += 1
                return None
            model = self.models[name] = ObservedModel(name, self.config.samples_max)
        return model

    # --- what is published

    async def _lead(self) -> None:
        """Hold the lease, or wait for it."""
        while True:
            try:
                self.leading = await self.lease.step()
            except BusError as error:
                self.counts["bus_errors"] += 1
                logger.debug("the lease: %s", error)
                self.leading = self.lease.left_s > 0
            await asyncio.sleep(self.config.lease_ttl_s / (3 if self.leading else 10))

    async def _follow(self) -> None:
        """Use what stands in the store, so that predictions and versions go on from it."""
        while True:
            for model in list(self.models.values()):
                try:
                    await self._read(model)
                except BusError as error:
                    self.counts["bus_errors"] += 1
                    logger.debug("the model of %s: %s", model.name, error)
            await asyncio.sleep(_FOLLOW_EVERY_S if self.models else self.config.tick_s)

    async def _read(self, model: ObservedModel) -> None:
        """Take the published model, if it is newer. Raises BusError."""
        data = await (await self._bus.objects(subjects.PREDICTORS)).get(encode_token(model.name))
        if data is None:
            return
        try:
            model.estimator.use(decode_latency_model(data))
        except (RemoteError, ValueError) as error:
            self.counts["undecodable"] += 1
            if self._reminders.due(str(error), time.monotonic(), model.name):
                logger.warning("the published model of %s is of no use: %s", model.name, error)
        else:
            self._reminders.over(model.name)

    async def _train(self) -> None:
        """Compare and train whenever it is time."""
        while True:
            await asyncio.sleep(self.config.tick_s)
            for model in list(self.models.values()):
                model.compare()
                if model.untrained >= self.config.retrain_requests and self.leading:
                    await self._train_one(model)

    async def _train_one(self, model: ObservedModel) -> None:
        model.untrained = 0
        try:
            await self._read(model)
            outcome = await asyncio.to_thread(
                learn,
                model.name,
                list(model.samples),
                model.published,
                time.time(),
                self.config.trees,
            )
            if outcome is None or self.lease.left_s <= 0:
                return
            objects = await self._bus.objects(subjects.PREDICTORS)
            await objects.put(encode_token(model.name), encode(outcome.model))
        except BusError as error:
            self.counts["bus_errors"] += 1
            logger.warning("the model of %s could not be published: %s", model.name, error)
            return
        model.trained(outcome)
        what = "replaces the one before" if outcome.replaced else "is no better: the old one stays"
        logger.info(
            "model of %s learnt from %d requests %s; within p99: TTFT %.3f, total %.3f",
            *(model.name, len(model.samples), what, *outcome.model.within),
        )
