"""A planted hotspot in a live plane: NATS, emulated engines, sidecars, routers and detectors.

`-s` prints the numbers.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from controlplane.bus import NatsBus
from controlplane.http_client import HttpClient
from lab.children import Child
from lab.load import Answered, Planned, plan, run_load
from lab.stack import LocalStack, StackOptions
from lab.traces import sample_trace
from schemas import subjects
from schemas.bus import HotspotCleared, HotspotRaised, decode_hotspot

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

ENGINES = 4
PREFIX_TOKENS = 4096
QUIET_S, LOAD_S = 8.0, 18.0
# Step times of a GPU four times slower than an H100, so that two cores can emulate four of them.
ENGINE_FLAGS = ("--speed", "0.25", "--max-num-seqs", "8", "--max-model-len", "16384")


def _prompt(rng: random.Random, start: list[int], ending_tokens: int) -> list[int]:
    return [*start, *(rng.randrange(300, 4000) for _ in range(ending_tokens))]


def _request(at_s: float, prompt: list[int], output_tokens: int) -> Planned:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    encoded = msgspec.json.encode(body)
    return Planned(at_s, "/v1/completions", lambda: encoded, len(prompt))


def _planned(seed: int) -> list[Planned]:
    """Plan a class that grows from rare to three of four requests; the others are short."""
    rng = random.Random(seed)
    hot = _prompt(rng, [], PREFIX_TOKENS)
    planned = []
    for rate, since_s, until_s in ((0.5, 0.0, QUIET_S), (3.0, QUIET_S, QUIET_S + LOAD_S)):
        at_s = since_s
        while (at_s := at_s + rng.expovariate(rate)) < until_s:
            planned.append(_request(at_s, _prompt(rng, hot, 21), rng.randrange(150, 250)))
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(1.0)) < QUIET_S + LOAD_S:
        planned.append(_request(at_s, _prompt(rng, [], 300), 8))
    return sorted(planned, key=lambda each: each.at_s)


class Run:
    """What one run came to."""

    def __init__(self) -> None:
        self.answers: list[Answered] = []
        self.told: list[HotspotRaised | HotspotCleared] = []
        self.standing_after: list[object] = []
        self.holders = 0

    @property
    def ttft_s(self) -> list[float]:
        """Of the class."""
        return [
            each.ttft_s or float("inf")
            for each in self.answers
            if each.planned.prompt_tokens > PREFIX_TOKENS
        ]

    def show(self, name: str) -> None:
        """Print a line."""
        p50_s, p99_s = np.percentile(self.ttft_s, (50, 99))
        print(
            f"\n{name}: {len(self.ttft_s)} requests of the class, TTFT p50 {p50_s:.2f} s, "
            f"p99 {p99_s:.2f} s; held by {self.holders} of {ENGINES} engines"
        )
        for each in self.told:
            verb = "raised" if isinstance(each, HotspotRaised) else "cleared"
            print(f"    {verb}: {each.reason}")


def _detector(stack: LocalStack, name: str) -> Child:
    command = (sys.executable, "-m", "controlplane.cli.main", "detector")
    flags = ("--nats", stack.nats_url, "--detector-id", name, "--requests-min", "8")
    return Child(name, [*command, *flags])


async def _run(
    detectors: int, planned: Sequence[Planned], engine_flags: tuple[str, ...] = ENGINE_FLAGS
) -> Run:
    """Put a load through a plane of its own."""
    run = Run()
    options = StackOptions(engines=ENGINES, routers=2, engine_flags=engine_flags)
    async with LocalStack(options) as stack:
        bus = await NatsBus.connect(stack.nats_url, name="test")
        await bus.subscribe(
            subjects.all_of("hotspot"),
            lambda _, payload: run.told.append(decode_hotspot(payload)),
        )
        children = [_detector(stack, f"detector-{number}") for number in range(detectors)]
        try:
            await asyncio.gather(*(child.start() for child in children))
            run.answers = await run_load(stack.url, planned)
            await _look(stack, run, max(planned, key=lambda each: each.prompt_tokens))
        finally:
            for child in children:
                await child.stop()
                child.close()
            await bus.close()
    return run


async def _look(stack: LocalStack, run: Run, planned: Planned) -> None:
    """Ask the routers what stands, once they are quiet, and who holds the class."""
    async with HttpClient(timeout_s=5.0) as http:
        deadline_s = time.monotonic() + 10.0
        while True:
            states = [await http.get(f"{url}/debug/state") for url in stack.admin_urls]
            models = [state["models"]["tiny"] for state in states]
            run.standing_after = [each for model in models for each in model["hotspots"]]
            if not run.standing_after or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.2)
        hot = msgspec.json.decode(planned.body())
        explained = await http.post(f"{stack.admin_urls[0]}/debug/explain", hot)
        hits = [candidate["hit_tokens"] for candidate in explained["candidates"]]
        run.holders = sum(hit >= PREFIX_TOKENS for hit in hits)


async def test_a_planted_hotspot_is_raised_spread_and_cleared_in_a_live_plane() -> None:
    """With two detectors the class is spread, its verdict ends, and nobody waits for long."""
    planned = _planned(5)
    off = await _run(0, planned)
    off.show("detector off")
    on = await _run(2, planned)
    on.show("detector on")
    assert all(each.ok for each in (*off.answers, *on.answers))
    assert off.told == []
    assert [type(each) for each in on.told[:2]] == [HotspotRaised, HotspotCleared]
    assert isinstance(on.told[0], HotspotRaised)
    assert 1 <= on.told[0].holders == len(on.told[0].instances) < ENGINES
    assert on.standing_after == []
    assert on.holders >= 3
    assert np.percentile(on.ttft_s, 99) < np.percentile(off.ttft_s, 99) / 2


async def test_conversations_raise_nothing_in_a_live_plane() -> None:
    """A minute of Mooncake's trace at four times its speed: one common block, and no hotspot."""
    trace = sample_trace().cut(0.0, 60.0).faster(4.0).within(32_000)
    assert len(trace.requests) > 100
    flags = ("--speed", "4", "--max-model-len", "65536", "--stream-interval", "8")
    run = await _run(1, plan(trace, "tiny"), flags)
    assert all(each.ok for each in run.answers)
    assert run.told == []
