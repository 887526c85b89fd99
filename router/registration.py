"""Lets people find this router: an entry in the routers' bucket for each model that it serves.

Nobody else needs it. What a router has booked counts for the others as long as they hear its
`RouterTotals`, which come more often than any entry could be written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import NoReturn

import msgspec

from controlplane.bus.protocol import Bus, BusError
from router.directory import Directory
from schemas import subjects
from schemas.bus import RouterLease
from schemas.codec import encode

logger = logging.getLogger(__name__)

_LOOK_S = 0.5


class Registration:
    """Keeps this router's entries fresh: `run` it, then `end` it.

    Args:
        lease: the first entry; `seq` and the time are filled in.
    """

    def __init__(self, bus: Bus, directory: Directory, lease: RouterLease) -> None:
        self._bus = bus
        self._directory = directory
        self._lease = lease
        self._keys: set[str] = set()

    async def run(self) -> NoReturn:
        """Renew the entries for ever; a bus that is away is no reason to end."""
        while True:
            try:
                await self._renew()
            except BusError as error:
                logger.debug("cannot register this router: %s", error)
            await self._pause()

    async def _pause(self) -> None:
        """Wait until the next renewal, or until there is another model to register for."""
        looks = max(round(self._lease.heartbeat_s / _LOOK_S), 1)
        for _ in range(looks):
            await asyncio.sleep(self._lease.heartbeat_s / looks)
            if len(self._directory) > len(self._keys):
                return

    async def _renew(self) -> None:
        lease = self._lease
        bucket = await self._bus.bucket(subjects.ROUTERS)
        now = msgspec.structs.replace(lease, seq=lease.seq + 1, sent_wall_s=time.time())
        for served in self._directory:
            key = subjects.key(served.model, lease.router_id)
            await bucket.put(key, encode(now))
            self._keys.add(key)
        self._lease = now

    async def end(self) -> None:
        """Delete the entries."""
        try:
            bucket = await self._bus.bucket(subjects.ROUTERS)
            for key in sorted(self._keys):
                await bucket.delete(key)
        except BusError as error:
            logger.debug("cannot deregister this router: %s; its entries expire", error)
