from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from lab.generators import KINDS, Hotspot, HotspotShape, generate, with_hotspot
from lab.traces import Trace, TraceRequest


def sessions(trace: Trace) -> dict[str, list[TraceRequest]]:
    """Requests by session, in order."""
    found: dict[str, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        found[request.session].append(request)
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_traces_are_functions_of_their_seed(kind: str) -> None:
    """The same seed gives the same trace, another one another."""
    made = [generate(kind, seed=seed, duration_s=60, requests_per_s=3) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


@pytest.mark.parametrize("kind", list(KINDS))
def test_rate_and_lengths_are_as_asked(kind: str) -> None:
    """Requests come in order at about the asked rate, and none is too long."""
    trace = generate(kind, seed=7, duration_s=600, requests_per_s=5, tokens_max=20_000)
    assert 0.75 * 3000 < len(trace.requests) < 1.25 * 3000
    times = [request.at_s for request in trace.requests]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 600
    for request in trace.requests:
        assert len(request.block_ids) == -(-request.input_tokens // trace.block_tokens)
        assert request.input_tokens + request.output_tokens <= 20_000


@pytest.mark.parametrize("kind", ["chatbot", "coder", "agent"])
def test_each_turn_extends_the_one_before(kind: str) -> None:
    """A turn's whole blocks are the beginning of the next turn's, which also holds the answer."""
    trace = generate(kind, seed=3, duration_s=300, requests_per_s=2)
    pairs = [pair for turns in sessions(trace).values() for pair in pairwise(turns)]
    assert len(pairs) > 100
    for before, after in pairs:
        whole = before.input_tokens // trace.block_tokens
        assert after.block_ids[:whole] == before.block_ids[:whole]
        assert after.input_tokens > before.input_tokens + before.output_tokens
        assert after.at_s > before.at_s


def test_popular_contexts_are_popular() -> None:
    """The most common context of many has far more than its even share."""
    trace = generate("api", seed=1, duration_s=500, requests_per_s=10)
    counts = Counter(request.block_ids[0] for request in trace.requests)
    assert len(counts) > 150
    assert counts.most_common(1)[0][1] > 10 * len(trace.requests) / KINDS["api"].contexts


def test_single_requests_have_no_second_turn() -> None:
    """API traffic has one request a session."""
    trace = generate("api", seed=1, duration_s=100, requests_per_s=10)
    assert max(map(len, sessions(trace).values())) == 1


def test_hotspot_has_its_share_while_it_lasts() -> None:
    """The planted requests share their prefix and nothing else, in their window only."""
    quiet = generate("api", seed=1, duration_s=300, requests_per_s=10)
    hot = with_hotspot(quiet, Hotspot(100, 60, 0.5, HotspotShape(1000)), seed=1)
    planted = [request for request in hot.requests if request.session == "hotspot"]
    window = [request for request in hot.requests if 100 <= request.at_s < 160]
    assert len(planted) / len(window) == pytest.approx(0.5, abs=0.01)
    assert set(planted) <= set(window)
    shared = set.intersection(*(set(request.block_ids) for request in planted))
    assert len(shared) == 63
    assert not shared & {each for request in quiet.requests for each in request.block_ids}
    assert len({request.block_ids[-1] for request in planted}) == len(planted)
    assert [each for each in hot.requests if each.session != "hotspot"] == list(quiet.requests)


def test_a_prefix_that_is_known_was_asked_for_before() -> None:
    """A few of the planted requests come earlier; they are more, not others."""
    quiet = generate("api", seed=1, duration_s=300, requests_per_s=10)
    new, known = (
        with_hotspot(quiet, Hotspot(100, 60, 0.5, HotspotShape(1000, early=early)), seed=1)
        for early in (0, 3)
    )
    planted = [
        [request.at_s for request in trace.requests if request.session == "hotspot"]
        for trace in (new, known)
    ]
    assert planted[1][3:] == planted[0]
    assert max(planted[1][:3]) < 100 <= planted[0][0]


def test_bad_arguments_are_refused() -> None:
    """Unknown kinds, rates of zero and impossible shares say so."""
    with pytest.raises(ValueError, match="no kind 'x'; there are chatbot, api, coder, agent"):
        generate("x", seed=1, duration_s=1, requests_per_s=1)
    with pytest.raises(ValueError, match="must be positive"):
        generate("api", seed=1, duration_s=1, requests_per_s=0)
    trace = generate("api", seed=1, duration_s=10, requests_per_s=5)
    with pytest.raises(ValueError, match="share=1"):
        with_hotspot(trace, Hotspot(0, 5, share=1), seed=1)
    with pytest.raises(ValueError, match="no request while the hotspot lasts"):
        with_hotspot(trace, Hotspot(50, 5, share=0.5), seed=1)
