"""The engine in real time: a loop that steps it, sleeps as long as a step takes, and tells of it.

Theory of operation. One task steps the pure engine; what a step made is due when the step would
have ended, so it is held back until then: first its block events go out, then its tokens, as in
vLLM. The loop keeps a schedule: a step that is told late (the machine is busy) does not make the
next one late. Requests come and go between steps only, since all of it runs in one event loop.

A `Generation` collects what its request got until its consumer fetches it; a slow consumer gets
several tokens at once, as from vLLM. It holds counts, never more than its answer has tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from controlplane.core.hashing import Extras, chain, pack_tokens
from lab.engine import Engine
from lab.engine_types import (
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    FinishReason,
    Output,
    Request,
    StepResult,
    engine_hashes,
)
from lab.server_model import Answer
from schemas.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event

_LAG_S_MAX = 0.25  # beyond this the schedule starts afresh: the past cannot be caught up with
_MEDIUM = "GPU"


class Job(msgspec.Struct, frozen=True):
    """One request with its tokens.

    Attributes:
        lora_id: the adapter's number, where `extras` name an adapter.
        report_hits: re-announce hit blocks.
    """

    request_id: str
    prompt_ids: Sequence[int]
    answer: Answer
    extras: Extras = Extras()
    lora_id: int | None = None
    session_id: str | None = None
    report_hits: bool = False


class Delta(msgspec.Struct, frozen=True):
    """What a request got since its consumer last looked."""

    new_tokens: int
    finish_reason: FinishReason | None
    cached_tokens: int


class Generation:
    """The receiving end of one job.

    Attributes:
        submitted_s: monotonic time; likewise the others, which are None before they happened.
    """

    def __init__(self, job: Job, stream_interval: int = 1) -> None:
        self.job = job
        self.submitted_s = time.monotonic()
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.cached_tokens = 0
        self._stream_interval = stream_interval
        self._new_tokens = 0
        self._finish_reason: FinishReason | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_for_end = False

    async def next(self) -> Delta:
        """Wait until there is enough to send, and return all of it. After the end: never again."""
        if not self._ready():
            await self._wait()
        new_tokens, self._new_tokens = self._new_tokens, 0
        return Delta(new_tokens, self._finish_reason, self.cached_tokens)

    async def all(self) -> Delta:
        """Wait for the end, and return everything; for consumers that call this alone."""
        self._waits_for_end = True
        if not self._ready():
            await self._wait()
        return Delta(self._new_tokens, self._finish_reason, self.cached_tokens)

    def put(self, output: Output, now_s: float) -> None:
        """Add what a step gave."""
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
            self.first_token_s = now_s
        self.last_token_s = now_s
        self._new_tokens += output.new_tokens
        self._finish_reason = output.finish_reason
        if self._waiter is not None and not self._waiter.done() and self._ready():
            self._waiter.set_result(None)

    def _ready(self) -> bool:
        """Whether the consumer need not wait: the first token and the end are never held back."""
        if self._finish_reason is not None:
            return True
        if self._waits_for_end or not self._new_tokens:
            return False
        return self._new_tokens >= self._stream_interval or self.first_token_s == self.last_token_s

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class LiveEngine:
    """Runs an engine in real time; `run` is its task.

    Args:
        engine: stepped by this object alone.
        publish: sends block events; called once a step that has any.
        observe: sees each step when it is due, with all unfinished generations and the time.
        stream_interval: a stream gets its tokens this many at a time, but for the first one.

    Attributes:
        stalled_until_s: no step begins before this monotonic time.
    """

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[list[Event]], Any],
        observe: Callable[[StepResult, dict[str, Generation], float], Any],
        stream_interval: int = 1,
    ) -> None:
        self.engine = engine
        self._stream_interval = stream_interval
        self.stalled_until_s = 0.0
        self._publish = publish
        self._observe = observe
        self._generations: dict[str, Generation] = {}
        self._wake = asyncio.Event()

    @property
    def unfinished_count(self) -> int:
        """Requests submitted and not yet ended: running and waiting."""
        return len(self._generations)

    def submit(self, job: Job) -> Generation:
        """Queue a job for the next step.

        Raises:
            ValueError: the engine cannot take it; says why.
        """
        tokens = pack_tokens([*job.prompt_ids, *job.answer.token_ids[:-1]])
        hashes = chain(tokens, self.engine.config.block_size, extras=job.extras)
        self.engine.add_request(
            Request(
                request_id=job.request_id,
                prompt_tokens=len(job.prompt_ids),
                output_tokens=len(job.answer.token_ids),
                block_hashes=engine_hashes(hashes),
                finish_reason=job.answer.finish_reason,
                report_hits=job.report_hits,
            )
        )
        generation = Generation(job, self._stream_interval)
        self._generations[job.request_id] = generation
        self._wake.set()
        return generation

    def abort(self, request_id: str) -> bool:
        """Drop a job that nobody waits for any more; return whether it was unfinished."""
        self.engine.abort(request_id)
        self._wake.set()
        return self._generations.pop(request_id, None) is not None

    async def run(self) -> None:
        """Step for ever."""
        due_s = time.monotonic()
        while True:
            if not self.engine.has_work:
                self._wake.clear()
                await self._wake.wait()
                due_s = max(due_s, time.monotonic())
            if (stalled_s := self.stalled_until_s - time.monotonic()) > 0:
                await asyncio.sleep(stalled_s)
            result = self.engine.step()
            events = self._wire_events(result.events)
            due_s = max(due_s, time.monotonic() - _LAG_S_MAX) + result.duration_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if events:
                self._publish(events)
            self._deliver(result)

    def _wire_events(self, events: Sequence[EngineEvent]) -> list[Event]:
        """Return a step's events as vLLM's: with tokens and extras, one removal a block."""
        wire: list[Event] = []
        for event in events:
            if isinstance(event, BlocksStored):
                job = self._generations[event.request_id].job
                wire.append(_stored(event, job, self.engine.config.block_size))
            elif isinstance(event, BlocksRemoved):
                wire += [BlockRemoved([each], medium=_MEDIUM, group_idx=0) for each in event.hashes]
            else:
                wire.append(AllBlocksCleared())
        return wire

    def _deliver(self, result: StepResult) -> None:
        now_s = time.monotonic()
        self._observe(result, self._generations, now_s)
        for output in result.outputs:
            generation = self._generations.get(output.request_id)
            if generation is None:
                continue  # its client hung up while the step ran
            generation.put(output, now_s)
            if output.finish_reason is not None:
                del self._generations[output.request_id]


def _stored(event: BlocksStored, job: Job, block_size: int) -> BlockStored:
    first, count = event.first_block, len(event.hashes)
    keys: list[list[Any] | None] = [
        [job.extras.lora] if job.extras.lora is not None else None for _ in range(count)
    ]
    if first == 0 and job.extras.salt is not None:
        keys[0] = [*(keys[0] or []), job.extras.salt]
    return BlockStored(
        block_hashes=list(event.hashes),
        parent_block_hash=event.parent,
        token_ids=_tokens(job, first * block_size, (first + count) * block_size),
        block_size=block_size,
        lora_id=job.lora_id,
        medium=_MEDIUM,
        lora_name=job.extras.lora,
        extra_keys=keys,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        session_id=job.session_id,
    )


def _tokens(job: Job, start: int, end: int) -> list[int]:
    """Return tokens `start` to `end` of a job's prompt and answer."""
    length = len(job.prompt_ids)
    prompt = list(job.prompt_ids[start:end])
    return prompt + job.answer.token_ids[max(0, start - length) : max(0, end - length)]
