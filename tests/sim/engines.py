"""An engine process: the lab's pure engine, stepped in simulated time, with vLLM's habits.

It publishes its block events numbered from 0 and keeps the last ones for replay; it tells nobody
that it is another process than before. What a step makes is due when the step would have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from controlplane.core.hashing import ROOT, BlockHash, chain, pack_tokens
from lab.engine import Engine
from lab.engine_types import (
    BlocksRemoved,
    BlocksStored,
    EngineConfig,
    EngineEvent,
    Output,
    Request,
    StepResult,
    block_hash_of,
    engine_hash,
)
from lab.profiles import StepTimes
from schemas.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_batch
from tests.sim.world import Process, World

BLOCK = 4
"""Tokens a block: small, so that short prompts have many."""

STEP_TIMES = StepTimes(
    step=0.01,
    sequence=1e-3,
    token=1e-4,
    weights=0.0,
    experts=0.0,
    expert_miss=1.0,
    pair=0.0,
    kv_token=0.0,
)


class Job(msgspec.Struct, frozen=True):
    """What an engine is asked to do: a prompt, and the answer that it will give."""

    job_id: str
    prompt: Sequence[int]
    answer: Sequence[int]
    report_hits: bool = False
    foreign: bool = False


OnOutput = Callable[[Output], None]
OnBroken = Callable[[], None]


class Parents:
    """Which block comes before which, for all blocks that there ever were: what truth needs."""

    def __init__(self) -> None:
        self._of: dict[BlockHash, BlockHash] = {}

    def learn(self, hashes: Sequence[BlockHash]) -> None:
        """Remember a chain."""
        before = ROOT
        for block in hashes:
            self._of[block] = before
            before = block

    def closed(self, blocks: set[BlockHash]) -> set[BlockHash]:
        """Return the blocks of a set that are reached from the root within it."""
        children: dict[BlockHash, list[BlockHash]] = {}
        for block in blocks:
            children.setdefault(self._of[block], []).append(block)
        reached: set[BlockHash] = set()
        waiting = [ROOT]
        while waiting:
            below = children.get(waiting.pop(), [])
            reached.update(below)
            waiting += below
        return reached


class EngineProcess(Process):
    """One incarnation of an engine.

    Attributes:
        core: the engine itself.
        refusing: chance that a request gets a 500.
        frozen: no step begins.
        silent: it has forgotten its cache and told nobody: vLLM tells with its next step, and
            without requests there is none.
        listener: the sidecar's subscription to the block events.
    """

    def __init__(
        self, world: World, name: str, config: EngineConfig, parents: Parents, replay_max: int
    ) -> None:
        super().__init__(world, name)
        self.core = Engine(config)
        self.refusing = 0.0
        self.frozen = False
        self.silent = False
        self.listener: Callable[[int, bytes], None] | None = None
        self._parents = parents
        self._jobs: dict[str, tuple[Job, OnOutput]] = {}
        self._connections: dict[str, OnBroken] = {}
        self._ended: dict[str, Job] = {}
        self._seq = 0
        self._replay: deque[tuple[int, bytes]] = deque(maxlen=replay_max)
        self._stepping = False

    # --- requests

    @property
    def unfinished(self) -> int:
        """Requests in its batch and its queue."""
        return self.core.running_count + self.core.waiting_count

    @property
    def foreign(self) -> int:
        """Those of them that came from no router."""
        return sum(job.foreign for job, _ in self._jobs.values())

    def accept(self, job_id: str, on_broken: OnBroken) -> None:
        """Accept a request's connection, busy or not; `on_broken` is called if this dies first."""
        self._connections[job_id] = on_broken

    def submit(self, job: Job, on_output: OnOutput) -> None:
        """Take a request."""
        hashes = chain(pack_tokens([*job.prompt, *job.answer[:-1]]), BLOCK)
        self._parents.learn(hashes)
        names = [engine_hash(block) for block in hashes]
        self.core.add_request(
            Request(
                job.job_id,
                len(job.prompt),
                len(job.answer),
                names,
                report_hits=job.report_hits,
            )
        )
        self._jobs[job.job_id] = (job, on_output)
        self._wake()

    def abort(self, job_id: str) -> None:
        """Drop a request that nobody waits for any more."""
        self._connections.pop(job_id, None)
        if self.core.abort(job_id):
            self._ended[job_id] = self._jobs.pop(job_id)[0]
            self._wake()

    def reset_cache(self) -> None:
        """Forget every block; whoever runs computes anew."""
        self.silent = self.core.reset_prefix_cache(preempt_running=True) or self.silent
        self._wake()

    def kill(self) -> None:
        """Die; connections break."""
        super().kill()
        for on_broken in self._connections.values():
            on_broken()
        self._connections.clear()
        self._jobs.clear()

    # --- steps

    def thaw(self) -> None:
        """Step again."""
        self.frozen = False
        self._wake()

    def _wake(self) -> None:
        if not self._stepping and self.core.has_work and not self.frozen:
            self._stepping = True
            self.after(0.0, self._step)

    def _step(self) -> None:
        self.silent = False
        result = self.core.step()
        self.after(result.duration_s, self._due, result)

    def _due(self, result: StepResult) -> None:
        self._stepping = False
        events = [each for event in result.events for each in self._wire(event)]
        if events:
            self._publish(events)
        for output in result.outputs:
            found = self._jobs.get(output.request_id)
            if found is None:
                continue
            if output.finish_reason is not None:
                del self._jobs[output.request_id]
                self._connections.pop(output.request_id, None)
            found[1](output)
        self._ended.clear()
        self._wake()

    def _wire(self, event: EngineEvent) -> list[Event]:
        """Return an event as vLLM sends it."""
        if isinstance(event, BlocksStored):
            found = self._jobs.get(event.request_id)
            job = found[0] if found is not None else self._ended[event.request_id]
            first, end = event.first_block * BLOCK, (event.first_block + len(event.hashes)) * BLOCK
            tokens = [*job.prompt, *job.answer][first:end]
            return [BlockStored(list(event.hashes), event.parent, tokens, BLOCK, medium="GPU")]
        if isinstance(event, BlocksRemoved):
            return [BlockRemoved([name], medium="GPU") for name in event.hashes]
        return [AllBlocksCleared()]

    # --- block events

    def _publish(self, events: list[Event]) -> None:
        payload = encode_batch(self.world.now_s, events)
        self._replay.append((self._seq, payload))
        if self.listener is not None:
            self.listener(self._seq, payload)
        self._seq += 1

    def messages_from(self, seq: int) -> list[tuple[int, bytes]]:
        """Return what its replay buffer still has, from a number on."""
        return [each for each in self._replay if each[0] >= seq]

    # --- truth

    def usable(self) -> set[BlockHash]:
        """Return the cached blocks that a prompt can reach: all that anybody should index."""
        return self._parents.closed({block_hash_of(name) for name in self.core.pool.cached})
