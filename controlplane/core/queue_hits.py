"""Requests that wait by how much of their prompts is where: who would find most on some instances.

Theory of operation. A request has a level for each change point of its hits: so many tokens, and
the mask of the instances that have them. Requests are sorted by tokens within each mask, so the
longest hit on some instances is the longest of the masks that share a bit with theirs. Most masks
are of one instance, a session's: those are looked up; the others, of system prompts and the like,
are few and looked at one by one.

Lists, not trees: a queue is bounded, and moving some thousand entries costs less than a node.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

Levels = tuple[tuple[int, int], ...]
Entry = tuple[int, int]
"""(-tokens, number)."""


class HitLines:
    """Numbers of requests, by their levels."""

    __slots__ = ("_lines", "_shared")

    def __init__(self, found: Iterable[tuple[int, Levels]] = ()) -> None:
        lines: dict[int, list[Entry]] = {}
        for number, levels in found:
            for tokens, mask in levels:
                lines.setdefault(mask, []).append((-tokens, number))
        for line in lines.values():
            line.sort()
        self._lines = lines
        self._shared = {mask: line for mask, line in lines.items() if mask & (mask - 1)}

    def add(self, number: int, levels: Levels) -> None:
        """Put a request in."""
        for tokens, mask in levels:
            line = self._lines.get(mask)
            if line is None:
                line = self._lines[mask] = []
                if mask & (mask - 1):
                    self._shared[mask] = line
            insort(line, (-tokens, number))

    def discard(self, number: int, levels: Levels) -> None:
        """Take a request out that is in with these levels."""
        for tokens, mask in levels:
            line = self._lines[mask]
            del line[bisect_left(line, (-tokens, number))]
            if not line:
                del self._lines[mask]
                self._shared.pop(mask, None)

    def longest(self, mask: int) -> Iterator[Entry]:
        """Yield each that hits something on a mask, the longest hit first, then the oldest.

        Complexity: O(masks) each; the first few are all that anybody asks for.
        """
        lines = self._on(mask)
        heads = [line[0] for line in lines]
        places = [0] * len(lines)
        seen: set[int] = set()
        while heads:
            first = min(heads)
            at = heads.index(first)
            places[at] += 1
            if places[at] < len(lines[at]):
                heads[at] = lines[at][places[at]]
            else:
                del heads[at], places[at], lines[at]
            if first[1] not in seen:
                seen.add(first[1])
                yield first

    def _on(self, mask: int) -> list[list[Entry]]:
        """Return the lines of masks that share a bit with one."""
        lines, shared = self._lines, self._shared
        found = [line for holders, line in shared.items() if holders & mask]
        if mask < 0 or mask.bit_count() > len(lines):
            return found + [
                line for holders, line in lines.items() if holders & mask and holders not in shared
            ]
        while mask:
            rest = mask & (mask - 1)
            line = lines.get(mask ^ rest)
            if line is not None:
                found.append(line)
            mask = rest
        return found

    def same_as(self, other: HitLines) -> bool:
        """Whether both hold the same requests; for tests."""
        return self._lines == other._lines and self._shared == other._shared
