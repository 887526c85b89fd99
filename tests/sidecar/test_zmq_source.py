"""The ZMQ adapter against real sockets that speak as vLLM does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from sidecar.zmq_source import SourceConfig, SourceError, ZmqSource
from tests.sidecar.zmq_engine import ZmqEngine


async def eventually(true: Callable[[], object], within_s: float = 5.0) -> None:
    """Return when a condition holds; fail when it does not in time."""
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.005)


@pytest.fixture
def engine() -> Iterator[ZmqEngine]:
    """An engine with an event stream and a replay socket."""
    engine = ZmqEngine()
    yield engine
    engine.close()


class Listener:
    """A source and what it heard."""

    def __init__(self, source: ZmqSource) -> None:
        self.source = source
        self.heard: list[tuple[int, bytes]] = []

    async def start(self) -> None:
        """Begin to listen."""
        await self.source.start(lambda seq, payload: self.heard.append((seq, payload)))


@pytest.fixture
async def listener(engine: ZmqEngine) -> AsyncIterator[Listener]:
    """A source that is subscribed to the engine."""
    config = SourceConfig(engine.endpoint, engine.replay_endpoint, topic="kv")
    listener = Listener(ZmqSource(config))
    await listener.start()
    await joined(engine, listener)
    yield listener
    await listener.source.close()


async def joined(engine: ZmqEngine, listener: Listener) -> None:
    """Return once messages arrive: a subscription takes effect some time after it is made."""

    def knock() -> bool:
        engine.raw(b"kv", (10**6).to_bytes(8, "big"), b"knock")
        return bool(listener.heard)

    await eventually(knock)
    engine.raw(b"kv", (10**6 + 1).to_bytes(8, "big"), b"last")
    await eventually(lambda: listener.heard[-1][1] == b"last")
    listener.heard.clear()


async def test_live_messages_arrive_in_order(engine: ZmqEngine, listener: Listener) -> None:
    """Number and payload of every message reach the handler."""
    for at in range(200):
        engine.publish(b"%d" % at)
    await eventually(lambda: len(listener.heard) == 200)
    assert listener.heard == [(at, b"%d" % at) for at in range(200)]


async def test_other_topics_and_malformed_messages_are_counted(
    engine: ZmqEngine, listener: Listener
) -> None:
    """A topic is matched whole though ZMQ matches prefixes, and odd frames cost only themselves."""
    engine.raw(b"kv-other", bytes(8), b"x")
    engine.raw(b"kv", b"short", b"x")
    engine.raw(b"kv")
    engine.publish(b"good")
    await eventually(lambda: listener.heard)
    assert listener.heard == [(0, b"good")]
    assert (listener.source.foreign, listener.source.malformed) == (1, 2)


@pytest.mark.parametrize("two_frames", [False, True])
async def test_a_replay_brings_what_the_engine_has_from_a_number_on(
    engine: ZmqEngine, listener: Listener, two_frames: bool
) -> None:
    """Both forms of the answer are understood, to the end mark."""
    engine.two_frames = two_frames
    for at in range(2000):
        engine.publish(b"%d" % at, lost=True)
    replayed = [message async for message in listener.source.replay(500)]
    assert replayed == [(at, b"%d" % at) for at in range(500, 2000)]
    assert [message async for message in listener.source.replay(2000)] == []


async def test_a_replay_that_is_not_answered_fails_in_time(engine: ZmqEngine) -> None:
    """A silent socket is an error that names it."""
    config = SourceConfig(engine.endpoint, engine.replay_endpoint, replay_silence_s_max=0.05)
    source = ZmqSource(config)
    engine.silent = True
    with pytest.raises(SourceError, match="no answer from tcp://"):
        _ = [message async for message in source.replay(0)]
    await source.close()


async def test_without_a_replay_socket_a_replay_fails(engine: ZmqEngine) -> None:
    """There is nothing to ask."""
    source = ZmqSource(SourceConfig(engine.endpoint))
    with pytest.raises(SourceError, match="no replay socket"):
        _ = [message async for message in source.replay(0)]
    await source.close()


async def test_an_engine_may_connect_to_a_source_that_listens() -> None:
    """Bind mode is for engines whose endpoint has no `*`, which connect."""
    listener = Listener(ZmqSource(SourceConfig("tcp://127.0.0.1:*", bind=True)))
    await listener.start()
    engine = ZmqEngine(connect=listener.source.bound_endpoint)
    await joined(engine, listener)
    engine.publish(b"hello")
    await eventually(lambda: listener.heard)
    assert listener.heard == [(0, b"hello")]
    engine.close()
    await listener.source.close()


async def test_a_restarted_engine_is_heard_again(engine: ZmqEngine, listener: Listener) -> None:
    """The subscription survives the publisher, if it comes back to the same address."""
    port, replay_port = (
        int(endpoint.rpartition(":")[2]) for endpoint in (engine.endpoint, engine.replay_endpoint)
    )
    engine.close()
    again = ZmqEngine(port=port, replay_port=replay_port)
    await joined(again, listener)
    again.publish(b"new life")
    await eventually(lambda: listener.heard)
    assert listener.heard == [(0, b"new life")]
    again.close()


@pytest.mark.slow
async def test_beyond_the_queue_messages_are_lost_and_show_as_a_gap(engine: ZmqEngine) -> None:
    """A process that does not read in time loses messages, and never more memory than the bound."""
    listener = Listener(ZmqSource(SourceConfig(engine.endpoint, topic="kv", queue_messages_max=10)))
    await listener.start()
    await joined(engine, listener)
    payload = bytes(100_000)
    for _ in range(3000):  # beyond both queues and what the kernel buffers
        engine.publish(payload)
    last = len(engine.sent)

    def heard_again() -> bool:
        engine.publish(b"last")
        return listener.heard[-1:] != [] and listener.heard[-1][0] >= last

    await eventually(heard_again, within_s=20.0)
    seqs = [seq for seq, _ in listener.heard]
    assert seqs == sorted(seqs)
    assert len(seqs) < seqs[-1] + 1
    await listener.source.close()


async def test_an_endpoint_that_makes_no_sense_is_an_error() -> None:
    """The message says which endpoint, and what was tried."""
    source = ZmqSource(SourceConfig("tcp://nowhere"))
    with pytest.raises(SourceError, match="cannot connect to tcp://nowhere"):
        await source.start(lambda seq, payload: None)
    await source.close()
