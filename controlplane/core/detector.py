"""The hotspot detector of one model: routed requests in, verdicts out.

Theory of operation. A class is the requests that share a prefix, named by the hash of its last
block; a request belongs to one class at each of `CLASS_DEPTHS`. Routers say with every decision how
many instances hold each of its classes (|M| of N) and the best scores inside and outside M; nothing
else is needed. Each class is in one of three states:

    state      means                              leaves it when
    --------   --------------------------------   ----------------------------------------------
    calm       nothing is kept but its count      its share outgrows its holders → alarmed
    alarmed    the last request found x > |M|/N   the next does not, or too few are left → calm
                                                  the streak reaches 2|M| → standing
    standing   a verdict bars its holders         the share no longer outgrows them, or it falls
                                                  silent, or barring does not help → calm

1. Alarm. At each request of the class, from its own |M| and N and the window's counts, itself
   included: `outgrows` and at least `requests_min` requests. In integers.
2. Streak. While alarmed, requests of the class in a row of which M still has the better (or an
   equally good) best score. Better outside resets it. A decision that was no choice says nothing:
   nobody outside M could take it, or the policy does not look at caches. With nobody inside M able
   to take it, it went outside: that resets. Requests of other classes neither add nor reset.
3. At 2|M| in a row, |M| as of that request, the verdict is raised: the first request that it can
   divert is the one after. From then on routers bar the present holders, so each diversion adds a
   copy, |M| grows and the alarm ends (controlled replication).

Nested classes. Requests with a long common prefix share all shorter ones, and the classes of all
depths alarm at once. One of them is the cause: a request counts in the streak of its deepest class
that is alarmed or standing, and in no other. So the most specific class is raised; what is shorter
is raised by those of its requests only that no deeper class explains. A class under a standing
shorter one makes no streak either: its holders are barred, so M has no score.

Leading. Several detectors see the same requests and keep the same counts and streaks; only the one
with `leading` set decides. The others `adopt` and `forget` what it decides, and go on from there
when they take over. A detector that has just started has an empty window: until it has watched for
a whole one, verdicts that it adopted are not cleared for want of requests, nor judged on a handful.

Bounds: the window's requests, `standing_max` verdicts, and at most
depths × requests_max / requests_min alarmed classes, since an alarm needs `requests_min`.

Source: LMetric (arXiv 2603.15202), section 5.2, for the two stages; window, minimum, recovery and
the handling of nested classes are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from controlplane.core.candidates import Candidates
from controlplane.core.detector_trouble import TroubleConfig, Troubles
from controlplane.core.detector_window import ClassWindow
from controlplane.core.verdicts import outgrows
from schemas.bus import ClassCoverage, HotspotCleared, HotspotRaised, Routed

BLIND_POLICIES = frozenset({"round_robin", "least_requests"})
"""Policies whose scores do not depend on caches: what they prefer says nothing about M."""

Change = HotspotRaised | HotspotCleared
"""A verdict or its end, without the revision that only the bucket can give."""


class DetectorConfig(msgspec.Struct, frozen=True):
    """How a detector judges.

    Attributes:
        window_s: over which shares are taken.
        requests_max: requests kept of one model; beyond it the window spans less time.
        requests_min: of a class in the window, for an alarm. A chat of a few turns a minute is no
            hotspot, although its share of a quiet fleet may exceed 1/N.
        streak_per_holder: 2 of the 2|M|.
        ttl_s: how long a verdict lasts unless it is renewed.
        standing_max: verdicts that stand at once; further ones are refused and counted.
        give_up_s: a verdict is given up when the copies have not grown in number for this long.
        trouble: what is remembered of classes that were raised.
    """

    window_s: float = 60.0
    requests_max: int = 100_000
    requests_min: int = 20
    streak_per_holder: int = 2
    ttl_s: float = 15.0
    standing_max: int = 64
    give_up_s: float = 30.0
    trouble: TroubleConfig = TroubleConfig()

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: names the setting.
        """
        for name in ("window_s", "ttl_s", "give_up_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive: {getattr(self, name)}")
        for name in ("requests_max", "requests_min", "streak_per_holder", "standing_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        if self.requests_max < self.requests_min:
            raise ValueError(
                f"requests_max={self.requests_max} is below requests_min={self.requests_min}: "
                "no class could ever be alarmed"
            )


class Alarm(msgspec.Struct):
    """A class whose share outgrows its holders.

    Attributes:
        streak: its requests in a row that still preferred M.
        above: keys of the shorter prefixes that it extends.
    """

    depth_blocks: int
    above: tuple[int, ...]
    streak: int = 0


class Standing(msgspec.Struct):
    """A verdict in force.

    Attributes:
        verdict: with the evidence of the latest request of the class.
        holders_max: the most instances that held the class since it was raised.
        grown_s: when that last grew.
        adopted: another detector raised it.
    """

    verdict: HotspotRaised
    holders_max: int
    grown_s: float
    adopted: bool


class HotspotDetector:
    """Watches the requests of one model.

    Attributes:
        leading: whether this detector decides; the others only watch.
        window: how many requests each class had lately.
        alarms: alarmed classes, by key.
        standing: verdicts in force, by key.
        troubles: what is remembered of classes that were raised.
        counts: raised:<depth>, cleared:<reason>, refused, retries.
    """

    def __init__(self, config: DetectorConfig, now_s: float, *, leading: bool = False) -> None:
        self.config = config
        self.leading = leading
        self.alarms: dict[int, Alarm] = {}
        self.window = ClassWindow(
            config.window_s,
            config.requests_max,
            config.requests_min,
            on_rare=lambda key: self.alarms.pop(key, None),
        )
        self.standing: dict[int, Standing] = {}
        self.troubles = Troubles(config.trouble)
        self.counts: Counter[str] = Counter()
        self._warm_s = now_s + config.window_s

    # --- what happens

    def routed(
        self,
        event: Routed,
        now_s: float,
        now_wall_s: float,
        seen: Callable[[], Candidates | None] = lambda: None,
    ) -> list[Change]:
        """Take a routed request; return what that changes.

        Args:
            now_s: when the event came, monotonic: routers' clocks are not compared.
            seen: returns what the decision saw of all instances, where that is known.

        Complexity: O(depths) for a request whose classes are calm.
        """
        if event.attempt:  # Another attempt at a request that was counted is no new demand.
            self.counts["retries"] += 1
            return []
        self.window.add(event.classes, now_s)
        changes: list[Change] = []
        explained = False
        for position in range(len(event.classes) - 1, -1, -1):
            key = event.classes[position].key
            if key in self.standing:
                reason = self._judge(event, position, now_s)
                explained = explained or not reason
                if reason and self.leading:
                    changes.append(self._clear(key, reason, now_wall_s))
            elif key in self.window.frequent and self._alarm(event, position, now_s):
                if not explained:
                    changes += self._count(event, position, now_s, now_wall_s, seen)
                explained = True
        return changes

    def tick(self, now_s: float, now_wall_s: float) -> list[Change]:
        """Let time pass; return what that changes. O(verdicts and classes in trouble)."""
        self.window.expire(now_s)
        self.troubles.expire(now_s)
        if not self.leading or now_s < self._warm_s:
            return []
        silent = [key for key in self.standing if not self.window.count(key)]
        return [self._clear(key, "silent", now_wall_s) for key in silent]

    def adopt(self, verdict: HotspotRaised, now_s: float) -> None:
        """Note that a verdict stands that this detector did not raise, or that was renewed."""
        key = verdict.key
        if key in self.standing:
            return
        alarm = self.alarms.pop(key, None)
        self.troubles.raised(key, alarm.above if alarm else (), now_s)
        self.standing[key] = Standing(verdict, verdict.holders, now_s, adopted=True)

    def forget(self, key: int) -> None:
        """Note that a verdict no longer stands, though this detector did not clear it."""
        self.standing.pop(key, None)

    def lost(self, now_s: float) -> None:
        """Note that requests were missed, as when the bus was away: nothing is in a row now."""
        self._warm_s = now_s + self.config.window_s
        for alarm in self.alarms.values():
            alarm.streak = 0

    # --- the two stages

    def _alarm(self, event: Routed, position: int, now_s: float) -> bool:
        """Stage 1: return whether a class is alarmed, as of one of its requests."""
        each = event.classes[position]
        requests, total = self.window.count(each.key), self.window.total
        if not outgrows(requests, total, each.holders, event.fleet):
            self.alarms.pop(each.key, None)
            return False
        if each.key not in self.alarms:
            above = tuple(shorter.key for shorter in event.classes[:position])
            self.alarms[each.key] = Alarm(each.depth_blocks, above)
        self.troubles.alarmed(each.key, requests, total, now_s)
        return True

    def _count(
        self,
        event: Routed,
        position: int,
        now_s: float,
        now_wall_s: float,
        seen: Callable[[], Candidates | None],
    ) -> list[Change]:
        """Stage 2: count a request of an alarmed class; raise it at the end of the streak."""
        each = event.classes[position]
        alarm = self.alarms[each.key]
        if each.best_inside is None:
            alarm.streak = 0
        elif each.best_outside is not None and event.policy not in BLIND_POLICIES:
            alarm.streak = alarm.streak + 1 if each.best_inside <= each.best_outside else 0
        needed = self.config.streak_per_holder * each.holders * self.troubles.factor(each.key)
        if alarm.streak < needed or not self.leading or self.troubles.resting(each.key, now_s):
            return []
        if len(self.standing) >= self.config.standing_max:
            self.counts["refused"] += 1
            return []
        del self.alarms[each.key]
        names = holders_of(seen(), each)
        verdict = self._verdict(event, each, names, alarm.streak, now_wall_s)
        self.troubles.raised(each.key, alarm.above, now_s)
        self.standing[each.key] = Standing(verdict, each.holders, now_s, adopted=False)
        self.counts[f"raised:{each.depth_blocks}"] += 1
        return [verdict]

    def _verdict(
        self, event: Routed, each: ClassCoverage, names: list[str], streak: int, now_wall_s: float
    ) -> HotspotRaised:
        requests, total = self.window.count(each.key), self.window.total
        reason = (
            f"{requests} of {total} requests have a prefix (blocks: {each.depth_blocks}) that "
            f"{each.holders} of {event.fleet} instances hold ({requests / total:.1%} > "
            f"{each.holders / event.fleet:.1%}), and {streak} in a row still preferred them"
        )
        return HotspotRaised(
            each.key,
            each.depth_blocks,
            names,
            0,
            now_wall_s,
            self.config.ttl_s,
            (requests, total),
            each.holders,
            event.fleet,
            streak,
            each.best_inside,
            each.best_outside,
            reason,
        )

    # --- the end of a verdict

    def _judge(self, event: Routed, position: int, now_s: float) -> str:
        """Return why a standing verdict should end, as of a request of its class; empty if not.

        The verdict gets the evidence of the request: routers judge by its share, too.
        """
        each = event.classes[position]
        standing = self.standing[each.key]
        requests, total = self.window.count(each.key), self.window.total
        if each.holders > standing.holders_max:
            standing.holders_max, standing.grown_s = each.holders, now_s
        standing.verdict = msgspec.structs.replace(
            standing.verdict, share=(requests, total), holders=each.holders, fleet=event.fleet
        )
        cold = standing.adopted and now_s < self._warm_s
        if not cold and requests < self.config.requests_min:
            return "few"
        judged = not cold or total >= self.config.requests_min
        if judged and not outgrows(requests, total, each.holders, event.fleet):
            return "covered" if each.holders else "evicted"
        if now_s - standing.grown_s >= self.config.give_up_s:
            self.troubles.gave_up(each.key, now_s)
            return "futile"
        self.troubles.alarmed(each.key, requests, total, now_s)
        return ""

    def _clear(self, key: int, reason: str, now_wall_s: float) -> HotspotCleared:
        verdict = self.standing.pop(key).verdict
        self.counts[f"cleared:{reason}"] += 1
        return HotspotCleared(
            key, verdict.depth_blocks, 0, now_wall_s, self._explained(verdict, reason)
        )

    def _explained(self, verdict: HotspotRaised, reason: str) -> str:
        requests, total = verdict.share
        having = f"{verdict.holders} of {verdict.fleet} instances hold it"
        if reason == "covered":
            return f"{having}, which suffices for {requests} of {total} requests"
        if reason == "evicted":
            return "no instance holds it any more"
        if reason == "few":
            return f"its requests in {self.config.window_s:g} s are down to {requests}"
        if reason == "silent":
            return f"no request came for {self.config.window_s:g} s"
        return f"{having} and no more for {self.config.give_up_s:g} s: barring does not help"

    def check(self) -> None:
        """Assert what must hold between any two calls; for tests."""
        self.window.check()
        assert not self.alarms.keys() & self.standing.keys()
        assert self.alarms.keys() <= self.window.frequent.keys()
        assert len(self.troubles) <= self.config.trouble.classes_max


def holders_of(seen: Candidates | None, each: ClassCoverage) -> list[str]:
    """Return the names of M; none if the candidates are not known, as where routers sample.

    M are the |M| candidates with the deepest hits, since a hit reaches the class's depth or not.
    """
    if seen is None or len(seen) < each.holders:
        return []
    deepest = np.argsort(-seen.hit_tokens, kind="stable")[: each.holders]
    return sorted(seen.rows.instance_ids[row] for row in deepest.tolist())
