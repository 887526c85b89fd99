"""Many replays: from the cache where they were made before, else on as many cores as asked for."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec

from lab.cache import Cache, key_of
from lab.children import end_with_parent
from lab.replay import replay
from lab.replay_config import PolicySpec, ReplayConfig
from lab.replay_result import Result, decode, encode
from lab.replay_source import TraceSource
from lab.traces import Trace

_TOLD_EVERY = 50
_POLL_S = 0.2


class Job(msgspec.Struct, frozen=True):
    """One replay to make."""

    source: TraceSource
    policy: PolicySpec
    config: ReplayConfig

    @property
    def key(self) -> str:
        """What the result is kept under."""
        settings = msgspec.json.encode([self.policy, self.config]).decode()
        return key_of(self.source.digest(), settings)


Progress = Callable[[int], None]
"""Told of further requests that have arrived, in any of the replays."""


def run_jobs(
    jobs: Sequence[Job],
    *,
    processes: int = 1,
    cache: Cache | None = None,
    progress: Progress = lambda _: None,
) -> list[Result]:
    """Return the results, in the order of the jobs.

    Raises:
        TraceError, ValueError: a trace or a setting cannot be used.
    """
    keys = [job.key if cache is not None else "" for job in jobs]
    results: dict[int, Result] = {}
    for position, key in enumerate(keys):
        data = cache.get(key) if cache is not None else None
        if data is not None:
            results[position] = decode(data)
            progress(_requests(jobs[position]))

    def made(position: int, result: Result) -> None:
        results[position] = result
        if cache is not None:
            cache.put(keys[position], encode(result))

    missing = [position for position in range(len(jobs)) if position not in results]
    if processes <= 1 or len(missing) <= 1:
        for position in missing:
            made(position, _run(jobs[position], progress))
    else:
        _run_apart({at: jobs[at] for at in missing}, processes, made, progress)
    return [results[position] for position in range(len(jobs))]


def _run_apart(
    jobs: dict[int, Job],
    processes: int,
    made: Callable[[int, Result], None],
    progress: Progress,
) -> None:
    """Run jobs in processes of their own; fresh ones, since a fork would copy our threads."""
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        min(processes, len(jobs)), mp_context=context, initializer=_begin, initargs=(told,)
    ) as pool:
        try:
            with _interrupts_held():
                waiting = {pool.submit(_run_there, job): at for at, job in jobs.items()}
            while waiting:
                done, _ = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
                while not told.empty():
                    progress(told.get())
                for future in done:
                    made(waiting.pop(future), decode(future.result()))
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()  # nobody waits for their results any more
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C from processes that are started meanwhile: they inherit what is blocked.

    A terminal sends it to all of them, and each would print where it was. Ours alone ends the rest.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_told: Any = None
"""In a process of its own: where its progress goes."""


def _begin(told: Any) -> None:
    """Begin a process: it ends with its parent, however that ends."""
    global _told
    _told = told
    end_with_parent()


def _run_there(job: Job) -> bytes:
    return encode(_run(job, _told.put))


def _run(job: Job, progress: Progress) -> Result:
    """Run a job, telling of its arrivals a few at a time."""
    arrived = 0

    def tell(count: int) -> None:
        nonlocal arrived
        if count - arrived >= _TOLD_EVERY:
            progress(count - arrived)
            arrived = count

    trace = _loaded(job.source)
    result = replay(trace, job.policy, job.config, tell)
    progress(len(trace.requests) - arrived)
    return result


def _requests(job: Job) -> int:
    return len(_loaded(job.source).requests)


@lru_cache(maxsize=2)
def _loaded(source: TraceSource) -> Trace:
    return source.load()
