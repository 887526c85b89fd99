"""Recording a plane: what its sets are now, then everything it says, into a file."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence

from controlplane.audit.heard import INSTANCES_PREFIX
from controlplane.audit.recording import RecordingWriter
from controlplane.audit.source import ROWS_S_MAX, recorded
from controlplane.bus.protocol import Bus, BusError, Record
from schemas import subjects
from schemas.bus import SnapshotRequest, decode_instance
from schemas.codec import RemoteError, encode

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 5.0


async def record(
    bus: Bus,
    writer: RecordingWriter,
    kinds: Sequence[str],
    *,
    model: str | None,
    wall: Callable[[], float],
    bytes_max: int,
    written: Callable[[Record], None] = lambda _: None,
) -> None:
    """Record until cancelled, or until the file has `bytes_max` bytes.

    Args:
        kinds: of subjects.
        wall: returns the time, Unix seconds.
        written: told of each record, for progress.

    Raises:
        BusError: the bus cannot be read.
        OSError: the file cannot be written.
    """
    since_wall_s = wall() - ROWS_S_MAX
    async for each in state(bus, model, wall, snapshots="kv" in kinds):
        writer.write(each)
        written(each)
    # From before the snapshots on, so that nothing between them and the streams is missing; and so
    # long before that decisions find the rows that they refer to.
    async for each in recorded(bus, kinds, model=model, since_wall_s=since_wall_s, follow=True):
        writer.write(each)
        written(each)
        if writer.nbytes >= bytes_max:
            return


async def state(
    bus: Bus, model: str | None, wall: Callable[[], float], *, snapshots: bool
) -> AsyncIterator[Record]:
    """Yield the records of the instances, and snapshots of their block sets, as of now.

    An instance whose sidecar does not answer is left out; its set is then known in part.
    """
    instances = await bus.bucket(subjects.INSTANCES)
    for key in await instances.keys():
        entry = await instances.get(key)
        if entry is None or entry.value is None:
            continue
        try:
            found, instance_id = subjects.parse_key(key)
            kv_events = decode_instance(entry.value).kv_events
        except RemoteError as error:
            logger.warning("unreadable instance record %s: %s", key, error)
            continue
        if model not in (None, found):
            continue
        yield Record(INSTANCES_PREFIX + key, entry.value, 0, wall())
        if snapshots and kv_events:
            for chunk in await _snapshot(bus, found, instance_id):
                yield Record(subjects.snapshot(found, instance_id), chunk, 0, wall())


async def _snapshot(bus: Bus, model: str, instance_id: str) -> list[bytes]:
    """Return the chunks of a snapshot; none if it did not come whole."""
    subject = subjects.snapshot(model, instance_id)
    question = encode(SnapshotRequest("audit"))
    try:
        return [
            chunk async for chunk in bus.request(subject, question, timeout_s=SNAPSHOT_TIMEOUT_S)
        ]
    except BusError as error:
        logger.warning("no snapshot of %s: %s", instance_id, error)
        return []
