"""What an operator says to the plane: drains, blacklists and policy overrides.

A statement is an entry in the verdicts bucket, which every router watches and which late ones read;
the same message goes to the `policy` subject, where the audit log keeps it.
"""

from __future__ import annotations

import getpass
import time

from controlplane.bus.protocol import Bus, BusError
from controlplane.operator_view import RouterEntry, read_instances, read_routers, read_standing
from schemas import subjects
from schemas.bus import Blacklist, Drain, InstanceRecord, PolicyOverride
from schemas.codec import RemoteError, encode

Said = Drain | Blacklist | PolicyOverride


class Operator:
    """Makes and lifts statements, in the name of whoever runs the command.

    Every call raises BusError where the bus cannot do it.
    """

    def __init__(self, bus: Bus, by: str = "") -> None:
        self._bus = bus
        self._by = by or _user()

    async def instances(self) -> list[InstanceRecord]:
        """Return all records that can be read, by model and instance."""
        return (await read_instances(self._bus)).rows

    async def routers(self) -> list[RouterEntry]:
        """Return the routers that say where they are, by model and router."""
        return (await read_routers(self._bus)).rows

    async def find(self, instance_id: str, model: str = "") -> InstanceRecord:
        """Return an instance's record.

        Args:
            model: needed only where instances of two models have the same id.

        Raises:
            BusError: there is none, or more than one.
        """
        records = await self.instances()
        found = [
            record
            for record in records
            if record.instance_id == instance_id and model in ("", record.model)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            models = ", ".join(record.model for record in found)
            raise BusError(f"{instance_id!r} is an instance of {models}: say which with --model")
        known = ", ".join(record.instance_id for record in records) or "none"
        raise BusError(f"no instance {instance_id!r}; registered: {known}")

    async def others(self, record: InstanceRecord) -> list[InstanceRecord]:
        """Return the other instances of a model that nobody has drained.

        A blacklist does not count here: routers overlook it where it would leave nobody.
        """
        drained = {
            each.statement.instance_id
            for each in (await read_standing(self._bus)).rows
            if each.model == record.model and isinstance(each.statement, Drain)
        }
        return [
            other
            for other in await self.instances()
            if other.model == record.model
            and other.instance_id not in (record.instance_id, *drained)
            and other.state == "ready"
        ]

    async def models(self) -> list[str]:
        """Return the models that have instances."""
        return sorted({record.model for record in await self.instances()})

    async def drain(
        self, instance_id: str, *, on: bool, reason: str = "", model: str = ""
    ) -> list[str]:
        """Keep new requests from an instance, or take it back, even if it is gone.

        Returns:
            The models whose instance it is; to take back what nobody drained, none.

        Raises:
            BusError: no such instance is registered.
        """
        message = Drain(instance_id, on, 0, time.time(), self._by, reason)
        return await self._of_instance("drain", instance_id, model, message, on=on)

    async def blacklist(
        self,
        instance_id: str,
        *,
        on: bool,
        ttl_s: float | None = None,
        reason: str = "",
        model: str = "",
    ) -> list[str]:
        """Keep requests from an instance for a while, or take it back; as `drain` otherwise."""
        message = Blacklist(instance_id, on, 0, time.time(), ttl_s, self._by, reason)
        return await self._of_instance("blacklist", instance_id, model, message, on=on)

    async def policy(
        self, model: str, policy: str, *, ttl_s: float | None = None, reason: str = ""
    ) -> None:
        """Override a model's policy; an empty `policy` ends the override."""
        message = PolicyOverride(policy, 0, time.time(), ttl_s, self._by, reason)
        await self._state(model, "policy", message, stands=bool(policy))

    async def _of_instance(
        self, kind: str, instance_id: str, model: str, message: Said, *, on: bool
    ) -> list[str]:
        name = f"{kind}-{instance_id}"
        if on:
            models = [(await self.find(instance_id, model)).model]
        else:
            models = [each for each in await self._stated(name) if model in ("", each)]
        for each in models:
            await self._state(each, name, message, stands=on)
        return models

    async def _stated(self, name: str) -> list[str]:
        """Return the models that have an entry of this name, readable or not."""
        bucket = await self._bus.bucket(subjects.VERDICTS)
        models = []
        for key in await bucket.keys():
            try:
                model, part = subjects.parse_key(key)
            except RemoteError:
                continue  # somebody else's; listings tell of it
            if part == name:
                models.append(model)
        return models

    async def _state(self, model: str, name: str, message: Said, *, stands: bool) -> None:
        bucket = await self._bus.bucket(subjects.VERDICTS)
        key = subjects.key(model, name)
        if stands:
            await bucket.put(key, encode(message))
        else:
            await bucket.delete(key)
        self._bus.publish(subjects.policy(model), encode(message))
        await self._bus.flush()


def _user() -> str:
    """Return who runs this; in a container the user may have no name."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "operator"
