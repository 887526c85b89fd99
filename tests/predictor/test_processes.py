"""A predictor as a process, on a real NATS server."""

from __future__ import annotations

import asyncio
import signal
import sys
import urllib.request
from itertools import count

import pytest

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import layout
from controlplane.bus.setup import ensure
from controlplane.core.latency import Circumstances, Learnt, rows_of
from lab.children import Child
from schemas import subjects
from schemas.bus import LatencyModel, decode_latency_model
from schemas.codec import encode
from tests.detector.virtual import now
from tests.predictor.samples import batches

pytestmark = [pytest.mark.live, pytest.mark.slow]

COMMAND = (sys.executable, "-m", "controlplane.cli.main", "predictor")


async def published(bus: NatsBus, within_s: float = 30.0) -> LatencyModel:
    """Tell of requests until a model stands in the store, and return it."""
    objects = await bus.objects(subjects.PREDICTORS)
    deadline_s, seed = now() + within_s, 0
    while (data := await objects.get("m")) is None:
        assert now() < deadline_s, "no model was published"
        seed += 1
        for batch in batches(300, seed=seed):
            bus.publish(subjects.route("m", "r"), encode(batch))
        await asyncio.sleep(0.3)
    return decode_latency_model(data)


async def page(url: str) -> str:
    """Return what an address shows."""
    with await asyncio.to_thread(urllib.request.urlopen, url, None, 5.0) as answer:
        return str(answer.read().decode())


async def test_a_predictor_process_publishes_what_it_has_learnt_and_ends_in_order() -> None:
    """One line of JSON, a model that routers can use, a metrics page, status 0 on SIGTERM."""
    server = await EmbeddedNats().start()
    bus = await NatsBus.connect(server.url, name="test")
    await ensure(bus, layout(storage="memory", size=0.05))
    flags = ("--nats", server.url, "--predictor-id", "a", "--retrain-requests", "500")
    child = Child("predictor", [*COMMAND, *flags, "--metrics-port", "0"])
    try:
        await child.start()
        assert child.ready["predictor"] == "a"
        model = await published(bus)
        known = [Circumstances(tokens, tokens, 4, 0) for tokens in (100, 7000)]
        found = Learnt(model).predict(rows_of(known, {}))
        assert found[1, 0] > 3 * found[0, 0], "a long prompt's first byte takes longer"
        url = f"http://{child.ready['metrics']}/metrics"
        # A lease may lapse for a moment while two cores are busy with the training.
        async with asyncio.timeout(30.0):
            for _ in count():
                if "multiplane_predictor_leading 1.0" in await page(url):
                    break
                await asyncio.sleep(0.1)
        child.signal(signal.SIGTERM)
        assert await child.wait() == 0, child.log()
    finally:
        await child.stop()
        child.close()
        await bus.close()
        await server.stop()
