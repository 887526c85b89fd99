"""The bounds of the data plane, in one place: nothing a peer sends may grow without one of these.

Every field names its unit last. The defaults suit one router process of a fleet: long prompts, long
answers, many streams, and engines with vLLM's own settings (uvicorn closes an idle connection after
5 s, so ours must be closed before).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

FILES_RESERVED = 48
"""Descriptors of a router that serves nobody: the bus, the log, listeners, the event loop."""
CONNECTIONS_LEAST = 4
"""However few files there are."""


class ServerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may cost.

    Fields:
        header_bytes_max: a request's head, first byte to blank line; past it: 431.
        headers_max: header lines in a head; past it: 431.
        body_bytes_max: one request body, decoded; past it: 413.
        buffered_bytes_max: all request bodies held at once; past it: 503 with Retry-After.
        pipeline_bytes_max: bytes taken ahead of the request being answered; past it reading stops.
        write_buffer_bytes: unsent answer bytes past which the engine's connection stops being read.
        connections_max: open client connections; past it: 503 and close. TLS handshakes in progress
            are none yet: `tls_handshake_s` bounds what they hold.
        connections_per_client_max: the same for one client address (a load balancer is one client).
        header_time_s: first byte to blank line; past it: 408.
        body_time_s: blank line to the body's last byte; past it: 408.
        idle_time_s: between requests, and before the first one; past it: close.
        write_stall_s: a client that has unsent bytes and takes none for this long is dropped.
        half_close_s: after its request, how long a client of HTTP/1.0 that waits for the answer may
            take to end its own side; who does so later has left.
        linger_s: after a refusal, how long what the client still sends is read and dropped, so that
            the answer is not lost to a reset.
        drain_idle_s: on a graceful stop, how long an idle connection may still bring a request.
        tls_handshake_s: TLS handshake, when TLS is on.
        tick_s: how often deadlines are looked at; every time above is met within one tick.
    """

    header_bytes_max: int = 32 * KIB
    headers_max: int = 128
    body_bytes_max: int = 32 * MIB
    buffered_bytes_max: int = 1 * GIB
    pipeline_bytes_max: int = 64 * KIB
    write_buffer_bytes: int = 64 * KIB
    connections_max: int = 16_384
    connections_per_client_max: int = 16_384
    header_time_s: float = 10.0
    body_time_s: float = 120.0
    idle_time_s: float = 75.0
    write_stall_s: float = 60.0
    half_close_s: float = 0.1
    linger_s: float = 2.0
    drain_idle_s: float = 1.0
    tls_handshake_s: float = 10.0
    tick_s: float = 0.5

    def __post_init__(self) -> None:
        _require_positive(self, self.__struct_fields__)


def within_files(limits: ServerLimits, files: int) -> ServerLimits:
    """Return limits under which clients cannot take the descriptors that engines' connections need.

    Args:
        limits: as configured.
        files: how many a process may open. A request takes two: its client's and its engine's.
    """
    most = max(CONNECTIONS_LEAST, (files - FILES_RESERVED) // 2)
    if limits.connections_max <= most:
        return limits
    return msgspec.structs.replace(limits, connections_max=most)


class UpstreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine may cost.

    Fields:
        connections_max: open connections to one instance, idle ones included; past it `pool_full`.
        idle_time_s: how long an unused connection is kept; below the engine's own keep-alive time
            (5 s in vLLM), or requests are lost to the race.
        connect_s: TCP (and TLS) connection.
        first_byte_s: request sent to the first byte of the answer's BODY. Long, since an engine may
            queue a request, and one that is not streamed is silent until it is complete.
        stall_s: silence in the middle of an answer.
        head_bytes_max: an answer's head.
        tick_s: how often deadlines are looked at; every time above is met within one tick.
    """

    connections_max: int = 4_096
    idle_time_s: float = 4.0
    connect_s: float = 2.0
    first_byte_s: float = 600.0
    stall_s: float = 120.0
    head_bytes_max: int = 64 * KIB
    tick_s: float = 0.25

    def __post_init__(self) -> None:
        _require_positive(self, self.__struct_fields__)


def _require_positive(limits: msgspec.Struct, names: Iterable[str]) -> None:
    """Refuse a limit that would refuse everything.

    Raises:
        ValueError: naming the field and what is accepted.
    """
    for name in names:
        value = getattr(limits, name)
        if not value > 0:
            raise ValueError(f"{type(limits).__name__}.{name} is {value!r}: it must be above zero")
