"""Asking for snapshots: one at a time, soon where somebody is there to answer, never mixed up."""

from __future__ import annotations

import msgspec
import pytest

from controlplane.core.effects import Effect, FetchSnapshot
from controlplane.core.events import BusState, SnapshotFailed, Tick
from controlplane.core.hashing import pack_hashes
from controlplane.core.intake import CHUNKS_MAX
from controlplane.core.plane import Plane
from controlplane.core.stream import Trust
from schemas.bus import KvBatch, KvStored
from tests.core.plane_helpers import Publisher, plane, prompt, record

FAR = 10**12


def _asked(effects: list[Effect]) -> list[FetchSnapshot]:
    return [effect for effect in effects if isinstance(effect, FetchSnapshot)]


def _joined(name: str = "a") -> tuple[Plane, Publisher, FetchSnapshot]:
    """Returns a plane that has asked for the set of an instance that published two chains."""
    made, publisher = Plane("m", "router-a", 1), Publisher(name)
    publisher.batch()
    publisher.store(prompt(1, 2, 3, 4, 5))
    (fetch,) = _asked(made.handle(record(name), 0.0))
    return made, publisher, fetch


def test_a_fetch_is_wanted_until_it_is_whole() -> None:
    """Whoever fetches can see when to begin, and when to stop."""
    made, publisher, fetch = _joined()
    chunks = publisher.snapshot(chunks=3)
    for chunk in chunks:
        assert made.wants(fetch)
        made.handle(chunk, 0.1)
    assert not made.wants(fetch)
    assert made.intake.counts["snapshots"] == 1


def test_an_answer_with_a_hole_leads_to_one_further_try() -> None:
    """However many parts follow the hole, the instance is asked once more, not once for each."""
    made, publisher, fetch = _joined()
    chunks = publisher.snapshot(chunks=5)
    del chunks[1]
    tries: list[FetchSnapshot] = []
    for chunk in chunks:
        if made.wants(fetch):
            tries += _asked(made.handle(chunk, 0.1))
    assert len(tries) == 1
    assert not made.wants(fetch)
    assert made.wants(tries[0])


def test_parts_of_two_answers_never_mix() -> None:
    """A part that is of another moment than those before it ends the try."""
    made, publisher, _ = _joined()
    before = publisher.snapshot(chunks=2)
    publisher.batch()
    after = publisher.snapshot(chunks=2)
    made.handle(before[0], 0.1)
    assert len(_asked(made.handle(after[1], 0.1))) == 1
    assert made.index.live == 0


def test_a_departed_instance_wants_nothing() -> None:
    """What is still on its way for it is not taken."""
    made, _, fetch = _joined()
    made.handle(record("a", state="stopped"), 0.1)
    assert not made.wants(fetch)


def test_an_instance_that_is_heard_of_again_is_asked_soon() -> None:
    """The wait that grew while it was silent ends with the first sign of life."""
    made, publisher, fetch = _joined()
    now_s = 0.0
    while fetch.after_s < 4.0:
        now_s += fetch.after_s
        (fetch,) = _asked(made.handle(SnapshotFailed("a", "nobody"), now_s))
    (sooner,) = _asked(made.handle(publisher.batch(), now_s + 0.1))
    assert sooner.after_s <= made.config.intake.retry_heard_s
    assert made.wants(sooner)
    assert not made.wants(fetch)
    assert not _asked(made.handle(publisher.batch(), now_s + 0.2)), "asked once is enough"


def test_an_instance_that_talks_but_gives_no_snapshot_is_not_stormed() -> None:
    """While it is heard of, tries still keep a distance."""
    made, publisher, fetch = _joined()
    now_s, tries = 0.0, 0
    while now_s < 10.0:
        now_s += 0.1
        extra = _asked(made.handle(publisher.batch(), now_s))
        tries += len(extra)
        fetch = extra[0] if extra else fetch
        if now_s >= fetch.after_s and made.wants(fetch):
            (fetch,) = _asked(made.handle(SnapshotFailed("a", "not now"), now_s))
            fetch = FetchSnapshot("m", "a", now_s + fetch.after_s, 0, "", fetch.fetch)
            tries += 1
    assert tries <= 10.0 / (0.5 * made.config.intake.retry_heard_s)


def test_nobody_is_asked_while_the_bus_is_away_and_all_at_once_when_it_is_back() -> None:
    """Tries that cannot succeed would only make the next one late."""
    made, _, fetch = _joined()
    made.handle(BusState(False), 0.1)
    assert not _asked(made.handle(SnapshotFailed("a", "not connected"), 0.2))
    assert not made.wants(fetch)
    (again,) = _asked(made.handle(BusState(True), 60.0))
    assert again.attempt == 1
    assert again.after_s <= made.config.intake.first_delay_s_max


def test_the_return_of_the_bus_voids_a_fetch_that_waits() -> None:
    """A wait that grew before the outage does not outlast it."""
    made, _, fetch = _joined()
    for _ in range(8):
        (fetch,) = _asked(made.handle(SnapshotFailed("a", "nobody"), 0.0))
    made.handle(BusState(False), 0.1)
    (again,) = _asked(made.handle(BusState(True), 0.2))
    assert made.wants(again)
    assert not made.wants(fetch)


def test_an_epoch_that_was_set_back_is_followed_once_the_record_names_it() -> None:
    """A sidecar that restarts with a clock behind the old one's is not ignored for ever."""
    made, old = plane("a"), Publisher("a", epoch=900)
    made.handle(record("a", epoch=900), 0.1)
    made.handle(old.store(prompt(1, 2)), 0.2)
    new = Publisher("a", epoch=500)
    instance = made.fleet.get("a")
    assert instance is not None
    made.handle(new.store(prompt(7)), 1.0)
    assert instance.trust is Trust.EXACT, "so far these may be a dead sidecar's last words"
    (fetch,) = _asked(made.handle(record("a", epoch=500), 1.1))
    assert made.wants(fetch)
    assert (instance.trust, made.index.live) == (Trust.RESYNCING, 0)
    for chunk in new.snapshot():
        made.handle(chunk, 1.2)
    assert instance.trust is Trust.EXACT
    assert set(made.index.blocks(instance.slots[0])) == set(prompt(7))


def test_a_record_may_name_the_earlier_epoch_before_its_batches_come() -> None:
    """The bucket and the streams are not in one order; either may be first."""
    made, old = plane("a"), Publisher("a", epoch=900)
    made.handle(old.store(prompt(1, 2)), 0.2)
    made.handle(record("a", epoch=500), 1.0)
    new = Publisher("a", epoch=500)
    made.handle(new.store(prompt(7)), 1.1)
    instance = made.fleet.get("a")
    assert instance is not None
    assert instance.trust is Trust.EXACT
    assert set(made.index.blocks(instance.slots[0])) == set(prompt(7))


def _life_of(made: Plane, publisher: Publisher, from_s: float, seconds: float) -> list[float]:
    """Lets a sidecar speak twice a second, and answer; returns when its set was exact."""
    instance = made.fleet.get(publisher.name)
    assert instance is not None
    exact_s = []
    for beat in range(int(2 * seconds)):
        now_s = from_s + beat / 2
        made.handle(publisher.store(prompt(beat)), now_s)
        if instance.fetch and instance.fetch_due_s <= now_s:
            for chunk in publisher.snapshot():
                made.handle(chunk, now_s)
        if instance.trust is Trust.EXACT and made.index.count(instance.slots[0]) == len(
            publisher.blocks
        ):
            exact_s.append(now_s)
    return exact_s


@pytest.mark.parametrize(("epoch", "seq"), [(1, FAR), (FAR, FAR), (FAR, 1), (FAR, 0)])
def test_one_wrong_batch_spoils_a_sidecars_stream_for_some_seconds_only(
    epoch: int, seq: int
) -> None:
    """However far ahead its epoch and its number are, and though no record speaks against it."""
    made, publisher = plane("a"), Publisher("a")
    publisher.batch()
    made.handle(publisher.store(prompt(1, 2)), 0.5)
    made.handle(KvBatch("a", epoch, seq, 0.0, [KvStored(pack_hashes([7]))], 1, 7), 1.0)
    exact_s = _life_of(made, publisher, 1.5, 20.0)
    assert exact_s[0] < 10.0
    assert exact_s[-20:] == [11.5 + beat / 2 for beat in range(20)], "and stays so"
    assert made.intake.counts["resyncs"] < 10


def test_a_snapshot_with_an_absurd_number_heals_as_well() -> None:
    """A position that no batch can follow is given up."""
    made, publisher, _ = _joined()
    wrong = publisher.snapshot()[0]
    made.handle(msgspec.structs.replace(wrong, seq=FAR), 0.1)
    exact_s = _life_of(made, publisher, 0.5, 20.0)
    assert exact_s[-10:] == [15.5 + beat / 2 for beat in range(10)]
    assert made.intake.counts["doubted"] == 1


def test_a_snapshot_of_absurdly_many_parts_ends_at_once() -> None:
    """It would keep one of the few places for fetches for ever."""
    made, publisher, fetch = _joined()
    endless = msgspec.structs.replace(publisher.snapshot(chunks=2)[0], chunks=CHUNKS_MAX + 1)
    (again,) = _asked(made.handle(endless, 0.1))
    assert not made.wants(fetch)
    most = msgspec.structs.replace(endless, chunks=CHUNKS_MAX)
    made.handle(most, 0.2)
    assert made.wants(again)


def test_old_batches_of_a_router_that_is_late_do_not_empty_its_sets() -> None:
    """It may work off what had come before a snapshot for long: its blocks stay known."""
    made, publisher = plane("a"), Publisher("a")
    publisher.batch()
    backlog = [publisher.store(prompt(number)) for number in range(100)]
    made.handle(backlog[0], 0.1)
    made.handle(publisher.batch(), 0.2)
    for chunk in publisher.snapshot():
        made.handle(chunk, 0.3)
    instance = made.fleet.get("a")
    assert instance is not None
    for number, batch in enumerate(backlog):
        effects = made.handle(batch, 1.0 + 0.1 * number)
        assert made.index.count(instance.slots[0]) == 100
        if _asked(effects):
            for chunk in publisher.snapshot():
                made.handle(chunk, 1.0 + 0.1 * number)
    assert instance.trust is Trust.EXACT
    assert made.intake.counts["doubted"] == 2, "once in five seconds"


def test_a_dead_sidecars_last_words_keep_nobody_alive() -> None:
    """Only what counts is a sign of life."""
    made, old, new = plane("a"), Publisher("a", epoch=2), Publisher("a", epoch=3)
    made.handle(old.batch(), 1.0)
    made.handle(new.batch(), 2.0)
    made.handle(old.batch(), 9.0)
    instance = made.fleet.get("a")
    assert instance is not None
    assert instance.heard_s == 2.0


def test_a_failed_snapshot_is_no_sign_of_life() -> None:
    """What is stale stays so: that nobody answers does not make a set any fresher."""
    made, _, _ = _joined()
    made.handle(Tick(), 6.0)
    made.handle(SnapshotFailed("a", "nobody"), 6.1)
    instance = made.fleet.get("a")
    assert instance is not None
    assert instance.trust is Trust.STALE
    assert not made.fleet.trusted[instance.row]


def test_a_set_that_is_always_wrong_is_asked_for_ever_more_rarely() -> None:
    """An index without room, or a sidecar that counts wrongly, must not mean a flood of sets."""
    made, publisher = plane("a"), Publisher("a")
    publisher.batch()
    instance = made.fleet.get("a")
    assert instance is not None
    now_s, asked_s = 0.0, []
    for _ in range(600):
        now_s += 0.1
        effects = made.handle(publisher.batch(KvStored(pack_hashes(prompt(5)))), now_s)
        if not instance.follower.exact and instance.fetch and instance.fetch_due_s <= now_s:
            asked_s.append(now_s)
            for chunk in publisher.snapshot():
                effects += made.handle(chunk, now_s)
    assert made.intake.counts["digest_mismatch"] > 5
    assert len(asked_s) < 20
    assert asked_s[-1] - asked_s[-2] > 4.0


def test_a_set_that_is_wrong_once_is_asked_for_at_once() -> None:
    """One mishap costs no time."""
    made, publisher = plane("a"), Publisher("a")
    publisher.batch()
    made.handle(SnapshotFailed("a", "settle the join"), 0.1)
    (fetch,) = _asked(made.handle(publisher.batch(KvStored(pack_hashes(prompt(5)))), 0.2))
    assert fetch.after_s <= made.config.intake.first_delay_s_max
