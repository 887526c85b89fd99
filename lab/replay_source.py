"""Where the requests of a replay come from: a file or a generator, at a load, with a seed."""

from __future__ import annotations

import hashlib
import math
import random
from functools import lru_cache
from pathlib import Path

import msgspec

from lab.generators import KINDS, Hotspot, HotspotShape, generate, with_hotspot
from lab.traces import Trace, TraceRequest, read_trace, sample_trace

SAMPLE = "sample"


class TraceSource(msgspec.Struct, frozen=True):
    """A trace that can be named in a few words, and made anywhere.

    Attributes:
        name: `sample`, a kind of `lab.generators`, or a file's path.
        start_s: of a file: leave out what comes before.
        duration_s: how much of it; infinite for all of a file.
        speed: how many times as fast as recorded a file's requests come.
        qps: mean requests a second instead; of a kind, 1 if 0.
        jitter_s: each request comes later by a random part of this, at the recorded speed. Traces
            whose times are rounded (Mooncake's to 3 s) are bursts without it.
        hotspot_share: of the requests in the middle third that share one more prefix; 0 for none.
        hotspot_shape: what those are like.
        seed: of all that is random here.
    """

    name: str
    start_s: float = 0.0
    duration_s: float = math.inf
    speed: float = 1.0
    qps: float = 0.0
    jitter_s: float = 0.0
    hotspot_share: float = 0.0
    hotspot_shape: HotspotShape = HotspotShape()
    seed: int = 0

    @property
    def made(self) -> bool:
        """Whether a generator makes it."""
        return self.name in KINDS

    def load(self) -> Trace:
        """Return the trace.

        Raises:
            TraceError: the file cannot be used.
            ValueError: nothing is left of it, or a setting makes no sense.
        """
        if self.made:
            duration_s = 600.0 if math.isinf(self.duration_s) else self.duration_s
            trace = generate(
                self.name, seed=self.seed, duration_s=duration_s, requests_per_s=self.qps or 1.0
            )
        else:
            trace = _recorded(self.name).cut(self.start_s, self.duration_s)
            if not trace.requests:
                raise ValueError(f"{self.name}: no request within the part that was asked for")
            trace = self._paced(trace)
        if self.hotspot_share:
            third_s = trace.duration_s / 3
            hotspot = Hotspot(third_s, third_s, self.hotspot_share, self.hotspot_shape)
            trace = with_hotspot(trace, hotspot, seed=self.seed)
        return trace

    def _paced(self, trace: Trace) -> Trace:
        """Return a recorded trace at the speed that was asked for."""
        speed = self.speed
        if self.qps:
            speed = self.qps * trace.duration_s / len(trace.requests)
        if not self.jitter_s:
            return trace.faster(speed)
        chance = random.Random(f"jitter {self.seed}")
        moved = [_later(each, chance.uniform(0.0, self.jitter_s)) for each in trace.requests]
        moved.sort(key=lambda request: request.at_s)
        spread = Trace(trace.name, trace.block_tokens, tuple(moved))
        return spread.cut(moved[0].at_s).faster(speed)

    def digest(self) -> str:
        """Return what tells this trace from every other, the file's content included."""
        content = b"" if self.made or self.name == SAMPLE else Path(self.name).read_bytes()
        return hashlib.sha256(msgspec.json.encode(self) + content).hexdigest()


def _later(request: TraceRequest, delay_s: float) -> TraceRequest:
    return msgspec.structs.replace(request, at_s=request.at_s + delay_s)


@lru_cache(maxsize=2)
def _recorded(name: str) -> Trace:
    return sample_trace() if name == SAMPLE else read_trace(Path(name))
