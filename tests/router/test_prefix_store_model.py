"""Several routers change the same records, in every order, against one who only counts."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.bus import MemoryBroker
from controlplane.bus.protocol import BusError
from router.prefix_records import Full, Unknown, register, release
from router.prefix_store import Busy, PrefixStore
from router.prefixes import PrefixRegistry
from schemas import subjects
from schemas.bus import RegisteredPrefix, TenantPrefixes, decode_prefixes
from tests.models.naive_prefixes import NaivePrefixes
from tests.router.gated_bucket import GatedBus

PROCESSES = 3
TENANTS = ("a", "b")

processes = st.integers(0, PROCESSES - 1)
tenants = st.sampled_from(["a", "a", "b"])
handles = st.sampled_from(["p1", "p1", "p2"])
signs = st.sampled_from([1, 1, -1])
verdicts = st.sampled_from(["done", "done", "done", "lost", "lost", "refused"])


class _Process:
    """One router's registry, store and connection."""

    def __init__(self, machine: Stores) -> None:
        self.bus = GatedBus(machine.broker.bus(), machine.written)
        self.registry = PrefixRegistry()
        self.store = PrefixStore(self.bus, self.registry, lambda _: None, pause_s=0.0)
        self.tasks: list[asyncio.Task[Any]] = []


class Stores(RuleBasedStateMachine):
    """Changes begin, their reads and writes are done, refused or lost, processes die and return."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.broker = MemoryBroker()
        self.naive = NaivePrefixes()
        self.asked: dict[str, tuple[str, str, int]] = {}
        self.versions = dict.fromkeys(TENANTS, 0)
        self.processes: list[_Process] = []

    @initialize()
    def begin(self) -> None:
        """All processes start."""
        self.processes = [_Process(self) for _ in range(PROCESSES)]
        for process in self.processes:
            self.loop.run_until_complete(process.store.start())

    def written(self, key: str, value: bytes) -> None:
        """A write was done: the one who counts hears of the change that it makes."""
        record = decode_prefixes(value)
        assert record.version == self.versions[key] + 1
        self.versions[key] = record.version
        mark = record.changes[-1]
        self.naive.write(mark, *self.asked[mark])

    @rule(asked=st.lists(st.tuples(processes, tenants, handles, signs), min_size=1, max_size=6))
    def change(self, asked: list[tuple[int, str, str, int]]) -> None:
        """Callers register and release."""
        for each in asked:
            self._ask(*each)
        self._run()

    def _ask(self, number: int, tenant: str, handle: str, by: int) -> None:
        process, mark = self.processes[number], f"c{len(self.asked)}"
        self.asked[mark] = (tenant, handle, by)
        prefix = RegisteredPrefix(handle, "m", 40, 2, int(handle[1:]))

        def apply(record: TenantPrefixes) -> TenantPrefixes:
            return register(record, prefix) if by > 0 else release(record, handle)

        process.tasks.append(self.loop.create_task(self._told(process, mark, apply)))

    async def _told(self, process: _Process, mark: str, apply: Any) -> None:
        """Whoever is told that a change was made, or could not be, can rely on it."""
        tenant = self.asked[mark][0]
        try:
            await process.store.change(tenant, mark, apply)
        except (Full, Unknown, Busy):
            assert mark not in self.naive.made
        except BusError:
            pass  # nobody knows, and the caller is told so
        else:
            assert mark in self.naive.made

    @rule(going=st.lists(st.tuples(processes, verdicts), min_size=10, max_size=40))
    def step(self, going: list[tuple[int, str]]) -> None:
        """The next reads and writes of processes go one way or the other."""
        for number, verdict in going:
            gates = self.processes[number].bus.gates
            if gates:
                gates.popleft().set_result(verdict)
            self._run()

    @rule(number=processes, kind=st.sampled_from(["cut", "heal", "heal", "die"]))
    def suffer(self, number: int, kind: str) -> None:
        """A process loses or finds the bus, or is killed and another one takes its place."""
        process = self.processes[number]
        if kind == "die":
            self._cancel(process)
            process.bus.cut()
            self.processes[number] = _Process(self)
            self.loop.run_until_complete(self.processes[number].store.start())
        else:
            getattr(process.bus, kind)()
        self._run()

    @precondition(lambda self: any(each.tasks for each in self.processes))
    @rule()
    def quiet(self) -> None:
        """Once the bus is back for all and everything was answered, all know what is true."""
        for process in self.processes:
            process.bus.heal()
        self._answer_all()
        for process in self.processes:
            process.store.stale.update(TENANTS)
            process.tasks.append(self.loop.create_task(process.store.refresh(0)))
            self._answer_all()
        for process in self.processes:
            for task in process.tasks:
                task.result()
            process.tasks.clear()
            for tenant in TENANTS:
                held = {p.id: p.references for p in process.registry.record(tenant).prefixes}
                assert held == self.naive.of(tenant)

    @invariant()
    def what_stands_is_what_was_made(self) -> None:
        """Each change counts exactly once, whatever happened to its answers."""
        shelf = self.broker.shelves[subjects.PREFIXES]
        for tenant in TENANTS:
            entry = shelf.live(tenant)
            record = TenantPrefixes(tenant) if entry is None else decode_prefixes(entry.value)
            assert {p.id: p.references for p in record.prefixes} == self.naive.of(tenant)

    def teardown(self) -> None:
        """End what is left."""
        for process in self.processes:
            self._cancel(process)
        self.loop.close()

    def _answer_all(self) -> None:
        for _ in range(10_000):
            self._run()
            gates = [each.bus.gates for each in self.processes if each.bus.gates]
            if not gates:
                return
            for each in gates:
                each.popleft().set_result("done")
        raise AssertionError("there is no end to it")

    def _cancel(self, process: _Process) -> None:
        for task in process.tasks:
            if task.done():
                task.result()
            task.cancel()
        if process.tasks:
            self.loop.run_until_complete(asyncio.gather(*process.tasks, return_exceptions=True))

    def _run(self) -> None:
        """Let everybody go on as far as they can."""

        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())


TestStores = Stores.TestCase
TestStores.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
