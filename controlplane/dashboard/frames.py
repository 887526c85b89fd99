"""What a page is sent: everything once, then what changed, a few times a second."""

from __future__ import annotations

from typing import Any

import msgspec

from controlplane.audit.lines import key_text
from controlplane.dashboard.picture import Picture
from controlplane.dashboard.windows import Slot, percentile
from schemas.bus import HotspotRaised

KPI_WINDOW_S = 10.0
SERIES_EVERY_S = 2.0
FULL_FIRST = 80
FULL_A_FRAME = 6
"""Decisions that come with their candidates: as many as a page lists."""


class Viewer:
    """One page: what it has been sent already.

    It may be as slow as it likes: a frame says what changed since the one before it.
    """

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self._fed = 0
        self._cells: dict[str, list[Any]] = {}
        self._verdicts_version = -1
        self._series_s = float("-inf")
        self._full = True

    def frame(self, now_s: float, now_wall_s: float) -> dict[str, Any]:
        """Return what changed since the last frame; the first one says everything."""
        picture = self.picture
        self._fed, feed = picture.feed(self._fed, FULL_FIRST if self._full else FULL_A_FRAME)
        cells = picture.cell_values(now_s)
        changed = [values for name, values in cells.items() if values != self._cells.get(name)]
        frame: dict[str, Any] = {
            "at": now_wall_s,
            "full": self._full,
            "cells": changed,
            "gone": [name for name in self._cells if name not in cells],
            "kpi": kpi(picture, cells, now_s),
            "feed": feed,
        }
        self._cells = cells
        if picture.verdicts_version != self._verdicts_version:
            self._verdicts_version = picture.verdicts_version
            frame["verdicts"] = verdicts(picture, now_s, now_wall_s)
        if now_s - self._series_s >= SERIES_EVERY_S:
            frame["series"] = series(picture, now_s, now_wall_s, whole=self._full)
            frame["tenants"] = picture.tenants.rows(now_s)
            self._series_s = now_s
        self._full = False
        return frame


def kpi(picture: Picture, cells: dict[str, list[Any]], now_s: float) -> dict[str, Any]:
    """Return the few numbers at the top of the page."""
    slots = picture.windows.last(now_s, KPI_WINDOW_S)
    ttft = [value for slot in slots for value in slot.ttft_s]
    tpot = [value for slot in slots for value in slot.tpot_s]
    prompt = sum(slot.prompt_tokens for slot in slots)
    span_s = max(now_s - slots[0].at_s, picture.windows.slot_s) if slots else 1.0
    return {
        "decisions_per_s": sum(slot.decisions for slot in slots) / span_s,
        "output_per_s": sum(slot.output_tokens for slot in slots) / span_s,
        "failed": sum(slot.failed for slot in slots),
        "hit_rate": sum(slot.cached_tokens for slot in slots) / prompt if prompt else None,
        "ttft_p95_s": percentile(ttft, 0.95),
        "tpot_p95_s": percentile(tpot, 0.95),
        "instances": len(cells),
        "exact": sum(values[2] == "exact" for values in cells.values()),
        "batch": sum(values[3] for values in cells.values()),
        "queued_tokens": sum(values[4] for values in cells.values()),
        "hotspots": sum(isinstance(each, HotspotRaised) for each, _ in picture.verdicts.values()),
        "decisions": picture.decisions,
        "policy": picture.policy,
        "queue": picture.tenants.queued,
    }


def series(picture: Picture, now_s: float, now_wall_s: float, *, whole: bool) -> list[list[Any]]:
    """Return points of the charts, as the page's `POINT` names them: slots that are over.

    Args:
        whole: all points; otherwise the last three.
    """
    picture.windows.now(now_s)
    slots = list(picture.windows.slots)[:-1]
    slots = slots if whole else slots[-3:]
    return [_point(slot, now_wall_s - now_s, picture.windows.slot_s) for slot in slots]


def _point(slot: Slot, to_wall_s: float, slot_s: float) -> list[Any]:
    cached = slot.cached_tokens / slot.prompt_tokens if slot.prompt_tokens else None
    return [
        round(slot.at_s + to_wall_s, 1),
        *(percentile(slot.ttft_s, share) for share in (0.5, 0.95)),
        *(percentile(slot.tpot_s, share) for share in (0.5, 0.95)),
        slot.decisions / slot_s,
        cached,
    ]


def verdicts(picture: Picture, now_s: float, now_wall_s: float) -> list[dict[str, Any]]:
    """Return the statements in force, hotspots first."""
    found = []
    for name, (verdict, since_s) in picture.verdicts.items():
        data = {"name": name, **msgspec.to_builtins(verdict)}
        if isinstance(verdict, HotspotRaised):
            data["key"] = key_text(verdict.key)
        ttl_s = getattr(verdict, "ttl_s", None)
        data["until"] = None if ttl_s is None else now_wall_s + ttl_s - (now_s - since_s)
        found.append(data)
    return sorted(found, key=lambda data: (data["type"] != "hotspot_raised", data["name"]))
