"""What only the real bus does: servers that are late, frozen, hidden or forgetful."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from controlplane.bus import Bus, BusError, NatsBus, NatsOptions, connect
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import BucketSpec, Layout
from controlplane.bus.protocol import Entry
from controlplane.bus.setup import ensure
from tests.bus.worlds import ON_DISK, answers, eventually, fast

pytestmark = pytest.mark.live


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedNats]:
    """A nats-server of the test's own."""
    async with EmbeddedNats() as server:
        yield server


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_bus_starts_before_its_server(free_port: int) -> None:
    """Everything that was begun without a server comes alive when it appears."""
    url = f"nats://127.0.0.1:{free_port}"
    begun = time.monotonic()
    bus = await NatsBus.connect(url, options=fast(), wait_s=0.05)
    assert time.monotonic() - begun < 2.0
    assert not bus.connected
    states: list[bool] = []
    got: list[bytes] = []
    told: list[Entry] = []

    async def serve(payload: bytes) -> AsyncIterator[bytes]:
        yield payload

    bus.on_state(states.append)
    await bus.subscribe("early", lambda _, payload: got.append(payload))
    await bus.serve("echo", serve)
    watch = await (await bus.bucket("mp_leaders")).watch(told.append)
    bus.publish("early", b"1")
    assert (bus.stats().buffered, bus.dropped) == (1, 0)
    async with EmbeddedNats(port=free_port):
        await eventually(lambda: bus.connected)
        await eventually(lambda: got == [b"1"])
        assert await answers(bus, "echo", b"x") == [b"x"]
        await ensure(bus, ON_DISK)  # the watch has been waiting for its bucket
        await watch.synced(5.0)
        await (await bus.bucket("mp_leaders")).put("k", b"v")
        await eventually(lambda: [entry.value for entry in told] == [b"v"])
        assert states == [True]
        await bus.close()


async def test_connect_knows_the_schemes(server: EmbeddedNats) -> None:
    """A URL names the bus: NATS, or one in memory."""
    bus: Bus = await connect(server.url)
    assert isinstance(bus, NatsBus)
    assert bus.connected
    await bus.close()
    assert (await connect("memory://")).connected
    with pytest.raises(BusError, match="not a NATS URL"):
        await connect("redis://host")


async def test_wrong_credentials_stop_the_start(tmp_path: Path) -> None:
    """A server that refuses us is an error at once; the right password, in the URL, is let in."""
    async with EmbeddedNats(args=["--user", "u", "--pass", "right"]) as server:
        begun = time.monotonic()
        for url in (server.url, server.url.replace("//", "//u:wrong@")):
            with pytest.raises(BusError, match=r"(?i)authorization violation"):
                await NatsBus.connect(url, options=fast(), wait_s=30.0)
        assert time.monotonic() - begun < 10.0
        bus = await NatsBus.connect(server.url.replace("//", "//u:right@"), options=fast())
        assert bus.connected
        await bus.close()


@pytest.mark.slow
async def test_a_server_that_throws_us_out_is_given_time() -> None:
    """Being let in only to be thrown out counts as a failure: no storm of reconnects."""
    visits = 0

    async def throw_out(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal visits
        visits += 1
        writer.write(b'INFO {"max_payload": 1048576, "headers": true}\r\n')
        for _ in range(2):
            while await reader.readline() not in (b"PING\r\n", b""):
                pass
            writer.write(b"PONG\r\n")
        writer.write(b"-ERR 'Account Authentication Expired'\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(throw_out, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        options = NatsOptions(retry_s_min=30.0, retry_s_max=60.0)
        bus = await NatsBus.connect(f"nats://127.0.0.1:{port}", options=options)
        await eventually(lambda: bus.stats().disconnects == 1)
        await asyncio.sleep(0.4)
        assert visits == 1
        await bus.close()


async def test_a_frozen_server_is_noticed(server: EmbeddedNats) -> None:
    """A server that answers no ping is lost within three intervals, and found again after."""
    bus = await NatsBus.connect(server.url, options=fast(ping_s=0.05, connect_s_max=0.2))
    got: list[bytes] = []
    await bus.subscribe("s", lambda _, payload: got.append(payload))
    server.suspend()
    try:
        await eventually(lambda: not bus.connected, within_s=2.0)
        bus.publish("s", b"x")
    finally:
        server.resume()
    await eventually(lambda: got == [b"x"])
    await bus.close()


async def test_a_frozen_server_does_not_delay_leaving(server: EmbeddedNats) -> None:
    """`close` gives up on unsent messages after a moment."""
    bus = await NatsBus.connect(server.url, options=fast())
    server.suspend()
    try:
        for _ in range(20):
            bus.publish("s", bytes(900_000))
        begun = time.monotonic()
        await bus.close()
        assert time.monotonic() - begun < 3.0
    finally:
        server.resume()


async def test_a_busy_service_says_so(server: EmbeddedNats) -> None:
    """More requests than it may serve at a time are refused, not queued."""
    bus = await NatsBus.connect(server.url, options=fast(serving_max=1))
    go_on = asyncio.Event()

    async def serve(_: bytes) -> AsyncIterator[bytes]:
        yield b"begun"
        await go_on.wait()

    await bus.serve("s", serve)
    request = bus.request("s", b"", timeout_s=5.0)
    assert await anext(request) == b"begun"
    with pytest.raises(BusError, match="busy"):
        await answers(bus, "s")
    go_on.set()
    assert [answer async for answer in request] == []
    assert await answers(bus, "s") == [b"begun"]
    await bus.close()


async def test_lost_and_unread_answers_are_errors(server: EmbeddedNats) -> None:
    """The end mark counts the answers; and a requester that does not read is cut off."""
    bus = await NatsBus.connect(server.url, options=fast(answers_max=10))

    def short(_: str, reply: str, payload: bytes, headers: dict[str, str] | None) -> None:
        bus.spawn(bus.link().publish(reply, b"one"))
        bus.spawn(bus.link().publish(reply, b"", headers={"Multiplane-End": "3"}))

    await bus.link().subscribe("short", short)
    with pytest.raises(BusError, match="1 of 3"):
        await answers(bus, "short")

    async def flood(_: bytes) -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"x"

    await bus.serve("flood", flood)
    request = bus.request("flood", b"", timeout_s=5.0)
    await anext(request)
    await bus.flush()
    await asyncio.sleep(0.05)
    with pytest.raises(BusError, match="more than 10"):
        [answer async for answer in request]
    await bus.close()


@pytest.mark.slow
async def test_a_reader_that_is_too_slow_is_cut_off_and_counted(tmp_path: Path) -> None:
    """The server drops a client that does not read; it comes back, and the loss is counted."""
    config = tmp_path / "nats.conf"
    config.write_text('max_pending: 1100000\nwrite_deadline: "100ms"\n')
    async with EmbeddedNats(config=config) as server:
        reader = await NatsBus.connect(server.url, options=fast())
        sender = await NatsBus.connect(server.url, options=fast(buffer_bytes_max=100_000_000))
        got: list[int] = []

        def stall(_: str, payload: bytes) -> None:
            got.append(len(payload))
            if len(got) == 1:
                time.sleep(0.5)

        await reader.subscribe("s", stall)
        for _ in range(60):
            sender.publish("s", bytes(900_000))
        await eventually(lambda: reader.stats().disconnects >= 1 and not sender.stats().buffered)

        def arrives() -> bool:
            sender.publish("s", b"after")
            return got[-1] == 5

        await eventually(arrives)
        assert 0 < got.count(900_000) < 60
        await reader.close()
        await sender.close()


async def test_a_watch_outlives_its_consumer_and_its_bucket(server: EmbeddedNats) -> None:
    """Whatever the server loses, a watch begins anew and tells what is different."""
    bus = await NatsBus.connect(server.url, options=fast())
    await ensure(bus, ON_DISK)
    bucket = await bus.bucket("mp_leaders")
    await bucket.put("a", b"1")
    await bucket.put("b", b"1")
    told: list[Entry] = []
    await (await bucket.watch(told.append)).synced(5.0)
    told.clear()

    consumers = await bus.jetstream.api("CONSUMER.NAMES.KV_mp_leaders", {})
    for name in consumers["consumers"]:
        await bus.jetstream.api(f"CONSUMER.DELETE.KV_mp_leaders.{name}")
    await bucket.put("a", b"2")
    await eventually(lambda: [(e.key, e.value) for e in told] == [("a", b"2")])
    told.clear()

    await bus.jetstream.api("STREAM.DELETE.KV_mp_leaders")
    await ensure(bus, ON_DISK)
    await bucket.put("a", b"1")
    await eventually(lambda: {entry.key: entry.value for entry in told} == {"a": b"1", "b": None})
    assert all(entry.expired == (entry.value is None) for entry in told)
    await bus.close()


@pytest.mark.slow
async def test_expired_entries_are_told_apart(server: EmbeddedNats) -> None:
    """An entry nobody renewed vanishes, and the watch says that nobody deleted it."""
    bus = await NatsBus.connect(server.url, options=fast())
    spec = BucketSpec("mp_short", history=1, ttl_s=1.0, bytes_max=1 << 20)
    await ensure(bus, Layout(streams=(), buckets=(spec,), stores=()))
    bucket = await bus.bucket("mp_short")
    told: list[Entry] = []
    await (await bucket.watch(told.append)).synced(5.0)
    await bucket.put("dead", b"v")
    await bucket.put("deleted", b"v")
    await bucket.delete("deleted")
    await eventually(lambda: len(told) == 4)
    gone = {entry.key: entry.expired for entry in told if entry.value is None}
    assert gone == {"dead": True, "deleted": False}
    assert await bucket.get("dead") is None
    assert await bucket.keys() == []
    assert await bucket.create("dead", b"again") > 0
    await bus.close()


async def test_a_damaged_object_is_an_error(server: EmbeddedNats) -> None:
    """Chunks that do not add up to the digest are not handed out."""
    bus = await NatsBus.connect(server.url, options=fast())
    await ensure(bus, ON_DISK)
    store = await bus.objects("mp_models")
    await store.put("o", b"x" * 300_000)
    info = msgspec.json.decode(
        (await bus.jetstream.last("OBJ_mp_models", "$O.mp_models.M.bw==")).payload
    )
    await bus.jetstream.store(f"$O.mp_models.C.{info['nuid']}", b"a byte too many")
    with pytest.raises(BusError, match="damaged"):
        await store.get("o")
    await store.put("o", b"y" * 10)
    assert await store.get("o") == b"y" * 10
    assert (await bus.jetstream.api("STREAM.INFO.OBJ_mp_models"))["state"]["messages"] == 2
    await bus.close()


@pytest.mark.slow
async def test_leaving_at_any_moment_ends(server: EmbeddedNats) -> None:
    """`close` returns and leaves nothing running, wherever a reconnect just is."""
    before = asyncio.all_tasks()
    for number in range(20):
        bus = await NatsBus.connect(server.url, options=fast())
        await (await bus.bucket("mp_leaders")).watch(lambda _: None)
        await server.kill()
        await server.start()
        await asyncio.sleep(number * 0.003)
        async with asyncio.timeout(5.0):
            await bus.close()
        await eventually(lambda: asyncio.all_tasks() == before)


def test_it_runs_on_uvloop() -> None:
    """The loop of production does the same, restarts included."""

    async def run() -> list[bytes]:
        got: list[bytes] = []
        async with EmbeddedNats() as server:
            bus = await NatsBus.connect(server.url, options=fast())
            await bus.subscribe("s", lambda _, payload: got.append(payload))
            bus.publish("s", b"1")
            await bus.flush()
            await server.kill()
            await eventually(lambda: not bus.connected)
            bus.publish("s", b"2")
            await server.start()
            await eventually(lambda: len(got) == 2)
            await bus.close()
        return got

    assert uvloop.run(run()) == [b"1", b"2"]
