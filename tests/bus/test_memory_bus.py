"""What the bus in memory offers beyond the contract: determinism and faults."""

import random
from collections.abc import Callable

import pytest

from controlplane.bus import MemoryBroker
from controlplane.bus.protocol import BusError
from schemas import subjects


async def test_a_scheduler_of_ones_own_delivers() -> None:
    """Every delivery goes through `schedule`, in order, and waits for it."""
    steps: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    broker = MemoryBroker(schedule=lambda step, *args: steps.append((step, args)))
    bus = broker.bus()
    got: list[bytes] = []
    await bus.subscribe("s", lambda _, payload: got.append(payload))
    for payload in (b"1", b"2", b"3"):
        bus.publish("s", payload)
    assert got == []
    for step, args in steps:
        step(*args)
    assert got == [b"1", b"2", b"3"]


async def lossy_run(seed: int) -> list[bytes]:
    """Return what arrives of 200 messages."""
    steps: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    broker = MemoryBroker(
        schedule=lambda step, *args: steps.append((step, args)), rng=random.Random(seed), drop=0.3
    )
    bus = broker.bus()
    got: list[bytes] = []
    await bus.subscribe("s", lambda _, payload: got.append(payload))
    for number in range(200):
        bus.publish("s", b"%d" % number)
    for step, args in steps:
        step(*args)
    assert len(got) + broker.lost == 200
    return got


async def test_losses_are_seeded() -> None:
    """The same seed loses the same messages; another one others; the order is kept."""
    first, second, other = await lossy_run(1), await lossy_run(1), await lossy_run(2)
    assert first == second != other
    assert 100 < len(first) < 180
    assert [int(payload) for payload in first] == sorted(int(payload) for payload in first)


async def test_a_lost_answer_fails_the_request() -> None:
    """A requester never takes a part for the whole."""
    broker = MemoryBroker(drop=1.0)
    bus = broker.bus()

    async def serve(_: bytes):
        yield b"1"

    await bus.serve("s", serve)
    with pytest.raises(BusError, match="lost"):
        [answer async for answer in bus.request("s", b"", timeout_s=1.0)]


async def test_one_client_is_cut_off_alone() -> None:
    """What is under way to it is lost; the others do not notice."""
    steps: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    broker = MemoryBroker(schedule=lambda step, *args: steps.append((step, args)))
    sender, cut, other = broker.bus(), broker.bus(), broker.bus()
    got: list[str] = []
    await cut.subscribe("s", lambda *_: got.append("cut"))
    await other.subscribe("s", lambda *_: got.append("other"))
    sender.publish("s", b"1")
    cut.cut()
    sender.publish("s", b"2")
    for step, args in steps:
        step(*args)
    assert got == ["other", "other"]
    assert (sender.connected, cut.connected) == (True, False)


async def test_history_is_bounded() -> None:
    """A stream keeps its newest messages, with their numbers."""
    broker = MemoryBroker(history_max=3)
    bus = broker.bus()
    for number in range(5):
        bus.publish(subjects.kv("m", "i"), b"%d" % number)
    records = [record async for record in bus.history("MP_KV")]
    assert [(record.seq, record.payload) for record in records] == [(3, b"2"), (4, b"3"), (5, b"4")]
