"""One instance as the dashboard shows it: gathered from its record, its load and its blocks."""

from __future__ import annotations

from collections import deque
from typing import Any

from schemas.bus import Finished, InstanceRecord, LoadReport

WINDOW_S = 60.0
"""Over which the hit rate of an instance is taken."""

ENDS_MAX = 512
SILENT_S = 5.0
"""Without a heartbeat for this long, a block set counts as stale, as it does at routers."""


class Cell:
    """One instance.

    Attributes:
        row: in the ledger; −1 once it left.
        blocks: published ones.
        heard_s: when its block stream last said something; −∞ if it never did.
        named_s: when anything was last said of it, by whomever.
        inexact: a router's latest decision did not hold its block set for exact.
        routed: requests sent to it since it was first seen.
        changed: the number of the frame that must show it next.
    """

    def __init__(self, instance_id: str, row: int) -> None:
        self.instance_id = instance_id
        self.row = row
        self.record: InstanceRecord | None = None
        self.load: LoadReport | None = None
        self.blocks = 0
        self.heard_s = self.named_s = float("-inf")
        self.inexact = False
        self.drained = self.blacklisted = self.hot = False
        self.routed = 0
        self.shown: list[Any] | None = None
        self._ends: deque[tuple[float, int, int]] = deque(maxlen=ENDS_MAX)

    def ended(self, end: Finished, now_s: float) -> None:
        """Take the end of a request that says what was cached."""
        if end.cached_tokens is not None and end.prompt_tokens:
            self._ends.append((now_s, end.prompt_tokens, end.cached_tokens))

    def hit_rate(self, now_s: float) -> float | None:
        """Return cached over all prompt tokens, recent; None if no request ended."""
        while self._ends and self._ends[0][0] < now_s - WINDOW_S:
            self._ends.popleft()
        prompt = sum(entry[1] for entry in self._ends)
        return sum(entry[2] for entry in self._ends) / prompt if prompt else None

    def trust(self, now_s: float) -> str:
        """Return how far its block set can be relied on."""
        record = self.record
        if record is not None and not record.kv_events:
            return "none"
        if now_s - self.heard_s > SILENT_S:
            return "stale"
        return "resyncing" if self.inexact else "exact"

    @property
    def state(self) -> str:
        """What keeps requests away, or its own word."""
        if self.record is None:
            return "unknown"
        if self.blacklisted:
            return "blacklisted"
        return "draining" if self.drained else self.record.state

    def values(self, batch: int, queued: int, now_s: float) -> list[Any]:
        """Return what is shown, as the page's `CELL` names it."""
        hit = self.hit_rate(now_s)
        load = self.load
        return [
            self.instance_id,
            self.state,
            self.trust(now_s),
            batch,
            queued,
            0 if load is None else load.running,
            0 if load is None else load.waiting,
            None if load is None else round(load.kv_usage, 3),
            None if hit is None else round(hit, 3),
            self.blocks,
            self.routed,
            int(self.hot),
        ]

    def details(self) -> dict[str, Any]:
        """Return what is shown when it is looked at closely."""
        record, load = self.record, self.load
        found: dict[str, Any] = {"instance": self.instance_id}
        if record is not None:
            found |= {
                "url": record.url,
                "engine": record.engine_version,
                "block_size": record.block_size,
                "num_blocks": record.num_blocks,
                "max_model_len": record.max_model_len,
                "loras": record.loras,
            }
        if load is not None:
            found |= {
                "prefill_tokens_per_s": load.prefill_tokens_per_s,
                "decode_tokens_per_s": load.decode_tokens_per_s,
            }
        return found
