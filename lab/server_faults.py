"""Faults that a test can ask of an emulated engine: `POST /debug/fault`.

{"kind": "stall", "seconds": 2}              the engine computes nothing for a while
{"kind": "error", "count": 3, "status": 500} the next requests fail
{"kind": "hang", "count": 1}                 the next requests never get an answer
{"kind": "close", "count": 1, "chunks": 2}   the next ones lose their connection after 2 chunks
{"kind": "drop_events", "count": 5}          the next KV-event batches are lost on the way
{"kind": "none"}                             all of these end; a stall already begun lasts
"""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["stall", "error", "hang", "close", "drop_events", "none"]


class Fault(msgspec.Struct, frozen=True):
    """One fault; see the module's text."""

    kind: Kind
    count: int = 1
    seconds: float = 0.0
    status: int = 500
    chunks: int = 0


class Faults:
    """The faults that wait for requests to strike; the oldest strikes first."""

    def __init__(self) -> None:
        self._pending: list[tuple[Fault, int]] = []  # with how often it still strikes

    def add(self, fault: Fault) -> None:
        """Let a fault wait; `none` forgets all of them."""
        if fault.kind == "none":
            self._pending.clear()
        elif fault.count > 0:
            self._pending.append((fault, fault.count))

    def strike(self) -> Fault | None:
        """Return what befalls the request that just came, if anything."""
        if not self._pending:
            return None
        fault, left = self._pending[0]
        if left > 1:
            self._pending[0] = (fault, left - 1)
        else:
            self._pending.pop(0)
        return fault
