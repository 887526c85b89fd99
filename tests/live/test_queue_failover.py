"""An engine is killed while everything is full and many wait, with real processes."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from controlplane.bus import NatsBus
from controlplane.http_client import HttpClient
from lab.load import Answered, Planned, run_load
from lab.stack import LocalStack, StackOptions
from schemas import subjects
from schemas.bus import Routed, RouteEvent, decode_route
from tests.live.chaos_rig import agree, eventually, logs

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(120)]

CAP, REQUESTS = 2, 36
OPTIONS = StackOptions(
    engines=3,
    routers=1,
    engine_flags=("--max-num-seqs", str(CAP), "--speed", "0.5"),
    router_flags=("--batch-cap", str(CAP), "--queue", "fcfs"),
)


def body(number: int) -> bytes:
    """Returns a completion that is answered in one piece, so that its instance can fail it."""
    rng = random.Random(number)
    prompt = [rng.randrange(300) for _ in range(200)]
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": 48, "ignore_eos": True}
    return msgspec.json.encode(asked)


async def many_wait(stack: LocalStack) -> bool:
    """Whether at least half of the requests wait at the router."""
    async with HttpClient(timeout_s=5.0) as http:
        state = await http.get(f"{stack.admin_urls[0]}/debug/state")
    queue = state["models"]["tiny"]["queue"]
    return queue is not None and queue["queued"] >= REQUESTS // 2


async def test_an_engine_dies_while_many_wait() -> None:
    """All are answered, and no survivor ever gets one more than its cap."""
    events: list[RouteEvent] = []
    planned = [
        Planned(0.0, "/v1/completions", lambda n=number: body(n), 200)  # type: ignore[misc]
        for number in range(REQUESTS)
    ]
    async with LocalStack(OPTIONS) as stack:
        bus = await NatsBus.connect(stack.nats_url, name="test")
        await bus.subscribe(
            subjects.all_of("route"), lambda _, payload: events.extend(decode_route(payload).events)
        )
        load = asyncio.create_task(run_load(stack.url, planned))
        await eventually(lambda: many_wait(stack), True, "half of them wait")
        await stack.fleet.instances[0].kill()
        results: list[Answered] = await load
        assert all(each.ok for each in results), logs(stack)
        await eventually(lambda: _sent(events), True, "all decisions were told")
        await bus.close()
        await agree(stack, within_s=20.0)
    decisions = [event for event in events if isinstance(event, Routed)]
    assert any(each.attempt for each in decisions), "the engine that was killed had requests"
    beyond = [each for each in decisions if each.batch_size >= CAP]
    assert not beyond, f"{len(beyond)} sent where there was no room: {beyond[0]}"


async def _sent(events: list[RouteEvent]) -> bool:
    return len({each.request_id for each in events if isinstance(each, Routed)}) == REQUESTS
