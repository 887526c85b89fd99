"""What a leader writes, given what it wants and what stands."""

from __future__ import annotations

from controlplane.core.detector_writes import (
    BY,
    POLICY,
    SLOTS,
    Seen,
    Write,
    is_ours,
    policy_write,
    slot_of,
    verdict_writes,
)
from schemas.bus import HotspotCleared, HotspotRaised, PolicyOverride


def _verdict(key: int, streak: int = 2) -> HotspotRaised:
    return HotspotRaised(key, 4, [], 0, 0.0, 15.0, streak=streak)


def _cleared(verdict: HotspotRaised) -> HotspotCleared:
    return HotspotCleared(verdict.key, verdict.depth_blocks, 0, 0.0, "over")


def _writes(wanted: list[HotspotRaised], seen: dict[str, Seen], now_s: float = 0.0) -> list[Write]:
    return verdict_writes({each.key: each for each in wanted}, seen, _cleared, now_s, 5.0)


def test_a_new_verdict_is_created_and_told() -> None:
    """An entry that must not exist yet."""
    (write,) = _writes([_verdict(7)], {})
    assert (write.name, write.revision, write.delete, write.news) == ("hotspot-007", None, False, 1)


def test_what_stands_and_is_wanted_is_left_alone_until_its_renewal() -> None:
    """A renewal replaces the revision that is known, with the present evidence, and is no news."""
    seen = {"hotspot-007": Seen(_verdict(7), 3, 10.0)}
    assert _writes([_verdict(7)], seen, 14.9) == []
    (write,) = _writes([_verdict(7, streak=9)], seen, 15.0)
    assert (write.revision, write.news, write.message) == (3, False, _verdict(7, streak=9))


def test_what_stands_and_is_not_wanted_is_deleted_with_its_reason() -> None:
    """By the revision that is known, and before anything is added."""
    seen = {"hotspot-007": Seen(_verdict(7), 3, 10.0)}
    first, second = _writes([_verdict(8)], seen, 10.0)
    assert (first.name, first.revision, first.delete) == ("hotspot-007", 3, True)
    assert first.message == HotspotCleared(7, 4, 0, 0.0, "over")
    assert (second.name, second.revision) == ("hotspot-008", None)


def test_names_are_used_again() -> None:
    """However many classes there ever were, the bucket has a bounded number of keys."""
    names = {slot_of(key) for key in range(10 * SLOTS)}
    assert len(names) == SLOTS


def test_two_classes_in_one_slot_take_turns() -> None:
    """The second waits for the first to be cleared, and then for the slot to be free."""
    first, second = _verdict(7), _verdict(7 + SLOTS)
    (write,) = _writes([first, second], {})
    assert write.message == first
    seen = {"hotspot-007": Seen(first, 3, 0.0)}
    assert _writes([first, second], seen) == []
    (write,) = _writes([second], seen)
    assert write.delete
    (write,) = _writes([second], {})
    assert write.message == second


def test_a_verdict_under_a_name_that_is_not_its_own_goes() -> None:
    """Nothing but its slot is looked at when a class is cleared."""
    seen = {"hotspot-abc": Seen(_verdict(7), 3, 0.0)}
    first, second = _writes([_verdict(7)], seen)
    assert (first.name, first.delete) == ("hotspot-abc", True)
    assert second.name == "hotspot-007"


def test_other_entries_are_left_alone() -> None:
    """An operator's statements stand in the same bucket."""
    assert _writes([], {POLICY: Seen(PolicyOverride("linear", 1, 0.0, by="op"), 1, 0.0)}) == []


OURS = PolicyOverride("round_robin", 0, 0.0, 15.0, BY)
THEIRS = PolicyOverride("linear", 0, 0.0, None, "op")
THEIRS_FOR_A_WHILE = PolicyOverride("linear", 0, 0.0, 60.0, "op")


def test_an_override_comes_is_renewed_and_goes() -> None:
    """By revision, like verdicts."""
    created = policy_write(OURS, None, 0.0, 5.0)
    assert created == Write(POLICY, OURS, None)
    seen = Seen(OURS, 4, 0.0)
    assert policy_write(OURS, seen, 4.9, 5.0) is None
    assert policy_write(OURS, seen, 5.0, 5.0) == Write(POLICY, OURS, 4, news=False)
    deleted = policy_write(None, seen, 1.0, 5.0)
    assert deleted is not None
    assert (deleted.delete, deleted.revision) == (True, 4)
    assert isinstance(deleted.message, PolicyOverride)
    assert deleted.message.policy == ""
    assert policy_write(None, None, 0.0, 5.0) is None


def test_what_an_operator_said_is_never_touched() -> None:
    """Neither replaced while it lasts, nor renewed, nor deleted."""
    for now_s in (0.0, 1e6):
        for wanted in (OURS, None):
            assert policy_write(wanted, Seen(THEIRS, 4, 0.0), now_s, 5.0) is None
    for wanted in (OURS, None):
        assert policy_write(wanted, Seen(THEIRS_FOR_A_WHILE, 4, 0.0), 59.9, 5.0) is None


def test_what_an_operator_said_gives_way_once_it_has_run_out() -> None:
    """Its entry stays in the bucket, which forgets nothing by itself."""
    entry = Seen(THEIRS_FOR_A_WHILE, 4, 0.0)
    assert policy_write(OURS, entry, 60.0, 5.0) == Write(POLICY, OURS, 4)
    assert policy_write(None, entry, 60.0, 5.0) is None


def test_an_override_is_ours_by_its_signature() -> None:
    """And by nothing else."""
    assert is_ours(Seen(OURS, 1, 0.0))
    assert not is_ours(Seen(THEIRS, 1, 0.0))
    assert not is_ours(Seen(_verdict(7), 1, 0.0))
    assert not is_ours(None)
