"""Files that are read anew when they change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.watched_files import WatchedFiles


class Reader:
    """Reads a file of numbers, and remembers the last good content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.value = 0
        self.loads = 0

    def load(self) -> None:
        """Read; a content that is no number raises ValueError."""
        self.loads += 1
        self.value = int(self.path.read_text())


def test_a_change_is_taken_into_use(tmp_path: Path) -> None:
    """Rewriting, replacing and moving a link are changes; looking alone is none."""
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("1")
    other.write_text("222")
    link = tmp_path / "link"
    link.symlink_to(path)
    reader, files = Reader(link), WatchedFiles()
    files.add([str(link)], reader.load)
    files.look()
    assert (reader.value, reader.loads) == (1, 1)
    path.write_text("33")
    files.look()
    assert reader.value == 33
    link.unlink()
    link.symlink_to(other)
    files.look()
    assert reader.value == 222
    new = tmp_path / "new"
    new.write_text("444")
    os.replace(new, other)
    files.look()
    assert (reader.value, files.loads, files.failures) == (444, 3, 0)


def test_a_bad_content_changes_nothing(tmp_path: Path) -> None:
    """The old content stays in force, the fault is counted once, and the mended file is used."""
    path = tmp_path / "a"
    path.write_text("1")
    reader, files = Reader(path), WatchedFiles()
    files.add([str(path)], reader.load)
    path.write_text("nonsense")
    files.look()
    files.look()
    assert (reader.value, files.failures) == (1, 1)
    path.unlink()
    files.look()
    assert (reader.value, files.failures) == (1, 2)
    path.write_text("55")
    files.look()
    assert (reader.value, files.loads) == (55, 1)


def test_a_bad_first_content_is_an_error(tmp_path: Path) -> None:
    """At the start there is nothing to fall back to."""
    path = tmp_path / "a"
    path.write_text("nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        WatchedFiles().add([str(path)], Reader(path).load)
