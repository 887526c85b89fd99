"""What a silence means, and two voices: whose they are, and what follows."""

from __future__ import annotations

import pytest

from controlplane.core.effects import Alarm, Note
from controlplane.core.events import BreakerState, Paused, Tick
from controlplane.core.stream import Trust
from schemas import records
from schemas.bus import LoadReport, RouteBatch, Routed
from tests.core.plane_helpers import Publisher, plane, prompt, record, request


def test_an_instance_whose_sidecar_died_serves_on_while_its_engine_answers() -> None:
    """Only where requests fail too does the silence of a sidecar take an instance out early."""
    made = plane("a", "b", stale_s=5.0, unreachable_s=30.0, departed_s=600.0)
    made.handle(Tick(), 6.0)
    made.handle(BreakerState("a", True), 10.0)
    assert made.handle(Tick(), 31.0) == [], "it may be back in a moment"
    notes = made.handle(Tick(), 41.0)
    assert [(n.kind, n.instance_id) for n in notes if isinstance(n, Note)] == [("left", "a")]
    decision = made.requests.decide(request(prompt(1)), 500.0)
    assert decision is not None
    assert decision.instance.record.instance_id == "b"
    ticket = made.requests.book(decision, 500.0, 0.0)
    made.requests.finish(ticket, "ok", 200, 590.0, 0.0)
    assert made.handle(Tick(), 1180.0) == [], "as long as its engine answers"
    notes = made.handle(Tick(), 1191.0)
    assert [(n.kind, n.instance_id) for n in notes if isinstance(n, Note)] == [("left", "b")]


def test_an_engine_that_fails_for_a_moment_is_not_lost_with_its_sidecar() -> None:
    """Nobody would tell of it again: so a breaker must stay open for long."""
    made = plane("a", stale_s=5.0, unreachable_s=30.0, departed_s=600.0)
    made.handle(Tick(), 100.0)
    for opened_s in (100.0, 140.0):
        made.handle(BreakerState("a", True), opened_s)
        made.handle(Tick(), opened_s + 29.0)
        made.handle(BreakerState("a", False), opened_s + 29.5)
        made.handle(Tick(), opened_s + 35.0)
    assert made.fleet.get("a") is not None


def test_a_time_in_which_the_router_did_not_run_is_nobodys_silence() -> None:
    """After a pause of its own a router trusts and counts as before, until others are silent."""
    made = plane("a", stale_s=5.0)
    made.handle(Publisher("a").batch(), 0.0)
    made.handle(RouteBatch("peer", 1, 0, 0.0, [Routed("r", "a", 0.0, new_tokens=7)]), 0.0)
    made.handle(LoadReport("a", 1, 0, 0.0, running=5, waiting=0), 1.0)
    made.handle(Paused(20.0), 21.0)
    made.handle(Tick(), 21.0)
    instance = made.fleet.get("a")
    assert instance is not None
    assert instance.trust is Trust.EXACT
    assert made.ledger.of("a") | {"peer_batch": 1, "foreign": 4} == made.ledger.of("a")
    made.handle(Tick(), 26.1)
    assert instance.trust is Trust.STALE
    assert not any(made.ledger.of("a").values())


def test_urls_are_taken_apart_only_where_instances_share_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each that joins is compared with all others: that has to be cheap for a thousand."""
    looked_at: list[str] = []
    monkeypatch.setattr(records, "_is_loopback", looked_at.append)
    made = plane(*(f"i{number}" for number in range(50)))
    assert made.doubled() == 0
    assert looked_at == []
    made.handle(record("other", url="http://i7:8000"), 0.0)
    assert set(looked_at) == {"http://i7:8000"}


def test_one_engine_with_two_names_is_an_alarm_once() -> None:
    """What it does counts twice, which no record will ever mend."""
    made = plane("a", "b")
    alarms = []
    for beat in range(30):
        for name in ("a", "c"):
            url = "http://a:8000" if beat < 20 else f"http://{name}:8000"
            effects = made.handle(record(name, url=url, seq=beat), 2.0 * beat)
            alarms += [effect for effect in effects if isinstance(effect, Alarm)]
        if beat == 19:
            assert made.doubled() == 2
    assert made.doubled() == 0
    assert [(alarm.kind, alarm.instance_id) for alarm in alarms] == [("two_names", "c")]
    assert "a has the same address, http://a:8000" in alarms[0].text
    made.handle(record("a", url="http://c:8000"), 61.0)
    ranks = [made.handle(record(f"r{n}", url="http://r", dp_rank=n), 61.0) for n in (0, 1)]
    assert not any(isinstance(effect, Alarm) for effects in ranks for effect in effects)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.3.2.1"])
def test_engines_of_many_machines_at_one_loopback_address_are_told_apart(host: str) -> None:
    """They are no engine of two names: one alarm says what they all lack, and none is renamed."""
    made = plane()
    url = f"http://{host}:8000"
    alarms = []
    for number in range(20):
        effects = made.handle(record(f"e{number}", url=url, host=f"gpu-{number}"), 0.0)
        alarms += [effect for effect in effects if isinstance(effect, Alarm)]
    assert [(alarm.kind, alarm.instance_id) for alarm in alarms] == [("loopback_url", "e1")]
    assert f"e0 on gpu-0 has the address {url} too" in alarms[0].text
    assert made.doubled() == 0
    made.handle(record("e1", url=url, host="gpu-1", seq=2), 100.0)
    made.handle(Tick(), 100.1)
    assert len(made.fleet) == 20
    effects = made.handle(record("again", url=url, host="gpu-1"), 100.2)
    assert [each.kind for each in effects if isinstance(each, Alarm)] == ["two_names"]
    assert made.doubled() == 2


def test_a_machine_is_of_no_matter_where_the_address_says_all() -> None:
    """Two sidecars of one engine may run on different machines; and old ones tell of none."""
    for url, hosts in (("http://gpu-1:8000", ("a", "b")), ("http://127.0.0.1:8000", ("a", ""))):
        made = plane()
        made.handle(record("one", url=url, host=hosts[0]), 0.0)
        effects = made.handle(record("two", url=url, host=hosts[1]), 0.0)
        assert [each.kind for each in effects if isinstance(each, Alarm)] == ["two_names"]


def test_a_renamed_engine_leaves_its_old_name() -> None:
    """The old name's record outlives its sidecar; its engine's answers must not keep it alive."""
    made = plane("a", "b", stale_s=5.0)
    made.handle(record("new", url="http://a:8000"), 4.0)
    assert made.fleet.get("a") is not None
    made.handle(record("new", url="http://a:8000"), 6.0)
    left = [n for n in made.handle(Tick(), 6.1) if isinstance(n, Note) and n.kind == "left"]
    assert [(n.instance_id, n.text) for n in left] == [("a", "its engine goes by new now")]
    assert made.fleet.get("b") is not None
    left = made.handle(record("newer", url="http://b:8000"), 7.0)
    assert [(n.kind, n.instance_id) for n in left if isinstance(n, Note)] == [
        ("joined", "newer"),
        ("left", "b"),
    ]


def test_two_sidecars_of_one_instance_are_an_alarm() -> None:
    """An epoch may go back once, as after a clock was set; one that does so in turn is named."""
    made = plane("a")
    alarms = []
    for beat in range(120):
        epoch = 200 if beat % 2 == 0 else 100
        effects = made.handle(record("a", epoch=epoch), 2.0 * beat)
        alarms += [beat for effect in effects if isinstance(effect, Alarm)]
    assert alarms == [5], "the third time that it went back"
    made.handle(record("a", epoch=300), 300.0)
    assert made.handle(record("a", epoch=250), 301.0) == []
