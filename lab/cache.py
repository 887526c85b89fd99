"""Results kept in files named by what they are of: the same question is not computed twice.

A key covers the question and the code that answers it, so a change of either is another file. The
folder's size is bounded; what was not asked for longest goes first. A file that cannot be read is
as good as none.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

CODE = (
    *("lab", "controlplane/core", "controlplane/detector", "controlplane/predictor"),
    *("schemas", "sidecar"),
)
"""Folders whose code a result depends on."""


class Cache:
    """A folder of results.

    Attributes:
        folder: made when something is put there.
        bytes_max: what all files may take.
        hits: how often something was there.
        misses: how often nothing was.
    """

    def __init__(self, folder: Path, bytes_max: int = 2_000_000_000) -> None:
        self.folder = folder
        self.bytes_max = bytes_max
        self.hits = 0
        self.misses = 0

    def get(self, key: str) -> bytes | None:
        """Return what was put under a key."""
        path = self._path(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            self.misses += 1
            return None
        self.hits += 1
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep something, whole or not at all, and let the oldest go beyond the bound."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(key)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(data)
        part.replace(path)
        self._trim()

    def _trim(self) -> None:
        found = [(each.stat(), each) for each in self.folder.glob("*.result")]
        total = sum(status.st_size for status, _ in found)
        for status, path in sorted(found, key=lambda item: item[0].st_mtime):
            if total <= self.bytes_max:
                return
            path.unlink(missing_ok=True)
            total -= status.st_size

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.result"


def default_cache() -> Cache:
    """Return the cache of this user."""
    home = os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else Path.home() / ".cache"
    return Cache(base / "multiplane" / "lab")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Return what tells this state of the code from every other."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((root / folder).glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(*parts: str) -> str:
    """Return the key of something that `parts` describe, made by this code."""
    return hashlib.sha256("\n".join([code_digest(), *parts]).encode()).hexdigest()[:32]
