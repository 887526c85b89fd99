"""The switch to round robin while alarms persist, and the operator's last word on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from controlplane.operator import Operator
from tests.detector.rig import CONFIG, MODEL, Rig, eventually, for_s
from tests.detector.virtual import in_virtual_time, now


async def _keep_hot(rig: Rig, until: Callable[[], object]) -> None:
    """Ask for the class, which nothing cures, until a condition holds."""
    deadline = now() + 200.0
    while not until():
        assert now() < deadline, "the condition did not come true"
        rig.router.ask(1)
        await asyncio.sleep(0.25)


def _policy(rig: Rig) -> str:
    override = rig.router.verdicts.policy(now())
    return "" if override is None else f"{override.policy} by {override.by}"


@pytest.mark.slow
@in_virtual_time
async def test_alarms_that_persist_switch_to_round_robin_until_it_is_calm() -> None:
    """The override is a detector's, lasts while it is renewed, and ends by itself."""
    async with Rig() as rig:
        await rig.lead("a")
        await _keep_hot(rig, lambda: _policy(rig) == "round_robin by detector")
        stays_until_s = now() + 60.0
        await _keep_hot(rig, lambda: now() > stays_until_s)
        assert _policy(rig) == "round_robin by detector"
        await eventually(lambda: _policy(rig) == "", CONFIG.detector.trouble.calm_s + 1.0)


@pytest.mark.slow
@in_virtual_time
async def test_a_successor_keeps_the_switch() -> None:
    """It finds the override in the bucket and goes on renewing it."""
    async with Rig() as rig:
        await rig.lead("a")
        standby = await rig.start("b")
        await _keep_hot(rig, lambda: _policy(rig) == "round_robin by detector")
        await rig.kill("a")
        await _keep_hot(rig, lambda: standby.leading)
        lasts_until_s = now() + 3 * CONFIG.detector.ttl_s
        await _keep_hot(rig, lambda: now() > lasts_until_s)
        assert _policy(rig) == "round_robin by detector"
        await eventually(lambda: _policy(rig) == "")


@pytest.mark.slow
@in_virtual_time
async def test_a_successor_that_knows_nothing_keeps_the_switch_for_its_time() -> None:
    """It has seen no alarm; what its predecessor decided stays as long as it may."""
    async with Rig() as rig:
        await rig.lead("a")
        await _keep_hot(rig, lambda: _policy(rig) == "round_robin by detector")
        await rig.kill("a")
        successor = await rig.lead("b")
        stay_s = CONFIG.detector.trouble.stay_s
        await for_s(stay_s - 5.0, lambda: _policy(rig) == "round_robin by detector")
        assert successor.models[MODEL].switch.on
        await eventually(lambda: _policy(rig) == "")


@pytest.mark.slow
@in_virtual_time
async def test_a_successor_leaves_an_operators_override_alone() -> None:
    """It cannot know for how long the override has stood, so it grants the whole time."""
    async with Rig() as rig:
        await rig.lead("a")
        await Operator(await rig.bus(), by="op").policy(MODEL, "linear", ttl_s=600.0)
        await eventually(lambda: _policy(rig) == "linear by op")
        standby = await rig.start("b")
        await _keep_hot(rig, lambda: MODEL in standby.models)
        await rig.kill("a")
        await _keep_hot(rig, lambda: standby.leading and standby.models[MODEL].switch.on)
        holds_until_s = now() + 30.0
        await _keep_hot(rig, lambda: now() > holds_until_s)
        assert _policy(rig) == "linear by op"


@pytest.mark.slow
@in_virtual_time
async def test_an_operators_override_is_never_replaced() -> None:
    """The detector wants its own, and waits until the operator's is gone."""
    async with Rig() as rig:
        leader = await rig.lead("a")
        operator = Operator(await rig.bus(), by="op")
        await operator.policy(MODEL, "linear")
        await _keep_hot(rig, lambda: MODEL in leader.models and leader.models[MODEL].switch.on)
        holds_until_s = now() + 60.0
        await _keep_hot(rig, lambda: now() > holds_until_s)
        assert _policy(rig) == "linear by op"
        await operator.policy(MODEL, "")
        await _keep_hot(rig, lambda: _policy(rig) == "round_robin by detector")


@pytest.mark.parametrize("policy", ["linear", ""])
@in_virtual_time
async def test_an_operator_who_changes_the_detectors_override_is_obeyed(policy: str) -> None:
    """Replaced or lifted, it is left alone for a while although the alarms go on."""
    rest_s = 30.0
    async with Rig(msgspec.structs.replace(CONFIG, operator_rest_s=rest_s)) as rig:
        leader = await rig.lead("a")
        operator = Operator(await rig.bus(), by="op")
        await _keep_hot(rig, lambda: _policy(rig) == "round_robin by detector")
        changed_s = now()
        await operator.policy(MODEL, policy)
        expected = f"{policy} by op" if policy else ""
        await eventually(lambda: _policy(rig) == expected)
        rests_until_s = changed_s + rest_s - 1.0
        await _keep_hot(rig, lambda: _policy(rig) != expected or now() > rests_until_s)
        assert _policy(rig) == expected
        assert leader.models[MODEL].switch.on
        if not policy:
            await _keep_hot(rig, lambda: _policy(rig) == "round_robin by detector")
