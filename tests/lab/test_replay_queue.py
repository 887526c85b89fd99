"""The production queue in replays: who waits, goes on, is shed, and what that is good for."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from controlplane.core.coalesce import CoalesceConfig
from controlplane.core.queue_lines import QueueConfig
from lab.generators import generate
from lab.replay_config import ReplayConfig
from lab.replay_metrics import Metrics, measure
from lab.replay_result import Result, decode, encode
from lab.replay_tenants import (
    TenantShare,
    budgets_by_tenant,
    budgets_of,
    parse_tenants,
    tenants_of,
)
from lab.traces import Trace
from tests.lab.replay_helpers import agents, chats, run, trace_of

FCFS = QueueConfig("fcfs")
ALONE = {"instances": 1, "batch_cap": 1, "sample_s": 0.01}
"""One request at a time, looked at often."""


def line_of(count: int, output_tokens: int = 20, every_s: float = 0.01) -> Trace:
    """Requests that share nothing, close together."""
    return trace_of(
        *(
            (n * every_s, 320, output_tokens, tuple(range(20 * n, 20 * n + 20)))
            for n in range(count)
        )
    )


def overloaded(seed: int, queue: QueueConfig | None) -> Metrics:
    """More than two instances can serve, half of it due soon and half of it later."""
    trace = generate("api", seed=seed, duration_s=10.0, requests_per_s=36.0)
    result = run(
        trace,
        instances=2,
        profile="h20/qwen2.5-7b",
        batch_cap=16,
        queue=queue,
        budgets_ttft_s=(0.5, 4.0),
        seed=seed,
    )
    assert result.unfinished == 0
    return measure(result)


def same(one: Result, other: Result) -> bool:
    """Whether two replays came to the same, request by request."""
    columns = ("at_s", "instance", "ttft_s", "end_s", "cached_tokens", "wait_s", "shed_at_s")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def test_whoever_waits_goes_on_when_a_booking_ends() -> None:
    """At a cap of one each begins when the one before has ended, and its TTFT counts the wait."""
    result = run(line_of(4), queue=FCFS, **ALONE)
    assert len(result.at_s) == 4
    begun_s = result.at_s + result.wait_s
    assert result.wait_s[0] == 0.0
    assert begun_s[1:] == pytest.approx(result.end_s[:-1])
    assert (result.ttft_s > result.wait_s).all()
    assert result.batch.max() == 1
    assert result.counts["queue:sent"] == 3


def test_without_a_queue_the_cap_gives_way() -> None:
    """Where every instance is full and nobody may wait, requests go on regardless."""
    result = run(line_of(4), **ALONE)
    assert result.wait_s.tolist() == [0.0] * 4
    assert not any(name.startswith("queue:") for name in result.counts)
    assert (result.at_s[1:] + result.ttft_s[1:] < result.end_s[:-1]).all()


@pytest.mark.parametrize("order", ["fcfs", "edf", "klpm", "edf+klpm"])
def test_a_replay_with_a_queue_is_a_function_of_its_seed(order: str) -> None:
    """The same seed gives the same waits and the same refusals, request by request."""
    settings = {
        "instances": 2,
        "batch_cap": 4,
        "queue": QueueConfig(order),  # type: ignore[arg-type]
        "budgets_ttft_s": (0.5, 5.0, 0.0),
    }
    trace = agents(duration_s=4.0, qps=8.0)
    first, again = run(trace, seed=3, **settings), run(trace, seed=3, **settings)
    assert same(first, again)
    assert len(first.shed_at_s) > 0 < first.wait_s.max()
    assert not same(first, run(trace, seed=4, **settings))


def test_a_queue_that_nobody_needs_changes_no_decision() -> None:
    """Under a cap that is never reached, every decision and every time is as without a queue."""
    trace = chats(duration_s=4.0)
    without = run(trace, instances=3, batch_cap=200, routers=2)
    assert same(without, run(trace, instances=3, batch_cap=200, routers=2, queue=QueueConfig()))


def test_who_would_be_late_is_shed_and_nothing_is_lost() -> None:
    """Behind a long answer, whoever is due meanwhile is refused; whoever is not is served."""
    first = (0.0, 320, 2000, tuple(range(20)))
    more = [(0.1 * n, 320, 2, tuple(range(100 * n, 100 * n + 20))) for n in range(1, 6)]
    hurried = run(trace_of(first, *more), queue=FCFS, budgets_ttft_s=(1.0,), **ALONE)
    assert hurried.at_s.tolist() == [0.0]
    assert hurried.shed_at_s.tolist() == pytest.approx([each[0] for each in more])
    assert hurried.counts["queue:late"] == 5
    assert hurried.unfinished == 0
    numbers = measure(hurried)
    assert (numbers.shed_rate, numbers.in_time_rate) == (5 / 6, 1 / 6)
    assert numbers.goodput_rps == pytest.approx(1 / hurried.end_s[0])
    patient = run(trace_of(first, *more), queue=FCFS, budgets_ttft_s=(60.0,), **ALONE)
    assert len(patient.at_s) == 6
    assert measure(patient).in_time_rate == 1.0


def test_the_queue_is_bounded_in_places_and_in_time() -> None:
    """Who finds no place is refused at once, and nobody waits longer than is allowed."""
    full = run(line_of(5), queue=QueueConfig("fcfs", requests_max=2), **ALONE)
    assert (len(full.at_s), full.counts["queue:full"]) == (3, 2)
    trace = line_of(2, output_tokens=2000)
    overdue = run(trace, queue=QueueConfig("fcfs", wait_s_max=0.5), **ALONE)
    assert (len(overdue.at_s), overdue.counts["queue:overdue"]) == (1, 1)


def test_prompts_that_were_shed_are_forgotten() -> None:
    """With tokens kept while a request runs, none is left of those that were refused."""
    settings = {"queue": FCFS, "budgets_ttft_s": (0.2,), **ALONE}
    trace = line_of(6, output_tokens=100)
    whole = run(trace, through_sidecars=True, **settings)
    assert len(whole.shed_at_s) > 0
    assert same(whole, run(trace, **settings))


def test_several_routers_have_a_queue_each() -> None:
    """Everybody is served although the end of a booking is another router's to tell."""
    trace = line_of(12)
    result = run(trace, routers=3, queue=FCFS, instances=2, batch_cap=1)
    assert len(result.at_s) == 12
    assert result.wait_s.max() > 0


def test_oracles_and_rivals_wait_as_the_planes_own_policies_do() -> None:
    """The lab's policies go through the same queue."""
    for policy in ("vllm_jsq", "oracle_ttft", "sglang"):
        result = run(line_of(6), policy, queue=FCFS, **ALONE)
        assert (len(result.at_s), result.batch.max()) == (6, 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_holding_for_the_prefix_keeps_a_capped_fleet_out_of_the_spiral(seed: int) -> None:
    """Agents at three quarters of saturation under a cap of 16, served by arrival and by pairs.

    Whoever goes wherever there is room computes its prompt again, and the queue that this makes
    keeps it so.
    """
    trace = generate("agent", seed=seed, duration_s=30.0, requests_per_s=9.0)
    settings = {"instances": 8, "profile": "h20/qwen2.5-7b", "batch_cap": 16, "seed": seed}
    numbers = {
        name: measure(run(trace, queue=queue, **settings))
        for name, queue in (("fcfs", FCFS), ("pairs", QueueConfig()))
    }
    assert numbers["pairs"].ttft_s[0] < 0.8 * numbers["fcfs"].ttft_s[0]
    assert numbers["pairs"].hit_rate > numbers["fcfs"].hit_rate + 0.1
    assert numbers["pairs"].served_rps > 1.25 * numbers["fcfs"].served_rps


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_under_overload_a_queue_keeps_answers_in_time(seed: int) -> None:
    """With it a third more of the answers begin in time, and latencies stay within budgets."""
    without, queued = overloaded(seed, None), overloaded(seed, FCFS)
    assert without.shed_rate is None
    assert queued.shed_rate is not None
    assert without.goodput_rps is not None
    assert queued.goodput_rps is not None
    assert queued.goodput_rps > 1.33 * without.goodput_rps
    assert queued.shed_rate > 0.2
    assert queued.ttft_s[0] < 0.6 * without.ttft_s[0]
    assert queued.tpot_s[0] < without.tpot_s[0]


@pytest.mark.slow
def test_deadlines_first_meets_more_of_mixed_deadlines() -> None:
    """Of requests of which half are due soon, `edf` answers more in time than `fcfs`."""
    seeds = (1, 2, 3)
    fcfs = [overloaded(seed, FCFS).in_time_rate or 0.0 for seed in seeds]
    edf = [overloaded(seed, QueueConfig("edf")).in_time_rate or 0.0 for seed in seeds]
    assert all(one > other for one, other in zip(edf, fcfs, strict=True))
    assert sum(edf) > 1.08 * sum(fcfs)


FLOOD = "chat:share=1,flood:share=9"


def flooded(seed: int, tenants: str) -> Result:
    """Two instances under half as much again as they can serve, whose requests by `tenants`."""
    trace = generate("api", seed=seed, duration_s=8.0, requests_per_s=60.0)
    settings = {"instances": 2, "profile": "h20/qwen2.5-7b", "batch_cap": 16, "seed": seed}
    return run(trace, queue=QueueConfig(), tenants=parse_tenants(tenants), **settings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3])
def test_one_tenants_flood_leaves_anothers_p99_within_its_budget(seed: int) -> None:
    """Nobody of it is refused, and 3 s suffice, where nine of ten requests wait for longer."""
    result = flooded(seed, FLOOD)
    chat, flood = (measure(result.of_tenant(place)) for place in (0, 1))
    assert (chat.policy, flood.policy) == ("multiplicative · chat", "multiplicative · flood")
    assert chat.requests + flood.requests == len(result.at_s)
    assert chat.busy == flood.busy <= 1.0, "the instances are everybody's"
    assert chat.served_rps + flood.served_rps == pytest.approx(measure(result).served_rps)
    assert (chat.shed_rate, result.unfinished) == (0.0, 0)
    assert chat.ttft_s[3] < 3.0
    assert flood.ttft_s[0] > 6.0
    alone = measure(flooded(seed, "").of_tenant(0))
    assert alone.ttft_s[0] > 1.5 * chat.ttft_s[3], "as one tenant everybody waits"


@pytest.mark.slow
def test_a_tenants_own_budget_is_kept_for_most_of_its_requests() -> None:
    """Nearly twice as many are in time as if the flood was its own, which has no deadline here."""
    chat, flood = (
        measure(flooded(1, "chat:share=1:weight=3:budget=3,flood:share=9").of_tenant(place))
        for place in (0, 1)
    )
    everybody = measure(flooded(1, "all:budget=3"))
    assert (chat.in_time_rate or 0.0) > 1.8 * (everybody.in_time_rate or 1.0)
    assert flood.in_time_rate is None


@pytest.mark.slow
def test_the_queue_goes_by_what_the_predictor_learns() -> None:
    """After a thousand answers it publishes a model; every router's queue decides otherwise then.

    The same seed learns the same trees.
    """
    trace = generate("api", seed=1, duration_s=35.0, requests_per_s=60.0)
    settings = {
        "instances": 4,
        "profile": "h20/qwen2.5-7b",
        "routers": 2,
        "batch_cap": 12,
        "queue": QueueConfig(),
        "budgets_ttft_s": (0.5, 4.0),
    }
    plain, told, again = (run(trace, predictor=on, **settings) for on in (False, True, True))
    assert told.counts["predictor:replaced"] == 1
    assert same(told, again)
    assert not same(plain, told)
    early = int((plain.at_s < 8.0).sum())
    assert np.array_equal(plain.end_s[:early], told.end_s[:early]), "it had not learnt yet"
    assert (measure(told, 20.0).in_time_rate or 0) > 0.9 * (measure(plain, 20.0).in_time_rate or 1)


def bursts(per: int = 6) -> Trace:
    """Four new prefixes of 4,096 tokens, each asked for by several at once."""
    requests = []
    for group in range(4):
        shared = tuple(range(1000 * group, 1000 * group + 256))
        for number in range(per):
            first = 100_000 + 100 * (per * group + number)
            own = tuple(range(first, first + 10))
            requests.append((1.5 * group + 0.02 * number, 4256, 20, (*shared, *own)))
    return trace_of(*requests)


@pytest.mark.parametrize("waits", [{}, {"queue": FCFS, "batch_cap": 6}])
def test_coalescing_computes_a_prefix_once(waits: dict[str, object]) -> None:
    """Five of six follow the first, to its instance if there is room, and find it computed."""
    settings = {"instances": 4, "profile": "h20/qwen2.5-7b", **waits}
    apart = run(bursts(), **settings)
    together = run(bursts(), coalesce=CoalesceConfig(), **settings)
    assert len(together.at_s) == len(apart.at_s) == 24
    computed = [int((r.prompt_tokens - r.cached_tokens).sum()) for r in (apart, together)]
    assert computed[1] < 0.6 * computed[0]
    assert together.counts["coalesce:followed"] == 20
    assert (measure(together).wait_s or (0.0,))[0] > 0
    if not waits:
        assert measure(apart).wait_s is None
        assert computed[1] == 4 * 4096 + 24 * 160


def test_tenants_that_are_kept_apart_follow_nobody_elses_requests() -> None:
    """Each computes the prefix for itself."""
    tenants = parse_tenants("a:isolated=true,b:isolated=true")
    settings = {"instances": 4, "coalesce": CoalesceConfig(), "routers": 1}
    together, apart = run(bursts(), **settings), run(bursts(), tenants=tenants, **settings)
    assert apart.counts["coalesce:followed"] < together.counts["coalesce:followed"]
    assert set(apart.tenant.tolist()) == {0, 1}


def test_tenants_are_read_from_a_few_words() -> None:
    """Shares, weights and budgets; what is missing has its default."""
    found = parse_tenants("chat:share=1:weight=3:budget=0.5,batch")
    assert found == (TenantShare("chat", 1.0, 3.0, 0.5), TenantShare("batch"))
    assert parse_tenants("") == ()
    whose = tenants_of(1000, parse_tenants("a:share=1,b:share=3"), 5)
    assert 200 < (whose == 0).sum() < 300
    own = budgets_by_tenant(np.full(3, 9.0), found, np.array([0, 1, 0]))
    assert own.tolist() == [0.5, 9.0, 0.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,a", "a is there twice"),
        (":share=1", "has no name"),
        ("a:size=1", "no 'size'"),
        ("a:share=x", "tenant 'a:share=x'"),
        ("a:share=0", "share must be from 1e-6"),
        ("a:weight=inf", "weight must be from 1e-6"),
        ("a:weight=1e-320", "weight must be from 1e-6"),
        ("a:budget=-1", "budget must not be negative"),
    ],
)
def test_tenants_that_make_no_sense_are_refused(text: str, said: str) -> None:
    """By name."""
    with pytest.raises(ValueError, match=said):
        parse_tenants(text)


def test_budgets_are_shared_out_by_the_seed() -> None:
    """Each request has one of them; 0 is none, and so is nothing."""
    assert np.isinf(budgets_of(3, (), 0)).all()
    assert budgets_of(3, (2.0,), 0).tolist() == [2.0] * 3
    mixed = budgets_of(1000, (0.5, 0.0), 7)
    assert set(mixed.tolist()) == {0.5, float("inf")}
    assert 400 < np.isinf(mixed).sum() < 600
    assert mixed.tolist() == budgets_of(1000, (0.5, 0.0), 7).tolist()
    assert mixed.tolist() != budgets_of(1000, (0.5, 0.0), 8).tolist()


def test_waits_survive_being_written() -> None:
    """A result that was encoded and decoded has the same waits, and the same settings make it."""
    result = run(line_of(4), queue=FCFS, budgets_ttft_s=(0.2,), **ALONE)
    assert measure(decode(encode(result))) == measure(result)
    config = ReplayConfig(
        queue=FCFS,
        batch_cap=4,
        budgets_ttft_s=(1.0, 2.0),
        coalesce=CoalesceConfig(),
        tenants=parse_tenants("a:weight=2"),
    )
    assert msgspec.json.decode(msgspec.json.encode(config), type=ReplayConfig) == config


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"queue": FCFS}, "a queue needs a batch cap"),
        ({"predictor": True}, "a predictor needs a queue"),
        ({"budgets_ttft_s": (1.0, -1.0)}, "budgets_ttft_s must not be negative"),
    ],
)
def test_queues_that_make_no_sense_are_refused(wrong: dict[str, object], said: str) -> None:
    """By name."""
    with pytest.raises(ValueError, match=said):
        ReplayConfig(**wrong)  # type: ignore[arg-type]
