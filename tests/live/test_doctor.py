"""The doctor on a live plane: several models, and everything that an operator or mishap may do."""

from __future__ import annotations

import time

import pytest

from controlplane.bus import Bus, NatsBus
from controlplane.doctor import doctor
from controlplane.doctor_canary import Finding
from controlplane.operator import Operator
from controlplane.operator_view import read_instances, try_doubles
from lab.stack import LocalStack, StackOptions
from lab.tiny_model import tiny_model_dir
from schemas import subjects
from schemas.bus import InstanceRecord
from schemas.codec import encode
from tests.live.chaos_rig import eventually

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(120)]

OPTIONS = StackOptions(
    engines=1, routers=2, engine_flags=("--speed", "20"), detector=True, dashboard_port=None
)


async def examined(bus: Bus, stack: LocalStack) -> tuple[list[Finding], list[Finding]]:
    """Return what is wrong, and what is noted."""
    findings = [finding async for finding in doctor(bus, stack.admin_urls[0])]
    assert len({finding.where for finding in findings}) >= 4
    wrong = [finding for finding in findings if not finding.ok]
    assert all(finding.mend for finding in wrong)
    return wrong, [finding for finding in findings if finding.ok and finding.mend]


async def until_registered(bus: Bus, *names: str) -> None:
    """Wait until exactly these instances have registered."""

    async def registered() -> set[str]:
        return {each.instance_id for each in (await read_instances(bus)).rows}

    await eventually(registered, set(names), "instances", 20.0)


async def test_what_operators_and_mishaps_do_is_found() -> None:
    """Two models are well; a drain is noted; a second sidecar and a second id are wrong."""
    async with LocalStack(OPTIONS) as stack:
        bus = await NatsBus.connect(stack.nats_url, name="doctor")
        (other,) = await stack.fleet.start(1, "--name", "second")
        await stack.start_sidecar("other", other.url, tiny_model_dir())
        await until_registered(bus, "engine-0", "other")
        await stack.ready(2)
        wrong, noted = await examined(bus, stack)
        assert (wrong, noted) == ([], [])

        await Operator(bus, by="ann").drain("other", on=True, reason="disk")
        wrong, (note,) = await examined(bus, stack)
        assert wrong == []
        assert (note.where, "drained by ann: disk" in note.found) == ("other", True)
        assert "`multiplane drain other --off`" in note.mend

        await stack.start_sidecar("alias", other.url, tiny_model_dir())
        await stack.start_sidecar("engine-0", stack.fleet.instances[0].url, tiny_model_dir())
        await until_registered(bus, "engine-0", "other", "alias")
        twice = {("tiny", "engine-0")}
        await eventually(lambda: try_doubles(bus, time.time()), twice, "two of one id", 20.0)
        wrong, _ = await examined(bus, stack)
        told = {finding.where: finding.found for finding in wrong if finding.what == "registered"}
        assert "two sidecars use this id" in told["engine-0"]
        assert "alias has the same url" in told["other"]
        assert "other has the same url" in told["alias"]

        bucket = await bus.bucket(subjects.INSTANCES)
        odd = InstanceRecord("odd", "tiny", "nowhere", 1, sent_wall_s=time.time() + 600.0)
        await bucket.put(subjects.key("tiny", "odd"), encode(odd))

        async def unusable() -> bool:
            wrong, _ = await examined(bus, stack)
            return any(each.found.startswith("odd: ") for each in wrong)

        await eventually(unusable, True, "a record that is of no use")
        await bus.close()
