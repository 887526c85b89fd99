"""The access log: one JSON object a line for every request that is over; no prompts, no keys.

Lines are gathered and handed to a thread now and then, so that neither a slow disk nor a stalled
pipe holds up requests. While a write is under way at most `LINES_BYTES_MAX` wait; lines beyond
that are dropped and counted. A file that was renamed or removed is opened anew (log rotation needs
no signal); several processes may append to the same one, since each write is of whole lines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

logger = logging.getLogger(__name__)

LINES_BYTES_MAX: Final = 4_000_000
STDOUT: Final = "-"

_FLUSH_S: Final = 0.5
_encode = msgspec.json.Encoder().encode


class Entry(msgspec.Struct, frozen=True):
    """One request, as the log shows it.

    Attributes:
        ts: when it ended, Unix seconds.
        model: its name on the bus; empty if the request named none that exists.
        status: what the client was answered with; 0 if it left before.
        outcome: `ok`, `client_gone`, `timeout`, `upstream_error`, or `rejected:` and why.
        instance: the last one tried; empty if none was.
        attempts: instances tried.
        prompt_tokens: exact, or an estimate where `exact` is false.
        hit_tokens: what the index promised; `cached_tokens` is what the engine reported.
        queue_s: waited for an instance with room.
    """

    ts: float
    request_id: str
    tenant: str
    model: str
    endpoint: str
    status: int
    outcome: str
    instance: str = ""
    attempts: int = 0
    exact: bool = False
    prompt_tokens: int = 0
    hit_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    duration_s: float = 0.0
    queue_s: float = 0.0


class AccessLog:
    """Writes entries to a file, or to standard output; `close` it.

    Attributes:
        lines: entries taken.
        dropped: entries lost because writing was too slow, or failed.
    """

    def __init__(self, path: str) -> None:
        """Open the log.

        Args:
            path: a file to append to, or `-`.

        Raises:
            OSError: it cannot be opened for writing.
        """
        self.lines = 0
        self.dropped = 0
        self._path = path
        self._fd = _open(path)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._due: asyncio.Handle | None = None
        self._failing = False
        self._writing: asyncio.Future[bool] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="access-log")
        self._loop = asyncio.get_running_loop()

    def add(self, entry: Entry) -> None:
        """Take an entry; it is written within half a second if the file keeps up."""
        self.lines += 1
        line = _encode(entry) + b"\n"
        if self._waiting_bytes + len(line) > LINES_BYTES_MAX:
            self.dropped += 1
            return
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        if self._due is None:
            self._due = self._loop.call_later(_FLUSH_S, self._flush)

    async def close(self) -> None:
        """Write what is left, and close the file."""
        if self._due is not None:
            self._due.cancel()
        while self._waiting or self._writing is not None:
            if self._writing is None:
                self._flush()
            assert self._writing is not None
            await asyncio.wait([self._writing])
        self._thread.shutdown()
        if self._path != STDOUT:
            os.close(self._fd)

    def _flush(self) -> None:
        """Hand over what waits, unless the write before is still under way."""
        self._due = None
        if self._writing is not None:
            return
        lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._writing = self._loop.run_in_executor(self._thread, self._write, b"".join(lines))
        self._writing.add_done_callback(lambda done: self._written(done, len(lines)))

    def _written(self, done: asyncio.Future[bool], lines: int) -> None:
        self._writing = None
        if not done.result():
            self.dropped += lines
        if self._waiting:
            self._due = self._loop.call_soon(self._flush)

    def _write(self, data: bytes) -> bool:
        """Write whole lines, in the log's own thread; returns whether it could."""
        try:
            if self._path != STDOUT and _was_moved(self._path, self._fd):
                moved, self._fd = self._fd, _open(self._path)
                os.close(moved)
            left = memoryview(data)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            if not self._failing:
                logger.error("the access log %s cannot be written: %s", self._path, error)
            self._failing = True
            return False
        self._failing = False
        return True


def _open(path: str) -> int:
    if path == STDOUT:
        return sys.stdout.fileno()
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _was_moved(path: str, fd: int) -> bool:
    """Whether a path no longer names the file that is open."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return True
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)
