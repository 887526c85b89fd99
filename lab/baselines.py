"""Rival policies that need more than a score: what the plane's own policies are compared with."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import msgspec

from controlplane.core.decision import RouteRequest
from controlplane.core.fleet import Fleet
from controlplane.core.scoring import FleetView, FloatArray, Request
from lab.engine_types import EngineConfig


class Surroundings(msgspec.Struct, frozen=True):
    """What a rival may look at: instances' own reports, and how their engines are configured."""

    fleet: Fleet
    engine: EngineConfig
    rng: random.Random


class Rival:
    """A policy that is told what happens."""

    name: ClassVar[str] = ""
    parameters: ClassVar[dict[str, float]] = {}

    def __init__(self, around: Surroundings, **parameters: float) -> None:
        self.around = around

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return (n,) scores; the lowest is best."""
        raise AssertionError("each rival has its own")

    def arriving(self, request: RouteRequest, now_s: float) -> None:
        """Note which request is about to be scored."""

    def sent(self, row: int, request: RouteRequest, hit_tokens: int, now_s: float) -> None:
        """Note where a request went."""

    def began(self, row: int, request_id: str) -> None:
        """Note that a request's first token came."""

    def ended(self, row: int, request_id: str) -> None:
        """Note that a request ended."""


BASELINES: dict[str, Any] = {}
"""Every rival by its name."""
