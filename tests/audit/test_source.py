"""Reading streams and files: in the order of time, as far as asked, and never more than bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.audit import source
from controlplane.audit.heard import Heard, Unreadable, understand
from controlplane.audit.record import record, state
from controlplane.audit.recording import (
    MAGIC,
    RecordingError,
    RecordingWriter,
    read_recording,
)
from controlplane.audit.source import recorded
from controlplane.bus.memory_bus import MemoryBroker, MemoryBus
from controlplane.bus.protocol import BusError, Record
from schemas import subjects
from schemas.bus import InstanceRecord, KvBatch, LoadReport, RouteBatch, SnapshotChunk
from schemas.codec import encode


class Clock:
    """A wall clock that moves when it is looked at."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time, a second later than before."""
        self.now_s += 1.0
        return self.now_s


async def _spoken(broker: MemoryBroker) -> MemoryBus:
    """Return a bus on which a little was said, at 101, 102, … s."""
    bus = broker.bus()
    for seq in range(3):
        bus.publish(subjects.kv("m", "a"), encode(KvBatch("a", 1, seq, 0.0)))
        bus.publish(subjects.route("m", "r"), encode(RouteBatch("r", 1, seq, 0.0)))
    bus.publish(subjects.kv("other", "b"), encode(KvBatch("b", 1, 0, 0.0)))
    await bus.flush()
    return bus


async def _all(records: AsyncIterator[Record]) -> list[tuple[float, str]]:
    return [(each.at_wall_s, each.subject.split(".")[2]) async for each in records]


async def test_streams_are_merged_by_time() -> None:
    """Whatever stream a message is in, it comes in its turn."""
    bus = await _spoken(MemoryBroker(wall=Clock()))
    found = await _all(recorded(bus, ("kv", "route")))
    assert [kind for _, kind in found] == ["kv", "route"] * 3 + ["kv"]
    assert [at_s for at_s, _ in found] == sorted(at_s for at_s, _ in found)


async def test_a_stretch_of_time_and_a_model() -> None:
    """Only what is asked for."""
    bus = await _spoken(MemoryBroker(wall=Clock()))
    assert len(await _all(recorded(bus, ("kv",), model="other"))) == 1
    found = await _all(recorded(bus, ("kv", "route"), since_wall_s=103.0, until_wall_s=104.0))
    assert [at_s for at_s, _ in found] == [103.0, 104.0]


async def test_following_goes_on_with_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent stream holds the others up once, not for every message."""
    monkeypatch.setattr(source, "LAG_S", 0.05)
    broker = MemoryBroker(wall=Clock())
    bus = await _spoken(broker)
    found: list[Record] = []
    came = asyncio.Event()

    async def read() -> None:
        async for each in recorded(bus, ("hotspot", "kv", "route"), follow=True):
            found.append(each)
            came.set()

    task = asyncio.create_task(read())
    speaker = broker.bus()
    for seq in range(3, 60):
        speaker.publish(subjects.kv("m", "a"), encode(KvBatch("a", 1, seq, 0.0)))
    async with asyncio.timeout(5.0):
        while len(found) < 64:
            came.clear()
            await came.wait()
    task.cancel()
    await asyncio.wait([task])


async def test_reading_what_is_not_there_fails() -> None:
    """With the bus's own error, not with silence."""
    bus = MemoryBroker().bus()
    with pytest.raises(BusError, match="no stream"):
        await _all(_of(bus, "MP_NOWHERE"))


def _of(bus: MemoryBus, stream: str) -> AsyncIterator[Record]:
    """Return a merge of one stream that has another name than it should."""

    class Renamed:
        def history(self, name: str, **options: object) -> AsyncIterator[Record]:
            return bus.history(stream, **options)  # type: ignore[arg-type]

    return recorded(Renamed(), ("kv",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("subject", "payload"),
    [("mp.v1.kv.m.a", b"\xc1"), ("elsewhere", b""), ("$KV.mp_instances.x", b"")],
)
def test_what_cannot_be_understood_says_why(subject: str, payload: bytes) -> None:
    """With its subject and place."""
    found = understand(Record(subject, payload, 7, 1.0))
    assert isinstance(found, Unreadable)
    assert (found.subject, found.seq) == (subject, 7)
    assert found.why


# --- recordings


def _records(count: int) -> list[Record]:
    return [
        Record(subjects.kv("m", "a"), encode(KvBatch("a", 1, seq, 0.5)), seq + 1, 1e9 + seq)
        for seq in range(count)
    ]


def test_a_recording_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Every record, and where it ends."""
    path = tmp_path / "x"
    with RecordingWriter(path) as writer:
        for each in _records(3):
            writer.write(each)
    found = list(read_recording(path))
    assert [each for each, _ in found] == _records(3)
    assert found[-1][1] == writer.nbytes == path.stat().st_size


def test_a_recording_that_was_cut_short_ends_early(tmp_path: Path) -> None:
    """As by a full disk: what is whole is read."""
    path = tmp_path / "x"
    with RecordingWriter(path) as writer:
        for each in _records(3):
            writer.write(each)
    path.write_bytes(path.read_bytes()[:-1])
    assert [each for each, _ in read_recording(path)] == _records(2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"something else", "not a recording"),
        (MAGIC + b"\xff\xff\xff\xff", f"the frame at byte {len(MAGIC)} is damaged"),
        (MAGIC + b"\x01\x00\x00\x00\xc1", "is damaged: "),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    """With the place of the damage."""
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=problem):
        list(read_recording(path))
    with pytest.raises(RecordingError, match="No such file"):
        list(read_recording(tmp_path / "nowhere"))


async def test_a_recording_begins_with_the_present_state(tmp_path: Path) -> None:
    """Records of the instances and snapshots of those that answer; then what is said."""
    broker = MemoryBroker(wall=Clock())
    bus = broker.bus()
    bucket = await bus.bucket(subjects.INSTANCES)
    for name, kv_events in (("a", True), ("silent", True), ("plain", False)):
        entry = InstanceRecord(name, "m", "http://h:1", 1, kv_events=kv_events)
        await bucket.put(subjects.key("m", name), encode(entry))
    await bucket.put("damaged", b"\xc1")
    other = InstanceRecord("b", "other", "http://h:1", 1)
    await bucket.put(subjects.key("other", "b"), encode(other))

    async def answer(_: bytes) -> AsyncIterator[bytes]:
        yield encode(SnapshotChunk("a", 1, 0, 0, 2, bytes(8)))
        yield encode(SnapshotChunk("a", 1, 0, 1, 2, b"", count=1))

    await bus.serve(subjects.snapshot("m", "a"), answer)
    path = tmp_path / "x"
    enough = asyncio.Event()
    with RecordingWriter(path) as writer:
        task = asyncio.create_task(
            record(
                bus,
                writer,
                ("kv", "load"),
                model="m",
                wall=Clock(),
                bytes_max=10_000,
                written=lambda _: enough.set() if writer.frames >= 8 else None,
            )
        )
        for seq in range(3):
            bus.publish(subjects.kv("m", "a"), encode(KvBatch("a", 1, seq, 0.0)))
        await asyncio.wait_for(enough.wait(), 10.0)
        task.cancel()
        await asyncio.wait([task])
    heard = [understand(each) for each, _ in read_recording(path)]
    kinds = [each.kind for each in heard if isinstance(each, Heard)]
    assert kinds == ["instance", "snapshot", "snapshot", "instance", "instance", "kv", "kv", "kv"]


async def test_a_recording_has_a_largest_size(tmp_path: Path) -> None:
    """It ends there by itself."""
    broker = MemoryBroker()
    bus = broker.bus()
    for seq in range(200):
        report = LoadReport("a", 1, seq, 0.0, 0, 0)
        bus.publish(subjects.load("m", "a"), encode(report))
    await bus.flush()
    with RecordingWriter(tmp_path / "x") as writer:
        async with asyncio.timeout(10.0):
            await record(bus, writer, ("load",), model=None, wall=lambda: 1.0, bytes_max=2_000)
        assert 2_000 <= writer.nbytes < 2_300


async def test_no_snapshots_are_asked_for_where_no_blocks_are_recorded() -> None:
    """Sidecars have other things to do."""
    bus = MemoryBroker().bus()
    bucket = await bus.bucket(subjects.INSTANCES)
    entry = InstanceRecord("a", "m", "http://h:1", 1)
    await bucket.put(subjects.key("m", "a"), encode(entry))
    found = [each async for each in state(bus, None, lambda: 1.0, snapshots=False)]
    assert len(found) == 1
