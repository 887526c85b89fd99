"""The event plane: one protocol, a NATS adapter and an in-memory twin."""

from __future__ import annotations

from controlplane.bus.memory_bus import MemoryBroker
from controlplane.bus.nats_bus import NatsBus
from controlplane.bus.nats_options import NatsOptions
from controlplane.bus.protocol import Bus, BusError

__all__ = ["Bus", "BusError", "MemoryBroker", "NatsBus", "NatsOptions", "connect"]


async def connect(
    url: str,
    *,
    name: str = "multiplane",
    options: NatsOptions | None = None,
    wait_s: float = 2.0,
) -> Bus:
    """Open the bus that a URL names.

    Args:
        url: `nats://HOST:PORT` or `tls://HOST:PORT`, several with commas; or `memory://`, a bus
            that nobody else is on (share a `MemoryBroker` to put several on one).
        name: who we are, for the server's tools.
        options: credentials, TLS, bounds.
        wait_s: a server that does not answer for this long is tried further in the background.

    Raises:
        BusError: the URL or the options make no sense, or the server refuses the credentials.
    """
    if url.startswith("memory:"):
        return MemoryBroker().bus()
    return await NatsBus.connect(url, name=name, options=options, wait_s=wait_s)
