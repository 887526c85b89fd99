"""Replays a trace in simulated time through the production decision code.

Theory of operation. One heap of events (`replay_agenda`). Requests arrive at their times at one of
the routers (`replay_router`: the production plane), which decides on what it knows, and join the
chosen engine's queue (`replay_instance`). Engines skip ahead: a run of decode steps is one event,
until a request ends or another comes. When a step ends, its tokens reach
the router at once, as they do on the stream of the answer; its block events reach every router
after that router's lag, and so do the routers' messages to each other. With a queue, or
coalescing, requests wait at their router (`replay_queue`).

Nothing here reads a clock: the same trace, policy and seed give the same result.
"""

from __future__ import annotations

import gc
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import numpy as np

from controlplane.core.coalesce import Leader
from controlplane.core.detector_writes import Message
from controlplane.core.dispatch import Ticket
from lab.baselines import OracleTtft
from lab.block_pool import BlockPool
from lab.engine_types import Output, StepResult
from lab.replay_agenda import Agenda
from lab.replay_config import PolicySpec, ReplayConfig, looks_at_blocks
from lab.replay_detector import SimDetector
from lab.replay_feed import BlockFeed, DirectFeed, SidecarFeed
from lab.replay_instance import SimInstance
from lab.replay_predictor import SimPredictor
from lab.replay_prompts import NamedPrompts, Prompts, TokenPrompts
from lab.replay_queue import Guest, SimRoom
from lab.replay_result import Result
from lab.replay_router import SimRouter
from lab.replay_tenants import EVERYBODY, budgets_by_tenant, budgets_of, tenants_of
from lab.traces import Trace
from schemas.bus import KvBatch, LatencyModel, LoadReport, RouteBatch

Progress = Callable[[int], None]
"""Told how many requests have arrived so far."""

Feeds = Callable[[str, BlockPool], BlockFeed]
"""Makes the feed of an instance, by its name and its engine's pool."""


def replay(
    trace: Trace, spec: PolicySpec, config: ReplayConfig, progress: Progress | None = None
) -> Result:
    """Return what a policy makes of a trace.

    Raises:
        ValueError: no request fits into an engine, or the settings make no sense.
    """
    config = config.resolved(trace.block_tokens)
    tokens_max = config.engine.max_model_len
    name, trace = trace.name, trace.within(tokens_max)
    if not trace.requests:
        raise ValueError(f"{name}: no request has at most {tokens_max} tokens")
    with _without_gc():
        began_s = time.process_time()
        world = Replay(trace, spec, config, progress)
        world.run()
        return world.result(time.process_time() - began_s)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Let no collection visit millions of blocks; nothing here leaves cycles behind."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _ways(
    trace: Trace, config: ReplayConfig
) -> tuple[Prompts, Callable[[str, BlockPool], BlockFeed]]:
    """Return how requests are made, and how an instance's events become batches."""
    if not config.through_sidecars:
        return NamedPrompts(trace, config.block_size), DirectFeed
    prompts = TokenPrompts(trace, config.block_size)
    return prompts, lambda name, _: SidecarFeed(name, config.block_size, prompts.tokens)


class _Open:
    """A request on its way."""

    __slots__ = ("leader", "position", "router", "ticket", "ttft_s", "waited_s")

    def __init__(
        self,
        position: int,
        router: SimRouter,
        ticket: Ticket,
        waited_s: float,
        leader: Leader | None,
    ) -> None:
        self.position = position
        self.router = router
        self.ticket = ticket
        self.ttft_s = -1.0
        self.waited_s = waited_s
        self.leader = leader


class Replay:
    """One replay under way.

    Attributes:
        router_type: what its routers are; another in replays that look at them closely.
    """

    router_type: type[SimRouter] = SimRouter

    def __init__(
        self, trace: Trace, spec: PolicySpec, config: ReplayConfig, progress: Progress | None
    ) -> None:
        self._trace = trace
        self._spec = spec
        self._config = config
        self._progress = progress
        self._agenda = Agenda()
        self._arrived = 0
        self._open: dict[str, _Open] = {}
        self._prompts, feeds = _ways(trace, config)
        engine = msgspec.structs.replace(
            config.engine, report_events=looks_at_blocks(spec) or config.detector
        )
        watched = spec.name == OracleTtft.name
        self.instances = [
            SimInstance(
                position,
                engine,
                feeds,
                self._agenda,
                coast_s_max=config.coast_s_max,
                on_output=self._output,
                on_step=self._stepped if watched else None,
                publish=self._publish,
            )
            for position in range(config.instances)
        ]
        self.routers = self._make_routers()
        self.detector = SimDetector(self._agenda, self._said) if config.detector else None
        self.predictor = SimPredictor(self._learnt) if config.predictor else None
        count = len(trace.requests)
        self._ttft_s = np.full(count, np.nan)
        self._end_s = np.full(count, np.nan)
        self._promised = np.zeros(count, np.int64)
        self._cached = np.zeros(count, np.int64)
        self._instance = np.zeros(count, np.int64)
        self._wait_s = np.zeros(count)
        self._shed = np.zeros(count, np.bool_)
        self._tenants = config.tenants or (EVERYBODY,)
        self._tenant = tenants_of(count, self._tenants, config.seed)
        shared_s = budgets_of(count, config.budgets_ttft_s, config.seed)
        self._budget_s = budgets_by_tenant(shared_s, self._tenants, self._tenant)
        self._rooms = self._make_rooms()
        self._samples: list[tuple[float, list[int], list[float]]] = []

    def _make_routers(self) -> list[SimRouter]:
        config = self._config
        chance = random.Random(f"lags {config.seed}")
        records = [each.record(config.block_size) for each in self.instances]
        several = config.routers > 1
        routers = []
        for position in range(config.routers):
            lag_s = config.event_lag_s * (chance.uniform(0.5, 1.5) if several else 1.0)
            heard = several or config.detector or config.predictor
            tell = self._told if heard else None
            routers.append(
                self.router_type(position, self._spec, config, self._agenda, records, lag_s, tell)
            )
        return routers

    def _make_rooms(self) -> list[SimRoom]:
        """Return a waiting room for each router; none where nobody waits."""
        queue, coalesce = self._config.queue, self._config.coalesce
        if queue is None and coalesce is None:
            return []
        return [
            SimRoom(queue, coalesce, router.plane, self._agenda, self._released, self._refused)
            for router in self.routers
        ]

    def run(self) -> None:
        """Replay it all."""
        config, agenda = self._config, self._agenda
        agenda.at(0.0, self._tick)
        agenda.at(0.0, self._report)
        agenda.at(0.0, self._sample)
        agenda.at(self._trace.requests[0].at_s, self._arrive, 0)
        agenda.run(self._trace.duration_s + config.drain_s_max)

    @property
    def _over(self) -> bool:
        if self._arrived < len(self._trace.requests) or self._open:
            return False
        return not any(map(len, self._rooms))

    # --- requests

    def _arrive(self, position: int) -> None:
        requests = self._trace.requests
        self._arrived = position + 1
        if self._arrived < len(requests):
            self._agenda.at(requests[self._arrived].at_s, self._arrive, self._arrived)
        request, asked = self._prompts.make(position)
        tenant = self._tenants[self._tenant[position]]
        if tenant.name:
            asked = msgspec.structs.replace(asked, tenant=tenant.name)
        due_s = self._agenda.now_s + float(self._budget_s[position])
        guest = Guest(position, request, asked, tenant, due_s)
        if not self._rooms or not self._rooms[position % len(self._rooms)].hold(guest):
            self._send(guest)
        if self._progress is not None:
            self._progress(self._arrived)

    def _send(self, guest: Guest, waited_s: float = 0.0) -> None:
        """Decide on a request and hand it to its instance."""
        position = guest.position
        router = self.routers[position % len(self.routers)]
        ticket = router.route(guest.request, waited_s)
        chosen = ticket.decision.choice.index
        self._promised[position] = ticket.decision.hit
        self._instance[position] = chosen
        leader = None
        if self._rooms:
            leader = self._rooms[position % len(self._rooms)].sent(guest, ticket.decision)
        request_id = guest.prompt.request_id
        self._open[request_id] = _Open(position, router, ticket, waited_s, leader)
        self.instances[chosen].add(guest.prompt)

    def _released(self, guest: Guest) -> None:
        position = guest.position
        waited_s = self._agenda.now_s - self._trace.requests[position].at_s
        self._wait_s[position] = waited_s
        self._send(guest, waited_s)

    def _refused(self, guest: Guest) -> None:
        self._shed[guest.position] = True
        self._prompts.forget(guest.prompt.request_id)

    def _output(self, output: Output) -> None:
        request = self._open[output.request_id]
        now_s, position = self._agenda.now_s, request.position
        if output.cached_tokens is not None and request.ttft_s < 0:
            request.ttft_s = now_s - self._trace.requests[position].at_s
            self._ttft_s[position] = request.ttft_s
            self._cached[position] = output.cached_tokens
            request.router.first_byte(request.ticket, request.ttft_s)
            if request.leader is not None:
                self._rooms[position % len(self._rooms)].computed(request.leader)
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self._prompts.forget(output.request_id)
            self._end_s[position] = now_s
            asked = self._trace.requests[position]
            cached = int(self._cached[position])
            request.router.finish(
                request.ticket, asked.output_tokens, cached, request.ttft_s, request.waited_s
            )
            if self._rooms:
                took_s = now_s - asked.at_s - request.waited_s
                new_tokens = request.ticket.decision.new_tokens
                room = self._rooms[position % len(self._rooms)]
                room.ended(request.ttft_s - request.waited_s, took_s, new_tokens)

    # --- messages

    def _stepped(self, row: int, result: StepResult, due_s: float) -> None:
        for router in self.routers:
            if router.rival is not None:
                router.rival.stepped(row, result, due_s)

    def _publish(self, batch: KvBatch) -> None:
        for router in self.routers:
            self._agenda.at(self._agenda.now_s + router.lag_s, router.hear, batch)

    def _told(self, batch: RouteBatch) -> None:
        for router in self.routers:
            if router.name != batch.router_id:
                self._agenda.at(self._agenda.now_s + router.lag_s, router.hear, batch)
        at_s = self._agenda.now_s + self._config.event_lag_s
        if self.detector is not None:
            self._agenda.at(at_s, self.detector.hear, batch)
        if self.predictor is not None:
            self._agenda.at(at_s, self.predictor.hear, batch)

    def _learnt(self, model: LatencyModel) -> None:
        for router, room in zip(self.routers, self._rooms, strict=True):
            self._agenda.at(self._agenda.now_s + router.lag_s, room.learn, model)

    def _said(self, message: Message) -> None:
        for router in self.routers:
            self._agenda.at(self._agenda.now_s + router.lag_s, router.hear, message)

    # --- time

    def _tick(self) -> None:
        for instance in self.instances:
            instance.heartbeat()
        for router in self.routers:
            router.tick()
        if self.detector is not None:
            self.detector.tick()
        if not self._over:
            self._agenda.at(self._agenda.now_s + self._config.tick_s, self._tick)

    def _report(self) -> None:
        reports: list[LoadReport] = [
            report for each in self.instances if (report := each.report()) is not None
        ]
        for report in reports:
            for router in self.routers:
                self._agenda.at(self._agenda.now_s + router.lag_s, router.hear, report)
            if self.predictor is not None:
                self.predictor.load(report)
        if not self._over:
            self._agenda.at(self._agenda.now_s + self._config.report_s, self._report)

    def _sample(self) -> None:
        engines = [each.engine for each in self.instances]
        self._samples.append(
            (
                self._agenda.now_s,
                [engine.running_count + engine.waiting_count for engine in engines],
                [engine.pool.usage for engine in engines],
            )
        )
        if not self._over:
            self._agenda.at(self._agenda.now_s + self._config.sample_s, self._sample)

    # --- the end

    def result(self, cpu_s: float) -> Result:
        """Return what it came to."""
        requests = self._trace.requests
        ended = np.isfinite(self._end_s)
        at_s = np.array([each.at_s for each in requests])
        prompt = np.array([each.input_tokens for each in requests], np.int64)
        output = np.array([each.output_tokens for each in requests], np.int64)
        counts: Counter[str] = Counter()
        for service in (self.detector, self.predictor):
            counts.update({} if service is None else service.counts)
        for router in self.routers:
            assert not router.plane.intake.counts["digest_mismatch"], "a feed said what is not"
            counts.update(router.plane.requests.counts)
        for room in self._rooms:
            counts.update(room.counts)
        return Result(
            policy=self._spec.label,
            trace=self._trace.name,
            seed=self._config.seed,
            at_s=at_s[ended],
            ttft_s=self._ttft_s[ended],
            end_s=self._end_s[ended],
            prompt_tokens=prompt[ended],
            output_tokens=output[ended],
            promised_tokens=self._promised[ended],
            cached_tokens=self._cached[ended],
            instance=self._instance[ended],
            wait_s=self._wait_s[ended],
            budget_s=self._budget_s[ended],
            queue="" if self._config.queue is None else self._config.queue.order,
            tenants=tuple(each.name for each in self._tenants),
            tenant=self._tenant[ended],
            shed_at_s=at_s[self._shed],
            shed_tenant=self._tenant[self._shed],
            left_tenant=self._tenant[~ended & ~self._shed],
            sample_s=np.array([at_s for at_s, _, _ in self._samples]),
            batch=np.array([batch for _, batch, _ in self._samples], np.int64),
            kv_usage=np.array([usage for _, _, usage in self._samples]),
            busy_s=np.array([each.busy_s for each in self.instances]),
            preemptions=sum(each.preemptions for each in self.instances),
            steps=sum(each.steps for each in self.instances),
            span_s=self._trace.duration_s,
            lasted_s=float(self._end_s[ended].max(initial=0.0)),
            cpu_s=cpu_s,
            counts=dict(counts),
        )
