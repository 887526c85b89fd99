"""The access log: whole lines, rotation, and never a wait for a slow file."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router import access_log
from router.access_log import AccessLog, Entry
from tests.router.service_rig import ServiceRig, until


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


@pytest.mark.slow
async def test_a_line_that_a_full_disk_cut_spoils_no_other(tmp_path: Path) -> None:
    """What fits is there, what was cut is counted, and the next line begins anew."""
    path = tmp_path / "log"
    log = AccessLog(str(path))
    log.add(entry(0))
    await until(lambda: has(path, 1))
    size = path.stat().st_size
    with no_larger_files(2 * size + size // 2):
        for number in range(1, 5):
            log.add(entry(number))
        await until(lambda: log.dropped)
    log.add(entry(5))
    await log.close()
    first, second, cut, last = path.read_text().splitlines()
    assert [json.loads(line)["request_id"] for line in (first, second, last)] == ["r0", "r1", "r5"]
    assert first.startswith(cut[:6])
    assert log.dropped == 3


@contextmanager
def no_larger_files(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as if the disk were full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_does_not_keep_the_process(tmp_path: Path) -> None:
    """The log gives up after a while, counts what is lost, and the process ends."""
    program = (
        "import asyncio\n"
        "from router import access_log\n"
        "from tests.router.test_access_log import entry\n"
        "access_log._CLOSE_S_MAX = 0.1\n"
        "async def main():\n"
        "    log = access_log.AccessLog('-')\n"
        "    for number in range(1000): log.add(entry(number))\n"
        "    await log.close()\n"
        "    assert log.dropped == 1000\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.wait(20.0) == 0
        finally:
            process.kill()
        assert process.stderr is not None
        assert b"takes nothing: 1000 lines are lost" in process.stderr.read()


async def test_a_log_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    """A wrong path stops the start."""
    with pytest.raises(OSError, match="No such file"):
        AccessLog(str(tmp_path / "nowhere" / "log"))


@pytest.mark.slow
async def test_requests_that_cannot_be_read_have_a_line(tmp_path: Path) -> None:
    """Those that HTTP itself refuses, unlike connections that bring nothing."""
    path = tmp_path / "log"
    async with ServiceRig({"access_log": str(path)}) as rig:
        host, port = rig.process.address
        for sent in (b"what\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000, b""):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(sent)
            writer.write_eof()
            await reader.read()
            writer.close()
        await until(lambda: has(path, 2))
    found = [(line["status"], line["outcome"], line["endpoint"]) for line in lines(path)]
    assert found == [(400, "rejected:http", ""), (431, "rejected:http", "")]
