"""The story of one request, whole, and in the order in which it happened."""

from __future__ import annotations

import msgspec

from controlplane.audit.heard import Unreadable
from controlplane.audit.lines import clock
from controlplane.audit.story import Story, StoryTeller, told
from schemas.bus import Prefilled
from tests.audit.tape import Tape
from tests.core.plane_helpers import prompt, record


def story_of(tape: Tape, request: str) -> Story:
    """Return the story of a request on a tape."""
    teller = StoryTeller(request)
    for heard in tape.heard():
        teller.hear(heard)
    assert teller.story is not None
    return teller.story


def _retried() -> Tape:
    """Return a tape of a request that failed at `a` and was answered by `b`."""
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1, 2)))
    tape.publish(tape.publishers["b"].store(prompt(1)))
    tape.ask(7, name="another")
    ticket = tape.begin(1, 2, 3, name="the-request", tenant="gold")
    assert ticket.decision.instance.record.instance_id == "a"
    tape.finish(ticket, "retried")
    again = msgspec.structs.replace(ticket.decision.request, tried=("a",))
    decision = tape.plane.requests.decide(again, tape.now_s)
    assert decision is not None
    second = tape.plane.requests.book(
        decision, tape.now_s, tape.wall_s, attempt=1, queue_s=0.25, tokenize_s=0.001
    )
    tape.tell()
    tape.finish(second, cached=0, output=77)
    return tape


def test_a_story_tells_every_attempt() -> None:
    """Prompt, promise, why, candidates, progress, end, and how the promise was kept."""
    text = "\n".join(told(story_of(_retried(), "the-request")))
    for part in (
        "request   the-request",
        "model     m, at router router-a",
        "sent to a",
        "53 tokens in blocks of 16, key ",
        "tenant gold",
        "32 tokens promised, 21 to compute; block set exact, as of epoch 1 seq 1",
        "why       P 21 × (B 0 + 1) = 21; next b 37",
        "ended: retried, status none",
        "attempt 2: sent to b",
        "queued for 250 ms",
        "left out: tried 1",
        "37 tokens computed, first byte 50 ms after the request",
        "answer    77 tokens",
        "0 tokens found by the engine: -16 against the promise",
    ):
        assert part in text, text
    assert text.index("sent to a") < text.index("attempt 2")
    rows = [line for line in text.splitlines() if line.startswith("  →")]
    assert [row.split()[1] for row in rows] == ["a", "b"]
    assert "tried" in text[text.rindex("  score") :]


def test_the_end_of_an_id_is_enough() -> None:
    """The first request that fits is told, and no other one is mixed in."""
    story = story_of(_retried(), "request")
    assert story.request_id == "the-request"
    assert len(story.attempts) == 2
    assert story.ended


def test_an_answer_counted_by_its_events_says_so() -> None:
    """The engine did not tell how long it was."""
    tape = Tape()
    ticket = tape.begin(1, name="q")
    tape.plane.requests.finish(
        ticket, "ok", 200, 2.0, tape.wall_s, output_tokens=120, output_estimated=True
    )
    tape.tell()
    text = "\n".join(told(story_of(tape, "q")))
    assert "answer    120 tokens, by the stream's events" in text


def test_times_are_those_of_the_request() -> None:
    """The end counts from the arrival as the first byte does, and no batch's time is after it."""
    tape = Tape()
    ticket = tape.begin(1, name="q")
    booked_s = ticket.booking.booked_s
    tape.plane.requests.finish(
        ticket, "ok", 200, booked_s + 0.2, tape.wall_s, ttft_s=0.49, started_s=booked_s - 0.3
    )
    tape.tell()
    story = story_of(tape, "q")
    end = story.attempts[0].finished
    assert end is not None
    story.attempts[0].prefilled.append((Prefilled("q", "a", 20, 0.49), end.at_wall_s + 0.009))
    lines = [line for line in told(story) if "after the request" in line]
    assert [line.split("  ")[0] for line in lines] == [clock(end.at_wall_s)] * 2
    assert lines[0].endswith("first byte 490 ms after the request")
    assert lines[1].endswith("ended: ok, status 200, 500 ms after the request")


def test_a_story_goes_as_far_as_the_record() -> None:
    """A request that has not ended says so."""
    tape = Tape()
    tape.begin(1, name="q")
    story = story_of(tape, "q")
    assert not story.ended
    assert list(told(story))[-1] == "it has not ended, as far as the record goes"


def test_a_story_without_candidates_says_what_it_knows() -> None:
    """As where routers sample, or the prompt could not be tokenized."""
    tape = Tape(audit_candidates=0.0)
    tape.ask(1, name="q", exact=False, by_load="inexact:images")
    text = "\n".join(told(story_of(tape, "q")))
    assert "about 21 tokens: not tokenized exactly" in text
    assert "inexact:images" in text


def test_long_lists_of_candidates_are_cut() -> None:
    """The best are listed, and how many more there are."""
    tape = Tape()
    for number in range(20):
        tape.plane.handle(record(f"extra-{number}"), 1.0)
    tape.ask(1, name="q")
    story = story_of(tape, "q")
    assert "    … and 14 more" in list(told(story))
    assert not any("more" in line for line in told(story, None))


def test_a_story_as_data() -> None:
    """JSON with the same content."""
    data = msgspec.json.decode(msgspec.json.encode(story_of(_retried(), "the-request").as_dict()))
    assert data["ended"]
    first, second = data["attempts"]
    assert first["routed"]["instance_id"] == "a"
    assert second["finished"]["output_tokens"] == 77
    assert second["prefilled"][0]["new_tokens"] == 37


def test_what_is_not_there_is_not_found() -> None:
    """Neither in other messages nor in bytes that cannot be read."""
    teller = StoryTeller("nobody")
    for heard in (*Tape().heard(), Unreadable("s", "why", 0.0)):
        teller.hear(heard)
    assert teller.story is None
