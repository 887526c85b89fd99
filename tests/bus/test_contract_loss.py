"""What both buses promise when the connection is lost and returns."""

import asyncio
import time

import pytest

from controlplane.bus.protocol import BusError, Entry
from schemas import subjects
from tests.bus.worlds import World, answers, collect_into, eventually, two

BUCKET = subjects.VERDICTS


async def test_everything_comes_back(fragile_world: World, own: str) -> None:
    """Subscriptions, services and publishing work again after the server crashed."""
    sender, receiver = await two(fragile_world)
    got: list[bytes] = []
    states: list[bool] = []
    receiver.on_state(states.append)

    async def serve(payload: bytes):
        yield payload

    await receiver.subscribe(f"{own}.>", lambda _, payload: got.append(payload))
    await receiver.serve(f"serve.{own}", serve)
    sender.publish(f"{own}.a", b"1")
    await fragile_world.settle()
    for crash in range(2):
        await fragile_world.cut()
        assert not sender.connected
        assert not receiver.connected
        with pytest.raises(BusError):
            await sender.flush()
        with pytest.raises(BusError):
            await answers(sender, f"serve.{own}")
        await receiver.subscribe(f"{own}.late{crash}", lambda _, payload: got.append(payload))
        await fragile_world.heal()
        await fragile_world.settle()
        sender.publish(f"{own}.a", b"2")
        await fragile_world.settle()
        assert await answers(sender, f"serve.{own}", b"again") == [b"again"]
        sender.publish(f"{own}.late{crash}", b"3")
        await fragile_world.settle()
    assert got == [b"1", *[b"2", b"3", b"3"] * 2]
    assert states == [False, True] * 2
    assert receiver.stats().disconnects == 2


async def test_publishing_into_the_gap_keeps_the_newest(fragile_world: World, own: str) -> None:
    """What is published without a connection waits, up to the bound; the oldest is dropped."""
    sender = await fragile_world.bus(buffer_messages_max=50)
    await fragile_world.cut()
    for number in range(80):
        sender.publish(own, b"%d" % number)
    assert sender.dropped == 30
    assert sender.stats().buffered == 50
    assert sender.stats().buffered_bytes == 100
    got: list[bytes] = []
    await sender.subscribe(own, lambda _, payload: got.append(payload))
    await fragile_world.heal()
    await fragile_world.settle()
    assert got == [b"%d" % number for number in range(30, 80)]
    assert sender.dropped == 30
    assert sender.stats().buffered == 0


async def test_operations_fail_while_cut_off(fragile_world: World, own: str) -> None:
    """Buckets, stores and history raise BusError, at once."""
    bus = await fragile_world.bus()
    bucket = await bus.bucket(BUCKET)
    store = await bus.objects(subjects.MODELS)
    await bucket.put(own, b"v")
    await fragile_world.cut()
    begun = time.monotonic()
    for work in (
        bucket.put(own, b"v"),
        bucket.create(own, b"v"),
        bucket.update(own, b"v", 1),
        bucket.get(own),
        bucket.delete(own),
        bucket.keys(),
        store.put(own, b"v"),
        store.get(own),
        store.names(),
        store.delete(own),
    ):
        with pytest.raises(BusError):
            await work
    assert time.monotonic() - begun < 2.0
    await fragile_world.heal()
    assert (await bucket.get(own)).value == b"v"


async def test_a_watch_goes_on_after_a_crash(fragile_world: World, own: str) -> None:
    """After the server's return a watch tells what changed, and only that, and goes on."""
    writer, reader = await two(fragile_world)
    bucket = await writer.bucket(BUCKET)
    await bucket.put(f"{own}.kept", b"1")
    await bucket.put(f"{own}.changed", b"1")
    told: list[Entry] = []
    watch = await (await reader.bucket(BUCKET)).watch(told.append, own)
    await watch.synced(5.0)
    for value in (b"2", b"3"):
        told.clear()
        await fragile_world.cut()
        await fragile_world.heal()
        await bucket.put(f"{own}.changed", value)
        await eventually(lambda: told)
        await bucket.put(f"{own}.new", value)
        await eventually(lambda: len(told) == 2)
        assert [(entry.key, entry.value) for entry in told] == [
            (f"{own}.changed", value),
            (f"{own}.new", value),
        ]


async def test_a_watch_begun_while_cut_off(fragile_world: World, own: str) -> None:
    """A watch may be begun without a connection; it is told everything at its return."""
    writer, reader = await two(fragile_world)
    await (await writer.bucket(BUCKET)).put(f"{own}.k", b"v")
    await fragile_world.cut()
    told: list[Entry] = []
    watch = await (await reader.bucket(BUCKET)).watch(told.append, own)
    with pytest.raises(BusError):
        await watch.synced(0.02)
    await fragile_world.heal()
    await watch.synced(5.0)
    assert [entry.value for entry in told] == [b"v"]


async def test_following_history_survives_a_crash(fragile_world: World, own: str) -> None:
    """A follower misses and repeats nothing that the stream holds."""
    sender, reader = await two(fragile_world)
    got: list[bytes] = []

    where = {"subject": subjects.kv(own, "i"), "follow": True}
    task = asyncio.create_task(collect_into(got, reader, "MP_KV", **where))
    sender.publish(subjects.kv(own, "i"), b"1")
    await eventually(lambda: got == [b"1"])
    await fragile_world.cut()
    sender.publish(subjects.kv(own, "i"), b"2")
    await fragile_world.heal()
    await fragile_world.settle()
    sender.publish(subjects.kv(own, "i"), b"3")
    await eventually(lambda: got == [b"1", b"2", b"3"])
    task.cancel()
    await asyncio.wait({task})


async def test_a_request_under_way_fails_with_the_connection(
    fragile_world: World, own: str
) -> None:
    """A requester does not wait for its timeout when the connection is lost."""
    server, client = await two(fragile_world)

    async def serve(_: bytes):
        yield b"first"
        await asyncio.sleep(0.05)
        yield b"second"
        await asyncio.sleep(3600)

    await server.serve(own, serve)
    request = client.request(own, b"", timeout_s=60.0)
    assert await anext(request) == b"first"
    await fragile_world.cut()
    begun = time.monotonic()
    with pytest.raises(BusError):
        await anext(request)
    assert time.monotonic() - begun < 5.0


async def test_a_closed_bus_is_silent(world: World, own: str) -> None:
    """After `close` nothing arrives, and what was published before it did leave."""
    sender, receiver = await two(world)
    got: list[bytes] = []
    states: list[bool] = []
    await receiver.subscribe(own, lambda _, payload: got.append(payload))
    sender.on_state(states.append)
    sender.publish(own, b"last words")
    await sender.close()
    assert states == [], "leaving is not a loss"
    await eventually(lambda: got == [b"last words"])
    assert not sender.connected
    with pytest.raises(BusError):
        await sender.flush()
