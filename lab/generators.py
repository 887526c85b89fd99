"""Made-up traces: four kinds of traffic and a planted hotspot, each a function of its seed.

Every kind is sessions. A session begins with a shared context (a system prompt, a template, a code
base, a set of tools), drawn by Zipf's law, so a few are popular and many are rare. Each turn adds
what the user or a tool says and asks for an answer; the next turn's prompt holds both. Sessions
begin at random (a Poisson process), turns follow after a pause.

What is in `KINDS` is chosen, not measured: lengths and turns are of the order that public traces
and papers give for such traffic, and are there to be changed.

A prompt's last, partial block is its own: in the next turn it goes on with other tokens.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import msgspec

from lab.traces import Trace, TraceRequest

BLOCK_TOKENS = 16
_SIGMA = 0.6  # spread of the lognormal lengths: the 95th percentile is 2.7 times the median


class Kind(msgspec.Struct, frozen=True):
    """One kind of traffic; lengths in tokens are medians, times are means.

    Attributes:
        contexts: how many shared contexts there are.
        zipf: exponent of their popularity; 0 makes all alike.
        turns_mean: geometric; 1 for single requests.
        pause_s: between an answer's asking and the next turn.
    """

    contexts: int
    zipf: float
    context_tokens: int
    said_tokens: int
    answer_tokens: int
    turns_mean: float = 1.0
    pause_s: float = 0.0


KINDS: dict[str, Kind] = {
    "chatbot": Kind(
        contexts=60,
        zipf=1.1,
        context_tokens=700,
        said_tokens=90,
        answer_tokens=250,
        turns_mean=4.0,
        pause_s=35.0,
    ),
    "api": Kind(contexts=200, zipf=1.0, context_tokens=600, said_tokens=150, answer_tokens=50),
    "coder": Kind(
        contexts=30,
        zipf=0.8,
        context_tokens=12_000,
        said_tokens=350,
        answer_tokens=200,
        turns_mean=6.0,
        pause_s=15.0,
    ),
    "agent": Kind(
        contexts=12,
        zipf=0.7,
        context_tokens=3500,
        said_tokens=500,
        answer_tokens=80,
        turns_mean=12.0,
        pause_s=4.0,
    ),
}


class HotspotShape(msgspec.Struct, frozen=True):
    """What the requests of a hotspot are like.

    Attributes:
        prefix_tokens: what they share; `said_tokens` come after it, their own.
        early: how many of them come before it begins, at random: if any, the prefix is known then.
    """

    prefix_tokens: int = 4096
    said_tokens: int = 200
    output_tokens: int = 100
    early: int = 0


class Hotspot(msgspec.Struct, frozen=True):
    """A burst of requests that share one prefix.

    Attributes:
        share: of all requests while it lasts, above 0 and below 1.
    """

    start_s: float
    duration_s: float
    share: float
    shape: HotspotShape = HotspotShape()


def generate(
    kind: str,
    *,
    seed: int,
    duration_s: float,
    requests_per_s: float,
    tokens_max: int = 32_768,
) -> Trace:
    """Return a made-up trace of one kind.

    Args:
        requests_per_s: mean, over the whole trace.
        tokens_max: a session ends before its prompt and answer would be longer than this.

    Raises:
        ValueError: there is no such kind, or a number is not positive.
    """
    if kind not in KINDS:
        raise ValueError(f"no kind {kind!r}; there are {', '.join(KINDS)}")
    if not (duration_s > 0 and requests_per_s > 0):
        raise ValueError("duration_s and requests_per_s must be positive")
    maker = _Maker(KINDS[kind], random.Random(f"{kind} {seed}"), tokens_max)
    requests: list[TraceRequest] = []
    begin_s = -maker.warm_up_s
    while begin_s < duration_s:
        requests += (each for each in maker.session(begin_s) if 0 <= each.at_s < duration_s)
        begin_s += maker.random.expovariate(requests_per_s / maker.turns_mean)
    requests.sort(key=lambda request: request.at_s)
    return Trace(f"{kind}-{seed}", BLOCK_TOKENS, tuple(requests))


def with_hotspot(trace: Trace, hotspot: Hotspot, *, seed: int) -> Trace:
    """Return `trace` with a hotspot planted in it.

    Raises:
        ValueError: the share is not between 0 and 1, or no request is there to share with.
    """
    if not 0 < hotspot.share < 1:
        raise ValueError(f"share={hotspot.share} must be above 0 and below 1")
    background = len(trace.cut(hotspot.start_s, hotspot.duration_s).requests)
    if not background:
        raise ValueError(f"{trace.name} has no request while the hotspot lasts")
    count, shape = round(background * hotspot.share / (1 - hotspot.share)), hotspot.shape
    chance = random.Random(f"hotspot {seed}")
    times_s = [hotspot.start_s + chance.random() * hotspot.duration_s for _ in range(count)]
    times_s += [chance.random() * hotspot.start_s for _ in range(shape.early)]
    ids = itertools.count(1 + max(max(request.block_ids) for request in trace.requests))
    prefix = _blocks(shape.prefix_tokens, trace.block_tokens, ids)
    shared_tokens = len(prefix) * trace.block_tokens
    planted = [
        TraceRequest(
            at_s,
            shared_tokens + shape.said_tokens,
            shape.output_tokens,
            (*prefix, *_blocks(shape.said_tokens, trace.block_tokens, ids)),
            "hotspot",
        )
        for at_s in times_s
    ]
    requests = sorted([*trace.requests, *planted], key=lambda request: request.at_s)
    return Trace(f"{trace.name}-hotspot", trace.block_tokens, tuple(requests))


class _Maker:
    """Makes sessions of one kind, one after the other."""

    def __init__(self, kind: Kind, chance: random.Random, tokens_max: int) -> None:
        self.random = chance
        self.turns_mean = kind.turns_mean
        self.warm_up_s = 3 * kind.turns_mean * kind.pause_s  # so that time 0 is not an empty world
        self._kind = kind
        self._tokens_max = tokens_max
        self._ids = itertools.count()
        self._numbers = itertools.count()
        self._contexts = [
            _blocks(self._length(kind.context_tokens), BLOCK_TOKENS, self._ids)
            for _ in range(kind.contexts)
        ]
        self._weights = list(
            itertools.accumulate(1 / (rank + 1) ** kind.zipf for rank in range(kind.contexts))
        )

    def session(self, begin_s: float) -> Iterator[TraceRequest]:
        """Yield a session's requests."""
        kind, at_s = self._kind, begin_s
        (context,) = self.random.choices(self._contexts, cum_weights=self._weights)
        blocks = list(context)
        tokens = len(blocks) * BLOCK_TOKENS
        name = str(next(self._numbers))
        while True:
            tokens += self._length(kind.said_tokens)
            answer = self._length(kind.answer_tokens)
            if tokens + answer > self._tokens_max:
                return
            blocks += itertools.islice(self._ids, tokens // BLOCK_TOKENS - len(blocks))
            partial = (next(self._ids),) if tokens % BLOCK_TOKENS else ()
            yield TraceRequest(at_s, tokens, answer, (*blocks, *partial), name)
            tokens += answer
            if self.random.random() * kind.turns_mean < 1:
                return
            at_s += self.random.expovariate(1 / kind.pause_s)

    def _length(self, median: int) -> int:
        return max(1, round(self.random.lognormvariate(math.log(median), _SIGMA)))


def _blocks(tokens: int, block_tokens: int, ids: Iterator[int]) -> tuple[int, ...]:
    """Return new ids for as many blocks as `tokens` need."""
    return tuple(itertools.islice(ids, -(-tokens // block_tokens)))
