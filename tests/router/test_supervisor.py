"""The supervisor, with workers that do nothing but live and die as they are told."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from router import supervised, supervisor
from router.config import RouterConfig
from router.supervisor import Supervisor, WorkerError
from tests.router.service_rig import until

pytestmark = pytest.mark.slow  # each starts some processes

# Says that it serves; when it is to stop, it has something to finish, and says when it has.
WORKER = """#!{python} -IS
import json, os, sys, time
sys.stdin.readline()
def stop():
    time.sleep({busy_s})
    open("{folder}/%d" % os.getpid(), "w").close()
    sys.exit(0)
port = ["127.0.0.1", 1]
print(json.dumps({{"router_id": "w", "pid": os.getpid(), "address": port, "admin_address": port}}))
sys.stdout.flush()
sys.stdin.read()
stop()
"""

# Of two workers, one does not get any further.
SLOW_SECOND = """
sys.stdin.readline()
try: os.mkdir("{folder}/first")
except FileExistsError:
    open("{folder}/waiting", "w").close()
    time.sleep(60)
"""

# Says now and then that it lives, and serves once there is a file.
BEATING = """
sys.stdin.readline()
def beat():
    while True:
        os.write(1, bytes([10]))
        time.sleep(0.02)
import threading
threading.Thread(target=beat, daemon=True).start()
while not os.path.exists("{folder}/bus"): time.sleep(0.01)
"""

Executable = Callable[[float], Path]


@pytest.fixture
def executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Executable:
    """Make workers of a program that takes so long to stop; returns where it is."""
    python = sys.executable
    monkeypatch.setattr(supervisor, "WAIT_S_MIN", 0.02)
    monkeypatch.setattr(supervisor, "WAIT_S_MAX", 0.02)

    def make(busy_s: float) -> Path:
        path = tmp_path / "worker"
        path.write_text(WORKER.format(python=python, busy_s=busy_s, folder=tmp_path))
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return path

    return make


def config() -> RouterConfig:
    """Settings that a supervisor can pass on; port 0 is of no concern to these workers."""
    return RouterConfig(bus_url="nats://127.0.0.1:1", admin_port=0, stop_grace_s=5.0)


def pids(kept: Supervisor) -> list[int]:
    """The processes at a supervisor's places; 0 for none."""
    return [0 if place.worker is None else place.worker.ready.pid for place in kept.places]


def finished(folder: Path) -> set[str]:
    """The processes that have finished what they had to."""
    return {path.name for path in folder.glob("[0-9]*")}


async def test_a_machine_out_of_processes_costs_no_place(
    executable: Executable, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that dies while no process can be started is replaced once one can."""
    program = executable(0.0)
    kept = Supervisor(config(), 1)
    await kept.start()
    hidden = program.rename(program.with_name("hidden"))
    (before,) = pids(kept)
    os.kill(before, signal.SIGKILL)
    await until(lambda: caplog.text.count("no process can be started") > 1)
    hidden.rename(program)
    await until(lambda: pids(kept)[0])
    assert pids(kept) != [before]
    await kept.stop()
    assert "ended with status -9" in caplog.text


async def test_a_start_without_processes_is_an_error(executable: Executable) -> None:
    """It is told as what it is, and ends the supervisor."""
    executable(0.0).unlink()
    kept = Supervisor(config(), 2)
    with pytest.raises(WorkerError, match="no process can be started"):
        await kept.start()


async def test_a_stop_need_not_wait_for_the_start(
    executable: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a worker takes its time, as without a bus, a signal ends all that has begun."""
    program = executable(0.0)
    slow = program.read_text().replace("sys.stdin.readline()", SLOW_SECOND)
    program.write_text(slow.replace("{folder}", str(tmp_path)))
    stop = asyncio.Event()
    running = asyncio.create_task(supervised.supervise(config(), 2, "info", stop, lambda *_: None))
    await until(lambda: (tmp_path / "waiting").exists())
    stop.set()
    assert await asyncio.wait_for(running, 5.0) == 0
    await until(lambda: len(finished(tmp_path)) == 1)


def beating(program: Path, folder: Path) -> None:
    """Let workers say that they live, and wait for a bus that is not there yet."""
    text = program.read_text()
    program.write_text(
        text.replace("sys.stdin.readline()", BEATING.replace("{folder}", str(folder)))
    )


async def supervised_beats(program: Path, folder: Path, workers: int) -> Supervisor:
    """Return a supervisor that has started workers which say that they live."""
    beating(program, folder)
    (folder / "bus").touch()
    kept = Supervisor(config(), workers)
    await kept.start()
    return kept


async def test_workers_that_wait_for_the_bus_are_waited_for(
    executable: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes, as long as they say that they live; operators are told."""
    monkeypatch.setattr(supervisor, "SILENCE_S", 0.2)
    beating(executable(0.0), tmp_path)
    kept = Supervisor(config(), 1)
    starting = asyncio.create_task(kept.start())
    patience_s = supervisor.SILENCE_S * supervisor.STARTING_SILENCES_MAX
    done, _ = await asyncio.wait([starting], timeout=2 * patience_s)
    assert not done
    assert not kept.started
    (tmp_path / "bus").touch()
    await asyncio.wait_for(starting, 5.0)
    assert kept.started
    assert pids(kept)[0]
    await kept.stop()


async def test_a_worker_that_says_nothing_does_not_start(
    executable: Executable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is stuck before it serves is killed, and is an error."""
    monkeypatch.setattr(supervisor, "SILENCE_S", 0.05)
    program = executable(0.0)
    silent = 'time.sleep(60) if "json" else sys.stdin.readline()'
    program.write_text(program.read_text().replace("sys.stdin.readline()", silent))
    with pytest.raises(WorkerError, match="did not start") as failure:
        await Supervisor(config(), 1).start()
    assert failure.value.status == -signal.SIGKILL


async def test_a_worker_that_is_stuck_is_replaced(
    executable: Executable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that has not ended, but does not run either, would keep its share of the port."""
    monkeypatch.setattr(supervisor, "SILENCE_S", 0.3)
    kept = await supervised_beats(executable(0.0), tmp_path, 2)
    stuck, well = pids(kept)
    os.kill(stuck, signal.SIGSTOP)
    await until(lambda: pids(kept)[0] not in (0, stuck))
    assert pids(kept)[1] == well
    assert caplog.text.count("is stuck, and is killed") == 1
    assert kept.places[0].restarts == 1
    await kept.stop()


async def test_a_stall_of_the_whole_machine_costs_no_worker(
    executable: Executable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A supervisor that was stalled, too, hears its workers out before it kills any."""
    monkeypatch.setattr(supervisor, "SILENCE_S", 0.3)
    kept = await supervised_beats(executable(0.0), tmp_path, 1)
    before = pids(kept)
    os.kill(before[0], signal.SIGSTOP)
    patience_s = supervisor.SILENCE_S * supervisor.SILENCES_MAX
    select.select([], [], [], 2 * patience_s)  # the stall
    os.kill(before[0], signal.SIGCONT)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(until(lambda: pids(kept) != before), 1.5 * patience_s)
    assert "stuck" not in caplog.text
    await kept.stop()


async def test_a_stop_waits_for_those_that_were_replaced(
    executable: Executable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that still has streams when its supervisor is stopped finishes them, too."""
    executable(0.4)
    kept = Supervisor(config(), 1)
    await kept.start()
    (before,) = pids(kept)
    renewing = asyncio.create_task(kept.renew())
    await until(lambda: pids(kept) != [before])
    (after,) = pids(kept)
    renewing.cancel()
    await kept.stop()
    assert finished(tmp_path) == {str(before), str(after)}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_successor_that_dies_is_replaced_at_once(
    executable: Executable, tmp_path: Path
) -> None:
    """Also while the worker before it still has streams to finish."""
    executable(2.0)
    kept = Supervisor(config(), 1)
    await kept.start()
    (before,) = pids(kept)
    renewing = asyncio.create_task(kept.renew())
    await until(lambda: pids(kept) != [before])
    (successor,) = pids(kept)
    os.kill(successor, signal.SIGKILL)
    await until(lambda: pids(kept)[0] not in (0, successor))
    assert not finished(tmp_path)
    (after,) = pids(kept)
    await asyncio.gather(renewing, kept.stop())
    assert finished(tmp_path) == {str(before), str(after)}


async def test_a_signal_during_a_renewal_is_not_lost(
    executable: Executable, tmp_path: Path
) -> None:
    """Whoever asks while workers are replaced gets them replaced once more, and only once."""
    executable(0.2)
    stop, seen = asyncio.Event(), list[int]()
    kept: list[Supervisor] = []
    running = asyncio.create_task(
        supervised.supervise(config(), 1, "info", stop, lambda found, _: kept.append(found))
    )
    await until(lambda: kept)

    def another() -> bool:
        seen.extend(pid for pid in pids(kept[0]) if pid not in seen)
        return len(seen) == wanted

    wanted = 1
    await until(another)
    os.kill(os.getpid(), signal.SIGHUP)
    wanted = 2
    await until(another)
    for _ in range(5):
        os.kill(os.getpid(), signal.SIGHUP)
    wanted = 3
    await until(another)
    await until(lambda: len(finished(tmp_path)) == 2)
    for _ in range(5):
        await asyncio.sleep(0)  # in which a third renewal would begin
    assert kept[0]._generation == 2
    stop.set()
    assert await running == 0
