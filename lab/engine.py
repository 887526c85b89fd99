"""The emulated engine: vLLM V1's scheduler over the block pool, without tokens, clock or I/O.

Theory of operation. `step` does what one iteration of vLLM's engine core does, at once: schedule,
compute, sample. The caller knows the time: what a step returns is due `duration_s` after it began,
and whatever arrives meanwhile (`add_request`, `abort`, `reset_prefix_cache`) counts from the next
step on, as in vLLM, which reads its input between steps.

A request is RUNNING or WAITING; a running one has computed some of its tokens:

    WAITING ── blocks for all its tokens are free ──> RUNNING ── last token sampled, abort ──> gone
       ^                                                 │
       └── no block for an earlier one: preempted ───────┘  (computes anew, hits allowed)

1. Running requests come first, in order of admission: each gets what it has not computed, up to
   the token budget (a decoding one: one token). When a block is needed and none is free, the last
   running request is preempted and goes to the queue's head.
2. Then waiting ones, in order of arrival, unless a request was preempted in this step: the longest
   cached prefix, of whole blocks and short of the last token, is taken over; the rest is computed
   in chunks of what the budget leaves. Admission needs blocks for all its tokens at once.
3. A request that computed all its tokens gets one more. Whole blocks are cached as they are
   scheduled; each event list is in the order in which vLLM would emit it.

Skipping ahead. While every running request decodes and none can be admitted, steps differ only in
the context's length, so `step(horizon_s)` takes as many of them at once as begin within the horizon
and end with the first request that finishes; blocks are handed out in the very same order.

Source: vllm/v1/core/sched/scheduler.py, kv_cache_manager.py of vLLM 0.32 (semantics; the code is
our own), checked block for block in tests/vllm/test_engine_fidelity.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

from lab.block_pool import BlockPool, EngineHash
from lab.engine_types import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    EngineConfig,
    EngineEvent,
    Output,
    Request,
    StepResult,
)


class Engine:
    """One emulated engine core; `step` until `has_work` is false."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._sequences: dict[str, _Sequence] = {}
        self._events: list[EngineEvent] = []  # what happened since the last step
        self._preempted: list[str] = []  # likewise
        self._departed = False  # a request left: one more step is due, if an empty one
        self._blocked = False  # the queue's head is refused until a request comes or leaves …
        self._wanted: EngineHash | None = None  # … or this block, its next one, is cached

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._running or self._waiting or self._departed)

    @property
    def running_count(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, it is empty, or it is longer than the model allows.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.request_id!r} needs a prompt and an output token")
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > self.config.max_model_len:
            raise ValueError(f"{tokens} tokens exceed max_model_len={self.config.max_model_len}")
        if len(request.block_hashes) < (tokens - 1) // self.config.block_size:
            raise ValueError(f"request {request.request_id!r} lacks hashes for its whole blocks")
        sequence = _Sequence(request)
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)
        if len(self._waiting) == 1:
            self._blocked = False

    def abort(self, request_id: str) -> bool:
        """Drop a request, wherever it is; return whether it was there. No output tells of it."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.admitted:
            self._running.remove(sequence)
            self.pool.release(sequence.blocks)
        else:
            self._waiting.remove(sequence)
        self._departed = True
        self._blocked = False
        return True

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget every cached block; return whether that was possible.

        It is not while requests run, unless they may be preempted. The event comes with the next
        step, so nobody hears of it while the engine is idle.
        """
        while preempt_running and self._running:
            self._preempt(self._running.pop(), self._preempted)
        self._blocked = False
        if not self.pool.clear():
            return False
        self._events.append(CacheCleared())
        return True

    def step(self, horizon_s: float = 0.0) -> StepResult:
        """Run one step, or a run of decode steps at once.

        Args:
            horizon_s: nothing will arrive for this long; 0 for exactly one step.
        """
        plan = _Plan(self._events, self._preempted, self.config.max_num_batched_tokens)
        self._events, self._preempted, self._departed = [], [], False
        steps = self._decode_run(horizon_s) if horizon_s > 0 else 1
        if steps > 1:
            self._skip(plan, steps)
        elif self._schedule_running(plan):
            self._schedule_waiting(plan)
        return self._finish(plan, steps)

    def run_s(self, horizon_s: float) -> float:
        """Return how long `step(horizon_s)` would last if it is a run of decode steps; else 0."""
        steps = self._decode_run(horizon_s)
        if steps == 1:
            return 0.0
        context = sum(sequence.tokens for sequence in self._running)
        return self.config.step_times.decode_s(steps, len(self._running), context)

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold; for tests, O(blocks)."""
        self.pool.check()
        references = [0] * self.config.num_blocks
        for sequence in self._running:
            assert sequence.admitted
            assert sequence.computed < sequence.tokens < sequence.end
            assert len(sequence.blocks) == -(-sequence.computed // self.config.block_size)
            for block in sequence.blocks:
                references[block] += 1
        assert references == self.pool.references
        assert not any(sequence.admitted or sequence.blocks for sequence in self._waiting)
        assert len(self._sequences) == len(self._running) + len(self._waiting)
        assert len(self._running) <= self.config.max_num_seqs

    # --- scheduling ---------------------------------------------------------------------------

    def _schedule_running(self, plan: _Plan) -> bool:
        """Schedule the batch; return whether that went without preemption."""
        running = self._running
        position, preempted_before = 0, len(plan.preempted)
        while position < len(running) and plan.budget > 0:
            sequence = running[position]
            new_tokens = min(sequence.tokens - sequence.computed, plan.budget)
            while not self._extend(sequence, new_tokens, plan.events):
                victim = running.pop()
                self._preempt(victim, plan.preempted)
                if victim is sequence:
                    return False
            plan.add(sequence, new_tokens)
            position += 1
        return len(plan.preempted) == preempted_before

    def _schedule_waiting(self, plan: _Plan) -> None:
        waiting, size = self._waiting, self.config.block_size
        while plan.budget > 0 and waiting and len(self._running) < self.config.max_num_seqs:
            sequence = waiting[0]
            hits: list[int] = []
            if self.config.prefix_caching:
                reusable = (sequence.tokens - 1) // size
                hits = self.pool.find(islice(sequence.request.block_hashes, reusable))
            if hits and sequence.request.report_hits:
                self._report_stored(sequence.request, 0, len(hits), plan.events)
            if not self._fits(sequence, hits):
                self._blocked = not sequence.request.report_hits  # else each refusal tells its hits
                self._wanted = next(islice(sequence.request.block_hashes, len(hits), None), None)
                return
            waiting.popleft()
            self._admit(sequence, hits, plan)
        self._blocked = len(self._running) >= self.config.max_num_seqs
        self._wanted = None

    def _fits(self, sequence: _Sequence, hits: list[int]) -> bool:
        """Whether blocks are free for all tokens of a waiting request, and the watermark beyond."""
        needed = -(-sequence.tokens // self.config.block_size) - len(hits)
        reserve = self._watermark_blocks if self._running else 0
        return needed + self.pool.count_free(hits) + reserve <= self.pool.free_count

    def _admit(self, sequence: _Sequence, hits: list[int], plan: _Plan) -> None:
        self.pool.touch(hits)
        sequence.admitted = True
        sequence.blocks = hits
        sequence.cached_blocks = len(hits)
        sequence.computed = len(hits) * self.config.block_size
        if not sequence.preemptions:
            sequence.hit_tokens = sequence.computed
            plan.queries += sequence.tokens
            plan.hits += sequence.computed
        self._running.append(sequence)
        new_tokens = min(sequence.tokens - sequence.computed, plan.budget)
        extended = self._extend(sequence, new_tokens, plan.events)
        assert extended, "admission made sure of the blocks"
        plan.add(sequence, new_tokens)

    def _extend(self, sequence: _Sequence, new_tokens: int, events: list[EngineEvent]) -> bool:
        """Give a request blocks for `new_tokens` more and cache those that they fill.

        Returns:
            False, and nothing changed, if too few blocks are free.
        """
        size = self.config.block_size
        end = sequence.computed + new_tokens
        missing = -(-end // size) - len(sequence.blocks)
        if missing > 0:
            if missing > self.pool.free_count:
                return False
            evicted: list[int] = []
            sequence.blocks += self.pool.allocate(missing, evicted)
            if evicted and self.config.report_events:
                events.append(BlocksRemoved(evicted))
        first, full = sequence.cached_blocks, end // size
        if full > first and self.config.prefix_caching:
            self.pool.cache(sequence.blocks[first:full], sequence.request.block_hashes[first:full])
            sequence.cached_blocks = full
            self._report_stored(sequence.request, first, full, events)
        return True

    def _report_stored(
        self, request: Request, first: int, end: int, events: list[EngineEvent]
    ) -> None:
        if self.config.report_events:
            hashes = request.block_hashes
            parent = hashes[first - 1] if first else None
            events.append(BlocksStored(request.request_id, first, hashes[first:end], parent))

    def _preempt(self, sequence: _Sequence, preempted: list[str]) -> None:
        """Send a request that just left the batch to the queue's head, without its blocks."""
        self.pool.release(sequence.blocks)
        sequence.admitted = False
        sequence.blocks = []
        sequence.cached_blocks = sequence.computed = 0
        sequence.preemptions += 1
        self._waiting.appendleft(sequence)
        self._blocked = False
        preempted.append(sequence.request.request_id)

    # --- skipping ahead -----------------------------------------------------------------------

    def _decode_run(self, horizon_s: float) -> int:
        """Return how many steps from now on do nothing but decode; 1 where that is not known."""
        running = self._running
        if not running or len(running) > self.config.max_num_batched_tokens:
            return 1
        if self._waiting and not self._blocked:
            return 1
        if not all(sequence.decodes for sequence in running):
            return 1
        context = sum(sequence.tokens for sequence in running)
        steps = min(sequence.end - sequence.tokens for sequence in running)
        times = self.config.step_times
        steps = min(steps, times.decode_steps_in(horizon_s, len(running), context))
        while steps > 1 and self._blocks_for(steps) > self.pool.free_count:
            steps //= 2
        if self._waiting and any(self._wanted in each for each in self._fills(steps)):
            return 1
        return steps

    def _blocks_for(self, steps: int) -> int:
        size = self.config.block_size
        return sum(-(-(each.computed + steps) // size) - len(each.blocks) for each in self._running)

    def _fills(self, steps: int) -> Iterator[Sequence[EngineHash]]:
        size = self.config.block_size
        for each in self._running:
            yield each.request.block_hashes[each.computed // size : (each.computed + steps) // size]

    def _skip(self, plan: _Plan, steps: int) -> None:
        """Take `steps` decode steps at once; only turns that touch a block are done one by one."""
        size = self.config.block_size
        starts = [sequence.computed for sequence in self._running]
        turns = [
            (turn, position)
            for position, computed in enumerate(starts)
            for offset in {-computed % size, (-computed - 1) % size}  # takes a block, fills one
            for turn in range(offset, steps, size)
        ]
        turns.sort()
        for turn, position in turns:
            sequence = self._running[position]
            sequence.computed = starts[position] + turn
            extended = self._extend(sequence, 1, plan.events)
            assert extended, "the run was cut to the free blocks"
        for sequence, computed in zip(self._running, starts, strict=True):
            sequence.computed = computed
            plan.add(sequence, 1)
            sequence.computed = computed + steps - 1
            sequence.tokens += steps - 1

    # --- sampling -----------------------------------------------------------------------------

    def _finish(self, plan: _Plan, steps: int) -> StepResult:
        outputs: list[Output] = []
        gone: set[_Sequence] = set()
        for sequence, new_tokens in plan.scheduled:
            sequence.computed += new_tokens
            if sequence.computed < sequence.tokens:
                continue
            request = sequence.request
            cached = sequence.hit_tokens if sequence.tokens == request.prompt_tokens else None
            sequence.tokens += 1
            reason = None
            if sequence.tokens == sequence.end:
                reason = request.finish_reason
                gone.add(sequence)
                self.pool.release(sequence.blocks)
                del self._sequences[request.request_id]
            outputs.append(Output(request.request_id, steps, reason, cached))
        if gone:
            self._running = [each for each in self._running if each not in gone]
            self._departed = True
            self._blocked = False
        return StepResult(
            duration_s=self._duration_s(plan, steps),
            steps=steps if plan.scheduled else 0,
            scheduled_tokens={
                sequence.request.request_id: new_tokens * steps
                for sequence, new_tokens in plan.scheduled
            },
            outputs=outputs,
            events=plan.events,
            preempted=plan.preempted,
            queries=plan.queries,
            hits=plan.hits,
            running=len(self._running),
            waiting=len(self._waiting),
            kv_usage=self.pool.usage,
        )

    def _duration_s(self, plan: _Plan, steps: int) -> float:
        sequences = len(plan.scheduled)
        if not sequences:
            return 0.0
        times = self.config.step_times
        if steps > 1:
            return times.decode_s(steps, sequences, plan.kv_tokens)
        tokens = self.config.max_num_batched_tokens - plan.budget
        return times.step_s(tokens, sequences, plan.pairs, plan.kv_tokens)


class _Sequence:
    """A request on its way.

    Attributes:
        tokens: of its prompt and what it generated.
        end: `tokens` when it has finished.
        computed: tokens whose keys and values are in its blocks.
        cached_blocks: how many of its blocks carry a hash.
        hit_tokens: what its first admission found cached.
    """

    __slots__ = (
        "admitted",
        "blocks",
        "cached_blocks",
        "computed",
        "end",
        "hit_tokens",
        "preemptions",
        "request",
        "tokens",
    )

    @property
    def decodes(self) -> bool:
        """Whether all that is left to compute is the last generated token."""
        return self.tokens == self.computed + 1 and self.tokens > self.request.prompt_tokens

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = request.prompt_tokens
        self.end = request.prompt_tokens + request.output_tokens
        self.computed = 0
        self.cached_blocks = 0
        self.hit_tokens = 0
        self.preemptions = 0
        self.admitted = False
        self.blocks: list[int] = []


class _Plan:
    """What a step schedules, and the work it makes.

    Attributes:
        budget: tokens that may still be scheduled.
        pairs: (query, key) pairs of prompt chunks; `kv_tokens`: context that decoding reads.
    """

    __slots__ = (
        "budget",
        "events",
        "hits",
        "kv_tokens",
        "pairs",
        "preempted",
        "queries",
        "scheduled",
    )

    def __init__(self, events: list[EngineEvent], preempted: list[str], budget: int) -> None:
        self.events = events
        self.preempted = preempted
        self.budget = budget
        self.scheduled: list[tuple[_Sequence, int]] = []
        self.pairs = 0
        self.kv_tokens = 0
        self.queries = 0
        self.hits = 0

    def add(self, sequence: _Sequence, new_tokens: int) -> None:
        """Schedule tokens of a request; its `computed` is still that before the step."""
        self.scheduled.append((sequence, new_tokens))
        self.budget -= new_tokens
        if sequence.decodes:
            self.kv_tokens += sequence.tokens
        else:
            self.pairs += new_tokens * sequence.computed + new_tokens * (new_tokens + 1) // 2
