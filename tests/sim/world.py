"""Simulated time: one heap of events, one seed, one trace.

Theory of operation. Everything that happens is a call on the heap, ordered by its time and then by
when it was asked for; nothing else advances time, and all chance comes from one generator. So a
seed fixes a whole run, and the hash over every call and every note (`trace`) is its fingerprint.

A `Process` is one incarnation of a program. What it asks for later is void once it is dead, and
waits while it is paused, as a stopped process's timers and sockets do. It has a monotonic clock
that begins anywhere, and a wall clock that may be wrong.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

Call = Callable[..., object]

WALL_S = 1_700_000_000.0
"""What a right wall clock says at the beginning."""

_STORY_MAX = 400


class World:
    """The clock, the heap and the source of chance.

    Attributes:
        now_s: simulated seconds since the beginning.
        story: the latest notes, for whoever has to understand a failure.
        events: calls made so far.
    """

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.events = 0
        self.story: deque[str] = deque(maxlen=_STORY_MAX)
        self._verbose = verbose
        self._heap: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._asked = 0
        self._hash = hashlib.sha256()

    def at(self, when_s: float, call: Call, *args: Any) -> None:
        """Make a call at a time; one that has passed means now."""
        self._asked += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._asked, call, args))

    def after(self, delay_s: float, call: Call, *args: Any) -> None:
        """Make a call some time from now."""
        self.at(self.now_s + delay_s, call, *args)

    def run(self, until_s: float) -> None:
        """Let time pass."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, number, call, args = heapq.heappop(heap)
            self.events += 1
            self._hash.update(struct.pack("<dQ", self.now_s, number))
            call(*args)
        self.now_s = until_s

    def note(self, text: str) -> None:
        """Write a line into the story and the trace."""
        line = f"{self.now_s:9.4f}  {text}"
        self.story.append(line)
        self._hash.update(line.encode())
        if self._verbose:
            print(line)

    def stamp(self, payload: bytes) -> None:
        """Let what was said become part of the trace."""
        self._hash.update(payload)

    @property
    def trace(self) -> str:
        """The fingerprint of all that has happened."""
        return self._hash.hexdigest()

    def chance(self, probability: float) -> bool:
        """True with a probability; draws nothing where the answer is certain."""
        return probability > 0.0 and self.rng.random() < probability


class Process:
    """One incarnation of a program.

    Attributes:
        alive: whether it runs at all; never again once it does not.
        paused: whether it is stopped, as by SIGSTOP or a machine that swaps.
        skew_s: by how much its wall clock is wrong.
    """

    def __init__(self, world: World, name: str, skew_s: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.skew_s = skew_s
        self.alive = True
        self.paused = False
        self._base_s = world.rng.uniform(0.0, 1e6)
        self._waiting: deque[tuple[Call, tuple[Any, ...]]] = deque()

    @property
    def clock_s(self) -> float:
        """Its monotonic clock."""
        return self._base_s + self.world.now_s

    @property
    def wall_s(self) -> float:
        """Its wall clock, Unix seconds."""
        return WALL_S + self.skew_s + self.world.now_s

    def after(self, delay_s: float, call: Call, *args: Any) -> None:
        """Make a call later, if this process then lives."""
        self.world.after(delay_s, self.do, call, *args)

    def do(self, call: Call, *args: Any) -> None:
        """Make a call now, or once the process goes on; never if it is dead."""
        if not self.alive:
            return
        if self.paused:
            self._waiting.append((call, args))
        else:
            call(*args)

    def every(self, period_s: float, call: Call) -> None:
        """Make a call again and again, the first time after a part of the period."""
        self.after(self.world.rng.uniform(0.0, period_s), self._again, period_s, call)

    def _again(self, period_s: float, call: Call) -> None:
        call()
        self.after(period_s, self._again, period_s, call)

    def kill(self) -> None:
        """Die at once, without a word."""
        self.alive = False
        self._waiting.clear()

    def pause(self) -> None:
        """Stop where it is."""
        self.paused = True

    def resume(self) -> None:
        """Go on with what came meanwhile, in order."""
        self.paused = False
        while self._waiting and self.alive and not self.paused:
            call, args = self._waiting.popleft()
            call(*args)
