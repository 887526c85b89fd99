"""A simulated world whose bus is recorded: what the server received, in order."""

from __future__ import annotations

from controlplane.audit.heard import Heard, Unreadable, understand
from controlplane.bus.protocol import Record
from schemas import subjects
from tests.sim.bus import Connection
from tests.sim.settings import MODEL, Settings
from tests.sim.simulation import Simulation
from tests.sim.world import WALL_S


class RecordedSimulation:
    """Runs a seed; a context would be too much.

    Attributes:
        records: everything that was published.
    """

    def __init__(self, seed: int, settings: Settings | None = None) -> None:
        self.simulation = Simulation(seed, settings)
        self.records: list[Record] = []
        server = self.simulation.cluster.server
        self._route = server.route
        server.route = self._recorded  # type: ignore[method-assign]

    def run(self) -> list[Record]:
        """Live through the run; returns the records."""
        self.simulation.run()
        return self.records

    def _recorded(self, sender: Connection, kind: str, payload: bytes) -> None:
        make = {"kv": subjects.kv, "load": subjects.load, "route": subjects.route}[kind]
        subject = make(MODEL, sender.process.name)
        now_s = WALL_S + self.simulation.world.now_s
        self.records.append(Record(subject, payload, len(self.records) + 1, now_s))
        self._route(sender, kind, payload)


def heard(records: list[Record]) -> list[Heard | Unreadable]:
    """Return what records say."""
    return [understand(record) for record in records]
