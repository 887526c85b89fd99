"""The simulated world: fixed seeds, fresh ones, those that once found something, and itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.faults import KINDS
from tests.sim.run import fresh_seed
from tests.sim.settings import Settings
from tests.sim.simulation import Simulation, SimulationFailed, draw, run_seed

FIXED = range(25)
REGRESSIONS = Path(__file__).parent / "regressions.txt"


def regressions() -> list[tuple[int, str]]:
    """Returns the seeds that once found something, each with what it found."""
    lines = [line.strip() for line in REGRESSIONS.read_text().splitlines()]
    kept = [line.partition("#") for line in lines if line and not line.startswith("#")]
    return [(int(seed), why.strip()) for seed, _, why in kept]


@pytest.mark.slow
@pytest.mark.parametrize("seed", FIXED)
def test_every_view_becomes_the_truth_again(seed: int) -> None:
    """Whatever went wrong: within 3 s of quiet all is known, and every request ended once."""
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(4))
def test_seeds_that_nobody_has_tried(attempt: int) -> None:
    """Luck may find what the fixed seeds do not; the failure says how to repeat it."""
    run_seed(fresh_seed())


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "why"), regressions())
def test_seeds_that_once_found_something(seed: int, why: str) -> None:
    """What is mended stays so."""
    run_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_fault_alone(kind: str) -> None:
    """A fault that comes often and with no other one is met head on."""
    settings = Settings(kinds=(kind,), faults_s=3.0, fault_every_s=0.15, skew_s=5.0)
    simulation = Simulation(1, settings)
    simulation.run()
    assert simulation.faults.done > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 6])
def test_batches_that_nobody_sent_hold_nobody_up(seed: int) -> None:
    """However often they come, what they spoil is known again within 3 s of their end."""
    simulation = Simulation(seed, Settings(faults_s=2.0, forge_every_s=0.1))
    report = simulation.run()
    assert simulation.faults.done > 10
    assert report.counts["never_sent"] > 10


def test_a_world_without_faults_serves_everybody() -> None:
    """What fails is due to faults, and nothing else."""
    simulation = Simulation(2, Settings(faults_s=2.0, cancels=0.0))
    report = simulation.run()
    assert report.ends["ok"] > 50
    assert set(report.ends) <= {"ok", "no_instance"}, "before the first instance is known"
    assert simulation.cluster.clients.exchanges[-1].ends == ["ok"]


def test_most_requests_reuse_what_is_cached() -> None:
    """The world is not so broken that its caches, or the routers' knowledge of them, are idle."""
    simulation = Simulation(3, Settings(faults_s=3.0))
    report = simulation.run()
    assert report.counts["blocks_stored"] > 1000
    assert report.counts["batches"] > 100


@pytest.mark.slow
def test_a_seed_is_a_whole_run() -> None:
    """The same seed is the same run, in another process with other hash seeds too."""
    command = [sys.executable, "-m", "tests.sim.run", "--seed", "6"]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, check=True)
    report = run_seed(6)
    assert f"trace='{report.trace}'" in done.stdout.decode()
    assert run_seed(7).trace != report.trace


def test_a_failure_says_how_to_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds one needs the seed, the settings and what happened last."""
    simulation = Simulation(8, Settings(faults_s=1.0))
    simulation.world.after(0.5, _fail)
    with pytest.raises(SimulationFailed) as failure:
        simulation.run()
    text = str(failure.value)
    assert "python -m tests.sim.run --seed 8 --verbose" in text
    assert "at 0.5" in text
    assert "Settings(routers=3" in text
    assert "router-0 starts" in text


def _fail() -> None:
    raise AssertionError("as this test wants it")


def test_seeds_differ_in_kind() -> None:
    """Sizes and faults are drawn too: some seeds meet everything, some one thing only."""
    drawn = [draw(seed) for seed in range(200)]
    assert {len(settings.kinds) for settings in drawn} >= {1, len(KINDS)}
    assert {settings.routers for settings in drawn} == {1, 2, 3, 4}
    assert {settings.promise_s > 0 for settings in drawn} == {False, True}
