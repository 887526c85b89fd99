"""What the ledger's tests share: its limits, messages of other routers, and a look at a row."""

from __future__ import annotations

from controlplane.core.load import Ledger, LoadConfig
from schemas.bus import Finished, RouteBatch, Routed, RouteEvent

CONFIG = LoadConfig(lease_s=3.0, foreign_window_s=1.0, peers_max=2)


def said(seq: int, *events: RouteEvent, router: str = "peer", epoch: int = 1) -> RouteBatch:
    """Returns a message of another router."""
    return RouteBatch(router, epoch, seq, 0.0, list(events))


def routed(instance_id: str, new: int = 10, prompt: int = 100) -> Routed:
    """Returns the event of a request sent to an instance."""
    return Routed("q", instance_id, 0.0, new_tokens=new, prompt_tokens=prompt)


def finished(instance_id: str, released: int = 10, prompt: int = 100) -> Finished:
    """Returns the event of a request that ended."""
    return Finished(
        "q", instance_id, "ok", 200, 0.0, released_tokens=released, prompt_tokens=prompt
    )


def row(ledger: Ledger, number: int) -> tuple[int, int, int]:
    """Returns batch size, queued tokens and context tokens of a row."""
    return int(ledger.batch[number]), int(ledger.queued[number]), int(ledger.context[number])
