"""From what an engine says of its load to `LoadReport` fields: one rank, pure.

Theory of operation. `/load` counts the requests in the API process at once, but stays 0 where the
server was not told to track it, and nothing says so. It is believed from its first value above 0
on. It is disbelieved, until then, when the metrics show requests while it says 0. It counts the
requests of all ranks, so it says nothing of one rank among several.

Rates are the growth of the engine's counters over the last `window_s`.

An engine that hangs may still answer every question. What gives it away is that requests run while
neither its counters move nor events come: it is *still*. (A long prefill moves no counter before
its end, but tells of its blocks.)
"""

from __future__ import annotations

from collections import deque

import msgspec

from schemas.message import AMOUNT_MAX
from sidecar.metrics_text import EngineSample


class Load(msgspec.Struct, frozen=True):
    """The load of one rank; fields as in `schemas.bus.LoadReport`."""

    running: int = 0
    waiting: int = 0
    server_load: int | None = None
    kv_usage: float = 0.0
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is known of."""
        return not (self.running or self.waiting or self.server_load)


class LoadTracker:
    """Keeps the load of one rank.

    Attributes:
        tracked: whether `/load` is believed; None while that is open.
    """

    def __init__(self, window_s: float = 5.0) -> None:
        self.tracked: bool | None = None
        self._window_s = window_s
        self._server_load = 0
        self._sample = EngineSample()
        self._events = 0
        self._still_since_s: float | None = None
        self._history: deque[tuple[float, EngineSample]] = deque(maxlen=1024)

    def take_server_load(self, requests: int) -> None:
        """Take the answer of `/load`."""
        self._server_load = requests
        if requests > 0:
            self.tracked = True

    def take_sample(self, sample: EngineSample, now_s: float, *, events: int = 0) -> None:
        """Take this rank's part of `/metrics`.

        Args:
            events: KV event messages that have come from this rank so far.
        """
        before, self._sample = self._sample, sample
        progress = (sample.computed_tokens, sample.generated_tokens, events)
        if not sample.running or progress != (
            before.computed_tokens,
            before.generated_tokens,
            self._events,
        ):
            self._still_since_s = None
        elif self._still_since_s is None:
            self._still_since_s = now_s
        self._events = events
        if self.tracked is None and self._server_load == 0 and min(before.running, sample.running):
            self.tracked = False
        history = self._history
        if history and (
            sample.computed_tokens < history[-1][1].computed_tokens
            or sample.generated_tokens < history[-1][1].generated_tokens
        ):
            history.clear()  # counters that shrink are another process's
        history.append((now_s, sample))
        while len(history) > 2 and history[1][0] <= now_s - self._window_s:
            history.popleft()

    def forget(self) -> None:
        """Begin anew: the engine is another process."""
        self.tracked = None
        self._server_load = 0
        self._sample = EngineSample()
        self._still_since_s = None
        self._history.clear()

    def still_s(self, now_s: float) -> float:
        """Return for how long requests have run while nothing was computed."""
        return 0.0 if self._still_since_s is None else now_s - self._still_since_s

    def load(self) -> Load:
        """Return the load as of the last inputs."""
        prefill, decode = self._rates()
        return Load(
            running=self._sample.running,
            waiting=self._sample.waiting,
            server_load=self._server_load if self.tracked else None,
            kv_usage=self._sample.kv_usage,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=decode,
        )

    def _rates(self) -> tuple[float | None, float | None]:
        if len(self._history) < 2:
            return None, None
        (first_s, first), (last_s, last) = self._history[0], self._history[-1]
        if last_s <= first_s:
            return None, None
        elapsed_s = last_s - first_s
        computed = (last.computed_tokens - first.computed_tokens) / elapsed_s
        generated = (last.generated_tokens - first.generated_tokens) / elapsed_s
        return min(computed, AMOUNT_MAX) or None, min(generated, AMOUNT_MAX) or None
