"""Calling other people's handlers: one that raises is logged and counted, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

log = logging.getLogger(__name__)


class Guard:
    """Calls handlers and counts the calls and the failures."""

    def __init__(self) -> None:
        self.calls = 0
        self.errors = 0

    def call(self, handler: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `handler`; an exception is logged with its traceback and goes no further."""
        self.calls += 1
        try:
            handler(*args, **kwargs)
        except Exception:
            self.errors += 1
            log.exception("a bus handler failed: %r", handler)
