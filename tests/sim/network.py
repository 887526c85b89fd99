"""Links between processes, with everything that can go wrong on them.

A link carries messages both ways with a delay each. It may lose them, bring them twice, or let
later ones overtake, which no single connection does but a bus with several ways may. While it is
down nothing passes: what was on its way is lost, unless it was sent `patiently`, as over TCP: then
it waits for the link to return.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from tests.sim.world import Call, World


class Link:
    """One path between two ends.

    Attributes:
        up: whether anything passes.
        delay_s: shortest and longest delay of a message.
        loss: chance that a message is lost.
        twice: chance that it comes again, later.
        overtake: chance that it takes so long that later ones come first.
        lag_s: further delay of patient messages, at most, by way.
        lost: messages that were lost.
    """

    def __init__(self, world: World, name: str, delay_s: tuple[float, float]) -> None:
        self.world = world
        self.name = name
        self.up = True
        self.lost = 0
        self.lag_s: dict[str, float] = {}
        self._usual_delay_s = delay_s
        self._cuts = 0
        self._last_s: dict[str, float] = {}
        self._patient: dict[str, deque[tuple[Call, tuple[Any, ...]]]] = {}
        self.calm()

    def calm(self) -> None:
        """Be a good link, apart from being up or down."""
        self.delay_s = self._usual_delay_s
        self.loss = self.twice = self.overtake = 0.0

    def carry(self, way: str, call: Call, *args: Any) -> None:
        """Send a message that may get lost: make `call` at the other end, perhaps.

        Args:
            way: messages of one way stay in order, unless one is overtaken.
        """
        world = self.world
        if not self.up or world.chance(self.loss):
            self.lost += 1
            return
        when_s = world.now_s + world.rng.uniform(*self.delay_s)
        if world.chance(self.overtake):
            when_s += world.rng.uniform(0.0, 0.3)
        else:
            when_s = self._last_s[way] = max(when_s, self._last_s.get(way, 0.0))
        world.at(when_s, self._arrive, self._cuts, call, args)
        if world.chance(self.twice):
            world.at(when_s + world.rng.uniform(0.0, 0.3), self._arrive, self._cuts, call, args)

    def _arrive(self, cuts: int, call: Call, args: tuple[Any, ...]) -> None:
        if cuts == self._cuts:
            call(*args)
        else:
            self.lost += 1

    def carry_patiently(self, way: str, call: Call, *args: Any) -> None:
        """Send a message that comes exactly once and in order, if the link ever returns."""
        self._patient.setdefault(way, deque()).append((call, args))
        if self.up:
            self._forward(way)

    def _forward(self, way: str) -> None:
        when_s = self.world.now_s + self.world.rng.uniform(*self.delay_s)
        if way in self.lag_s:
            when_s += self.world.rng.uniform(0.0, self.lag_s[way])
        when_s = self._last_s[way] = max(when_s, self._last_s.get(way, 0.0))
        self.world.at(when_s, self._arrive_patiently, self._cuts, way)

    def _arrive_patiently(self, cuts: int, way: str) -> None:
        if cuts == self._cuts:  # else the message is still the first of those that wait
            call, args = self._patient[way].popleft()
            call(*args)

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self.up = False
        self._cuts += 1

    def heal(self) -> None:
        """Let messages pass again, those that waited first."""
        if self.up:
            return
        self.up = True
        for way, waiting in self._patient.items():
            for _ in waiting:
                self._forward(way)
