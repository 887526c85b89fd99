import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from controlplane.bus.memory_bus import MemoryBroker
from controlplane.predictor.config import PredictorConfig
from controlplane.predictor.metrics import describe
from controlplane.predictor.service import PredictorService
from schemas import subjects
from schemas.bus import LatencyModel, LoadReport, decode_latency_model
from schemas.codec import encode
from tests.detector.rig import eventually
from tests.predictor.samples import batches

pytestmark = pytest.mark.slow

MODEL = "m"
CONFIG = PredictorConfig(trees=10, tick_s=0.02, lease_ttl_s=2.0, retrain_requests=500)


class Rig:
    """A bus with predictors, and what pretended routers say on it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = self.broker.bus()
        self.services: list[PredictorService] = []

    async def predictor(self, **changes: Any) -> PredictorService:
        """Start one."""
        config = msgspec.structs.replace(CONFIG, **changes)
        service = PredictorService(self.broker.bus(), config)
        self.services.append(service)
        await service.start()
        return service

    def requests(self, count: int, seed: int = 1) -> None:
        """Let so many requests be routed and end."""
        self.bus.publish(subjects.load(MODEL, "i"), encode(LoadReport("i", 1, 0, 0.0, 1, 0)))
        for batch in batches(count, seed=seed):
            self.bus.publish(subjects.route(MODEL, "r"), encode(batch))

    async def published(self) -> LatencyModel | None:
        """Return what stands in the store."""
        data = await (await self.bus.objects(subjects.PREDICTORS)).get(MODEL)
        return None if data is None else decode_latency_model(data)


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    """A bus; everything on it ends."""
    made = Rig()
    try:
        yield made
    finally:
        for service in made.services:
            await service.stop()


async def test_a_leader_trains_and_publishes_and_versions_go_on_after_a_restart() -> None:
    """The object in the store is whole, and what follows builds upon it."""
    async with rig() as plane:
        first = await plane.predictor()
        await eventually(lambda: first.leading)
        plane.requests(600)
        await eventually(lambda: first.models and first.models[MODEL].published)
        found = await plane.published()
        assert found is not None
        assert (found.version, found.confirmed) == (1, 0)
        await first.stop()
        plane.services.clear()
        second = await plane.predictor()
        await eventually(lambda: second.leading)
        plane.requests(600, seed=2)
        await eventually(lambda: second.models and second.models[MODEL].counts)
        found = await plane.published()
        assert found is not None
        assert found.confirmed == 1


async def test_one_of_two_leads_and_the_other_follows() -> None:
    """The standby has the same samples, uses what is published, and takes over."""
    async with rig() as plane:
        first = await plane.predictor()
        await eventually(lambda: first.leading)
        second = await plane.predictor()
        plane.requests(600)
        await eventually(lambda: first.models and first.models[MODEL].published)
        assert not second.leading
        assert len(second.models[MODEL].samples) == len(first.models[MODEL].samples)
        await first.stop()
        plane.services.remove(first)
        await eventually(lambda: second.leading)
        await eventually(lambda: second.models[MODEL].published, within_s=20.0)


async def test_nonsense_on_the_bus_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Undecodable messages, unusable models and surplus models do no harm."""
    async with rig() as plane:
        objects = await plane.bus.objects(subjects.PREDICTORS)
        await objects.put(MODEL, b"nonsense")
        service = await plane.predictor(models_max=1)
        plane.bus.publish(subjects.route(MODEL, "r"), b"nonsense")
        plane.requests(50)
        plane.bus.publish(subjects.route("other", "r"), encode(batches(1)[0]))
        await eventually(lambda: service.counts["models_refused"])
        await eventually(lambda: service.counts["undecodable"] == 2)
        assert list(service.models) == [MODEL]
        await service._read(service.models[MODEL])
        assert caplog.text.count("is of no use") == 1, "at first; and then now and again"


async def test_messages_are_bounded() -> None:
    """The oldest go, and are counted."""
    async with rig() as plane:
        service = await plane.predictor(messages_max=2)
        for batch in batches(250):
            service._mailbox.put(subjects.route(MODEL, "r"), encode(batch))
        assert service.waiting == 2
        assert service.counts["overflow"] == 3
        await eventually(lambda: not service.waiting)


async def test_everything_is_described() -> None:
    """Calibration and errors have a sample for each model and time once there are any."""
    async with rig() as plane:
        service = await plane.predictor()
        await eventually(lambda: service.leading)
        plane.requests(600)
        await eventually(lambda: service.models and service.models[MODEL].published)
        plane.requests(200, seed=3)
        await eventually(lambda: len(service.models[MODEL].samples) == 800)
        found = {family.name: dict(family.samples) for family in describe(service)}
        within = found["multiplane_predictor_within_p99"]
        assert set(within) == {(MODEL, "ttft"), (MODEL, "total")}
        assert found["multiplane_predictor_version"] == {(MODEL,): 1.0}
        assert found["multiplane_predictor_leading"] == {(): 1.0}


@pytest.mark.parametrize("bad", [{"trees": 0}, {"tick_s": 0.0}, {"lease_ttl_s": 0.5}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, Any]) -> None:
    """The error names the setting."""
    with pytest.raises(ValueError, match=next(iter(bad))):
        PredictorConfig(**bad)


async def test_stop_ends_a_run() -> None:
    """Its lease is free at once."""
    async with rig() as plane:
        service = await plane.predictor()
        plane.services.clear()
        stop = asyncio.Event()
        stop.set()
        await service.run(stop)
        assert service.lease.left_s <= 0
