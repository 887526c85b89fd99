"""From what routers tell to samples: what was known when a request was sent, and what it took."""

from __future__ import annotations

from collections import Counter, OrderedDict

import msgspec

from controlplane.core.latency import Circumstances, Recent
from schemas.bus import Finished, LoadReport, RouteBatch, Routed

GOOD_STATUS_MAX = 399
SERVICE_S_MAX = 86_400.0
"""No request takes a day: who says so errs, and would spoil the means of all others."""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One request that ended well.

    Attributes:
        ttft_s: from when it was sent to its first byte; None where that is not known.
        total_s: from when it was sent to its end.
    """

    known: Circumstances
    ttft_s: float | None
    total_s: float


class _Sent(msgspec.Struct, frozen=True, gc=False):
    """A request on its way; `before_s` is what passed between its coming and its sending."""

    known: Circumstances
    before_s: float
    attempt: int


class Joiner:
    """Joins the events of one model's requests.

    Args:
        open_max: requests on their way that are remembered; the oldest go beyond it.
        names_max: routers and instances whose latest state is kept.

    Attributes:
        counts: joined, failed, unmatched, absurd, forgotten.
    """

    def __init__(self, open_max: int = 50_000, names_max: int = 8192) -> None:
        self.counts: Counter[str] = Counter()
        self._open_max = open_max
        self._names_max = names_max
        self._open: OrderedDict[tuple[str, str], _Sent] = OrderedDict()
        self._kv_usage: OrderedDict[str, float] = OrderedDict()
        self._recent: OrderedDict[str, Recent] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def load(self, report: LoadReport) -> None:
        """Take what an engine says of itself."""
        self._kv_usage[report.instance_id] = report.kv_usage
        self._kv_usage.move_to_end(report.instance_id)
        if len(self._kv_usage) > self._names_max:
            self._kv_usage.popitem(last=False)

    def batch(self, batch: RouteBatch) -> list[Sample]:
        """Take what a router did; returns the requests that ended well in it."""
        recent = self._recent.setdefault(batch.router_id, Recent())
        self._recent.move_to_end(batch.router_id)
        if len(self._recent) > self._names_max:
            self._recent.popitem(last=False)
        samples = []
        for event in batch.events:
            if isinstance(event, Routed):
                self._sent((batch.router_id, event.request_id), event, recent)
            elif isinstance(event, Finished):
                sample = self._ended((batch.router_id, event.request_id), event)
                if sample is not None:
                    recent.add(sample.ttft_s, sample.total_s)
                    samples.append(sample)
        return samples

    def _sent(self, key: tuple[str, str], event: Routed, recent: Recent) -> None:
        prompt_tokens = event.prompt_tokens or 0
        known = Circumstances(
            prompt_tokens,
            event.new_tokens or prompt_tokens,
            event.batch_size,
            event.queued_tokens,
            self._kv_usage.get(event.instance_id, 0.0),
            recent.ttft_s.mean,
            recent.total_s.mean,
            event.head or 0,
            event.tenant,
        )
        self._open[key] = _Sent(known, event.queue_s + event.tokenize_s, event.attempt)
        if len(self._open) > self._open_max:
            self._open.popitem(last=False)
            self.counts["forgotten"] += 1

    def _ended(self, key: tuple[str, str], event: Finished) -> Sample | None:
        sent = self._open.pop(key, None)
        if sent is None:
            self.counts["unmatched"] += 1
            return None
        if event.outcome != "ok" or not 0 < event.status <= GOOD_STATUS_MAX:
            self.counts["failed"] += 1
            return None
        if max(event.duration_s, event.ttft_s or 0.0) > SERVICE_S_MAX:
            self.counts["absurd"] += 1
            return None
        self.counts["joined"] += 1
        ttft_s = event.ttft_s
        if ttft_s is not None:
            # After a retry the time to the first byte holds that of the failed attempt, too.
            ttft_s = None if sent.attempt else max(ttft_s - sent.before_s, 0.0)
        return Sample(sent.known, ttft_s, event.duration_s)
