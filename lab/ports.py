"""Ports of this machine: free ones, and those that somebody else has."""

from __future__ import annotations

import socket


class PortTakenError(RuntimeError):
    """A port is in use, or not ours to take."""


def free_port(host: str) -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_free(host: str, port: int) -> None:
    """See that nobody listens on a port, not even somebody who would share it.

    Raises:
        PortTakenError: somebody does, or the port cannot be had at all.
    """
    with socket.socket() as probe:
        # Connections that have ended hold the port for a while, and do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError as error:
            raise PortTakenError(f"{host}:{port}: {error.strerror}") from error


def free_or_any(host: str, port: int) -> int:
    """Return a port if nobody listens there, and 0, which takes any free one, otherwise."""
    try:
        check_free(host, port)
    except PortTakenError:
        return 0
    return port
