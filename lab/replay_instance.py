"""An emulated engine in simulated time: it steps, and what a step made is due at the step's end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lab.block_pool import BlockPool
from lab.engine import Engine
from lab.engine_types import EngineConfig, Output, Request, StepResult
from lab.replay_agenda import Agenda
from lab.replay_feed import EPOCH, BlockFeed
from schemas.bus import InstanceRecord, KvBatch, LoadReport

MODEL = "replayed"


class SimInstance:
    """One instance: an engine, and what its sidecar would publish of it.

    While all requests decode it *coasts*: the run of steps is made at its end, at once, or when a
    request comes, up to the step that is then under way. So what a run stores and evicts is
    published at its end, late by `coast_s_max` at most.

    Attributes:
        name: its id.
        position: its row in every router's fleet.
        engine: the engine.
        busy_s: how long it has been stepping.
        steps: how many steps it has made.
        preemptions: how often a request was sent back to the queue.
    """

    def __init__(
        self,
        position: int,
        config: EngineConfig,
        feeds: Callable[[str, BlockPool], BlockFeed],
        agenda: Agenda,
        *,
        coast_s_max: float,
        on_output: Callable[[Output], None],
        on_step: Callable[[int, StepResult, float], None] | None,
        publish: Callable[[KvBatch], None],
    ) -> None:
        self.position = position
        self.name = f"i{position}"
        self.engine = Engine(config)
        self.busy_s = 0.0
        self.steps = 0
        self.preemptions = 0
        self._agenda = agenda
        self._feed = feeds(self.name, self.engine.pool)
        self._coast_s_max = coast_s_max
        self._coasting_since_s: float | None = None
        self._coastings = 0
        self._on_output = on_output
        self._on_step = on_step
        self._publish = publish
        self._stepping = False
        self._changed = True
        self._reported_s = float("-inf")
        self._reports = 0

    def add(self, request: Request) -> None:
        """Take a request; it counts from the end of the step that is under way."""
        self._changed = True
        if self._coasting_since_s is not None:
            self._begin(self._coasting_since_s, self._agenda.now_s - self._coasting_since_s)
        self.engine.add_request(request)
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        """Begin what comes next: one step, or to coast."""
        now_s = self._agenda.now_s
        self._stepping = True
        coast_s = self.engine.run_s(self._coast_s_max)
        if not coast_s:
            self._begin(now_s, 0.0)
            return
        self._coasting_since_s = now_s
        self._coastings += 1
        self._agenda.at(now_s + coast_s, self._coasted, self._coastings)

    def _coasted(self, coasting: int) -> None:
        """End a run that nobody has interrupted."""
        if self._coasting_since_s is not None and coasting == self._coastings:
            self._coasting_since_s = None
            self._due(self._run(self._coast_s_max))

    def _begin(self, began_s: float, horizon_s: float) -> None:
        """Make the steps that began within a horizon; they are due when the last one ends."""
        self._coasting_since_s = None
        result = self._run(horizon_s)
        due_s = began_s + result.duration_s
        if self._on_step is not None:
            self._on_step(self.position, result, due_s)
        self._agenda.at(due_s, self._due, result)

    def _run(self, horizon_s: float) -> StepResult:
        result = self.engine.step(horizon_s)
        self.busy_s += result.duration_s
        self.steps += result.steps
        self.preemptions += len(result.preempted)
        return result

    def _due(self, result: StepResult) -> None:
        self._stepping = False
        self._changed = True
        if result.events:
            self._tell(self._feed.take(result.events, self._agenda.now_s))
        for output in result.outputs:
            if output.finish_reason is not None or output.cached_tokens is not None:
                self._on_output(output)
        if self.engine.has_work and not self._stepping:
            self._step()

    def _tell(self, batches: Sequence[KvBatch]) -> None:
        for batch in batches:
            self._publish(batch)

    def record(self, block_size: int) -> InstanceRecord:
        """Return what its sidecar says of it."""
        return InstanceRecord(self.name, MODEL, f"http://{self.name}", EPOCH, block_size=block_size)

    def heartbeat(self) -> None:
        """Publish a sign of life, if nothing else was published for a while."""
        self._tell(self._feed.heartbeat(self._agenda.now_s))

    def report(self, again_s: float = 1.0) -> LoadReport | None:
        """Return the engine's own counts; None if nothing happened for less than `again_s`."""
        now_s = self._agenda.now_s
        if not self._changed and now_s - self._reported_s < again_s:
            return None
        self._changed, self._reported_s = False, now_s
        self._reports += 1
        engine = self.engine
        return LoadReport(
            self.name,
            EPOCH,
            self._reports,
            now_s,
            engine.running_count,
            engine.waiting_count,
            kv_usage=engine.pool.usage,
        )
