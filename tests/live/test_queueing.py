"""A plane under half as much again as it can serve: the queue keeps what it accepts in time."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from lab.load import Answered, Planned, run_load
from lab.stack import LocalStack, StackOptions

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(400)]

SECONDS = float(os.environ.get("MULTIPLANE_OVERLOAD_S", "60"))
BUDGET_S = 2.0
BATCH = 8
OVERLOAD = 1.5
PROMPT, ANSWER = 400, 48
ENGINE = ("--max-num-seqs", str(BATCH), "--stream-interval", "8", "--speed", "0.5")


def body(number: int) -> bytes:
    """Returns a completion of a prompt that nobody has sent before."""
    rng = random.Random(number)
    return msgspec.json.encode(
        {
            "model": "tiny",
            "prompt": [rng.randrange(300) for _ in range(PROMPT)],
            "max_tokens": ANSWER,
            "ignore_eos": True,
            "stream": True,
        }
    )


def planned(rate: float, seconds: float, first: int = 0) -> list[Planned]:
    """Returns requests at random times, so many a second on average."""
    rng = random.Random(first)
    made: list[Planned] = []
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        number = first + len(made)
        made.append(Planned(at_s, "/v1/completions", lambda n=number: body(n), PROMPT))  # type: ignore[misc]
        at_s += rng.expovariate(rate)
    return made


async def capacity(stack: LocalStack) -> float:
    """Returns how many requests a second the plane ends, with every place of it taken."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    requests = [Planned(0.0, "/v1/completions", lambda n=n: body(n), PROMPT) for n in range(96)]  # type: ignore[misc]
    places = BATCH * stack.options.engines
    results = await run_load(stack.url, requests, concurrent_max=places)
    assert all(result.ok for result in results)
    return len(results) / (loop.time() - began_s)


async def overload(flags: tuple[str, ...]) -> list[Answered]:
    """Starts a plane, measures what it can serve, and sends it half as much again."""
    options = StackOptions(
        engines=2,
        routers=1,
        engine_flags=ENGINE,
        router_flags=("--batch-cap", str(BATCH), *flags),
    )
    async with LocalStack(options) as stack:
        rate = OVERLOAD * await capacity(stack)
        return await run_load(stack.url, planned(rate, SECONDS, first=1000))


def told(name: str, results: Sequence[Answered]) -> tuple[float, float]:
    """Prints what came of it; returns goodput a second, and the share of answers in time."""
    answered = [each for each in results if each.ok]
    in_time = [each for each in answered if each.ttft_s is not None and each.ttft_s <= BUDGET_S]
    goodput, share = len(in_time) / SECONDS, len(in_time) / max(len(answered), 1)
    statuses = dict(Counter(each.status for each in results))
    slowest = max((each.ttft_s or 0.0 for each in answered), default=0.0)
    print(
        f"{name}: {len(results)} requests, by status {statuses}; goodput {goodput:.1f}/s; "
        f"{share:.1%} of answers within {BUDGET_S:g} s, the slowest after {slowest:.1f} s"
    )
    return goodput, share


async def test_under_overload_the_queue_keeps_answers_in_time(tmp_path: Path) -> None:
    """Nothing is lost either way; with the queue what is accepted is in time, and it is more."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f"[tenants.default]\nttft_budget_s = {BUDGET_S}\n")
    without = await overload(())
    flags = ("--queue", "edf+klpm", "--tenants", str(tenants))
    queued = await overload(flags)
    plain_goodput, _ = told("without the queue", without)
    goodput, share = told("with the queue", queued)
    assert all(result.ok for result in without), "engines queue without end"
    assert {(each.status, each.error) for each in queued} <= {(200, ""), (429, ""), (503, "")}
    assert share > 0.85, "a busy machine's engines stall now and then"
    assert goodput > 1.2 * plain_goodput, "and the longer it lasts, the more"
