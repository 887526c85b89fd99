"""The access log: whole lines, rotation, and never a wait for a slow file."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from router import access_log
from router.access_log import AccessLog, Entry
from tests.router.service_rig import until


def entry(number: int) -> Entry:
    """Return a recognisable entry."""
    return Entry(1.5, f"r{number}", "t", "m", "chat", 200, "ok", instance="a", attempts=1)


def lines(path: Path) -> list[dict[str, object]]:
    """Return the log's lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def has(path: Path, count: int) -> bool:
    """Whether a log has so many lines."""
    return path.exists() and len(lines(path)) >= count


async def test_every_entry_is_a_line(tmp_path: Path) -> None:
    """All fields are there, in order, and closing loses nothing."""
    path = tmp_path / "log"
    log = AccessLog(str(path))
    for number in range(1000):
        log.add(entry(number))
    await log.close()
    found = lines(path)
    assert [line["request_id"] for line in found] == [f"r{number}" for number in range(1000)]
    assert found[0]["cached_tokens"] is None
    assert list(found[0])[:7] == [
        *("ts", "request_id", "tenant", "model", "endpoint", "status", "outcome")
    ]
    assert (log.lines, log.dropped) == (1000, 0)


async def test_a_rotated_file_is_opened_anew(tmp_path: Path) -> None:
    """After a rename the lines go to a new file of the old name."""
    path = tmp_path / "log"
    log = AccessLog(str(path))
    log.add(entry(1))
    await until(lambda: has(path, 1))
    path.rename(tmp_path / "log.1")
    log.add(entry(2))
    await until(lambda: has(path, 1))
    await log.close()
    assert lines(path)[0]["request_id"] == "r2"
    assert lines(tmp_path / "log.1")[0]["request_id"] == "r1"


async def test_a_stalled_pipe_costs_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads: the loop goes on, what waits is bounded, the rest is counted as dropped."""
    monkeypatch.setattr(access_log, "LINES_BYTES_MAX", 10_000)
    monkeypatch.setattr(access_log, "_FLUSH_S", 0.0)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = AccessLog(str(path))
    began_s = time.monotonic()
    for number in range(3000):
        log.add(entry(number))
        if number % 100 == 0:
            await asyncio.sleep(0)
    assert time.monotonic() - began_s < 2.0
    assert log.dropped > 1000
    os.set_blocking(reader, True)
    closing = asyncio.create_task(log.close())
    received = bytearray()
    while read := await asyncio.to_thread(os.read, reader, 1 << 16):
        received += read
    await closing
    os.close(reader)
    assert received.endswith(b"\n")
    assert received.count(b"\n") == log.lines - log.dropped


async def test_a_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing write drops its lines, says so once, and recovers."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "log"
    log = AccessLog(str(path))
    path.unlink()
    folder.rmdir()
    for number in range(3):
        log.add(entry(number))
        log._flush()
        await until(lambda dropped=number + 1: log.dropped == dropped)
    assert caplog.text.count("cannot be written") == 1
    folder.mkdir()
    log.add(entry(4))
    await log.close()
    assert [line["request_id"] for line in lines(path)] == ["r4"]
    assert log.dropped == 3


async def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    """A wrong path stops the start."""
    with pytest.raises(OSError, match="No such file"):
        AccessLog(str(tmp_path / "nowhere" / "log"))
