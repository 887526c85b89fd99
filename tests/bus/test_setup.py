"""Streams, buckets and stores: created once, corrected when they differ, described."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane.bus import BusError, MemoryBroker, NatsBus, NatsOptions
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import MIB, layout
from controlplane.bus.setup import NoRoomError, create_missing, describe, ensure, keep
from schemas import subjects
from tests.bus.worlds import eventually, fast

pytestmark = pytest.mark.live

PLAN = layout(storage="memory", size=0.05)


@pytest.fixture
async def bus() -> AsyncIterator[NatsBus]:
    """A client of an empty server."""
    async with EmbeddedNats() as server:
        bus = await NatsBus.connect(server.url, options=fast())
        yield bus
        await bus.close()


async def test_setup_is_idempotent_and_corrects(bus: NatsBus) -> None:
    """The first run creates, the second changes nothing, another plan changes what differs."""
    plan = layout(storage="memory", size=0.3)
    changes = await ensure(bus, plan)
    assert [change.name for change in changes] == [
        *subjects.STREAMS,
        subjects.INSTANCES,
        subjects.ROUTERS,
        subjects.VERDICTS,
        subjects.LEADERS,
        subjects.PREFIXES,
        subjects.MODELS,
        subjects.PREDICTORS,
    ]
    assert {change.action for change in changes} == {"created"}
    assert {change.action for change in await ensure(bus, plan)} == {"unchanged"}
    bus.publish(subjects.kv("m", "i"), b"kept")
    await (await bus.bucket(subjects.LEADERS)).put("k", b"kept")
    larger = layout(storage="memory", size=0.6)
    corrected = await ensure(bus, larger)
    assert {(change.action, change.detail) for change in corrected} == {("updated", "max_bytes")}
    assert {change.action for change in await ensure(bus, larger)} == {"unchanged"}
    assert (await (await bus.bucket(subjects.LEADERS)).get("k")).value == b"kept"
    holdings = {holding.name: holding for holding in await describe(bus, larger)}
    assert holdings["MP_KV"].messages == 1
    assert holdings["MP_KV"].bytes_max == int(2048 * MIB * 0.6)


async def test_an_earlier_layout_is_brought_up_to_date_in_place(bus: NatsBus) -> None:
    """Records that lived for ten minutes live for two hours; a new bucket comes beside them."""
    plan = layout(storage="memory", size=0.3)
    earlier = [each for each in plan.buckets if each.name != subjects.PREFIXES]
    earlier[0] = replace(earlier[0], ttl_s=600.0)
    await ensure(bus, replace(plan, buckets=tuple(earlier)))
    instances = await bus.bucket(subjects.INSTANCES)
    await instances.put("m.i", b"kept")
    changes = {change.name: change for change in await ensure(bus, plan)}
    assert changes[subjects.PREFIXES].action == "created"
    assert changes[subjects.INSTANCES].detail == "max_age"
    assert (await instances.get("m.i")).value == b"kept"
    held = {holding.name: holding.age_s_max for holding in await describe(bus, plan)}
    assert held[subjects.INSTANCES] == 7200.0


async def test_what_is_there_can_be_left_as_it_is(bus: NatsBus) -> None:
    """Creating only what is missing does not change the bounds of the rest."""
    await ensure(bus, layout(storage="memory", size=0.3))
    await bus.jetstream.api("STREAM.DELETE.KV_mp_verdicts")
    changes = await ensure(bus, PLAN, missing_only=True)
    done = {change.name: change.action for change in changes if change.action != "unchanged"}
    assert done == {subjects.VERDICTS: "created"}
    held = {holding.name: holding.bytes_max for holding in await describe(bus, PLAN)}
    assert held["MP_KV"] == int(2048 * MIB * 0.3)


async def test_what_the_server_loses_is_created_anew() -> None:
    """`keep` waits for a server that is away, and fills one that came back without its files."""
    async with EmbeddedNats() as server:
        await server.kill()
        bus = await NatsBus.connect(server.url, options=fast(), wait_s=0.1)
        created: list[str] = []
        keeping = asyncio.create_task(
            keep(bus, PLAN, lambda change: created.append(change.name), every_s=0.05)
        )
        await server.start()
        everything = len(PLAN.streams) + len(PLAN.buckets) + len(PLAN.stores)
        await eventually(lambda: len(created) == everything)
        await server.kill()  # the plan's storage is memory
        await server.start()
        await eventually(lambda: len(created) == 2 * everything, within_s=10.0)
        assert len(await describe(bus, PLAN)) == everything
        keeping.cancel()
        await bus.close()


async def test_a_server_without_accounts_is_filled_by_anybody(bus: NatsBus) -> None:
    """Whoever finds something missing creates it, several at once too; then there is nothing."""
    created = await asyncio.gather(*(create_missing(bus) for _ in range(3)))
    assert {change.name for changes in created for change in changes} == PLAN.names
    assert await create_missing(bus) == []


async def test_a_small_disk_gets_small_bounds(tmp_path: Path) -> None:
    """Where the usual bounds do not fit, `create_missing` takes smaller ones; others are told."""
    config = tmp_path / "nats.conf"
    config.write_text('jetstream { store_dir: "js", max_file_store: 1G }\n')
    async with EmbeddedNats(config=config) as server:
        bus = await NatsBus.connect(server.url, options=fast())
        with pytest.raises(NoRoomError, match=r"stream MP_KV: .*insufficient storage"):
            await ensure(bus, layout())
        await create_missing(bus)
        held = {holding.name: holding.bytes_max for holding in await describe(bus, PLAN)}
        assert set(held) == PLAN.names
        await bus.close()


async def test_who_is_known_to_the_server_leaves_it_to_operators(bus: NatsBus) -> None:
    """With credentials nothing is tried: the server would refuse, and count it."""
    assert NatsOptions(user="ann").identified
    assert NatsOptions(creds="file").identified
    assert not fast().identified
    bus.options = NatsOptions(user="ann")
    assert await create_missing(bus) == []
    assert await describe(bus, PLAN) == []


async def test_what_cannot_be_changed_is_an_error(bus: NatsBus) -> None:
    """A plan that the server cannot follow in place names what stands in its way."""
    await ensure(bus, PLAN)
    with pytest.raises(BusError, match="stream MP_KV"):
        await ensure(bus, layout(storage="file", size=0.05))
    with pytest.raises(BusError, match="stream MP_KV"):
        await ensure(bus, layout(replicas=3, storage="memory", size=0.05))


async def test_describe_tells_what_is_held(bus: NatsBus) -> None:
    """Counts, bytes, ages and bounds of each; what is missing is left out."""
    assert await describe(bus, PLAN) == []
    await ensure(bus, PLAN)
    empty = {holding.name: holding for holding in await describe(bus, PLAN)}
    assert {(holding.messages, holding.oldest_wall_s) for holding in empty.values()} == {(0, None)}
    for number in range(3):
        bus.publish(subjects.load("m", str(number)), b"x" * 100)
    bucket = await bus.bucket(subjects.INSTANCES)
    await bucket.put("m.a", b"1")
    await bucket.put("m.b", b"1")
    await bucket.delete("m.b")
    await (await bus.objects(subjects.MODELS)).put("card", b"x" * 300_000)
    held = {holding.name: holding for holding in await describe(bus, PLAN)}
    load = held["MP_LOAD"]
    assert (load.kind, load.messages, load.replicas, load.current) == ("stream", 3, 1, 1)
    assert load.nbytes >= 300
    assert load.oldest_wall_s <= load.newest_wall_s
    assert (held[subjects.INSTANCES].kind, held[subjects.INSTANCES].messages) == ("bucket", 1)
    assert held[subjects.INSTANCES].age_s_max == 7200.0
    assert (held[subjects.MODELS].kind, held[subjects.MODELS].messages) == ("store", 1)


async def test_streams_stay_within_their_bounds(bus: NatsBus) -> None:
    """Over its bytes a stream discards its oldest messages, and a reader goes on with the rest."""
    small = layout(storage="memory", size=1e-9)
    await ensure(bus, small)
    for number in range(40):
        bus.publish(subjects.kv("m", "i"), b"%02d" % number + bytes(100_000))
    await bus.flush()
    held = {holding.name: holding for holding in await describe(bus, small)}["MP_KV"]
    assert held.nbytes <= held.bytes_max == MIB
    records = [record async for record in bus.history("MP_KV")]
    assert [record.payload[:2] for record in records] == [b"%02d" % n for n in range(30, 40)]


async def test_a_bus_in_memory_needs_no_setup() -> None:
    """Its buckets are always there."""
    assert await ensure(MemoryBroker().bus(), PLAN) == []
    assert await create_missing(MemoryBroker().bus()) == []
