"""Turns failures that an operator can mend into one line on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from controlplane.bus.protocol import BusError
from schemas.codec import RemoteError


class UsageError(Exception):
    """A setting makes no sense; the message names the flag."""


@contextmanager
def explained() -> Iterator[None]:
    """End the process with a clear line instead of a traceback where one is enough."""
    try:
        yield
    except (UsageError, BusError, RemoteError, OSError) as error:
        sys.stderr.write(f"multiplane: {error}\n")
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from error
