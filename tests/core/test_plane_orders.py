"""What operators and detectors order, and how far a plane obeys."""

from __future__ import annotations

from controlplane.core.effects import Alarm, Note
from controlplane.core.events import BreakerState, InstanceGone, Tick
from controlplane.core.plane import Plane
from schemas.bus import (
    Blacklist,
    Drain,
    HotspotCleared,
    HotspotRaised,
    PolicyOverride,
)
from tests.core.plane_helpers import Publisher, plane, prompt, record, request


def _pick(made: Plane, hashes: list[int], now_s: float = 1.0, **fields: object) -> str:
    """Decide only."""
    decision = made.requests.decide(request(hashes, **fields), now_s)
    assert decision is not None
    return decision.instance.record.instance_id


def test_draining_keeps_new_requests_away_and_off_takes_them_back() -> None:
    """A drained instance gets nothing while another is left; an old message changes nothing."""
    made = plane("a", "b")
    made.handle(Drain("a", True, 5, 0.0), 0.0)
    assert {_pick(made, prompt(n)) for n in range(6)} == {"b"}
    made.handle(Drain("a", False, 4, 0.0), 0.0)
    assert {_pick(made, prompt(n)) for n in range(6)} == {"b"}
    made.handle(Drain("a", False, 6, 0.0), 0.0)
    assert {_pick(made, prompt(n)) for n in range(6)} == {"a", "b"}


def test_the_last_instance_is_never_filtered_away() -> None:
    """Blacklisting everybody is ignored and named, so that requests still get through."""
    made = plane("a")
    made.handle(Blacklist("a", True, 1, 0.0), 0.0)
    decision = made.requests.decide(request(prompt(1)), 0.0)
    assert decision is not None
    assert decision.reason == "ignored:blacklist"
    made.requests.book(decision, 0.0, 0.0)
    assert made.requests.counts["ignored:blacklist"] == 1


def test_who_is_drained_gets_nothing_even_if_that_leaves_nobody() -> None:
    """An operator who drains all instances is obeyed, until one is taken back."""
    made = plane("a", "b")
    made.handle(BreakerState("b", open=True), 0.0)
    made.handle(Drain("a", True, 1, 0.0), 0.0)
    assert _pick(made, prompt(1)) == "b"  # whose breaker is open, but who is not drained
    made.handle(Drain("b", True, 1, 0.0), 0.0)
    assert made.requests.decide(request(prompt(1)), 0.0) is None
    made.handle(Drain("a", False, 2, 0.0), 0.0)
    assert _pick(made, prompt(1)) == "a"


def test_a_drain_of_all_that_have_an_adapter_is_obeyed_too() -> None:
    """The others could not serve it."""
    made = plane("a", "b")
    made.handle(record("b", loras=["fr"]), 0.0)
    made.handle(Drain("b", True, 1, 0.0), 0.0)
    assert made.requests.decide(request(prompt(1), lora="fr"), 0.0) is None
    assert _pick(made, prompt(1)) == "a"


def test_a_drain_follows_its_instance_to_another_row() -> None:
    """When an instance leaves, the last row takes its place, drain and all."""
    made = plane("a", "b", "c")
    made.handle(Drain("c", True, 1, 0.0), 0.0)
    made.handle(InstanceGone("a"), 0.0)
    assert {_pick(made, prompt(n)) for n in range(4)} == {"b"}


def test_a_retry_goes_to_who_was_not_tried_whatever_else_speaks_against_it() -> None:
    """Somebody whose breaker is open is better than who just failed; nobody tried is left out."""
    made = plane("a", "b")
    made.handle(BreakerState("b", open=True), 0.0)
    assert _pick(made, prompt(1), tried=("a",)) == "b"
    assert made.requests.may_retry(request(prompt(1), tried=("a",)))
    made.handle(Drain("b", True, 1, 0.0), 0.0)
    assert not made.requests.may_retry(request(prompt(1), tried=("a",)))


def test_a_hotspot_that_is_not_renewed_is_told_to_end() -> None:
    """A silent detector's verdict runs out, and the log says so."""
    made = plane("a", "b")
    made.handle(HotspotRaised(1, 1, ["a"], 1, 0.0, 5.0), 0.0)
    notes = [note for note in made.handle(Tick(), 6.0) if isinstance(note, Note)]
    assert [note.instance_id for note in notes if note.kind == "hotspot_expired"] == ["a"]


def test_a_blacklist_ends_by_itself() -> None:
    """Its time to live takes the instance back without a message."""
    made = plane("a", "b")
    made.handle(Blacklist("a", True, 1, 0.0, ttl_s=10.0), 0.0)
    assert {_pick(made, prompt(n), 1.0) for n in range(6)} == {"b"}
    for name in ("a", "b"):
        made.handle(Publisher(name).batch(), 9.0)
    made.handle(Tick(), 10.5)
    assert {_pick(made, prompt(n), 10.5) for n in range(6)} == {"a", "b"}


def test_a_hotspot_verdict_bars_its_class_only() -> None:
    """Requests of the class avoid M; others may still use it; clearing lifts it."""
    made, a = plane("a", "b"), Publisher("a")
    a.batch()
    hot = prompt(1, 2)
    made.handle(a.store([*hot, *prompt(5, 6)]), 0.1)
    made.handle(HotspotRaised(hot[1], 2, ["a"], 1, 0.0, ttl_s=60.0), 0.2)
    assert _pick(made, prompt(1, 2, 3)) == "b"
    assert _pick(made, prompt(5, 6)) == "a"
    made.handle(HotspotCleared(hot[1], 2, 2, 0.0), 0.3)
    assert _pick(made, prompt(1, 2, 3)) == "a"


def test_a_policy_override_applies_and_ends() -> None:
    """An operator's override decides until it is lifted or runs out."""
    made = plane("a", "b")
    made.handle(PolicyOverride("round_robin", 1, 0.0, ttl_s=5.0, by="op"), 0.0)
    decision = made.requests.decide(request(prompt(1)), 1.0)
    assert decision is not None
    assert (decision.choice.policy, decision.reason) == ("round_robin", "override:op")
    after = made.requests.decide(request(prompt(1)), 6.0)
    assert after is not None
    assert after.choice.policy == "multiplicative"


def test_an_override_that_names_no_known_policy_changes_nothing() -> None:
    """As a newer detector may send it: told once, and the configured policy goes on."""
    made = plane("a", "b")
    made.handle(PolicyOverride("round_robin", 1, 0.0), 0.0)
    override = PolicyOverride("no_such_policy", 2, 0.0)
    (alarm,) = made.handle(override, 0.1)
    assert isinstance(alarm, Alarm)
    assert (alarm.kind, "no_such_policy" in alarm.text) == ("unknown_policy", True)
    assert made.handle(override, 0.2) == []
    decision = made.requests.decide(request(prompt(1)), 1.0)
    assert decision is not None
    assert (decision.choice.policy, decision.reason) == ("multiplicative", "")
