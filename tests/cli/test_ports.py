"""Ports of this machine: which are free, and who has the others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from controlplane.ports import PortTakenError, check_free, free_or_any, free_ports, listener

HOST = "127.0.0.1"


def test_free_ports_differ_and_can_be_had() -> None:
    """All at once, as processes that start together need them."""
    ports = free_ports(HOST, 20)
    assert len(set(ports)) == 20
    for port in ports:
        check_free(HOST, port)


def test_a_taken_port_is_told_with_who_has_it() -> None:
    """So that an operator knows what to stop."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        name = Path("/proc/self/comm").read_text().strip()
        assert listener(port) == (name, os.getpid())
        with pytest.raises(
            PortTakenError, match=rf"{port}: .* there, .* \(process {os.getpid()}\)"
        ):
            check_free(HOST, port)
        assert free_or_any(HOST, port) == 0
    assert listener(port) is None
    assert free_or_any(HOST, port) == port
