"""The audit of a plane that was hurt under traffic: nothing that it decided is unexplained."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from lab.load import run_load
from lab.stack import LocalStack, StackOptions
from tests.audit.load import chats
from tests.live.chaos_rig import Reply, steady

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(180)]

ENGINE_FLAGS = ("--speed", "10", "--blocks", "1024", "--max-model-len", "2048")


async def verified(stack: LocalStack) -> tuple[int, dict[str, Any]]:
    """Return what `audit verify` exits with and reports."""
    status, output = await audit(stack, "verify")
    report: dict[str, Any] = json.loads(output)
    return status, report


async def tail(stack: LocalStack) -> list[dict[str, Any]]:
    """Return everything that was said."""
    _, output = await audit(stack, "tail", "--since", "1h", "--no-follow")
    return [json.loads(line) for line in output.splitlines()]


async def audit(stack: LocalStack, *words: str) -> tuple[int, str]:
    """Run a command of the audit; returns its status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", "audit", *words, "--json"),
        *("--nats", stack.nats_url),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 90.0)
    assert process.returncode is not None
    return process.returncode, output.decode()


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


async def test_decisions_on_requests_that_waited_are_explained() -> None:
    """For room, or for a prefix that another computed: who was left out, and why, is recorded."""
    options = StackOptions(
        engines=2,
        routers=1,
        engine_flags=("--speed", "0.2"),
        router_flags=(
            *("--batch-cap", "2", "--queue", "edf"),
            *("--coalesce", "--coalesce-tokens", "128"),
        ),
    )
    async with LocalStack(options) as stack:
        answers = await run_load(stack.url, chats(60, 80.0))
        status, report = await verified(stack)
        record = await tail(stack)
    assert all(answer.ok for answer in answers)
    assert report["findings"] == []
    assert status == 0
    assert report["decisions"] == report["chosen"] == len(answers)
    routed = [each for each in record if each["type"] == "routed"]
    assert any(each.get("queue_s", 0.0) > 0.0 for each in routed)
    assert any(
        "pinned" in row.get("excluded_by", ()) for each in routed for row in each["candidates"]
    )
