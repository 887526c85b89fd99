"""Files that are read anew when they change: keys, tenants, certificates.

A look at each file now and then is enough, works on every file system, and sees a file that was
replaced or whose link was moved (as mounted secrets are). A new content that cannot be used changes
nothing: the old one stays in force, and the fault is logged and counted until it is mended.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

LOOK_S = 1.0

_Look = tuple[tuple[int, int, int], ...]


class WatchedFiles:
    """Calls a function when one of its files has changed.

    Attributes:
        loads: contents taken into use after the first.
        failures: contents that could not be used.
    """

    def __init__(self) -> None:
        self.loads = 0
        self.failures = 0
        self._watched: list[tuple[tuple[str, ...], Callable[[], None], _Look]] = []

    def add(self, paths: Sequence[str], load: Callable[[], None]) -> None:
        """Load now, and again whenever a file changes.

        Args:
            paths: what `load` reads.
            load: raises ValueError or OSError for a content that cannot be used, and then must have
                changed nothing.

        Raises:
            ValueError, OSError: from this first `load`.
        """
        seen = _look(paths)
        load()
        self._watched.append((tuple(paths), load, seen))

    def look(self) -> None:
        """Load what has changed since the last look."""
        for index, (paths, load, before) in enumerate(self._watched):
            seen = _look(paths)
            if seen == before:
                continue
            self._watched[index] = (paths, load, seen)
            try:
                load()
            except (ValueError, OSError) as error:
                self.failures += 1
                logger.error("%s changed, but the old content stays: %s", ", ".join(paths), error)
            else:
                self.loads += 1
                logger.info("%s: the new content is in use", ", ".join(paths))

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()


def _look(paths: Sequence[str]) -> _Look:
    """Return what tells one content of some files from another."""
    return tuple(_identity(path) for path in paths)


def _identity(path: str) -> tuple[int, int, int]:
    try:
        stat = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)
