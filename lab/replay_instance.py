"""An emulated engine in simulated time: it steps, and what a step made is due at the step's end."""

from __future__ import annotations

from collections.abc import Callable

from lab.engine import Engine
from lab.engine_types import EngineConfig, Output, Request, StepResult
from lab.replay_agenda import Agenda
from lab.replay_feed import BlockFeed
from schemas.bus import InstanceRecord, KvBatch, LoadReport

MODEL = "replayed"


class SimInstance:
    """One instance: an engine, and what its sidecar would publish of it.

    What a run of decode steps evicts is published at the end of the run: late by no more than the
    time between two arrivals.

    Attributes:
        name: its id.
        position: its row in every router's fleet.
        engine: the engine.
        busy_s: how long it has been stepping.
        steps: how many steps it has made.
        preemptions: how often a request was sent back to the queue.
        prefill_tokens: prompt tokens that it was asked for and did not find cached.
    """

    def __init__(
        self,
        position: int,
        config: EngineConfig,
        feed: BlockFeed,
        agenda: Agenda,
        *,
        quiet_until_s: Callable[[], float],
        on_output: Callable[[Output], None],
        on_step: Callable[[int, StepResult], None] | None,
        publish: Callable[[KvBatch], None],
    ) -> None:
        self.position = position
        self.name = f"i{position}"
        self.engine = Engine(config)
        self.busy_s = 0.0
        self.steps = 0
        self.preemptions = 0
        self.prefill_tokens = 0
        self._agenda = agenda
        self._feed = feed
        self._quiet_until_s = quiet_until_s
        self._on_output = on_output
        self._on_step = on_step
        self._publish = publish
        self._stepping = False
        self._reported: tuple[int, int] | None = None
        self._reported_s = float("-inf")
        self._reports = 0

    def add(self, request: Request) -> None:
        """Take a request."""
        self.engine.add_request(request)
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        now_s = self._agenda.now_s
        self._stepping = True
        result = self.engine.step(max(self._quiet_until_s() - now_s, 0.0))
        self.busy_s += result.duration_s
        self.steps += result.steps
        self.preemptions += len(result.preempted)
        self.prefill_tokens += result.queries - result.hits
        self._agenda.at(now_s + result.duration_s, self._due, result)

    def _due(self, result: StepResult) -> None:
        self._stepping = False
        if result.events:
            for batch in self._feed.take(result.events, self._agenda.now_s):
                self._publish(batch)
        if self._on_step is not None:
            self._on_step(self.position, result)
        for output in result.outputs:
            if output.finish_reason is not None or output.cached_tokens is not None:
                self._on_output(output)
        if self.engine.has_work and not self._stepping:
            self._step()

    def record(self, block_size: int) -> InstanceRecord:
        """Return what its sidecar says of it."""
        return InstanceRecord(self.name, MODEL, f"http://{self.name}", 1, block_size=block_size)

    def heartbeat(self) -> None:
        """Publish a sign of life, if nothing else was published for a while."""
        for batch in self._feed.heartbeat(self._agenda.now_s):
            self._publish(batch)

    def report(self, again_s: float = 1.0) -> LoadReport | None:
        """Return the engine's own counts; None if they are known and not `again_s` old."""
        now_s = self._agenda.now_s
        counts = self.engine.running_count, self.engine.waiting_count
        if counts == self._reported and now_s - self._reported_s < again_s:
            return None
        self._reported, self._reported_s = counts, now_s
        self._reports += 1
        usage = self.engine.pool.usage
        return LoadReport(self.name, 1, self._reports, now_s, *counts, kv_usage=usage)
