"""Ports of this machine: free ones, and those that somebody else has."""

from __future__ import annotations

import errno
import socket


class PortTakenError(RuntimeError):
    """A port cannot be had."""


def free_port(host: str) -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_free(host: str, port: int) -> None:
    """See that nobody listens on a port, not even somebody who would share it; 0 always is free.

    Raises:
        PortTakenError: somebody does, or the port cannot be had at all; says which and why.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # Connections that have ended hold the port for a while, and do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        reason = "somebody else serves there" if error.errno == errno.EADDRINUSE else error.strerror
        raise PortTakenError(f"{host}:{port}: {reason}") from error


def free_or_any(host: str, port: int) -> int:
    """Return a port if nobody listens there, and 0, which takes any free one, otherwise."""
    try:
        check_free(host, port)
    except PortTakenError:
        return 0
    return port
