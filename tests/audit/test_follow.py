"""Following: which events are shown, as lines and as data."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.audit import lines
from controlplane.audit.follow import Follower
from controlplane.audit.heard import Unreadable
from controlplane.audit.selection import Selection, Wanted
from schemas import bus as messages
from schemas import subjects
from schemas.bus import ClassCoverage, Finished, Prefilled, Routed
from tests.audit.tape import Tape
from tests.core.plane_helpers import prompt


def printed(tape: Tape, **wanted: object) -> list[str]:
    """Return the lines on a tape."""
    follower = Follower(Wanted(**wanted))  # type: ignore[arg-type]
    return [line for heard in tape.heard() for line in follower.lines(heard)]


def test_progress_is_not_told_for_later_than_the_end() -> None:
    """It has the time of its batch, and that leaves after the end that is in it, too."""
    tape = Tape()
    ticket = tape.begin(1, name="q")
    tape.plane.requests.first_byte(ticket, 0.05)
    tape.plane.requests.finish(ticket, "ok", 200, tape.now_s, tape.wall_s)
    ended_s = tape.wall_s
    tape.now_s += 0.04
    tape.tell()
    items = [item for heard in tape.heard() for item in Follower(Wanted()).data(heard)]
    assert [item["type"] for item in items] == ["routed", "prefilled", "finished"]
    assert items[1]["at_wall_s"] == items[2]["at_wall_s"] == ended_s


def _tape() -> Tape:
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1, 2)))
    tape.ask(1, 2, 3, name="first-request", tenant="gold")
    tape.ask(9, name="other-request")
    return tape


def test_decisions_ends_and_progress_are_lines() -> None:
    """With the formula, the next best and what was promised and found."""
    shown = printed(_tape())
    assert [line.split()[1] for line in shown] == ["routed", "prefilled", "finished"] * 2
    assert shown[0] == (
        "22:13:21.030 routed    irst-request → a  53 tokens, 32 cached (exact); "
        "P 21 × (B 0 + 1) = 21; next b 53; took 0 µs"
    )
    assert shown[1].endswith("a  21 tokens computed by then, first byte after 50 ms")
    assert shown[2].endswith("a  ok 200, in 10 ms, 10 tokens out, 32 tokens cached, 32 promised")
    assert "one of 2 equally good, in turn" in shown[3]


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({}, 6),
        ({"instance": "a"}, 3),
        ({"instance": "x"}, 0),
        ({"tenant": "gold"}, 3),
        ({"request": "other-request"}, 3),
        ({"request": "request"}, 6),
        ({"key": prompt(1, 2)[1]}, 3),
        ({"key": 1}, 0),
    ],
)
def test_a_selection_shows_whole_requests(wanted: dict[str, object], count: int) -> None:
    """What follows a chosen decision is chosen with it, though it does not say tenant or class."""
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1, 2)))
    tape.publish(tape.publishers["b"].store(prompt(9)))
    tape.ask(1, 2, 3, name="first-request", tenant="gold")
    tape.ask(9, name="other-request")
    assert len(printed(tape, **wanted)) == count


def test_a_retry_says_which_attempt_it_is_and_why() -> None:
    """Attempts are counted from 1 for people."""
    tape = Tape()
    ticket = tape.begin(1, name="q")
    tape.finish(ticket, "retried")
    decision = tape.plane.requests.decide(
        msgspec.structs.replace(ticket.decision.request, by_load="retries", exact=False), 1.0
    )
    assert decision is not None
    tape.plane.requests.book(decision, 1.0, tape.wall_s, attempt=1)
    tape.tell()
    shown = printed(tape)
    assert "retried, in" in shown[1]
    assert "attempt 2; about 21 tokens" in shown[2]
    assert "least_requests" in shown[2]
    assert "retries" in shown[2]


def test_statements_are_shown_with_their_reasons() -> None:
    """Of detectors and operators; those on other instances and classes only where wanted."""
    tape = Tape()
    policy, hotspot = subjects.policy("m"), subjects.hotspot("m")
    tape.write(hotspot, messages.HotspotRaised(7, 1, ["a"], 1, 0.0, 15.0, reason="too hot"))
    tape.write(hotspot, messages.HotspotCleared(7, 1, 2, 0.0, reason="calm"))
    tape.write(policy, messages.PolicyOverride("round_robin", 1, 0.0, by="ops", reason="trial"))
    tape.write(policy, messages.PolicyOverride("", 2, 0.0))
    tape.write(policy, messages.Drain("a", True, 1, 0.0, reason="upgrade"))
    tape.write(policy, messages.Blacklist("b", False, 1, 0.0))
    shown = [line.split(maxsplit=1)[1] for line in printed(tape)]
    assert shown == [
        "hotspot   class 0000000000000007 bars a: too hot",
        "hotspot   class 0000000000000007 cleared: calm",
        "policy    round_robin by ops: trial",
        "policy    the configured policy by operator",
        "drain     a on: upgrade",
        "blacklist b off",
    ]
    assert len(printed(tape, instance="a")) == 3
    assert len(printed(tape, key=7)) == 2
    assert printed(tape, key=8) == []
    assert printed(tape, tenant="gold") == []


def test_data_has_candidates_by_name_and_why() -> None:
    """What a program reads needs no knowledge of columns."""
    follower = Follower(Wanted())
    items = [item for heard in _tape().heard() for item in follower.data(heard)]
    routed = msgspec.json.decode(msgspec.json.encode(items[0]))
    assert (routed["model"], routed["router_id"], routed["type"]) == ("m", "router-a", "routed")
    assert [each["instance_id"] for each in routed["candidates"]] == ["a", "b"]
    assert routed["candidates"][0]["hit_tokens"] == 32
    assert routed["why"]["next_best"] == ["b", 53.0]
    assert routed["prompt_key"] == lines.key_text(prompt(1, 2, 3)[-1])
    assert routed["classes"][0]["key"] == lines.key_text(prompt(1)[0])
    assert items[1]["type"] == "prefilled"
    assert follower.counts == {"shown": 6}


def test_data_of_statements_names_the_class_as_the_command_line_does() -> None:
    """Keys are hexadecimal in JSON: many readers' numbers have 53 bits."""
    tape = Tape()
    tape.write(subjects.hotspot("m"), messages.HotspotCleared(7, 1, 2, 0.0))
    tape.write(subjects.policy("m"), messages.Drain("a", True, 1, 0.0))
    follower = Follower(Wanted())
    items = [item for heard in tape.heard() for item in follower.data(heard)]
    assert items[0]["key"] == "0000000000000007"
    assert items[1]["instance_id"] == "a"


def test_decisions_without_candidates_are_shown_too() -> None:
    """As where routers sample what they record."""
    tape = Tape(audit_candidates=0.0)
    tape.ask(1)
    assert "multiplicative" in printed(tape)[0]


def test_bytes_that_cannot_be_read_are_counted() -> None:
    """Following goes on."""
    follower = Follower(Wanted())
    assert list(follower.lines(Unreadable("s", "why", 0.0))) == []
    assert follower.counts["unreadable"] == 1


def test_chosen_requests_are_bounded() -> None:
    """The oldest are forgotten: their later events are not shown."""
    selection = Selection(Wanted(tenant="gold"), requests_max=1)
    for name in ("q1", "q2"):
        assert selection.has(Routed(name, "a", 0.0, tenant="gold"))
    assert not selection.has(Prefilled("q1", "a", 1))
    assert selection.has(Finished("q2", "a", "ok", 200, 0.0))
    coverage = [ClassCoverage(1, 1, 0)]
    assert not selection.has(Routed("q3", "a", 0.0, tenant="tin", classes=coverage))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (71e-6, "71 µs"), (0.0005, "500 µs"), (0.0421, "42 ms"), (1.25, "1.2 s")],
)
def test_durations_have_the_unit_that_suits_them(value: float | None, text: str) -> None:
    """Nobody counts zeros."""
    assert lines.seconds(value) == text
