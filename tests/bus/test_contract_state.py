"""What both buses promise of buckets, object stores and recorded streams."""

import asyncio
import time
from itertools import pairwise

import pytest

from controlplane.bus.protocol import BusError, Entry, WrongRevision
from schemas import subjects
from tests.bus.worlds import World, collect, collect_into, eventually, two

BUCKET = subjects.VERDICTS


async def test_bucket_writes_and_reads(world: World, own: str) -> None:
    """put, get, delete and keys do what they say, and revisions grow."""
    bucket = await (await world.bus()).bucket(BUCKET)
    assert await bucket.get(f"{own}.k") is None
    first = await bucket.put(f"{own}.k", b"v1")
    second = await bucket.put(f"{own}.k", b"v2")
    await bucket.put(f"{own}.empty", b"")
    assert second > first
    assert await bucket.get(f"{own}.k") == Entry(f"{own}.k", b"v2", second)
    assert (await bucket.get(f"{own}.empty")).value == b""
    assert [k for k in await bucket.keys() if k.startswith(own)] == [f"{own}.empty", f"{own}.k"]
    await bucket.delete(f"{own}.k")
    await bucket.delete(f"{own}.never-there")
    assert await bucket.get(f"{own}.k") is None
    assert [k for k in await bucket.keys() if k.startswith(own)] == [f"{own}.empty"]


async def test_compare_and_set(world: World, own: str) -> None:
    """Create wants no entry, update and delete the exact revision."""
    bucket = await (await world.bus()).bucket(BUCKET)
    first = await bucket.create(own, b"1")
    with pytest.raises(WrongRevision):
        await bucket.create(own, b"again")
    second = await bucket.update(own, b"2", first)
    with pytest.raises(WrongRevision):
        await bucket.update(own, b"late", first)
    with pytest.raises(WrongRevision):
        await bucket.delete(own, first)
    assert (await bucket.get(own)).value == b"2"
    await bucket.delete(own, second)
    with pytest.raises(WrongRevision):
        await bucket.update(own, b"late", second)
    assert await bucket.create(own, b"3") > second


async def test_one_of_many_writers_wins(world: World, own: str) -> None:
    """Of writers that race for a key exactly one creates it, and one makes each update."""
    buses = [await world.bus() for _ in range(2)]
    buckets = [await bus.bucket(BUCKET) for bus in buses]

    async def attempt(write) -> bool:
        try:
            await write
        except WrongRevision:
            return False
        return True

    created = await asyncio.gather(*(attempt(b.create(own, b"0")) for b in buckets * 10))
    assert sum(created) == 1
    for _ in range(5):
        entry = await buckets[0].get(own)
        won = await asyncio.gather(
            *(attempt(b.update(own, b"x", entry.revision)) for b in buckets * 4)
        )
        assert sum(won) == 1


async def test_follow_tells_what_is_written_from_now_on(world: World, own: str) -> None:
    """With its value, and not what was there before, nor deletions."""
    writer, reader = await two(world)
    bucket = await writer.bucket(BUCKET)
    await bucket.put(f"{own}.a", b"before")
    told: list[tuple[str, bytes]] = []

    def hear(key: str, value: bytes) -> None:
        if key.startswith(own):
            told.append((key, value))

    following = await (await reader.bucket(BUCKET)).follow(hear)
    revision = await bucket.create(f"{own}.b", b"1")
    await bucket.update(f"{own}.b", b"2", revision)
    await bucket.delete(f"{own}.b")
    await bucket.put(f"{own}.a", b"3")
    await eventually(lambda: len(told) == 3)
    assert told == [(f"{own}.b", b"1"), (f"{own}.b", b"2"), (f"{own}.a", b"3")]
    await following.stop()
    await bucket.put(f"{own}.a", b"4")
    await world.settle()
    assert len(told) == 3


async def test_watch_tells_what_is_there_and_what_changes(world: World, own: str) -> None:
    """Current entries first, then every change in order; deletions have no value."""
    writer, reader = await two(world)
    bucket = await writer.bucket(BUCKET)
    await bucket.put(f"{own}.a", b"1")
    await bucket.put(f"{own}.gone", b"x")
    await bucket.delete(f"{own}.gone")
    await bucket.put(f"{own}.b", b"1")
    told: list[Entry] = []
    watch = await (await reader.bucket(BUCKET)).watch(told.append, own)
    await watch.synced(5.0)
    assert [(entry.key, entry.value) for entry in told] == [(f"{own}.a", b"1"), (f"{own}.b", b"1")]
    told.clear()
    await bucket.put(f"{own}.a", b"2")
    await bucket.put(f"{own}.a", b"3")
    await bucket.delete(f"{own}.b")
    await bucket.put(f"{own}x.other", b"not below the prefix")
    await bucket.put(own, b"not below the prefix")
    await bucket.put(f"{own}.c.d", b"4")
    await eventually(lambda: len(told) >= 4)
    assert [(entry.key, entry.value, entry.expired) for entry in told] == [
        (f"{own}.a", b"2", False),
        (f"{own}.a", b"3", False),
        (f"{own}.b", None, False),
        (f"{own}.c.d", b"4", False),
    ]
    assert all(a.revision < b.revision for a, b in pairwise(told))


async def test_a_watch_tells_how_long_what_it_found_had_stood(world: World, own: str) -> None:
    """So that what was said for a while does not count for longer with whoever comes late."""
    writer, reader = await two(world)
    bucket = await writer.bucket(BUCKET)
    begun_s = time.monotonic()
    await bucket.put(f"{own}.a", b"1")
    await eventually(lambda: time.monotonic() - begun_s > 0.3)
    told: list[Entry] = []
    watch = await (await reader.bucket(BUCKET)).watch(told.append, own)
    await watch.synced(5.0)
    assert 0.1 < told[0].age_s < time.monotonic() - begun_s + 0.1
    await bucket.put(f"{own}.a", b"2")
    await bucket.put(f"{own}.b", b"1")
    await eventually(lambda: len(told) == 3)
    assert [entry.age_s for entry in told[1:]] == [0.0, 0.0]


async def test_watch_of_an_empty_bucket_is_synced(world: World, own: str) -> None:
    """Where nothing is, a watch is complete at once, and goes on."""
    writer, reader = await two(world)
    told: list[Entry] = []
    watch = await (await reader.bucket(BUCKET)).watch(told.append, own)
    await watch.synced(5.0)
    assert told == []
    await (await writer.bucket(BUCKET)).put(f"{own}.k", b"v")
    await eventually(lambda: told)


async def test_watch_of_many_entries(world: World, own: str) -> None:
    """More entries than a batch of the reader all arrive, once."""
    bus = await world.bus()
    bucket = await bus.bucket(BUCKET)
    keys = [f"{own}.{number:04}" for number in range(700)]
    for start in range(0, len(keys), 100):
        await asyncio.gather(*(bucket.put(key, b"v") for key in keys[start : start + 100]))
    told: list[str] = []
    watch = await bucket.watch(lambda entry: told.append(entry.key), own)
    await watch.synced(10.0)
    assert sorted(told) == keys
    assert set(keys) <= set(await bucket.keys())


async def test_a_stopped_watch_is_silent(world: World, own: str) -> None:
    """No handler call follows `stop`."""
    bucket = await (await world.bus()).bucket(BUCKET)
    told: list[Entry] = []
    watch = await bucket.watch(told.append, own)
    other: list[Entry] = []
    await (await bucket.watch(other.append, own)).synced(5.0)
    await watch.synced(5.0)
    await watch.stop()
    await watch.stop()
    await bucket.put(f"{own}.k", b"v")
    await eventually(lambda: other)
    assert told == []


async def test_a_bucket_that_nobody_made(world: World, own: str) -> None:
    """Its calls raise BusError; opening it does not."""
    bucket = await (await world.bus()).bucket("mp_nothing")
    with pytest.raises(BusError):
        await bucket.put("k", b"v")
    with pytest.raises(BusError):
        await bucket.get("k")
    with pytest.raises(BusError):
        await bucket.keys()


@pytest.mark.parametrize("size", [0, 1, 128 * 1024, 300_000, 5_000_000])
async def test_objects_of_all_sizes(world: World, own: str, size: int) -> None:
    """What was put comes back whole, elsewhere; replacing and deleting do what they say."""
    writer, reader = await two(world)
    store = await writer.objects(subjects.MODELS)
    other = await reader.objects(subjects.MODELS)
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    name = f"{own} Qwen/Qwen3-8B ü"
    assert await other.get(name) is None
    await store.put(name, b"what was there before")
    await store.put(name, data)
    await store.put(name, data)
    assert await other.get(name) == data
    assert name in await other.names()
    await store.delete(name)
    await store.delete(name)
    assert await other.get(name) is None
    assert name not in await other.names()


async def test_a_store_that_nobody_made(world: World) -> None:
    """Its calls raise BusError."""
    store = await (await world.bus()).objects("mp_nothing")
    with pytest.raises(BusError):
        await store.put("k", b"v")
    with pytest.raises(BusError):
        await store.get("k")


async def test_history_is_what_was_published(world: World, own: str) -> None:
    """A stream yields its subjects' messages in order, from where one asks, and ends."""
    sender, reader = await two(world)
    begun = time.time()
    for number in range(600):
        sender.publish(subjects.kv(own, f"i{number % 2}"), b"%d" % number)
        sender.publish(f"{own}.elsewhere", b"not recorded")
    await world.settle()
    mine = subjects.all_of("kv", own)
    records = await collect(reader, "MP_KV", subject=mine)
    assert [record.payload for record in records] == [b"%d" % number for number in range(600)]
    assert begun - 5 < records[0].at_wall_s <= records[-1].at_wall_s < time.time() + 5
    later = await collect(reader, "MP_KV", subject=mine, from_seq=records[400].seq)
    assert later == records[400:]
    one = await collect(reader, "MP_KV", subject=subjects.kv(own, "i1"))
    assert one == records[1::2]
    recent = await collect(reader, "MP_KV", subject=mine, since_wall_s=records[300].at_wall_s)
    assert recent == [r for r in records if r.at_wall_s >= records[300].at_wall_s]
    assert await collect(reader, "MP_KV", subject=mine, since_wall_s=time.time() + 60) == []


async def test_history_follows(world: World, own: str) -> None:
    """Following, a reader gets what is recorded later too."""
    sender, reader = await two(world)
    sender.publish(subjects.policy(own), b"1")
    await world.settle()
    got: list[bytes] = []

    where = {"subject": subjects.policy(own), "follow": True}
    task = asyncio.create_task(collect_into(got, reader, "MP_POLICY", **where))
    await eventually(lambda: got == [b"1"])
    sender.publish(subjects.policy(own), b"2")
    await eventually(lambda: got == [b"1", b"2"])
    task.cancel()
    await asyncio.wait({task})


async def test_history_of_nothing(world: World, own: str) -> None:
    """A stream that is not there is an error, following or not; an empty one just ends."""
    bus = await world.bus()
    assert await collect(bus, "MP_HOTSPOT", subject=subjects.hotspot(own)) == []
    for follow in (False, True):
        with pytest.raises(BusError):
            await collect(bus, "MP_NOTHING", follow=follow)
