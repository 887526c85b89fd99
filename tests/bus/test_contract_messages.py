"""What both buses promise of messages, requests and answers."""

import asyncio
import time

import pytest

from controlplane.bus.protocol import PAYLOAD_BYTES_MAX, BusError
from tests.bus.worlds import World, answers, two


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("a.b.c", ["a.b.c"]),
        ("a.*.c", ["a.b.c", "a.x.c"]),
        ("a.b.>", ["a.b.c", "a.b.c.d"]),
        ("a.*.*", ["a.b.c", "a.x.c"]),
        ("a.>", ["a.b.c", "a.x.c", "a.b.c.d", "a.b"]),
        ("*.b", ["a.b"]),
    ],
)
async def test_wildcards(world: World, own: str, pattern: str, heard: list[str]) -> None:
    """A subscriber hears exactly the subjects that its pattern matches."""
    sender, receiver = await two(world)
    got: list[str] = []
    await receiver.subscribe(f"{own}.{pattern}", lambda subject, _: got.append(subject))
    for subject in ("a.b.c", "a.x.c", "a.b.c.d", "a.b", "z.y.x"):
        sender.publish(f"{own}.{subject}", b"")
    await world.settle()
    assert got == [f"{own}.{subject}" for subject in heard]


@pytest.mark.parametrize("subject", ["", "a..b", ".a", "a.>.b", "a b", "a\r\nPUB x 0"])
async def test_what_is_no_subject_is_refused(world: World, subject: str) -> None:
    """Subscribing and serving refuse at once what no server would take."""
    bus = await world.bus()
    with pytest.raises(ValueError, match="not a subject"):
        await bus.subscribe(subject, lambda *_: None)
    with pytest.raises(ValueError, match="not a subject"):
        await bus.serve(subject, lambda _: None)
    assert bus.connected


async def test_order_is_kept(world: World, own: str) -> None:
    """Messages of one publisher arrive in order, all of them, across subjects of one pattern."""
    sender, receiver = await two(world)
    got: list[bytes] = []
    await receiver.subscribe(f"{own}.>", lambda _, payload: got.append(payload))
    sent = [b"%d" % number for number in range(3000)]
    for number, payload in enumerate(sent):
        sender.publish(f"{own}.{number % 3}", payload)
    await world.settle()
    assert got == sent
    assert sender.dropped == 0
    assert sender.stats().published >= 3000


async def test_every_subscriber_gets_a_copy_and_so_does_the_sender(world: World, own: str) -> None:
    """Publishing reaches all subscriptions, the publisher's own included."""
    sender, receiver = await two(world)
    got: list[str] = []
    await receiver.subscribe(own, lambda *_: got.append("one"))
    await receiver.subscribe(own, lambda *_: got.append("two"))
    await sender.subscribe(own, lambda *_: got.append("own"))
    sender.publish(own, b"x")
    await world.settle()
    assert sorted(got) == ["one", "own", "two"]


async def test_nothing_is_delivered_inside_publish(world: World, own: str) -> None:
    """A publisher is never re-entered."""
    bus = await world.bus()
    got: list[bytes] = []
    await bus.subscribe(own, lambda _, payload: got.append(payload))
    bus.publish(own, b"x")
    assert got == []
    await world.settle()
    assert got == [b"x"]


async def test_a_stopped_subscription_is_silent(world: World, own: str) -> None:
    """No handler call follows `stop`, which may be called twice."""
    sender, receiver = await two(world)
    got: list[bytes] = []
    subscription = await receiver.subscribe(own, lambda _, payload: got.append(payload))
    sender.publish(own, b"1")
    await world.settle()
    await subscription.stop()
    await subscription.stop()
    sender.publish(own, b"2")
    await world.settle()
    assert got == [b"1"]


async def test_a_failing_handler_loses_its_message_only(
    world: World, own: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that raises is logged and counted; the next message arrives."""
    sender, receiver = await two(world)
    got: list[bytes] = []

    def handler(_: str, payload: bytes) -> None:
        if payload == b"bad":
            raise LookupError("planted")
        got.append(payload)

    await receiver.subscribe(own, handler)
    for payload in (b"1", b"bad", b"2"):
        sender.publish(own, payload)
    await world.settle()
    assert got == [b"1", b"2"]
    assert receiver.stats().handler_errors == 1
    assert "planted" in caplog.text


async def test_payload_sizes(world: World, own: str) -> None:
    """From empty to the limit, payloads arrive unchanged; over it, publish refuses at once."""
    sender, receiver = await two(world)
    got: list[bytes] = []
    await receiver.subscribe(own, lambda _, payload: got.append(payload))
    payloads = [b"", b"\r\n", b"MSG a 1 5\r\n", bytes(range(256)) * 300, b"x" * PAYLOAD_BYTES_MAX]
    for payload in payloads:
        sender.publish(own, payload)
    with pytest.raises(ValueError, match="split it"):
        sender.publish(own, b"x" * (PAYLOAD_BYTES_MAX + 1))
    await world.settle()
    assert got == payloads


async def test_many_answers_in_order(world: World, own: str) -> None:
    """A request yields all answers in order, large and empty ones included."""
    server, client = await two(world)

    async def serve(payload: bytes):
        yield payload
        yield b""
        for number in range(20):
            yield b"%d" % number * 100_000

    await server.serve(own, serve)
    got = await answers(client, own, b"question")
    assert got == [b"question", b"", *(b"%d" % number * 100_000 for number in range(20))]


async def test_requests_do_not_mix(world: World, own: str) -> None:
    """Requests under way at the same time each get their own answers."""
    server, client = await two(world)

    async def serve(payload: bytes):
        for number in range(5):
            await asyncio.sleep(0)
            yield payload + b"%d" % number

    await server.serve(own, serve)
    questions = [b"q%d-" % number for number in range(20)]
    got = await asyncio.gather(*(answers(client, own, question) for question in questions))
    assert got == [[question + b"%d" % n for n in range(5)] for question in questions]


async def test_nobody_answers(world: World, own: str) -> None:
    """Without a service the requester knows at once, before any timeout."""
    bus = await world.bus()
    begun = time.monotonic()
    with pytest.raises(BusError, match="nobody answers"):
        await answers(bus, own, timeout_s=30.0)
    assert time.monotonic() - begun < 5.0


async def test_a_stopped_service_is_nobody(world: World, own: str) -> None:
    """A service that was stopped does not answer."""
    server, client = await two(world)

    async def serve(_: bytes):
        yield b"here"

    service = await server.serve(own, serve)
    assert await answers(client, own) == [b"here"]
    await service.stop()
    await world.settle()
    with pytest.raises(BusError, match="nobody answers"):
        await answers(client, own)


async def test_a_failing_service_is_an_error_at_the_requester(
    world: World, own: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What the service had yielded arrives, then the error with its reason."""
    server, client = await two(world)

    async def serve(_: bytes):
        yield b"first"
        raise LookupError("no such block")

    await server.serve(own, serve)
    request = client.request(own, b"", timeout_s=5.0)
    assert await anext(request) == b"first"
    with pytest.raises(BusError, match="no such block"):
        await anext(request)


async def test_a_service_that_hangs_times_out(world: World, own: str) -> None:
    """`timeout_s` bounds the wait for each answer."""
    server, client = await two(world)

    async def serve(_: bytes):
        yield b"first"
        await asyncio.sleep(3600)

    await server.serve(own, serve)
    with pytest.raises(BusError, match="within"):
        await answers(client, own, timeout_s=0.05)


async def test_one_of_several_services_answers(world: World, own: str) -> None:
    """Two services on one subject do not both answer a request."""
    one, two_ = await two(world)
    client = await world.bus()

    async def serve(_: bytes):
        yield b"x"

    await one.serve(own, serve)
    await two_.serve(own, serve)
    assert await answers(client, own) == [b"x"]


async def test_a_requester_may_leave_early(world: World, own: str) -> None:
    """Breaking out of the answers leaves the bus usable."""
    server, client = await two(world)

    async def serve(_: bytes):
        for _ in range(50):
            yield b"x" * 1000

    await server.serve(own, serve)
    request = client.request(own, b"", timeout_s=5.0)
    assert await anext(request) == b"x" * 1000
    await request.aclose()
    assert len(await answers(client, own)) == 50
