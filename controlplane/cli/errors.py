"""Turns failures that an operator can mend into one line on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from controlplane.bus.jetstream import JetStreamError
from controlplane.bus.protocol import BusError
from schemas.codec import RemoteError

_NOT_FOUND = 404


class UsageError(Exception):
    """A setting makes no sense; the message names the flag."""


def in_words(error: BusError) -> str:
    """Return what is wrong with the bus, and how to mend it where that is known."""
    if isinstance(error, JetStreamError) and error.code == _NOT_FOUND:
        return (
            f"NATS does not hold what the plane keeps there ({error}): "
            "create it with `multiplane bus init`"
        )
    return str(error)


@contextmanager
def explained() -> Iterator[None]:
    """End the process with a clear line instead of a traceback where one is enough."""
    try:
        yield
    except BusError as error:
        _end(in_words(error), 1, error)
    except (RemoteError, OSError) as error:
        _end(str(error), 1, error)
    except UsageError as error:
        _end(str(error), 2, error)


def _end(message: str, status: int, error: Exception) -> None:
    sys.stderr.write(f"multiplane: {message}\n")
    raise SystemExit(status) from error
