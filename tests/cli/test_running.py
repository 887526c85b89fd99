"""Planes of `multiplane up` on this machine: found while they live, and only by their owner."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane import running
from controlplane.running import PLANES_MAX, RunningPlane, announced, running_planes
from tests.cli.commands import call

NATS = "nats://127.0.0.1:1"

LEAVES_A_FILE = f"""
import os
from controlplane.running import RunningPlane, announced
with announced(RunningPlane(os.getpid(), {NATS!r}, "http://x", 1.0)):
    print("there", flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files are in a test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "multiplane"


def plane(pid: int = 1, nats: str = NATS, since_wall_s: float = 1.0) -> RunningPlane:
    """Return a plane."""
    return RunningPlane(pid, nats, "http://127.0.0.1:8000", since_wall_s)


def test_a_plane_is_found_while_it_is_announced(folder: Path) -> None:
    """And leaves nothing behind; the newest of several comes first."""
    assert running_planes() == []
    with announced(plane(1, since_wall_s=5.0)):
        with announced(plane(2, since_wall_s=7.0)):
            assert [each.pid for each in running_planes()] == [2, 1]
        assert running_planes() == [plane(1, since_wall_s=5.0)]
    assert running_planes() == []
    assert list(folder.iterdir()) == []


def test_what_a_killed_plane_leaves_is_removed(folder: Path) -> None:
    """A process id that another process got meanwhile does not matter: the lock is gone."""
    subprocess.run([sys.executable, "-c", LEAVES_A_FILE], check=False, timeout=30)
    assert len(list(folder.iterdir())) == 1
    assert running_planes() == []
    assert list(folder.iterdir()) == []


def test_the_folder_of_somebody_else_is_not_believed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who could write there could send commands, and their passwords, to another bus."""
    with announced(plane()):
        folder.chmod(0o777)
        assert running_planes() == []
        with caplog.at_level(logging.WARNING), announced(plane(2)):
            pass
        assert f"export MULTIPLANE_NATS={NATS}" in caplog.text
        folder.chmod(0o700)
        assert [each.pid for each in running_planes()] == [1]


def test_a_link_in_place_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """Nor a link in place of a file."""
    real = tmp_path / "real"
    folder.symlink_to(real)
    real.mkdir(mode=0o700)
    with announced(plane()):
        assert running_planes() == []
    folder.unlink()
    with announced(plane()):
        (folder / "2.json").symlink_to(folder / "1.json")
        assert [each.pid for each in running_planes()] == [1]


def test_a_file_that_makes_no_sense_is_passed_over(folder: Path) -> None:
    """Whatever holds its lock."""
    folder.mkdir(mode=0o700)
    with (folder / "3.json").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("nonsense")
        file.flush()
        with announced(plane()):
            assert [each.pid for each in running_planes()] == [1]


def test_only_so_many_files_are_looked_at(folder: Path) -> None:
    """The newest; dead ones among them go, and the others wait for their turn."""
    folder.mkdir(mode=0o700)
    for number in range(PLANES_MAX + 3):
        path = folder / f"{number}.json"
        path.touch(mode=0o600)
        os.utime(path, (number, number))
    assert running_planes() == []
    assert {path.name for path in folder.iterdir()} == {"0.json", "1.json", "2.json"}


def test_without_a_place_for_such_files_there_is_one_of_this_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The temporary folder is everybody's, so the folder in it has the user's number."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert running.folder() == tmp_path / f"multiplane-{os.getuid()}"
    with announced(plane()):
        assert len(running_planes()) == 1
        assert running.folder().stat().st_mode & 0o777 == 0o700


def test_commands_speak_to_the_plane_that_runs_here_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flag or the variable comes first, and then nothing is said."""
    with announced(plane(7)):
        assert call(monkeypatch, "instances") == 1
        said = capsys.readouterr().err
        assert f"the plane of `multiplane up` here: process 7, --nats {NATS}" in said
        assert f"no NATS server answers at {NATS}" in said
        with announced(plane(8, since_wall_s=2.0)):
            call(monkeypatch, "routers")
            assert "the newest of 2 planes of `multiplane up`" in capsys.readouterr().err
        call(monkeypatch, "instances", "--nats", "nats://127.0.0.1:2")
        said = capsys.readouterr().err
        assert "no NATS server answers at nats://127.0.0.1:2" in said
        assert "multiplane up" not in said
        monkeypatch.setenv("MULTIPLANE_NATS", "nats://127.0.0.1:3")
        call(monkeypatch, "instances")
        assert "no NATS server answers at nats://127.0.0.1:3" in capsys.readouterr().err


def test_a_service_never_joins_a_plane_that_happens_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what it takes instead, and where the other one is."""
    with announced(plane(7)):
        assert call(monkeypatch, "router", "--queue", "edf") == 2  # what it would not start with
        said = capsys.readouterr().err
    assert "taking --nats nats://127.0.0.1:4222" in said
    assert f"process 7, has its bus at {NATS}" in said
