"""Ports of this machine: free ones, and those that somebody else has."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

_LISTENS: Final = "0A"  # the state in /proc/net/tcp


class PortTakenError(RuntimeError):
    """A port cannot be had."""


def free_port(host: str) -> int:
    """Return a port that nobody uses now."""
    return free_ports(host, 1)[0]


def free_ports(host: str, count: int) -> list[int]:
    """Return different ports that nobody uses now."""
    with ExitStack() as probes:
        ports: list[int] = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind((host, 0))
            ports.append(probe.getsockname()[1])
        return ports


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
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = f"somebody else serves there{_shown(listener(port))}"
        raise PortTakenError(f"{host}:{port}: {reason}") from error


def free_or_any(host: str, port: int) -> int:
    """Return a port if nobody listens there, and 0, which takes any free one, otherwise."""
    try:
        check_free(host, port)
    except PortTakenError:
        return 0
    return port


def listener(port: int) -> tuple[str, int] | None:
    """Return (name, process id) of somebody who listens on a TCP port, as far as we may know.

    Source: proc(5), `/proc/net/tcp` and `/proc/PID/fd`.
    """
    links = {f"socket:[{inode}]" for inode in _listening(port)}
    if not links:
        return None
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(each) in links for each in (folder / "fd").iterdir()):
                return (folder / "comm").read_text().strip(), int(folder.name)
        except OSError:
            continue  # it has ended, or is not ours to look at
    return None


def _listening(port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue  # only Linux has them
        for _, local, _, state, _, _, _, _, _, inode, *_ in map(str.split, lines):
            if state == _LISTENS and local.endswith(f":{port:04X}"):
                yield inode


def _shown(owner: tuple[str, int] | None) -> str:
    return "" if owner is None else ", {} (process {})".format(*owner)
