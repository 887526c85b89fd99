"""Rolling restarts under traffic lose nothing."""

from __future__ import annotations

import pytest

from tests.sim import checkers
from tests.sim.rolling import RollingRestart
from tests.sim.settings import Settings
from tests.sim.simulation import Simulation

CALM = Settings(routers=3, instances=3, faults_s=1.0, chats=12, foreign=0)


def roll(simulation: Simulation) -> None:
    """Restart everything under traffic, and let all requests end."""
    world, cluster = simulation.world, simulation.cluster
    cluster.start()
    world.run(2.0)
    restart = RollingRestart(cluster)
    restart.start()
    while not restart.done:
        assert world.now_s < 60.0, "the restart does not come to an end"
        world.run(world.now_s + 1.0)
        checkers.steady(cluster)
    cluster.clients.stop()
    while cluster.busy:
        assert world.now_s < 90.0, "requests do not come to an end"
        world.run(world.now_s + 0.1)
    world.run(world.now_s + 3.0)


@pytest.mark.parametrize("seed", range(4))
def test_no_request_fails_while_everything_is_restarted(seed: int) -> None:
    """Each client gets its answer, whichever instance or router it was talking to."""
    simulation = Simulation(seed, CALM)
    roll(simulation)
    checkers.settled(simulation.cluster)
    checkers.drained(simulation.cluster)
    ends = simulation.cluster.clients.ends
    assert ends["ok"] > 100
    assert set(ends) <= {"ok", "client_gone"}


def test_a_router_that_hears_nothing_of_it_loses_nothing_either() -> None:
    """Cut off from the bus it runs into instances that are gone, and goes elsewhere in time."""
    simulation = Simulation(5, CALM)
    world, cluster = simulation.world, simulation.cluster
    cluster.start()
    world.run(2.0)
    deaf = cluster.hosts["router-0"].process
    assert deaf is not None
    deaf.connection.cut(0.1)
    for site in cluster.sites.values():
        assert site.sidecar is not None
        site.sidecar.drain()
        world.run(world.now_s + 3.0)
        site.kill_sidecar()
        site.kill_engine()
        world.run(world.now_s + 0.3)
        site.start_engine()
        site.start_sidecar()
        world.run(world.now_s + 1.5)
    cluster.clients.stop()
    world.run(world.now_s + 5.0)
    assert not cluster.busy
    assert any(exchange.attempts > 1 for exchange in cluster.clients.exchanges)
    broken = {end for end in cluster.clients.ends if end not in ("ok", "client_gone")}
    assert broken <= {"broken:reset_mid_stream"}, "only what ran on an engine that was killed"
