"""What is remembered of classes that became hotspots: flapping, giving up, alarms that persist.

Theory of operation. A class that was ever barred is in trouble until its alarm has been quiet for
`memory_s`. Meanwhile

- raising it anew takes a longer streak, twice as long for each time it was raised before, up to
  `damping_max` times: a class at the boundary does not flap;
- one whose verdict was given up (it stood, and the copies did not grow in number) rests: barring
  it again at once would not help either;
- an alarm that was never quiet for `calm_s` since `persist_s` ago persists. That spreading does not
  cure it is a reason to stop trusting locality for a while: `PolicySwitch`.

    off ── classes whose alarms persist make ≥ share_min of the requests ──> on
    on ── for stay_s at least, and no class in trouble was alarmed for calm_s ──> off

Round robin gives up everybody's cache hits, hence `share_min`: one small class is not worth it.
"""

from __future__ import annotations

import msgspec


class TroubleConfig(msgspec.Struct, frozen=True):
    """How long trouble is remembered, and when it persists.

    Attributes:
        memory_s: quiet after which a class is as any other again.
        damping_max: largest factor on the streak of a class that was raised before.
        rest_s: how long a class is not raised again after its verdict was given up.
        classes_max: classes remembered; the one that was raised longest ago is forgotten first.
        persist_s: an alarm this old persists.
        calm_s: quiet that ends an alarm's age, and that the switch waits for.
        share_min: share of requests in persisting classes that turns the switch on; above 1: never.
        stay_s: how long the switch stays on at least.
    """

    memory_s: float = 60.0
    damping_max: int = 8
    rest_s: float = 60.0
    classes_max: int = 256
    persist_s: float = 60.0
    calm_s: float = 15.0
    share_min: float = 0.25
    stay_s: float = 60.0

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: names the setting.
        """
        for name in ("memory_s", "rest_s", "persist_s", "calm_s", "stay_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")
        for name in ("damping_max", "classes_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        if not self.share_min > 0:
            raise ValueError(f"share_min must be positive: {self.share_min}")


class _Trouble(msgspec.Struct):
    """One class in trouble.

    Attributes:
        above: keys of the shorter prefixes that it extends.
        since_s: since when its alarm has not been quiet for `calm_s`.
        last_s: when it was last alarmed.
        raises: how often it was raised.
        share: of requests, when it was last alarmed.
    """

    above: tuple[int, ...]
    since_s: float
    last_s: float
    raises: int = 0
    share: float = 0.0
    rest_until_s: float = float("-inf")


class Troubles:
    """The classes of one model that are in trouble, by key."""

    def __init__(self, config: TroubleConfig) -> None:
        self.config = config
        self._troubles: dict[int, _Trouble] = {}

    def __len__(self) -> int:
        return len(self._troubles)

    def raised(self, key: int, above: tuple[int, ...], now_s: float) -> None:
        """Note that a class was raised."""
        before = self._troubles.pop(key, None)
        trouble = before or _Trouble(above, now_s, now_s)
        trouble.raises += 1
        self._troubles[key] = trouble
        while len(self._troubles) > self.config.classes_max:
            del self._troubles[next(iter(self._troubles))]

    def alarmed(self, key: int, requests: int, total: int, now_s: float) -> None:
        """Note that a class is alarmed now; nothing if it was never raised."""
        trouble = self._troubles.get(key)
        if trouble is None:
            return
        if now_s - trouble.last_s > self.config.calm_s:
            trouble.since_s = now_s
        trouble.last_s = now_s
        trouble.share = requests / total

    def gave_up(self, key: int, now_s: float) -> None:
        """Note that barring a class did not help."""
        trouble = self._troubles.get(key)
        if trouble is not None:
            trouble.rest_until_s = now_s + self.config.rest_s

    def factor(self, key: int) -> int:
        """Return by how much longer a class's streak has to be than the first time."""
        trouble = self._troubles.get(key)
        if trouble is None:
            return 1
        doublings = min(trouble.raises, self.config.damping_max.bit_length())
        return min(1 << doublings, self.config.damping_max)

    def resting(self, key: int, now_s: float) -> bool:
        """Say whether a class must not be raised yet."""
        trouble = self._troubles.get(key)
        return trouble is not None and now_s < trouble.rest_until_s

    def expire(self, now_s: float) -> None:
        """Forget the classes that have been quiet for long."""
        quiet_s = now_s - self.config.memory_s
        for key in [key for key, each in self._troubles.items() if each.last_s <= quiet_s]:
            del self._troubles[key]

    def persisting_share(self, now_s: float) -> float:
        """Return the share of requests in classes whose alarm persists.

        A class within another that counts already is left out, so that nothing counts twice.
        """
        config = self.config
        persisting = {
            key: each
            for key, each in self._troubles.items()
            if now_s - each.last_s <= config.calm_s
            and each.last_s - each.since_s >= config.persist_s
        }
        return sum(
            each.share for each in persisting.values() if persisting.keys().isdisjoint(each.above)
        )

    def last_alarm_s(self) -> float:
        """Return when any class in trouble was last alarmed; −∞ if none is in trouble."""
        return max((each.last_s for each in self._troubles.values()), default=float("-inf"))


class PolicySwitch:
    """Whether a model should be routed by round robin for a while.

    Attributes:
        on: whether it should.
        share: of requests in classes whose alarm persists, as of the last `update`.
    """

    def __init__(self, config: TroubleConfig) -> None:
        self.config = config
        self.on = False
        self.share = 0.0
        self._since_s = float("-inf")

    def update(self, troubles: Troubles, now_s: float) -> bool:
        """Look at the troubles; return whether the switch turned."""
        self.share = troubles.persisting_share(now_s)
        before = self.on
        if not self.on:
            self.on = self.share >= self.config.share_min
            self._since_s = now_s
        elif now_s - self._since_s >= self.config.stay_s:
            self.on = now_s - troubles.last_alarm_s() <= self.config.calm_s
        return self.on is not before

    def adopt(self, on: bool, now_s: float) -> None:
        """Take over what another detector had decided; its stay begins anew."""
        if on is not self.on:
            self.on, self._since_s = on, now_s
