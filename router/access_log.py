"""The access log: one JSON object a line for every request that is over; no prompts, no keys.

Probes and `OPTIONS`, which bring no key, have no line.

Lines are gathered and handed to a thread now and then, so that neither a slow disk nor a stalled
pipe holds up requests. While a write is under way at most `LINES_BYTES_MAX` wait; lines beyond
that are dropped and counted. A file that was renamed or removed is opened anew (log rotation needs
no signal); several processes may append to the same one, since each write is of whole lines. Where
a full disk has cut one, the next begins on a line of its own. A write that never ends, to a pipe
that nobody reads, does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from queue import SimpleQueue
from typing import Final

import msgspec

from router.tenants import NOBODY

logger = logging.getLogger(__name__)

LINES_BYTES_MAX: Final = 4_000_000
STDOUT: Final = "-"

_FLUSH_S: Final = 0.5
_CLOSE_S_MAX: Final = 2.0
"""How long a file may take for what is left when the log is closed."""
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
        self._torn = False  # the file ends in the middle of a line of ours
        self._writing = 0  # lines handed over
        self._written = asyncio.Event()
        self._orders: SimpleQueue[bytes | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        # A daemon, as an executor's threads are waited for when the process ends.
        self._thread = threading.Thread(target=self._work, name="access-log", daemon=True)
        self._thread.start()

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

    def refused(self, status: int) -> None:
        """Take an entry on a request that was answered before it was whole, or could be read."""
        ts = round(time.time(), 3)
        self.add(Entry(ts, "", NOBODY.name, "", "", status, "rejected:http"))

    async def close(self) -> None:
        """Write what is left, as far as the file takes it in time, and close the file."""
        if self._due is not None:
            self._due.cancel()
        try:
            async with asyncio.timeout(_CLOSE_S_MAX):
                while self._waiting or self._writing:
                    self._flush()
                    self._written.clear()
                    await self._written.wait()
        except TimeoutError:
            lost = self._writing + len(self._waiting)
            self.dropped += lost
            logger.error("the access log %s takes nothing: %d lines are lost", self._path, lost)
            return
        self._orders.put(None)
        self._thread.join()
        if self._path != STDOUT:
            os.close(self._fd)

    def _flush(self) -> None:
        """Hand over what waits, unless the write before is still under way."""
        self._due = None
        if self._writing:
            return
        lines, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._writing = len(lines)
        self._orders.put(b"".join(lines))

    def _was_written(self, lost: int) -> None:
        """Note the end of a write, and how many of its lines are lost."""
        self._writing = 0
        self.dropped += lost
        self._written.set()
        if self._waiting and self._due is None:
            self._due = self._loop.call_soon(self._flush)

    # In the log's own thread.

    def _work(self) -> None:
        """Write what is handed over, until there is nothing more."""
        while (data := self._orders.get()) is not None:
            lost = self._write(data)
            if self._loop.is_closed():
                return  # Nobody waited for this any more.
            self._loop.call_soon_threadsafe(self._was_written, lost)

    def _write(self, data: bytes) -> int:
        """Write whole lines; returns how many could not be written."""
        left = memoryview(data)
        try:
            if self._path != STDOUT and _was_moved(self._path, self._fd):
                moved, self._fd = self._fd, _open(self._path)
                os.close(moved)
                self._torn = False
            if self._torn:
                os.write(self._fd, b"\n")
                self._torn = False
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            if not self._failing:
                logger.error("the access log %s cannot be written: %s", self._path, error)
            self._failing = True
            done = len(data) - len(left)
            self._torn = self._torn or data[done - 1 : done] not in (b"", b"\n")
            return data.count(b"\n", done)
        self._failing = False
        return 0


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
