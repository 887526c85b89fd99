"""The planes of `multiplane up` on this machine, so that other commands find them by themselves.

Each `up` leaves a file in a folder of its user, and holds a lock on it as long as it lives. The
kernel gives the lock back however it ends, so a file without one is a dead plane's: whoever meets
it removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR
from typing import Final

import msgspec

logger = logging.getLogger(__name__)

PLANES_MAX: Final = 32
"""Files looked at, the newest; nobody runs so many planes on one machine."""

_FILE_BYTES_MAX: Final = 4096


class RunningPlane(msgspec.Struct, frozen=True):
    """A plane that runs on this machine.

    Attributes:
        pid: process id of its `multiplane up`.
        nats: URL of its bus.
        clients: URL for clients.
        since_wall_s: when it started.
    """

    pid: int
    nats: str
    clients: str
    since_wall_s: float


def folder() -> Path:
    """Return where the files of this user's planes are: in memory, if the system has such a place.

    Source: XDG Base Directory Specification, `XDG_RUNTIME_DIR`.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir():
        return Path(given) / "multiplane"
    return Path(tempfile.gettempdir()) / f"multiplane-{os.getuid()}"


@contextmanager
def announced(plane: RunningPlane) -> Iterator[None]:
    """Let others find a plane until the context is left; says in a warning if that cannot be."""
    path = folder() / f"{plane.pid}.json"
    try:
        descriptor = _write(path, msgspec.json.encode(plane))
    except OSError as error:
        logger.warning(
            "other commands do not find this plane (%s): export MULTIPLANE_NATS=%s",
            error.strerror or error,
            plane.nats,
        )
        yield
        return
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)


def running_planes() -> list[RunningPlane]:
    """Return this user's living planes, the newest first; removes what dead ones left."""
    where = folder()
    if not _ours(where):
        return []
    newest = sorted(where.glob("*.json"), key=_changed_ns, reverse=True)[:PLANES_MAX]
    found = [plane for path in newest if (plane := _read(path)) is not None]
    return sorted(found, key=lambda plane: plane.since_wall_s, reverse=True)


def _write(path: Path, content: bytes) -> int:
    """Write a file that is locked before anybody sees it; returns the descriptor that locks it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _ours(path.parent):
        raise PermissionError(f"{path.parent} is not only ours")
    fresh = path.with_suffix(".new")
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, content)
        fresh.rename(path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read(path: Path) -> RunningPlane | None:
    """Return what a living plane's file says; None, and no file any more, if it is dead."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None  # it ended just now
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(os.read(descriptor, _FILE_BYTES_MAX), type=RunningPlane)
        return None
    else:
        with suppress(FileNotFoundError):
            path.unlink()
        return None
    finally:
        os.close(descriptor)


def _ours(where: Path) -> bool:
    """Whether a folder is there, no link, and nobody else could have put a file into it."""
    try:
        stat = where.lstat()
    except OSError:
        return False
    private = stat.st_uid == os.getuid() and not stat.st_mode & 0o022
    return S_ISDIR(stat.st_mode) and private


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
