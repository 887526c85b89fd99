"""Leaving a port that several processes share, without losing a connection on the way.

The kernel deals new connections out to all sockets that listen on the port, and completes their
handshakes before anybody accepts them. Closing a socket resets those that wait at it, and those in
the middle of their handshake. So a socket that is to be closed first stops hearing SYN packets:
what has begun completes and is accepted, and a client whose SYN goes unheard sends another within
a second, which the kernel deals to a socket that is left.

Source: socket(7), SO_ATTACH_FILTER; Linux, Documentation/networking/filter.rst.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from typing import Final, Protocol

HANDSHAKE_S: Final = 0.1
"""Time for handshakes that have begun: a long round trip within a site."""

_SO_ATTACH_FILTER: Final = 26
_SYN: Final = 0x02
_SYN_AND_ACK: Final = 0x12
_FLAGS_OFFSET: Final = 13  # of a TCP header, where the filter of a TCP socket begins to read

# (operation, jump if true, jump if false, operand): drop a packet if it has SYN but no ACK.
_FILTER: Final = (
    (0x30, 0, 0, _FLAGS_OFFSET),  # load the byte
    (0x54, 0, 0, _SYN_AND_ACK),  # and
    (0x15, 0, 1, _SYN),  # equal?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFF),  # keep
)


class Listening(Protocol):
    """A socket, or what an event loop shows of one."""

    def setsockopt(self, level: int, option: int, value: bytes, /) -> object:
        """Set an option."""


def ignore_handshakes(listening: Listening) -> bool:
    """Let a listening socket ignore new connections; False where that is not possible.

    What has begun is not affected, and can be accepted.
    """
    if sys.platform != "linux":
        return False
    program = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in _FILTER)
    )
    option = struct.pack("HL", len(_FILTER), ctypes.addressof(program))
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
    except OSError:
        return False
    return True
