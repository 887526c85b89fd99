"""How nested readers of a request give up: with the reason why its prompt is not known exactly."""

from __future__ import annotations

from router.prompt import Inexact, Reason


class Unreadable(Exception):
    """Carries an Inexact outcome out of nested readers."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.outcome = Inexact(reason, detail)
