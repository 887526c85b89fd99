"""Recordings: what the bus said, in a file that can be checked, exported and replayed elsewhere.

The file is `MAGIC`, then frames until its end. A frame is its length (u32, little endian), then a
msgpack array of that many bytes: subject, when the server stored it (Unix seconds), its place in
its stream, payload. A recording begins with the records of the instances and with snapshots of
their block sets, so that it says all by itself; then come the streams, in the order of their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from controlplane.bus.protocol import Record

MAGIC = b"multiplane recording 1\n"
FRAME_BYTES_MAX = 16_000_000


class RecordingError(Exception):
    """A file that is no recording, or is damaged; says where."""


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    subject: str
    at_wall_s: float
    seq: int
    payload: bytes


_DECODER = msgspec.msgpack.Decoder(_Frame)


class RecordingWriter:
    """Writes a recording; a context manager.

    Attributes:
        frames: written so far; `nbytes` their size.
    """

    def __init__(self, path: Path) -> None:
        """Create the file. Raises OSError."""
        self.frames = 0
        self.nbytes = len(MAGIC)
        self._file: IO[bytes] = path.open("wb")
        self._file.write(MAGIC)

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, record: Record) -> None:
        """Append a record. Raises OSError."""
        frame = msgspec.msgpack.encode(
            _Frame(record.subject, record.at_wall_s, record.seq, record.payload)
        )
        self._file.write(len(frame).to_bytes(4, "little") + frame)
        self.frames += 1
        self.nbytes += 4 + len(frame)


def read_recording(path: Path) -> Iterator[tuple[Record, int]]:
    """Yield the records of a file, and the place in bytes after each.

    A last frame that is cut short, as by a full disk, ends the recording.

    Raises:
        RecordingError: the file cannot be read, is no recording, or a frame makes no sense.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RecordingError(f"{path}: not a recording of `multiplane audit record`")
            place = len(MAGIC)
            while len(head := file.read(4)) == 4:
                length = int.from_bytes(head, "little")
                if length > FRAME_BYTES_MAX:
                    raise RecordingError(f"{path}: the frame at byte {place} is damaged")
                frame = file.read(length)
                if len(frame) < length:
                    return
                yield _record(frame, path, place), place + 4 + length
                place += 4 + length
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error


def _record(frame: bytes, path: Path, place: int) -> Record:
    try:
        found = _DECODER.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path}: the frame at byte {place} is damaged: {error}") from error
    return Record(found.subject, found.payload, found.seq, found.at_wall_s)
