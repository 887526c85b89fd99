"""The check of a record: what is right passes, what was changed is found and named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from controlplane.audit import outcomes
from controlplane.audit.heard import understand
from controlplane.audit.report import Report
from controlplane.audit.verify import Verifier, VerifyLimits
from controlplane.bus.protocol import Record
from schemas import bus as messages
from schemas import subjects
from schemas.codec import encode
from tests.audit.sim_record import RecordedSimulation
from tests.audit.tape import Tape, named
from tests.core.plane_helpers import Publisher, prompt, request
from tests.sim.settings import Settings

Change = Callable[[Any], Any]


def check(records: Iterable[Record], **limits: Any) -> Report:
    """Return the report on a record."""
    verifier = Verifier(VerifyLimits(**limits))
    for each in records:
        verifier.hear(understand(each))
    verifier.end()
    return verifier.report


def story() -> Tape:
    """Return a tape with hits, misses, an eviction and equal scores."""
    tape = Tape()
    a, b = tape.publishers["a"], tape.publishers["b"]
    tape.ask(1, 2, 3)
    tape.publish(a.store(prompt(1, 2, 3)))
    tape.publish(b.store(prompt(1)))
    tape.ask(1, 2, 3, 4)
    tape.publish(a.remove(prompt(1, 2, 3)[2:]))
    tape.ask(1, 2, 3)
    tape.ask(9)
    tape.publish(a.clear())
    tape.ask(1, 2)
    return tape


def rewritten(records: list[Record], kind: type, change: Change) -> list[Record]:
    """Return records in which every route event, or kv batch, of a kind is changed."""
    found = []
    for each in records:
        heard = understand(each)
        message: Any = heard.message  # type: ignore[union-attr]
        if isinstance(message, messages.RouteBatch):
            events = [change(e) if isinstance(e, kind) else e for e in message.events]
            message = msgspec.structs.replace(message, events=events)
        elif isinstance(message, kind):
            message = change(message)
        found.append(Record(each.subject, encode(message), each.seq, each.at_wall_s))
    return found


def with_fields(**fields: object) -> Change:
    """Return a change of fields."""
    return lambda struct: msgspec.structs.replace(struct, **fields)


def with_columns(**fields: object) -> Change:
    """Return a change of what a decision saw."""

    def change(event: messages.Routed) -> messages.Routed:
        assert event.candidates is not None
        columns = msgspec.structs.replace(event.candidates, **fields)
        return msgspec.structs.replace(event, candidates=columns)

    return change


def test_a_true_record_passes() -> None:
    """Every choice and all hits are computed again, and every promise is accounted for."""
    report = check(story().records)
    assert report.findings == []
    assert report.clean
    assert (report.decisions, report.chosen, report.hits, report.instances) == (5, 5, 5, 10)
    assert {cause: entry.requests for cause, entry in report.promised.items()} == {
        outcomes.AS_PROMISED: 5
    }
    assert sum(report.unchecked.values()) == 0


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (with_fields(instance_id="x"), "choice", "x is none of the 2 candidates"),
        (with_fields(score=1.5), "score", "the score is 1.5, but computes to"),
        (with_fields(batch_size=7), "numbers", "batch_size is 7, but its row says 0"),
        (with_fields(hit_tokens=160), "numbers", "hit_tokens is 160"),
        (with_fields(new_tokens=5), "numbers", "new_tokens is 5"),
        (with_fields(queued_tokens=5), "numbers", "queued_tokens is 5"),
        (with_fields(fleet=3), "numbers", "fleet is 3, but its row says 2"),
        (with_fields(policy="linear"), "policy", "linear decided without a reason"),
        (with_columns(hit_tokens=b"\x30\x30"), "hits", "48 hit tokens, but its blocks as of"),
        (with_columns(queued_tokens=b"\x05"), "numbers", "its columns do not fit its rows"),
        (with_columns(excluded={"batch_cap": b"\x03"}), "filter", "batch_cap=None excludes"),
        (with_columns(excluded={"health": b"\x03"}), "filter", "ignored:health is not in"),
        (with_columns(levels=[]), "hits", "hit tokens"),
    ],
)
def test_a_decision_that_was_changed_is_found(change: Change, kind: str, text: str) -> None:
    """Whatever was changed in it; the request and its router are named."""
    report = check(rewritten(story().records, messages.Routed, change))
    found = [finding for finding in report.findings if finding.kind == kind]
    assert any(text in finding.text for finding in found), report.findings
    assert "by router router-a, place" in found[0].where
    assert not report.clean


def test_a_decision_for_the_other_instance_is_found() -> None:
    """Swapping the chosen one contradicts scores, numbers or both."""

    def swap(event: messages.Routed) -> messages.Routed:
        other = "b" if event.instance_id == "a" else "a"
        return msgspec.structs.replace(event, instance_id=other)

    report = check(rewritten(story().records, messages.Routed, swap))
    assert any("was chosen at" in finding.text for finding in report.findings)


def test_an_excluded_instance_must_not_be_chosen() -> None:
    """Whichever filter it was."""
    change = with_columns(excluded={"draining": b"\x01"})
    report = check(rewritten(story().records, messages.Routed, change))
    assert any(
        finding.text == "a was chosen though excluded by draining" for finding in report.findings
    )


def test_a_changed_block_event_is_found_and_named() -> None:
    """By instance, epoch, sequence number and place, from the digest that it states."""

    def flip(batch: messages.KvBatch) -> messages.KvBatch:
        if batch.instance_id != "a" or batch.seq != 1:
            return batch
        (op,) = batch.ops
        assert isinstance(op, messages.KvStored)
        hashes = bytes([op.hashes[0] ^ 1]) + op.hashes[1:]
        return msgspec.structs.replace(batch, ops=[messages.KvStored(hashes)])

    report = check(rewritten(story().records, messages.KvBatch, flip))
    (finding,) = report.findings
    assert finding.kind == "kv"
    assert finding.where.startswith("a epoch 1 seq 1, place")
    assert finding.text.startswith("digest: applied as recorded, seq 1 leaves 3 blocks")
    assert report.unchecked["block set not in the record"] > 0


def test_bytes_that_cannot_be_read_are_found_and_named() -> None:
    """By subject and place in the stream."""
    records = story().records
    spoilt = records[4]
    records[4] = Record(spoilt.subject, spoilt.payload[:-1], spoilt.seq, spoilt.at_wall_s)
    report = check(records)
    assert report.findings[0].kind == "unreadable"
    assert report.findings[0].where == f"{spoilt.subject} at stream place 5"


def test_hits_that_the_router_did_not_know_of_are_found() -> None:
    """An index that lost a block, or never heard of it while it held itself for exact."""
    tape = story()
    tape.publish(tape.publishers["b"].store(prompt(1, 2)), reaches=False)
    tape.plane.fleet.get("b").follower.seq += 1  # type: ignore[union-attr]
    tape.plane.fleet.refresh(tape.plane.fleet.get("b"), 1.0)  # type: ignore[arg-type]
    tape.ask(1, 2, 3)
    report = check(tape.records)
    (finding,) = report.findings
    assert finding.kind == "hits"
    assert "b: 16 hit tokens, but its blocks as of epoch 1 seq 2 make more" in finding.text


def test_a_router_behind_the_stream_is_judged_by_what_it_had_seen() -> None:
    """Positions, not times, say which blocks a decision could know of."""
    tape = story()
    late = tape.publishers["b"].store(prompt(1, 2))
    tape.publish(late, reaches=False)
    tape.ask(1, 2, 3)
    tape.plane.handle(late, tape.now_s)
    tape.ask(1, 2, 3)
    report = check(tape.records)
    assert report.clean
    assert report.hits == 7


def test_a_decision_waits_for_the_block_stream() -> None:
    """Streams are read side by side; the record of one may come later than it happened."""
    records = story().records
    kv = [each for each in records if ".kv." in each.subject]
    route = [each for each in records if ".route." in each.subject]
    assert check([*route, *kv], patience_s=1e9).hits == 5
    hasty = check([*route, *kv], patience_s=1e9, waiting_max=2)
    assert hasty.clean
    assert hasty.unchecked["block set not in the record"] > 0


def test_a_resyncing_set_is_not_held_against_the_router() -> None:
    """What it does not hold for exact is counted apart."""
    tape = story()
    tape.publishers["a"].seq += 1
    tape.publish(tape.publishers["a"].store(prompt(5)))
    tape.ask(5)
    report = check(tape.records)
    assert report.clean
    assert report.unchecked["block set not exact at the router"] == 1
    assert report.unchecked["block stream: gap"] == 1


def test_filters_and_overrides_follow_from_statements() -> None:
    """A verdict, a blacklisting or an override that was taken back must not show any more."""
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1)))
    subject = subjects.hotspot("m")
    key = prompt(1)[0]
    hot = messages.HotspotRaised(key, 1, ["a"], 1, 0.0, 1e6, share=(9, 10))
    tape.say(subject, hot)
    tape.say(subjects.policy("m"), messages.Blacklist("a", True, 1, 0.0))
    tape.ask(1)
    tape.say(subjects.policy("m"), messages.Blacklist("a", False, 2, 0.0))
    tape.say(subjects.policy("m"), messages.PolicyOverride("round_robin", 1, 0.0, by="ops"))
    tape.ask(1)
    assert check(tape.records).clean
    tape.write(subject, messages.HotspotCleared(key, 1, 2, 0.0))
    tape.write(subjects.policy("m"), messages.PolicyOverride("", 2, 0.0))
    tape.now_s += 10.0
    tape.ask(1)
    texts = [finding.text for finding in check(tape.records).findings]
    assert texts == [
        "a hotspot filter, but every verdict on its classes was lifted",
        "round_robin by an override that had been ended",
    ]


def test_a_blacklist_that_was_lifted_must_not_show() -> None:
    """The instance is named."""
    tape = Tape()
    tape.say(subjects.policy("m"), messages.Blacklist("a", True, 1, 0.0))
    tape.write(subjects.policy("m"), messages.Blacklist("a", False, 2, 0.0))
    tape.now_s += 10.0
    tape.ask(1)
    (finding,) = check(tape.records).findings
    assert finding.text == "a was kept out, but its blacklisting had been lifted"


def test_what_is_not_recorded_is_counted_and_no_fault() -> None:
    """Sampled candidates, lost rows and messages, requests that began before or end after."""
    tape = Tape(audit_candidates=0.0)
    tape.ask(1)
    assert check(tape.records).unchecked["candidates not recorded"] == 1
    records = story().records
    first = next(n for n, each in enumerate(records) if ".route." in each.subject)
    report = check(records[first + 1 :])
    assert report.clean
    assert report.unchecked["rows not recorded"] == 4
    assert report.unchecked["request decided before the record began"] == 1
    report = check([*records[:first], *records[first + 1 : -1]])
    assert report.unchecked["end of the request not in the record"] == 1
    second = [n for n, each in enumerate(records) if ".route." in each.subject][2]
    report = check([*records[:second], *records[second + 1 :]])
    assert report.unchecked["messages of routers that were not recorded"] == 1


def test_a_policy_of_a_later_version_is_counted() -> None:
    """Its choice cannot be computed, its numbers and hits can."""
    change = with_fields(policy="of tomorrow", reason="try it")
    report = check(rewritten(story().records, messages.Routed, change))
    assert report.clean
    assert report.unchecked["the policy is of a later version"] == 5
    assert (report.chosen, report.hits) == (0, 5)


def test_requests_under_way_are_bounded() -> None:
    """The oldest are let go, and counted."""
    tape = Tape()
    for number in range(3):
        asked = named(f"q{number}", prompt(number))
        decision = tape.plane.requests.decide(asked, 1.0)
        assert decision is not None
        tape.plane.requests.book(decision, 1.0, 1.0)
    tape.tell()
    report = check(tape.records, open_max=2)
    assert report.unchecked["too many requests under way at once"] == 1
    assert report.unchecked["end of the request not in the record"] == 2


@pytest.mark.parametrize(
    ("cached", "cause"),
    [(0, outcomes.UNEXPLAINED), (64, outcomes.UNEXPLAINED), (48, outcomes.AS_PROMISED)],
)
def test_promises_that_nothing_explains_say_so(cached: int, cause: str) -> None:
    """The engine found fewer tokens though nothing was removed, or more though nothing came."""
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1, 2, 3)))
    tape.now_s += 1.0
    decision = tape.plane.requests.decide(request(prompt(1, 2, 3, 4)), 1.0)
    assert decision is not None
    ticket = tape.plane.requests.book(decision, 1.0, 1.0)
    tape.tell()
    tape.publish(tape.publishers["a"].batch())
    tape.plane.requests.finish(ticket, "ok", 200, 2.0, 2.0, cached_tokens=cached)
    tape.tell()
    report = check(tape.records)
    assert list(report.promised) == [cause]
    assert report.promised[cause].promised_tokens == 48


@pytest.mark.parametrize(
    ("between", "cached", "cause"),
    [
        (lambda a: [a.remove(prompt(1, 2, 3)[1:])], 16, outcomes.EVICTED),
        (lambda a: [a.store(prompt(1, 2, 3, 4))], 64, outcomes.COMPUTED),
        (lambda a: [a.clear()], 0, outcomes.BROKEN_OFF),
        (lambda a: [], 0, outcomes.SILENT),
    ],
)
def test_promises_that_were_not_kept_are_explained(
    between: Callable[[Publisher], list[messages.KvBatch]], cached: int, cause: str
) -> None:
    """By what the block stream says between the decision and the end."""
    tape = Tape()
    a = tape.publishers["a"]
    tape.publish(a.store(prompt(1, 2, 3)))
    decision = tape.plane.requests.decide(request(prompt(1, 2, 3, 4, 5)), 1.0)
    assert decision is not None
    ticket = tape.plane.requests.book(decision, 1.0, 1.0)
    tape.tell()
    for batch in between(a):
        tape.publish(batch)
    tape.plane.requests.finish(ticket, "ok", 200, 2.0, 2.0, cached_tokens=cached)
    tape.tell()
    assert list(check(tape.records).promised) == [cause]


@pytest.mark.slow
def test_no_decision_of_a_chaotic_world_is_unexplained() -> None:
    """Whatever fails: what routers decided follows from what they had seen."""
    decisions = 0
    for seed in range(30, 42):
        report = check(RecordedSimulation(seed).run())
        assert report.findings == [], f"seed {seed}"
        decisions += report.decisions
    assert decisions > 500  # a single world may lose them all before they are recorded


@pytest.mark.slow
def test_a_world_without_faults_is_checked_to_the_last_hit() -> None:
    """Nothing is left out where nothing was lost."""
    settings = Settings(faults_s=2.0, cancels=0.0, kinds=(), promise_s=1.0)
    report = check(RecordedSimulation(5, settings).run())
    assert report.clean
    assert report.decisions == report.chosen > 50
    assert report.unchecked["block set not in the record"] == 0
    assert report.promised[outcomes.AS_PROMISED].requests > 20
