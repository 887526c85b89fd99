from controlplane.core.room import Again, Room
from schemas.bus import Drain, LoadReport
from tests.core.plane_helpers import plane, prompt, record, request


def test_there_is_room_while_an_eligible_instance_is_below_its_cap() -> None:
    """Bookings fill it, ends free it, and who may not get requests does not count."""
    made = plane("a", "b", batch_cap=1)
    room = Room(made.fleet, made.ledger, 1)
    tickets = []
    for _ in range(2):
        assert room(None)
        decision = made.requests.decide(request(prompt(1)), 1.0)
        assert decision is not None
        tickets.append(made.requests.book(decision, 1.0, 0.0))
    assert not room(None)
    made.requests.finish(tickets[0], "ok", 200, 2.0, 0.0)
    assert room(None)
    free = tickets[0].decision.instance.record.instance_id
    made.handle(record(free, state="draining"), 2.0)
    assert not room(None)


def test_an_adapter_has_room_only_where_it_is_served() -> None:
    """Its instances may be full while others are not; one that nobody serves waits for nobody."""
    made = plane("a", batch_cap=1)
    made.handle(record("b", loras=["fr"]), 0.0)
    room = Room(made.fleet, made.ledger, 1)
    made.ledger.book("r", "b", 10, 10, 0.0)
    assert room(None)
    assert not room("fr")
    assert room("unknown"), "the filter would leave nobody, and is ignored"


def test_one_that_comes_back_has_room_where_it_has_not_failed() -> None:
    """An instance that has failed it is none for it, unless nobody else is left."""
    made = plane("a", batch_cap=1)
    made.handle(record("b", loras=["fr"]), 0.0)
    room = Room(made.fleet, made.ledger, 1)
    made.ledger.book("r", "b", 10, 10, 0.0)
    assert room(Again(None, ("b",)))
    assert not room(Again(None, ("a",)))
    assert not room(Again("fr", ("a",)))
    assert room(Again(None, ("a", "b"))), "the filter would leave nobody, and is ignored"
    assert not room(Again("fr", ("b",))), "likewise, and only the one that failed serves it"


def test_without_a_cap_or_a_fleet_there_is_nothing_to_wait_for() -> None:
    """Such requests go on, and are answered or refused."""
    made = plane("a")
    assert Room(made.fleet, made.ledger, None)(None)
    empty = plane()
    assert Room(empty.fleet, empty.ledger, 1)(None)
    assert Room(empty.fleet, empty.ledger, 1).load().batch_size == 0


def test_nobody_waits_for_an_instance_that_is_drained() -> None:
    """It is no room, however idle; where all are drained there is nothing to wait for."""
    made = plane("a", "b")
    room = Room(made.fleet, made.ledger, 1)
    decision = made.requests.decide(request(prompt(1)), 0.0)
    assert decision is not None
    made.requests.book(decision, 0.0, 0.0)
    busy = decision.instance.record.instance_id
    (idle,) = {"a", "b"} - {busy}
    assert room(None)
    made.handle(Drain(idle, True, 1, 0.0), 0.0)
    assert not room(None)
    made.handle(Drain(busy, True, 1, 0.0), 0.0)
    assert room(None)


def test_the_load_is_what_the_next_request_would_meet() -> None:
    """The smallest batch and queue, and the mean use of KV memory."""
    made = plane("a", "b")
    made.ledger.book("r", "a", 500, 500, 0.0)
    made.ledger.book("s", "b", 100, 100, 0.0)
    made.handle(LoadReport("a", 1, 0, 0.0, 1, 0, kv_usage=0.5), 0.0)
    load = Room(made.fleet, made.ledger, None).load()
    assert (load.batch_size, load.queued_tokens, load.kv_usage) == (1, 100, 0.5)
