"""Which messages of routers count."""

from __future__ import annotations

from controlplane.core.detector_streams import REPEATED_MAX, RouterStreams
from schemas.bus import RouteBatch


def _batch(router: str, epoch: int, seq: int) -> RouteBatch:
    return RouteBatch(router, epoch, seq, 0.0)


def test_repeats_are_left_out_and_losses_counted() -> None:
    """A message counts once; what is skipped is lost for good."""
    streams = RouterStreams()
    new = [streams.is_new(_batch("a", 1, seq)) for seq in (0, 1, 1, 0, 4, 3, 5)]
    assert new == [True, True, False, False, True, False, True]
    assert (streams.repeated, streams.lost) == (3, 2)


def test_a_detector_that_joins_late_has_lost_nothing() -> None:
    """The first message that is heard of a router begins its stream."""
    streams = RouterStreams()
    assert streams.is_new(_batch("a", 1, 500))
    assert streams.lost == 0


def test_a_restarted_router_counts_anew() -> None:
    """A later epoch begins at any number; what an earlier one still sends is old."""
    streams = RouterStreams()
    assert streams.is_new(_batch("a", 1, 7))
    assert streams.is_new(_batch("a", 2, 0))
    assert not streams.is_new(_batch("a", 1, 8))
    assert (streams.repeated, streams.lost) == (1, 0)


def test_routers_are_told_apart_and_bounded() -> None:
    """The router that was silent longest makes room for another."""
    streams = RouterStreams(routers_max=2)
    for name in ("a", "b", "a", "c"):
        assert streams.is_new(_batch(name, 1, 10 + len(streams) + ord(name)))
        streams.is_new(_batch("a", 1, 0))
    assert len(streams) == 2


def test_one_absurd_message_does_not_deafen_for_ever() -> None:
    """What follows it looks old; so many old messages in a row are no repeats."""
    for epoch, seq in ((10**12, 0), (1, 10**12)):
        streams = RouterStreams()
        assert streams.is_new(_batch("a", 1, 0))
        assert streams.is_new(_batch("a", epoch, seq))
        new = [streams.is_new(_batch("a", 1, 1 + number)) for number in range(REPEATED_MAX + 50)]
        assert new == [False] * REPEATED_MAX + [True] * 50
        assert streams.repeated == REPEATED_MAX
