"""How every Multiplane process runs: its event loop, its signals, its logs."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

LOG_FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def run(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Run a service on uvloop until it ends; returns its exit status.

    Args:
        main: gets an event that is set by the first SIGTERM or SIGINT; a second one ends the
            process at once. SIGHUP, where it is not ignored as under `nohup`, sets it too, unless
            `main` gives it another meaning.
    """

    async def guarded() -> int:
        stop, signalled = asyncio.Event(), False
        loop = asyncio.get_running_loop()

        def asked() -> None:
            nonlocal signalled
            if signalled:  # What else may have set `stop` was no signal.
                logging.getLogger(__name__).warning("stopped at once by a second signal")
                os._exit(130)
            signalled = True
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, stop.set)
        return await main(stop)

    raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(guarded())


def raise_file_limit() -> None:
    """Let this process have as many open files as it may: a connection is one, and a stream two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some systems' hard limit is none that may be set
        logging.getLogger(__name__).info("the limit on open files stays %d: %s", soft, error)


def log_to_stderr(level: str = "info") -> None:
    """Send log lines to standard error, our own from `level` on, others' from warnings on."""
    logging.basicConfig(format=LOG_FORMAT, level=logging.WARNING, stream=sys.stderr, force=True)
    for name in ("controlplane", "router", "sidecar", "lab"):
        logging.getLogger(name).setLevel(level.upper())


def settle_gc() -> None:
    """Take what is long-lived out of the collector's sight, and let it look less often.

    Hot objects here are untracked or freed by reference counts; a collection is for the rare cycle.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
