"""One rank's block stream from real sockets to the bus: what is wrong is counted and said."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from controlplane.bus import BusError
from schemas import subjects
from schemas.vllm_events import BlockStored, encode_batch
from sidecar.changes import Change
from sidecar.config import SidecarConfig
from sidecar.feed import BlockFeed, new_epoch
from sidecar.mirror import MirrorConfig
from sidecar.zmq_source import SourceConfig
from tests.bus.worlds import MemoryWorld, answers, eventually
from tests.models.naive_relay import snapshot_sets
from tests.sidecar.service_helpers import Router, snapshot_of
from tests.sidecar.zmq_engine import ZmqEngine

CONFIG = SidecarConfig(
    engine_url="http://unused",
    mirror=MirrorConfig(silent_batches_max=3),
    probe_s=0.05,
    replay_silence_s_max=0.05,
)


def stored(*names: int, parent: int | None = None) -> bytes:
    """A message that stores blocks of four tokens each."""
    tokens = [name for name in names for _ in range(4)]
    event = BlockStored(list(names), parent, tokens, 4, medium="GPU", group_idx=0)
    return encode_batch(0.0, [event], 0)


class Rig:
    """An engine's sockets, a feed, and a router that listens."""

    def __init__(self, engine: ZmqEngine, feed: BlockFeed, router: Router) -> None:
        self.engine = engine
        self.feed = feed
        self.router = router

    async def send(self, payload: bytes) -> None:
        """Publish a message; return when it was taken."""
        self.engine.publish(payload)
        count = len(self.engine.sent)
        await eventually(lambda: self.feed.stream.next_seq == count and self.feed.stream.live)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A feed that has joined an engine."""
    world = MemoryWorld()
    router = Router(await world.bus())
    await router.start()
    engine = ZmqEngine()
    source = SourceConfig(engine.endpoint, engine.replay_endpoint, replay_silence_s_max=0.2)
    feed = BlockFeed(await world.bus(), "m", "i-1", source, CONFIG, lambda: None)
    await feed.start()
    assert await feed.joined(5.0)
    yield Rig(engine, feed, router)
    await feed.close()
    engine.close()
    await world.close()


async def test_messages_that_do_not_decode_cost_only_themselves(rig: Rig) -> None:
    """They are counted, and the sequence goes on."""
    await rig.send(b"\xc1")
    await rig.send(stored(1))
    assert rig.feed.counts["undecodable"] == 1
    await eventually(lambda: len(rig.router.blocks("i-1")) == 1)


async def test_extras_nested_too_deep_cost_only_their_event(rig: Rig) -> None:
    """They can be decoded and not be encoded again."""
    for depth in range(900, 1000):
        nested = b"\x91" * depth + b"\x90"
        keys = [["MARK"]]
        event = BlockStored([depth], None, [1] * 4, 4, medium="GPU", group_idx=0, extra_keys=keys)
        await rig.send(encode_batch(0.0, [event], 0).replace(b"\xa4MARK", nested))
    await rig.send(stored(1))
    await eventually(lambda: rig.feed.mirror.hash_of(1) in rig.router.blocks("i-1"))
    assert rig.feed.counts["unapplied"] == 0


async def test_a_batch_that_cannot_be_applied_costs_an_epoch(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it left half done is not trusted, and what follows is followed."""

    def fail(_: object) -> list[Change]:
        raise KeyError("a bug")

    await rig.send(stored(1))
    epoch = rig.feed.epoch
    with monkeypatch.context() as patched:
        patched.setattr(rig.feed.mirror, "apply", fail)
        await rig.send(stored(2))
    await rig.send(stored(3))
    assert rig.feed.epoch > epoch
    assert not rig.feed.mirror.complete
    assert "cannot be applied" in caplog.text
    await eventually(lambda: rig.router.blocks("i-1") == {rig.feed.mirror.hash_of(3)})


async def test_blindness_is_an_alarm_until_something_applies(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Events that arrive while none applies are logged once, with their reasons."""
    caplog.set_level(logging.WARNING, "sidecar.feed")
    for name in range(10, 16):
        await rig.send(stored(name, parent=999))
    assert rig.feed.mirror.blind
    alarms = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(alarms) == 1
    assert "'unknown_parent': 3" in alarms[0]
    await rig.send(stored(1))
    assert not rig.feed.mirror.blind
    assert "apply again" in caplog.text


async def test_what_is_lost_on_the_way_is_found_by_probes(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that does not listen where it should is found out, and followed by replay."""
    for name in (1, 2, 3):
        rig.engine.publish(stored(name), lost=True)
    await eventually(lambda: len(rig.router.blocks("i-1")) == 3)
    await eventually(lambda: rig.feed.counts["missed_live"] == 3)
    assert "came by replay only" in caplog.text


async def test_a_sidecar_that_was_frozen_does_not_blame_the_engine(rig: Rig) -> None:
    """A replay that overtakes what waits in the live socket is no sign of a deaf engine."""
    await rig.send(stored(1))
    for name in range(2, 200):
        rig.engine.publish(stored(name))
    rig.feed._probe_silence()  # as the tick does once it is late, before any message is taken
    await eventually(lambda: len(rig.router.blocks("i-1")) == 199 and rig.feed.stream.live)
    assert rig.feed.counts["missed_live"] == 0


async def test_a_replay_socket_that_falls_silent_keeps_the_state(rig: Rig) -> None:
    """Probes that fail change nothing, and are no flood of warnings."""
    await rig.send(stored(1, 2))
    rig.engine.silent = True
    await eventually(lambda: rig.feed.counts["replays_failed"] >= 3)
    epoch = rig.feed.epoch
    await eventually(lambda: rig.feed.stream.live)
    assert (rig.feed.epoch, rig.feed.stream.losses) == (epoch, 0)
    assert len(rig.router.blocks("i-1")) == 2


async def test_snapshots_are_shared_and_follow_the_set(rig: Rig) -> None:
    """Each answer is the set as of the last batch; nonsense gets an error."""
    await rig.send(stored(1, 2))
    bus = rig.router.bus
    first, again = await snapshot_of(bus, "m", "i-1"), await snapshot_of(bus, "m", "i-1")
    assert snapshot_sets(first) == snapshot_sets(again) == {0: rig.feed.relay.published()}
    assert len(rig.feed.relay.published()) == 2
    await rig.send(stored(3))
    assert len(snapshot_sets(await snapshot_of(bus, "m", "i-1"))[0]) == 3
    assert rig.feed.counts["snapshots"] == 3
    with pytest.raises(BusError):
        await answers(bus, subjects.snapshot("m", "i-1"), b"nonsense")


def test_epochs_only_grow() -> None:
    """Also where the clock goes back."""
    last = new_epoch(0)
    assert new_epoch(last) > last
    assert new_epoch(last + 10**18) == last + 10**18 + 1
