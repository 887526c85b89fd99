"""How long requests take: what is known of one when it is sent, and what follows from that.

Theory of operation. A request's *service* begins when it is sent to an instance. Its times to the
first byte and to the end are predicted from `FEATURES`, by trees that the predictor service has
learnt (`schemas.bus.LatencyModel`). Where there are none, or old ones, the mean of what was
observed here stands for the mean, and mean + 3σ for the p99.

The same code makes the features where models are learnt and where they are used.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.core.forest import VALUE_MAX, Forest
from controlplane.core.hashing import ROOT, hash_block, pack_tokens
from controlplane.core.queue_lines import Service
from schemas.records import LatencyModel

FEATURES: tuple[str, ...] = (
    *("prompt_tokens", "new_tokens", "batch_size", "queued_tokens", "kv_usage"),
    *("recent_ttft_s", "recent_total_s", "head", "tenant"),
)
"""In the order of a row."""

COLD_REQUESTS = 100
"""So many requests must have been observed before a learnt model is believed."""
SIGMAS = 3.0
OLD_REQUESTS = 10_000
"""A model that was not confirmed for so many requests is old: ten trainings were missed."""

Rows = NDArray[np.float32]


class Circumstances(msgspec.Struct, frozen=True, gc=False):
    """What a row is made of; see `FEATURES`.

    Attributes:
        head: hash of the first token ids; 0 where they are not known.
        tenant: its name.
    """

    prompt_tokens: int
    new_tokens: int
    batch_size: int
    queued_tokens: int
    kv_usage: float = 0.0
    recent_ttft_s: float = 0.0
    recent_total_s: float = 0.0
    head: int = 0
    tenant: str = ""


def head_hash(token_ids: Sequence[int]) -> int:
    """Return the hash of a prompt's first token ids."""
    return hash_block(pack_tokens(token_ids), b"", ROOT)


def rows_of(found: Iterable[Circumstances], tenants: dict[str, float]) -> Rows:
    """Return (n, features) rows.

    Args:
        found: what is known of each request.
        tenants: remembers what names were turned into; the caller bounds and keeps it.
    """
    return np.array(
        [
            (
                each.prompt_tokens,
                each.new_tokens,
                each.batch_size,
                each.queued_tokens,
                each.kv_usage,
                each.recent_ttft_s,
                each.recent_total_s,
                each.head >> 40,  # 24 bits are exact in a float32
                _tenant(each.tenant, tenants),
            )
            for each in found
        ],
        np.float32,
    ).reshape(-1, len(FEATURES))


def _tenant(name: str, known: dict[str, float]) -> float:
    value = known.get(name)
    if value is None:
        value = known[name] = float(hash_block(name.encode(), b"", ROOT) >> 40)
    return value


class Observed:
    """Mean and spread of a time, the latest observations weighing most.

    Args:
        memory: observations after which one weighs 1/e of the latest.

    Attributes:
        count: observations so far.
        mean: of them.
    """

    __slots__ = ("_memory", "_variance", "count", "mean")

    def __init__(self, memory: int = 1000) -> None:
        self._memory = memory
        self.count = 0
        self.mean = 0.0
        self._variance = 0.0

    def add(self, value: float) -> None:
        """Observe."""
        self.count += 1
        weight = 1.0 / min(self.count, self._memory)
        off = value - self.mean
        self.mean += weight * off
        self._variance = (1.0 - weight) * (self._variance + weight * off * off)

    @property
    def sigma(self) -> float:
        """Standard deviation."""
        return math.sqrt(self._variance)

    @property
    def high(self) -> float:
        """Mean + 3σ."""
        return self.mean + SIGMAS * self.sigma


class Trend:
    """How much a time grows with a size: the slope of a line, the latest pairs weighing most.

    Args:
        memory: pairs after which one weighs 1/e of the latest.
        pairs_min: so many are needed to say anything.
    """

    __slots__ = ("_count", "_covariance", "_mean", "_memory", "_pairs_min", "_size", "_variance")

    def __init__(self, memory: int = 1000, pairs_min: int = 32) -> None:
        self._memory = memory
        self._pairs_min = pairs_min
        self._count = 0
        self._size = self._mean = self._variance = self._covariance = 0.0

    def add(self, size: float, value: float) -> None:
        """Observe."""
        self._count += 1
        weight = 1.0 / min(self._count, self._memory)
        larger, longer = size - self._size, value - self._mean
        self._size += weight * larger
        self._mean += weight * longer
        self._variance = (1.0 - weight) * (self._variance + weight * larger * larger)
        self._covariance = (1.0 - weight) * (self._covariance + weight * larger * longer)

    @property
    def slope(self) -> float:
        """Time for one more of the size; 0 while there is nothing to tell it from."""
        if self._count < self._pairs_min or self._variance <= 0.0:
            return 0.0
        return max(self._covariance / self._variance, 0.0)


class Recent:
    """Latencies of late, as a feature: means over about the last 32 requests of one router."""

    __slots__ = ("total_s", "ttft_s")

    def __init__(self) -> None:
        self.ttft_s = Observed(32)
        self.total_s = Observed(32)

    def add(self, ttft_s: float | None, total_s: float) -> None:
        """Note that a request has ended."""
        if ttft_s is not None:
            self.ttft_s.add(ttft_s)
        self.total_s.add(total_s)


class Calibration:
    """How predictions of one time compare with what came, over the latest requests.

    Attributes:
        count: predictions compared so far.
    """

    def __init__(self, window: int = 1000) -> None:
        self._window: deque[tuple[bool, float]] = deque(maxlen=window)
        self.count = 0

    def add(self, mean_s: float, p99_s: float, actual_s: float) -> None:
        """Compare one."""
        self.count += 1
        self._window.append((actual_s <= p99_s, abs(actual_s - mean_s)))

    @property
    def within(self) -> float:
        """Share of requests that took no longer than their predicted p99; 0.99 if it is right."""
        count = len(self._window)
        return sum(kept for kept, _ in self._window) / count if count else math.nan

    @property
    def error_s(self) -> float:
        """Mean absolute error of the mean."""
        count = len(self._window)
        return sum(error for _, error in self._window) / count if count else math.nan


class Predicts(Protocol):
    """Something that predicts services."""

    def predict(self, rows: Rows) -> NDArray[np.float32]:
        """Return (n, 4): mean and p99 to the first byte, mean and p99 to the end, in seconds."""


class Learnt:
    """A published model, ready for use.

    Attributes:
        model: as published.

    Raises:
        ValueError: it is about other features, or its trees make no sense.
    """

    def __init__(self, model: LatencyModel) -> None:
        if tuple(model.features) != FEATURES:
            raise ValueError(f"the model looks at {model.features}, which are not ours")
        if not all(0.0 <= margin <= VALUE_MAX for margin in model.margins):
            raise ValueError(f"a margin is no factor: {model.margins}")
        sets = [model.ttft, model.ttft_p99, model.total, model.total_p99]
        self.model = model
        self._forest = Forest(sets, len(FEATURES))
        self._margins = np.array(model.margins, np.float32)

    def predict(self, rows: Rows) -> NDArray[np.float32]:
        """See `Predicts`."""
        found = self._forest.sums(rows)
        found[:, 1::2] = np.exp(np.minimum(found[:, 1::2], 20.0)) * self._margins
        found[:, ::2] = np.maximum(found[:, ::2], 0.0)
        found[:, 1::2] = np.maximum(found[:, ::2], found[:, 1::2])
        return found


class Estimator:
    """Predicts with the learnt model while it may be believed, else by what was observed here.

    Attributes:
        ttft_s: times to the first byte observed here.
        total_s: times to the end, likewise.
        token_s: how the first grow with the tokens to be computed.
        recent: of late, as features.
        learnt: the newest model; None if there is none.
    """

    def __init__(self) -> None:
        self.ttft_s = Observed()
        self.total_s = Observed()
        self.token_s = Trend()
        self.recent = Recent()
        self.learnt: Learnt | None = None
        self._confirmed_at = 0
        self._tenants: dict[str, float] = {}

    def observe(self, ttft_s: float | None, total_s: float, new_tokens: int | None = None) -> None:
        """Note that a request has ended well, so long after it was sent.

        Args:
            new_tokens: of its prompt, that had to be computed; None if nobody knows.
        """
        if ttft_s is not None:
            self.ttft_s.add(ttft_s)
            if new_tokens is not None:
                self.token_s.add(new_tokens, ttft_s)
        self.total_s.add(total_s)
        self.recent.add(ttft_s, total_s)

    def use(self, model: LatencyModel) -> bool:
        """Take a published model; False if it is the one in use, or older.

        Raises:
            ValueError: it cannot be used.
        """
        known = self.learnt
        if known is not None and _age(model) <= _age(known.model):
            return False
        self.learnt = Learnt(model)
        self._confirmed_at = self.total_s.count
        return True

    @property
    def source(self) -> str:
        """What predictions are made of: learnt, old, cold or none."""
        if self.learnt is None:
            return "cold" if self.total_s.count else "none"
        if self.total_s.count - self._confirmed_at > OLD_REQUESTS:
            return "old"
        return "learnt"

    def roughly(self) -> Service:
        """Return what is expected of any request, by what was observed here."""
        ttft, total = self.ttft_s, self.total_s
        return Service(ttft.mean, ttft.high, total.mean, total.high)

    def predict(self, found: Sequence[Circumstances]) -> list[Service]:
        """Return what is expected of each; zeros while nothing was observed."""
        if self.source == "learnt" and found:
            assert self.learnt is not None
            if len(self._tenants) > 4096:
                self._tenants.clear()
            table = self.learnt.predict(rows_of(found, self._tenants))
            return [Service(*row) for row in table.tolist()]
        return [self.roughly()] * len(found)


def _age(model: LatencyModel) -> tuple[int, int]:
    return model.version, model.confirmed
