"""The waiting rooms of all models, and the latency models that their queues go by."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

from controlplane.bus.protocol import Bus, BusError
from controlplane.reminders import Reminders
from router.config import RouterConfig
from router.directory import ServedModel
from router.metrics import RequestMetrics, Sample
from router.waiting_room import WaitingRoom
from schemas import subjects
from schemas.bus import decode_latency_model
from schemas.codec import RemoteError
from schemas.ids import encode_token

logger = logging.getLogger(__name__)


class WaitingRooms:
    """One room for each model, made when a request comes for it.

    Attributes:
        counts: latency models that were taken, or could not be.
    """

    def __init__(self, config: RouterConfig, metrics: RequestMetrics) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._metrics = metrics
        self._rooms: dict[str, WaitingRoom] = {}

    def of(self, served: ServedModel) -> WaitingRoom:
        """Return a model's room."""
        room = self._rooms.get(served.model)
        if room is None:
            config = self._config
            room = WaitingRoom(served, config.queue, config.coalesce, self._metrics)
            self._rooms[served.model] = room
        return room

    def get(self, model: str) -> WaitingRoom | None:
        """Return a model's room, if there is one yet."""
        return self._rooms.get(model)

    async def follow(self, bus: Bus) -> NoReturn:
        """Use the latency models that are published, for ever."""
        reminders = Reminders()
        while True:
            for model, room in list(self._rooms.items()):
                try:
                    objects = await bus.objects(subjects.PREDICTORS)
                    data = await objects.get(encode_token(model))
                    if data is not None and room.estimator.use(decode_latency_model(data)):
                        self.counts["taken"] += 1
                except BusError as error:
                    self.counts["bus_errors"] += 1
                    logger.debug("the latency model of %s: %s", model, error)
                except (RemoteError, ValueError) as error:
                    self.counts["unusable"] += 1
                    if reminders.due(str(error), time.monotonic(), model):
                        logger.warning("the latency model of %s is of no use: %s", model, error)
                else:
                    reminders.over(model)
            await asyncio.sleep(self._config.latency_poll_s)

    def forget(self, model: str) -> None:
        """Close the room of a model that is gone."""
        room = self._rooms.pop(model, None)
        if room is not None:
            room.stop()

    def stop(self) -> None:
        """Refuse whoever still waits."""
        for room in self._rooms.values():
            room.stop()

    def samples(self) -> Iterator[Sample]:
        """Yield the state of every room."""
        queued = Sample("queue_requests", "Requests that wait for room.", labels=("model",))
        held = Sample(
            "queue_held_requests",
            "Those of them that were passed over for a full instance that has their prefix.",
            labels=("model",),
        )
        returned = Sample(
            "queue_returned_requests",
            "Those of them that were sent before, to an instance that failed.",
            labels=("model",),
        )
        nbytes = Sample("queue_bytes", "Bodies of requests that wait.", labels=("model",))
        following = Sample(
            "coalesce_followers", "Requests that wait for a prefix.", labels=("model",)
        )
        leading = Sample("coalesce_leaders", "Requests that may be followed.", labels=("model",))
        learnt = Sample(
            "predictions_learnt",
            "1 while predictions are a learnt model's, 0 while they are mean + 3σ.",
            labels=("model",),
        )
        within = Sample(
            "predicted_p99_within",
            "Share of the latest requests that had waited, within their predicted p99.",
            labels=("model", "time"),
        )
        error = Sample(
            "predicted_error_seconds",
            "Mean absolute error of their predicted mean.",
            labels=("model", "time"),
        )
        for model, room in self._rooms.items():
            if room.queue is not None:
                queued.values[(model,)] = len(room.queue)
                held.values[(model,)] = room.queue.held
                returned.values[(model,)] = room.queue.returned
                nbytes.values[(model,)] = room.queue.nbytes
                learnt.values[(model,)] = room.estimator.source == "learnt"
            if room.coalescer is not None:
                following.values[(model,)] = room.coalescer.following
                leading.values[(model,)] = len(room.coalescer)
            for time_of, found in (("ttft", room.ttft), ("total", room.total)):
                if found.count:
                    within.values[model, time_of] = found.within
                    error.values[model, time_of] = found.error_s
        taken = Sample("latency_models_total", "Latency models, by use.", labels=("outcome",))
        taken.values.update(((outcome,), count) for outcome, count in self.counts.items())
        yield from (queued, held, returned, nbytes, following, leading)
        yield from (learnt, within, error, taken)
