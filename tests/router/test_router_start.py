"""How a router process begins and ends: it serves once it knows, and leaves nothing booked."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from controlplane.bus.protocol import Entry
from controlplane.operator import Operator
from router.config import RouterConfig
from router.main import RouterProcess, serve
from schemas import subjects
from schemas.bus import RouteBatch, RouterTotals, decode_route
from tests.core.plane_helpers import Publisher, prompt
from tests.router.service_rig import MODEL, ServiceRig, until

pytestmark = pytest.mark.slow  # each starts routers with a real tokenizer


def another(rig: ServiceRig, join_s_max: float = 5.0) -> RouterProcess:
    """Return a second router on the rig's bus."""
    config = msgspec.structs.replace(
        rig.process.config, router_id="other", join_s_max=join_s_max, tick_s=60.0
    )
    return RouterProcess(config, rig.broker.bus())


async def test_a_router_listens_once_it_knows_what_the_others_know() -> None:
    """At its first request it has the instances, their blocks and the tokenizer."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        publisher = rig.publishers["a"]
        await rig.publish(publisher.store(prompt(1, 2, 3)))
        await rig.bus.serve(subjects.snapshot(MODEL, "a"), rig.snapshots("a"))
        other = another(rig)
        await other.start()
        served = other.router.directory.get(MODEL)
        assert served is not None
        assert served.reader is not None
        (instance,) = served.plane.fleet
        assert set(served.plane.index.blocks(instance.slots[0])) == publisher.blocks
        await other.stop()


async def test_a_router_that_cannot_learn_all_serves_in_the_end() -> None:
    """A sidecar that does not answer holds up a router's start for `join_s_max`, not for ever."""
    async with ServiceRig() as rig:
        await rig.instance("a", seen=False)
        await until(lambda: rig.known("a"))
        rig.publishers["a"] = Publisher("a")
        other = another(rig, join_s_max=0.3)
        began_s = time.monotonic()
        await other.start()
        assert 0.25 < time.monotonic() - began_s < 5.0
        assert other.address[1]
        await other.stop()


async def test_on_a_shared_port_a_router_without_the_bus_leaves_clients_to_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It serves operators at once, and listens for clients once the bus has told of instances."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        bus = rig.broker.bus()
        bus.cut()
        shared: dict[str, Any] = {"reuse_port": True, "router_id": "other", "join_s_max": 0.1}
        other = RouterProcess(msgspec.structs.replace(rig.process.config, **shared), bus)
        starting = asyncio.create_task(other.start())
        await until(lambda: other.admin_address[1])
        admin = "http://{}:{}".format(*other.admin_address)
        assert (await rig.http.get(f"{admin}/debug/state"))["models"] == {}
        await until(lambda: "not listening on the shared port" in caplog.text)
        later_s = time.monotonic() + 5 * shared["join_s_max"]
        await until(lambda: time.monotonic() > later_s)
        assert caplog.text.count("not listening on the shared port") == 1, "for now"
        assert not starting.done()
        assert not other.address[1]
        bus.heal()
        await starting
        assert other.router.directory.get(MODEL) is not None
        await other.stop()


async def test_a_router_that_waits_for_the_bus_can_be_stopped() -> None:
    """A signal ends a start that may take for ever."""
    stop = asyncio.Event()
    config = RouterConfig("nats://127.0.0.1:1", port=0, admin_port=0, reuse_port=True)
    serving = asyncio.create_task(serve(config, stop, lambda _: None))
    stop.set()
    assert await asyncio.wait_for(serving, 10.0) == 0


async def test_a_router_that_stops_tells_that_nothing_is_booked() -> None:
    """Its last word to the other routers is an empty total, whatever they had missed."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        told: list[RouteBatch] = []
        subject = subjects.route(MODEL, "other")
        await rig.bus.subscribe(subject, lambda _, payload: told.append(decode_route(payload)))
        other = another(rig)
        await other.start()
        await other.stop()
        await until(lambda: told)
        assert told[-1].events[-1] == RouterTotals({})


async def test_metrics_show_whom_a_router_trusts_and_how_long_they_have_been_silent() -> None:
    """An operator finds the instance whose sidecar is gone, not only how many are."""
    async with ServiceRig(stale_s=0.2) as rig:
        await rig.instance("a")

        def shown(name: str) -> float:
            page = rig.process.metrics.render().decode()
            label = f'multiplane_{name}{{instance="a",model="{MODEL}"}} '
            (line,) = [line for line in page.splitlines() if line.startswith(label)]
            return float(line.removeprefix(label))

        assert shown("instance_silence_seconds") < 5.0
        await until(lambda: shown("instance_trust") == 2)
        assert shown("instance_silence_seconds") > 0.2
        await rig.publish(rig.publishers["a"].batch())
        await until(lambda: shown("instance_trust") == 0)


async def test_operators_find_a_router_until_it_stops() -> None:
    """Its entry says where it answers clients and operators, and is gone with it."""
    async with ServiceRig() as rig:
        operator = Operator(rig.bus)
        heard: list[Entry] = []
        await (await rig.bus.bucket(subjects.ROUTERS)).watch(heard.append)
        await rig.instance("a")
        other = another(rig)
        await other.start()
        key = subjects.key(MODEL, "other")
        await until(lambda: key in {entry.key for entry in heard})
        (found,) = [e for e in await operator.routers() if e.lease.router_id == "other"]
        assert found.model == MODEL
        assert found.lease.address == "{}:{}".format(*other.address)
        assert found.lease.admin == "{}:{}".format(*other.admin_address)
        await other.stop()
        assert "other" not in {e.lease.router_id for e in await operator.routers()}
