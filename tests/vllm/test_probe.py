"""vLLM's own scheduler answers step by step, and what it says about its cache is consistent."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vllm.fleet import VllmFleet
from tests.vllm.harness import VllmSpec
from tests.vllm.kv_events import Event, copies
from tests.vllm.probe import ProbeError, SchedulerProbe, Step
from tests.vllm.token_rule import answer, prompt_seed, sampled_token

SMALL = {
    "num_blocks": 20,
    "block_size": 16,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
}


def events_in(steps: Sequence[Step]) -> list[Event]:
    """Returns the events of steps, in order."""
    return [event for step in steps for event in step.events]


def test_a_request_runs_as_the_rule_says(scheduler_probe: SchedulerProbe) -> None:
    """One prefill step, a token a step, the tokens of the rule, whole blocks stored."""
    scheduler_probe.open()
    scheduler_probe.add("a", range(100, 140), max_tokens=10)
    steps = scheduler_probe.run()
    assert [step.scheduled for step in steps[:10]] == [[("a", 40)]] + [[("a", 1)]] * 9
    assert [step.sampled["a"] for step in steps[:10]] == answer("a", 40, 10)
    assert steps[0].cached_tokens == {"a": 0}
    assert steps[9].finished == {"a": "length"}
    assert steps[-1].scheduled == []  # vLLM clears away what ended in a step of its own
    tokens = [*range(100, 140), *answer("a", 40, 8)]
    assert [t for event in events_in(steps) for t in event["token_ids"]] == tokens


def test_long_prompts_are_computed_in_chunks(scheduler_probe: SchedulerProbe) -> None:
    """A chunk fills the step's budget, each stores its own blocks, and a token comes at the end."""
    scheduler_probe.open(**SMALL)
    scheduler_probe.add("a", range(150), max_tokens=1)
    steps = scheduler_probe.run()
    assert [step.scheduled for step in steps[:3]] == [[("a", 64)], [("a", 64)], [("a", 22)]]
    assert [step.sampled for step in steps[:2]] == [{}, {}]
    assert [len(event["block_hashes"]) for event in events_in(steps)] == [4, 4, 1]


def test_prefixes_hit_unless_salted(scheduler_probe: SchedulerProbe) -> None:
    """A second request hits all whole blocks but the last token's; a salt keeps them apart."""
    scheduler_probe.open()
    found = {}
    for name, salt in (("cold", None), ("warm", None), ("salted", "s")):
        scheduler_probe.add(name, range(64), max_tokens=1, cache_salt=salt)
        found.update(scheduler_probe.run()[0].cached_tokens)
    assert found == {"cold": 0, "warm": 48, "salted": 0}
    assert sorted(scheduler_probe.blocks().values()) == [1] * 7 + [2]


def test_hits_are_announced_on_request(scheduler_probe: SchedulerProbe) -> None:
    """`kv_cache_report_mode=full` stores again, in events only."""
    scheduler_probe.open()
    scheduler_probe.add("a", range(40), max_tokens=1)
    scheduler_probe.run()
    held = scheduler_probe.blocks()
    scheduler_probe.add("b", range(40), max_tokens=1, report_hits=True)
    (event,) = events_in(scheduler_probe.run())
    assert set(event["block_hashes"]) == held.keys()
    assert scheduler_probe.blocks() == held


def test_requests_arrive_at_their_step(scheduler_probe: SchedulerProbe) -> None:
    """An arrival step delays a request; the engine idles until then."""
    scheduler_probe.open()
    scheduler_probe.add("late", range(20), max_tokens=1, arrival_step=4)
    scheduler_probe.add("now", range(20), max_tokens=1)
    steps = scheduler_probe.run()
    assert [i for i, step in enumerate(steps) if step.scheduled] == [0, 4]
    assert steps[4].cached_tokens == {"late": 16}


def test_a_full_pool_preempts_and_recovers(scheduler_probe: SchedulerProbe) -> None:
    """Two growing requests do not fit: the later one waits, resumes, and ends as it would have."""
    scheduler_probe.open(num_blocks=8, max_model_len=112)
    for name in ("first", "second"):
        scheduler_probe.add(name, [ord(name[0])] * 33, max_tokens=50)
    steps = scheduler_probe.run()
    assert [step.preempted for step in steps if step.preempted] == [["second"]]
    tokens = [step.sampled["second"] for step in steps if "second" in step.sampled]
    assert tokens == answer("second", 33, 50)


def test_abort_and_reset(scheduler_probe: SchedulerProbe) -> None:
    """An aborted request leaves its blocks; a reset is refused while one runs, and tells later."""
    scheduler_probe.open()
    scheduler_probe.add("a", range(40), max_tokens=100)
    first = scheduler_probe.step()
    assert first.running == ["a"]
    assert not scheduler_probe.reset_prefix_cache()
    scheduler_probe.abort("a")
    assert len(scheduler_probe.blocks()) == 2
    assert scheduler_probe.reset_prefix_cache()
    assert scheduler_probe.blocks() == {}
    assert events_in(scheduler_probe.run()) == [{"type": "AllBlocksCleared"}]


def test_what_cannot_be_done_is_refused(scheduler_probe: SchedulerProbe) -> None:
    """Unknown limits, repeated ids and endless runs are errors that say so."""
    with pytest.raises(ProbeError, match=r"unknown limits \['blocks'\]"):
        scheduler_probe.open(blocks=3)
    scheduler_probe.open()
    scheduler_probe.add("a", range(10), max_tokens=50)
    with pytest.raises(ProbeError, match="'a' exists already"):
        scheduler_probe.add("a", range(10), max_tokens=1)
    with pytest.raises(ProbeError, match="still busy after 3 steps"):
        scheduler_probe.run(steps_max=3)


requests = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 120), st.integers(1, 40), st.integers(0, 30)),
    min_size=1,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests)
def test_events_are_a_ledger_of_the_cache(
    scheduler_probe: SchedulerProbe, plan: list[tuple[int, int, int, int]]
) -> None:
    """Stores and removals add up to the block pool's own map under eviction and preemption."""
    scheduler_probe.open(**SMALL)
    for i, (family, prompt, tokens, arrival) in enumerate(plan):
        token_ids = [family] * min(prompt, 50) + list(range(max(0, prompt - 50)))
        scheduler_probe.add(f"r{i}", token_ids, max_tokens=tokens, arrival_step=arrival)
    steps = scheduler_probe.run()
    assert copies(events_in(steps)) == scheduler_probe.blocks()
    ended = Counter(name for step in steps for name in step.finished)
    assert ended == Counter(f"r{i}" for i in range(len(plan)))


def test_the_server_fills_the_same_blocks(
    scheduler_probe: SchedulerProbe, vllm_fleet: VllmFleet
) -> None:
    """Server and probe, given the same requests and seeds, hold the same hashes."""
    server = vllm_fleet.server(VllmSpec())
    scheduler_probe.open(num_blocks=1024, max_model_len=4096)
    for i, prompt in enumerate(([1] * 50, [1] * 48, list(range(3000, 3100)))):
        body = {"model": server.model, "prompt": prompt, "max_tokens": 20, "ignore_eos": True}
        server.post("/v1/completions", body)
        scheduler_probe.add(f"r{i}", prompt, max_tokens=20, seed=prompt_seed(prompt))
        scheduler_probe.run()
    assert server.cached_blocks() == scheduler_probe.blocks()


def test_the_rule_avoids_special_tokens() -> None:
    """Sampled tokens are text in every vocabulary in use, and vary."""
    tokens = {sampled_token("seed", position) for position in range(5000)}
    assert min(tokens) >= 300
    assert max(tokens) < 3800
    assert len(tokens) > 2000
