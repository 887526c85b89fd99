"""A server behind the admission queue in simulated time, one request at a time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from controlplane.core.openings import ANYWHERE, Hits
from controlplane.core.queue import AdmissionQueue
from controlplane.core.queue_lines import QueueConfig, Service, Waiting


class Job(msgspec.Struct):
    """One request: when it comes, whose it is, and how much prefix its group shares."""

    at_s: float
    group: int
    shared_tokens: int
    own_tokens: int
    tenant: str = ""
    weight: float = 1.0
    budget_s: float = float("inf")
    ttft_s: float = float("nan")

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.shared_tokens + self.own_tokens

    @property
    def met(self) -> bool:
        """Whether it was served within its budget."""
        return self.ttft_s <= self.budget_s


def poisson(rng: random.Random, rate: float, count: int, make: Callable[[float], Job]) -> list[Job]:
    """Returns jobs that come at random times."""
    at_s, jobs = 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        jobs.append(make(at_s))
    return jobs


def serve(jobs: Sequence[Job], config: QueueConfig, tokens_per_s: float) -> AdmissionQueue:
    """Serves jobs by the queue's order; a prompt's prefix is a hit if its group's was just served.

    That is the paper's model: the time of a prefill is its length less what it shares with the one
    before. Jobs that the queue refuses keep no TTFT.
    """
    queue = AdmissionQueue(config)
    arrivals = [(job.at_s, number) for number, job in enumerate(jobs)]
    heapq.heapify(arrivals)
    now_s, last, members = 0.0, -1, dict[int, list[Waiting]]()
    while arrivals or len(queue):
        if not len(queue):
            now_s = max(now_s, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now_s:
            job = jobs[heapq.heappop(arrivals)[1]]
            one = _waiting(job, last)
            if queue.add(one, Service(ttft_p99_s=job.tokens / tokens_per_s)) is not one:
                members.setdefault(job.group, []).append(one)
        taken = queue.take(lambda _: ANYWHERE, now_s)
        assert taken is not None
        job = taken.payload
        now_s += (job.tokens - (job.shared_tokens if job.group == last else 0)) / tokens_per_s
        job.ttft_s = now_s - job.at_s
        if job.group != last:
            _turn(queue, members, last, job.group)
            last = job.group
    return queue


def _waiting(job: Job, last: int) -> Waiting:
    return Waiting(
        job,
        job.at_s,
        tenant=job.tenant,
        weight=job.weight,
        ttft_by_s=job.at_s + job.budget_s,
        tokens=job.tokens,
        hits=_hits(job, job.group == last),
    )


def _hits(job: Job, is_hit: bool) -> Hits:
    return ((job.shared_tokens, 1),) if is_hit and job.shared_tokens else ()


def _turn(queue: AdmissionQueue, members: dict[int, list[Waiting]], last: int, new: int) -> None:
    """Tells the queue whose prefix is a hit now, and whose no more."""
    found = []
    for group, is_hit in ((last, False), (new, True)):
        members[group] = [one for one in members.get(group, ()) if one in queue]
        found += [(one, one.service, _hits(one.payload, is_hit)) for one in members[group]]
    queue.refresh(found)


def p99(jobs: Sequence[Job]) -> float:
    """Returns the 99th percentile of TTFT."""
    return float(np.percentile([job.ttft_s for job in jobs], 99))
