"""Sums and percentiles over the last minutes, in slots of time: bounded whatever the traffic."""

from __future__ import annotations

import random
from collections import deque

import msgspec

SAMPLES_A_SLOT = 256
"""Values kept of a slot; beyond it each has the same chance to be among those kept."""


class Slot(msgspec.Struct):
    """What happened in one stretch of time.

    Attributes:
        at_s: its beginning, on the caller's clock.
        ttft_s: a sample of the times to the first token; `tpot_s` of the times per output token.
        seen: values that each sample was taken of.
    """

    at_s: float
    decisions: int = 0
    ended: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_s: list[float] = msgspec.field(default_factory=list)
    tpot_s: list[float] = msgspec.field(default_factory=list)
    seen: dict[str, int] = msgspec.field(default_factory=dict)

    def sample(self, name: str, value: float, rng: random.Random) -> None:
        """Take a value into the sample of this name."""
        kept: list[float] = getattr(self, name)
        seen = self.seen[name] = self.seen.get(name, 0) + 1
        if len(kept) < SAMPLES_A_SLOT:
            kept.append(value)
        elif (place := rng.randrange(seen)) < SAMPLES_A_SLOT:
            kept[place] = value


class Windows:
    """Slots of equal length, the newest last.

    Args:
        slot_s: length of a slot.
        slots_max: how many are kept.
    """

    def __init__(self, slot_s: float = 2.0, slots_max: int = 150, seed: int = 1) -> None:
        self.slot_s = slot_s
        self.slots: deque[Slot] = deque(maxlen=slots_max)
        self._rng = random.Random(seed)

    def now(self, now_s: float) -> Slot:
        """Return the slot of this moment; stretches without any are filled in."""
        at_s = now_s - now_s % self.slot_s
        if not self.slots:
            self.slots.append(Slot(at_s))
        missing = round((at_s - self.slots[-1].at_s) / self.slot_s)
        first = max(missing - (self.slots.maxlen or 0), 0)
        for number in range(first, missing):
            self.slots.append(Slot(at_s - (missing - number - 1) * self.slot_s))
        return self.slots[-1]

    def ended(
        self,
        now_s: float,
        *,
        ok: bool,
        prompt_tokens: int,
        cached_tokens: int | None,
        output_tokens: int | None,
        ttft_s: float | None,
        duration_s: float,
        streamed: bool,
    ) -> None:
        """Count the end of a request.

        Args:
            ttft_s: from the request's arrival; `duration_s` likewise.
            streamed: whether its tokens came one by one, so that there is a time per token.
        """
        slot = self.now(now_s)
        slot.ended += 1
        slot.failed += not ok
        if cached_tokens is not None:
            slot.prompt_tokens += prompt_tokens
            slot.cached_tokens += cached_tokens
        slot.output_tokens += output_tokens or 0
        if ttft_s is None:
            return
        slot.sample("ttft_s", ttft_s, self._rng)
        # Later than the end is the first byte of a router that does not tell how long one waited.
        if streamed and output_tokens is not None and output_tokens > 1 and duration_s >= ttft_s:
            slot.sample("tpot_s", (duration_s - ttft_s) / (output_tokens - 1), self._rng)

    def last(self, now_s: float, seconds: float) -> list[Slot]:
        """Return the slots of the last so many seconds, the present one included."""
        self.now(now_s)
        return [slot for slot in self.slots if slot.at_s > now_s - seconds]


def percentile(values: list[float], share: float) -> float | None:
    """Return a percentile by rank, 0 ≤ share ≤ 1; None of nothing."""
    if not values:
        return None
    ranked = sorted(values)
    return ranked[min(int(share * len(ranked)), len(ranked) - 1)]
