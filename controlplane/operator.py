"""What an operator says to the plane: drains, blacklists and policy overrides.

A statement is an entry in the verdicts bucket, which every router watches and which late ones read;
the same message goes to the `policy` subject, where the audit log keeps it.
"""

from __future__ import annotations

import getpass
import time

import msgspec

from controlplane.bus.protocol import Bus, BusError
from schemas import subjects
from schemas.bus import (
    Blacklist,
    Drain,
    InstanceRecord,
    PolicyOverride,
    RouterLease,
    decode_instance,
    decode_policy,
    decode_router,
)
from schemas.codec import encode

Statement = Drain | Blacklist | PolicyOverride


class Standing(msgspec.Struct, frozen=True):
    """A statement that is in force, and the model it is about."""

    model: str
    statement: Statement


class RouterEntry(msgspec.Struct, frozen=True):
    """Where a router that serves a model is."""

    model: str
    lease: RouterLease


class Operator:
    """Makes and lifts statements, in the name of whoever runs the command."""

    def __init__(self, bus: Bus, by: str = "") -> None:
        self._bus = bus
        self._by = by or getpass.getuser()

    async def instances(self) -> list[InstanceRecord]:
        """Return all records, by model and instance."""
        bucket = await self._bus.bucket(subjects.INSTANCES)
        records = []
        for key in await bucket.keys():
            entry = await bucket.get(key)
            if entry is not None and entry.value is not None:
                records.append(decode_instance(entry.value))
        return sorted(records, key=lambda record: (record.model, record.instance_id))

    async def routers(self) -> list[RouterEntry]:
        """Return the routers that say where they are, by model and router."""
        bucket = await self._bus.bucket(subjects.ROUTERS)
        found = []
        for key in await bucket.keys():
            model, _ = subjects.parse_key(key)
            entry = await bucket.get(key)
            if entry is not None and entry.value is not None:
                found.append(RouterEntry(model, decode_router(entry.value)))
        return sorted(found, key=lambda entry: (entry.model, entry.lease.router_id))

    async def find(self, instance_id: str) -> InstanceRecord:
        """Return an instance's record.

        Raises:
            BusError: there is none, or more than one.
        """
        records = await self.instances()
        found = [record for record in records if record.instance_id == instance_id]
        if len(found) == 1:
            return found[0]
        known = ", ".join(record.instance_id for record in records) or "none"
        raise BusError(f"no instance {instance_id!r}; registered: {known}")

    async def drain(self, instance_id: str, *, on: bool, reason: str = "") -> None:
        """Keep new requests from an instance, or take it back. Raises BusError."""
        record = await self.find(instance_id)
        message = Drain(instance_id, on, 0, time.time(), self._by, reason)
        await self._state(record.model, f"drain-{instance_id}", message, stands=on)

    async def blacklist(
        self, instance_id: str, *, on: bool, ttl_s: float | None, reason: str = ""
    ) -> None:
        """Keep requests from an instance for a while, or take it back. Raises BusError."""
        record = await self.find(instance_id)
        message = Blacklist(instance_id, on, 0, time.time(), ttl_s, self._by, reason)
        await self._state(record.model, f"blacklist-{instance_id}", message, stands=on)

    async def policy(
        self, model: str, policy: str, *, ttl_s: float | None = None, reason: str = ""
    ) -> None:
        """Override a model's policy; an empty `policy` ends the override. Raises BusError."""
        message = PolicyOverride(policy, 0, time.time(), ttl_s, self._by, reason)
        await self._state(model, "policy", message, stands=bool(policy))

    async def standing(self) -> list[Standing]:
        """Return the statements in force, hotspot verdicts left out."""
        bucket = await self._bus.bucket(subjects.VERDICTS)
        found = []
        for key in await bucket.keys():
            model, name = subjects.parse_key(key)
            entry = await bucket.get(key)
            if entry is not None and entry.value is not None and not name.startswith("hotspot"):
                found.append(Standing(model, decode_policy(entry.value)))
        return found

    async def _state(self, model: str, name: str, message: Statement, *, stands: bool) -> None:
        bucket = await self._bus.bucket(subjects.VERDICTS)
        key = subjects.key(model, name)
        if stands:
            await bucket.put(key, encode(message))
        else:
            await bucket.delete(key)
        self._bus.publish(subjects.policy(model), encode(message))
        await self._bus.flush()
