"""Requests from recordings of the bus (`multiplane audit record`): one's own traffic, to replay.

Routers tell how long each prompt and answer was and which block its prompt ended with; sidecars
tell which block followed which. That is all that a replay needs, and nobody's words are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from controlplane.audit.heard import understand
from controlplane.audit.recording import RecordingError, read_recording
from controlplane.audit.trace import TRACE_BLOCK_TOKENS, TraceLine, TraceWriter

BLOCK_TOKENS = TRACE_BLOCK_TOKENS


class NothingRecorded(Exception):
    """A recording without a request that could be replayed; says what there was instead."""


def recorded_requests(path: Path) -> Iterator[TraceLine]:
    """Yield the requests of a recording, each once its blocks are known.

    Raises:
        RecordingError: the file cannot be read or is damaged.
        NothingRecorded: there is no request in it.
    """
    writer = TraceWriter()
    for record, _ in read_recording(path):
        yield from writer.hear(understand(record))
    yield from writer.end()
    if not writer.counts["requests"]:
        seen = [f"{name}: {count:,}" for name, count in writer.counts.items() if count]
        raise NothingRecorded(
            f"no request whose tokens are known ({'; '.join(seen) or 'no decision at all'})"
        )


__all__ = ["BLOCK_TOKENS", "NothingRecorded", "RecordingError", "recorded_requests"]
