"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

Tests of services that hold leases for seconds and verdicts for a quarter of a minute run in
milliseconds, with production's times, and do not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

WAKE_UPS_MAX = 1_000_000


class _Selector(selectors.SelectSelector):
    """Lets the time that it should wait pass at once."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        """Return what is ready; without a timer nothing could ever happen."""
        assert timeout is not None, "everybody waits, and no timer is set"
        self._loop.pass_by(max(timeout, 0.0))
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop for what happens within this process."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._wake_ups = 0
        super().__init__(_Selector(self))

    def time(self) -> float:
        """Return the virtual time."""
        return self._now_s

    def pass_by(self, seconds: float) -> None:
        """Let time pass."""
        self._wake_ups += 1
        assert self._wake_ups < WAKE_UPS_MAX, "this does not come to an end"
        self._now_s += seconds


def in_virtual_time(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Run an async test on a virtual loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def now() -> float:
    """Return the running loop's time."""
    return asyncio.get_running_loop().time()
