"""One run: a safety phase with faults and traffic, quiet, and the end.

0 ──── faults and traffic ──── quiet ─ 2.5 s ─ frozen ─ 3 s: settled? ─ drained? ── end
"""

from __future__ import annotations

import random

import msgspec

from tests.sim import checkers
from tests.sim.cluster import Cluster
from tests.sim.faults import KINDS, Faults
from tests.sim.settings import Settings
from tests.sim.world import World

HEAL_S = 3.0
"""What the design promises: load and index equal the truth within this time of quiet."""

FROZEN_S = 0.45
CHECK_EVERY_S = 0.3
THOROUGH_EVERY = 5
DRAIN_S_MAX = 20.0


class Report(msgspec.Struct, frozen=True):
    """What a run was like.

    Attributes:
        trace: fingerprint of everything that happened.
        events: calls made.
        faults: how many.
        ends: how requests ended.
        counts: what routers counted, summed.
    """

    seed: int
    trace: str
    simulated_s: float
    events: int
    faults: int
    ends: dict[str, int]
    counts: dict[str, int]


class SimulationFailed(AssertionError):
    """A run broke a promise; the text says which, how to repeat it, and what happened last."""


def draw(seed: int) -> Settings:
    """Return the settings of a seed: sizes, limits, and which faults it may meet."""
    rng = random.Random(f"settings {seed}")
    names = sorted(KINDS)
    some = rng.sample(names, rng.randrange(1, 5)) if rng.random() < 0.5 else names
    return Settings(
        routers=rng.choice([1, 2, 2, 3, 4]),
        instances=rng.choice([1, 2, 3, 4, 6]),
        faults_s=rng.uniform(3.0, 8.0),
        fault_every_s=rng.choice([0.1, 0.3, 0.8]),
        lasts_s=rng.choice([0.3, 1.0, 3.0]),
        kinds=tuple(some),
        chats=rng.choice([3, 8, 16]),
        talk_in_quiet=rng.random() < 0.6,
        think_s=rng.choice([0.05, 0.2, 0.5]),
        cancels=rng.choice([0.0, 0.1, 0.4]),
        streamed=rng.choice([0.0, 0.7, 1.0]),
        reports=rng.choice([0.0, 0.0, 0.05]),
        foreign=rng.choice([0, 0, 1, 3]),
        engine_blocks=rng.choice([104, 160, 400]),
        engine_seqs=rng.choice([4, 16]),
        engine_tokens=rng.choice([32, 128, 512]),
        slowness=rng.choice([0.5, 1.0, 2.0]),
        replay_max=rng.choice([20, 10_000, 10_000]),
        skew_s=rng.choice([0.0, 0.0, 0.5, 60.0]),
        scrape_s=rng.choice([0.1, 0.25, 0.5]),
        inbox_max=rng.choice([50, 300, 100_000]),
        stale_s=rng.choice([1.5, 5.0]),
        departed_s=rng.choice([2.5, 30.0]),
        promise_s=rng.choice([0.0, 0.0, 1.0]),
        forge_every_s=rng.choice([0.0, 0.0, 0.0, 0.5]),
    )


class Simulation:
    """A world with a cluster and its faults."""

    def __init__(
        self, seed: int, settings: Settings | None = None, *, verbose: bool = False
    ) -> None:
        self.seed = seed
        self.settings = draw(seed) if settings is None else settings
        self.world = World(seed, verbose=verbose)
        self.cluster = Cluster(self.world, self.settings)
        self.faults = Faults(self.cluster)
        self._checks = 0

    def run(self) -> Report:
        """Live through it all.

        Raises:
            SimulationFailed: a checker, or an assertion of the production code, found something.
        """
        try:
            self._run()
        except Exception as error:
            raise SimulationFailed(self._explain(error)) from error
        return self.report()

    def report(self) -> Report:
        """Return what the run was like so far."""
        counts: dict[str, int] = {}
        for router in self.cluster.routers:
            plane = router.plane
            for each in (router.counts, plane.intake.counts if plane else {}):
                for name, count in each.items():
                    counts[name] = counts.get(name, 0) + count
        return Report(
            self.seed,
            self.world.trace,
            self.world.now_s,
            self.world.events,
            self.faults.done,
            dict(self.cluster.clients.ends),
            counts,
        )

    def _explain(self, error: Exception) -> str:
        what = f"{type(error).__name__}: {error}"
        story = "\n".join(list(self.world.story)[-60:])
        return (
            f"seed {self.seed}, at {self.world.now_s:.4f} s: {what}\n"
            f"repeat it: python -m tests.sim.run --seed {self.seed} --verbose\n"
            f"{self.settings}\nthe last that happened:\n{story}"
        )

    def _run(self) -> None:
        world, cluster, settings = self.world, self.cluster, self.settings
        cluster.start()
        self.faults.start(settings.faults_s)
        self._pass(settings.faults_s)
        self.faults.end()
        quiet_s = world.now_s
        if settings.talk_in_quiet:
            self._pass(quiet_s + HEAL_S - FROZEN_S - 0.5)
            cluster.clients.ask_at_length(2 * settings.instances)
        else:
            cluster.clients.stop()
        self._pass(quiet_s + HEAL_S - FROZEN_S)
        cluster.clients.stop()
        cluster.freeze()
        world.run(quiet_s + HEAL_S)
        world.note("frozen: everything has arrived")
        checkers.steady(cluster)
        checkers.settled(cluster)
        checkers.peers_expired(cluster)
        cluster.thaw()
        self._drain()

    def _pass(self, until_s: float) -> None:
        """Let time pass, checking now and then."""
        while self.world.now_s < until_s:
            self.world.run(min(until_s, self.world.now_s + CHECK_EVERY_S))
            self._checks += 1
            checkers.steady(self.cluster, thorough=self._checks % THOROUGH_EVERY == 0)

    def _drain(self) -> None:
        """Let all requests end, and what is gone be forgotten."""
        world = self.world
        until_s = world.now_s + DRAIN_S_MAX
        while self.cluster.busy and world.now_s < until_s:
            world.run(world.now_s + 0.1)
        silent_s = self.settings.departed_s if self.settings.departed_s < HEAL_S else 0.0
        self._pass(world.now_s + 1.0 + silent_s)
        checkers.drained(self.cluster)
        if silent_s:
            checkers.departed(self.cluster)


def run_seed(seed: int, *, verbose: bool = False) -> Report:
    """Run one seed from beginning to end."""
    return Simulation(seed, verbose=verbose).run()
