from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from controlplane.core.decision import RouteRequest
from controlplane.core.fleet import Fleet
from controlplane.core.scoring import FleetView, Request
from lab.baselines import (
    BASELINES,
    Aibrix,
    LlmD,
    OracleTtft,
    Preble,
    Rival,
    Sglang,
    Surroundings,
    VllmJsq,
)
from lab.baselines_prefixes import SeenPrefixes
from lab.engine import Engine
from lab.engine_types import EngineConfig, derived_hashes
from lab.engine_types import Request as EngineRequest
from lab.profiles import find_profile
from schemas.bus import InstanceRecord, LoadReport

BLOCK = 16
TIMES = find_profile("h100/qwen2.5-7b").step_times
ENGINE = EngineConfig(num_blocks=4096, step_times=TIMES, block_size=BLOCK)


class World:
    """A rival among some instances."""

    def __init__(self, kind: type[Rival], instances: int, **parameters: float) -> None:
        self.fleet = Fleet()
        for row in range(instances):
            self.fleet.add(InstanceRecord(f"i{row}", "m", f"http://i{row}", 1), 0.0)
        self.rival = kind(Surroundings(self.fleet, ENGINE, random.Random(0)), **parameters)
        self.batch = [0] * instances
        self.hits: list[int] | None = None
        self._sent = 0

    def report(self, row: int, running: int, waiting: int, kv_usage: float = 0.0) -> None:
        """An engine says how it is."""
        self.fleet.rows[row].load = LoadReport(
            f"i{row}", 1, self._sent, 0.0, running, waiting, kv_usage=kv_usage
        )

    def scores(self, hashes: list[int], *, tokens: int = 0, now_s: float = 0.0) -> list[float]:
        """What a prompt's scores are."""
        count = len(self.fleet)
        request = RouteRequest("next", tokens or len(hashes) * BLOCK, hashes, BLOCK)
        self.rival.arriving(request, now_s)
        zeros = np.zeros(count, np.int64)
        view = FleetView(np.array(self.batch, np.int64), zeros, zeros)
        hits = None if self.hits is None else np.array(self.hits, np.int64)
        found: list[float] = self.rival.score(view, Request(request.prompt_tokens, hits)).tolist()
        return found

    def best(self, hashes: list[int], **more: Any) -> set[int]:
        """Which instances have the least score."""
        scores = self.scores(hashes, **more)
        return {row for row, score in enumerate(scores) if score == min(scores)}

    def send(self, row: int, hashes: list[int], *, now_s: float = 0.0, hit: int = 0) -> str:
        """Send a prompt to an instance, whoever had the best score."""
        self.scores(hashes, now_s=now_s)
        self._sent += 1
        name = f"r{self._sent}"
        self.rival.sent(row, RouteRequest(name, len(hashes) * BLOCK, hashes, BLOCK), hit)
        return name


def chain(root: int, blocks: int) -> list[int]:
    """The blocks of a prompt."""
    return derived_hashes(root, blocks)


# --- vLLM: 4 × waiting + running


def test_vllm_weighs_waiting_four_times() -> None:
    """One waiting is as bad as four running."""
    world = World(VllmJsq, 3)
    world.report(0, running=9, waiting=0)
    world.report(1, running=0, waiting=2)
    world.report(2, running=1, waiting=2)
    assert world.scores([]) == [9.0, 8.0, 9.0]


def test_vllm_counts_what_it_sent_until_the_next_report() -> None:
    """Each request that was sent counts as waiting; a new report knows of it."""
    world = World(VllmJsq, 2)
    world.report(0, running=1, waiting=0)
    world.send(0, [])
    world.send(0, [])
    assert world.scores([]) == [9.0, 0.0]
    world.report(0, running=3, waiting=0)
    assert world.scores([]) == [3.0, 0.0]


# --- llm-d: 2 × queue + 2 × (1 − KV use) + 3 × match


def test_llm_d_adds_its_three_scores() -> None:
    """Queues between the shortest and the longest, memory, and the share that is cached."""
    world = World(LlmD, 3)
    world.report(0, running=5, waiting=0, kv_usage=0.5)
    world.report(1, running=5, waiting=4, kv_usage=0.0)
    world.report(2, running=5, waiting=2, kv_usage=1.0)
    world.hits = [0, 80, 160]
    assert world.scores(chain(1, 10)) == pytest.approx(
        [-(2 * 1 + 2 * 0.5 + 0), -(0 + 2 * 1.0 + 3 * 0.5), -(2 * 0.5 + 0 + 3 * 1.0)]
    )


def test_llm_d_gives_equal_queues_the_full_score() -> None:
    """With all queues alike nobody is punished, and nothing is divided by zero."""
    world = World(LlmD, 2)
    assert world.scores(chain(1, 10)) == [-4.0, -4.0]


# --- SGLang


def test_sglang_follows_a_match_that_is_long_enough() -> None:
    """Above the threshold the last one that got the prefix; below, the smallest tree."""
    world = World(Sglang, 3)
    world.send(1, chain(1, 10))
    assert world.best(chain(1, 10)) == {1}
    half = chain(1, 10)[:4] + chain(2, 6)
    assert world.best(half) == {1}, "0.4 of it is cached, more than 0.3"
    third = chain(1, 10)[:3] + chain(2, 7)
    assert world.best(third) == {0, 2}, "0.3 is not more than 0.3: the smallest trees"


def test_sglang_takes_the_latest_of_equal_matches() -> None:
    """Both have the whole prompt; the one that got it last is taken."""
    world = World(Sglang, 3)
    world.send(2, chain(1, 10))
    world.send(0, chain(1, 10))
    assert world.best(chain(1, 10)) == {0}


def test_sglang_balances_when_queues_are_too_uneven() -> None:
    """Uneven means both by more than 64 and by more than half."""
    world = World(Sglang, 2)
    world.send(0, chain(1, 10))
    world.batch = [64, 0]
    assert world.best(chain(1, 10)) == {0}, "64 is not more than 64"
    world.batch = [65, 0]
    assert world.best(chain(1, 10)) == {1}
    world.batch = [300, 200]
    assert world.best(chain(1, 10)) == {0}, "300 is not more than 1.5 × 200"


# --- AIBrix


def test_aibrix_takes_the_longest_match_that_is_not_too_busy() -> None:
    """Mean and one standard deviation bound what a holder may have."""
    world = World(Aibrix, 4)
    world.send(0, chain(1, 10))
    world.send(1, chain(1, 5))
    world.batch = [4, 2, 2, 2]
    assert world.best(chain(1, 10)) == {1}, "4 > 2.5 + 0.87"
    world.batch = [3, 3, 2, 2]
    assert world.best(chain(1, 10)) == {0}, "3 ≤ 2.5 + 0.5"


def test_aibrix_breaks_ties_by_requests_and_falls_back_to_the_least() -> None:
    """Equal matches: the less busy one; no match: the least busy ones."""
    world = World(Aibrix, 3)
    world.send(0, chain(1, 10))
    world.send(1, chain(1, 10))
    world.batch = [2, 1, 0]
    assert world.best(chain(1, 10)) == {1}
    assert world.best(chain(2, 10)) == {2}


def test_aibrix_looks_at_the_least_busy_only_when_imbalanced() -> None:
    """A difference of more than 8 requests leaves the least busy ones, match or not."""
    world = World(Aibrix, 3)
    world.send(0, chain(1, 10))
    world.batch = [8, 0, 0]
    assert world.best(chain(1, 4)) == {1, 2}, "8 > 2.7 + 3.8: too busy"
    world.batch = [9, 9, 0]
    world.send(1, chain(1, 10))
    assert world.best(chain(1, 10)) == {2}


# --- Preble


def test_preble_exploits_what_is_mostly_cached() -> None:
    """More cached than new: the least loaded holder; else load plus own prefill."""
    world = World(Preble, 2)
    for root, row in ((1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1), (7, 1)):
        world.send(row, chain(root, 10))
    mostly = chain(1, 10)[:6] + chain(9, 4)
    assert world.best(mostly) == {0}
    half = chain(1, 10)[:5] + chain(9, 5)
    assert world.best(half) == {1}, "as much new as cached: the one with less work"


def test_preble_counts_work_of_its_window_only() -> None:
    """Prefill at the engine's own rate, decoding at the priors, for three minutes."""
    world = World(Preble, 2)
    world.send(0, chain(1, 10), now_s=0.0)
    work_s = 160 * TIMES.token + 45 * 0.15
    own_s = 160 * TIMES.token
    assert world.scores(chain(2, 10), now_s=179.0) == pytest.approx([work_s + own_s, own_s])
    assert world.scores(chain(2, 10), now_s=180.0) == pytest.approx([own_s, own_s])


def test_preble_moves_work_off_an_overloaded_holder() -> None:
    """The most loaded one, beyond 1.5 times the least load: its match is not followed."""
    world = World(Preble, 2)
    for root, row in ((1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1), (7, 1)):
        world.send(row, chain(root, 10))
    assert world.best(chain(1, 10)) == {0}, "4 is less than 1.5 × 3"
    world.send(0, chain(8, 10))
    assert world.best(chain(1, 10)) == {1}


def test_preble_learns_how_long_answers_are() -> None:
    """Measured answers move the priors."""
    world = World(Preble, 2)
    for _ in range(200):
        world.rival.ended(0, "r", 100, 0.01)
    world.send(0, chain(1, 1))
    expected_s = 16 * TIMES.token + 100 * 0.01
    assert world.scores(chain(2, 1))[0] == pytest.approx(expected_s + 16 * TIMES.token, rel=0.01)


# --- the oracle


def test_the_oracle_is_right_about_an_idle_engine() -> None:
    """What it foresees is what the engine's first step takes."""
    world = World(OracleTtft, 1)
    engine = Engine(ENGINE)
    hashes = chain(1, 100)
    engine.add_request(EngineRequest("r", 1600, 1, hashes))
    (foreseen,) = world.scores(hashes)
    assert foreseen == pytest.approx(engine.step().duration_s)


def test_the_oracle_is_right_about_a_queue() -> None:
    """Behind another prompt and decoding requests, it foresees the time within a percent."""
    world = World(OracleTtft, 1)
    engine, rival, now_s = Engine(ENGINE), world.rival, 0.0
    for number, blocks in enumerate((20, 60, 700)):
        hashes = chain(number, blocks)
        tokens = blocks * BLOCK
        name = world.send(0, hashes)
        engine.add_request(EngineRequest(name, tokens, 500, [*hashes, *chain(number + 50, 40)]))
        if blocks < 700:
            result = engine.step()
            now_s += result.duration_s
            rival.stepped(0, result, now_s)
    hashes = chain(9, 300)
    (foreseen,) = world.scores(hashes, now_s=now_s)
    engine.add_request(EngineRequest("next", 4800, 2, hashes))
    took_s, begun = 0.0, False
    while not begun:
        result = engine.step()
        took_s += result.duration_s
        begun = any(output.request_id == "next" for output in result.outputs)
    assert foreseen == pytest.approx(took_s, rel=0.01)


def test_the_oracle_waits_for_the_step_under_way() -> None:
    """What is left of it comes first."""
    world = World(OracleTtft, 1)
    engine = Engine(ENGINE)
    name = world.send(0, chain(1, 100))
    engine.add_request(EngineRequest(name, 1600, 1, chain(1, 100)))
    result = engine.step()
    world.rival.stepped(0, result, 1.0)
    idle = world.scores(chain(2, 100), now_s=1.0)[0]
    assert world.scores(chain(2, 100), now_s=0.25)[0] == pytest.approx(idle + 0.75)


def test_the_oracle_puts_a_preempted_request_back() -> None:
    """Its whole context has to be computed again."""
    world = World(OracleTtft, 1)
    tight = EngineConfig(num_blocks=65, step_times=TIMES, block_size=BLOCK, max_model_len=1000)
    engine = Engine(tight)
    for number in (1, 2):
        name = world.send(0, chain(number, 31))
        engine.add_request(EngineRequest(name, 496, 200, chain(number, 44)))
    preempted = False
    while not preempted:
        result = engine.step()
        world.rival.stepped(0, result, 0.0)
        preempted = bool(result.preempted)
    alone = World(OracleTtft, 1).scores(chain(3, 10))[0]
    assert world.scores(chain(3, 10))[0] > alone + 300 * TIMES.token


# --- what was sent where


def test_seen_prefixes_forget_tails_first() -> None:
    """Beyond the bound the least recent prompt goes, from its end."""
    seen = SeenPrefixes(blocks_max=8)
    first, second = chain(1, 6), chain(2, 5)
    seen.add(0, first)
    seen.add(0, second)
    assert seen.depths(first, 1).tolist() == [3]
    assert seen.depths(second, 1).tolist() == [5]
    assert seen.sizes(2).tolist() == [8, 0]


def test_seen_prefixes_keep_what_is_sent_again() -> None:
    """Sending a prompt again makes it the most recent one."""
    seen = SeenPrefixes(blocks_max=8)
    first, second = chain(1, 4), chain(2, 4)
    for prompt in (first, second, first, chain(3, 4)):
        seen.add(1, prompt)
    assert seen.depths(first, 2).tolist() == [0, 4]
    assert seen.depths(second, 2).tolist() == [0, 0]


def test_every_rival_is_known_by_its_name() -> None:
    """The table and the classes agree, and no parameter is unknown."""
    for name, kind in BASELINES.items():
        assert kind.name == name
        assert World(kind, 2).rival.set == kind.parameters
