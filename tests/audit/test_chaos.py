"""The audit of a plane that was hurt under traffic: nothing that it decided is unexplained."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from lab.stack import LocalStack, StackOptions
from tests.live.chaos_rig import Reply, steady

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(180)]

ENGINE_FLAGS = ("--speed", "10", "--blocks", "1024", "--max-model-len", "2048")


async def verified(stack: LocalStack) -> tuple[int, dict[str, Any]]:
    """Return what `audit verify` exits with and reports."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", "audit", "verify", "--json"),
        *("--nats", stack.nats_url),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 90.0)
    assert process.returncode is not None
    report: dict[str, Any] = json.loads(output)
    return process.returncode, report


def hurt(reply: Reply) -> bool:
    """Requests whose router or engine died under them may break; others may not."""
    return reply.broke


async def test_every_decision_of_a_run_with_faults_is_explained() -> None:
    """A sidecar, an engine, a router and NATS die and return; the record accounts for all of it."""
    options = StackOptions(engines=3, routers=2, engine_flags=ENGINE_FLAGS)
    async with LocalStack(options) as stack:
        assert stack.embedded is not None
        async with steady(stack, requests_per_s=40.0, may_fail=hurt, before=30, after=30) as flow:
            sidecar, engine, router = stack.sidecars[0], stack.fleet.instances[1], stack.routers[0]
            await sidecar.kill()
            await flow.answered(30)
            await sidecar.start()
            await engine.kill()
            await flow.answered(30)
            await engine.restart()
            await router.kill()
            await flow.answered(30)
            await router.start()
            await stack.embedded.kill()
            await flow.answered(30)
            await stack.embedded.start()
            await stack.ready(3)
        status, report = await verified(stack)
    assert report["findings"] == []
    assert status == 0
    assert report["decisions"] >= 100
    assert report["chosen"] > 0.8 * report["decisions"], report["unchecked"]
    assert report["hits"] > 0.5 * report["decisions"], report["unchecked"]
