"""The bus benchmark runs, at a size that says nothing, so that it cannot rot."""

import pytest
import uvloop

from bench.bus import Result, Resync, enough, missed, run, table


@pytest.mark.slow
@pytest.mark.live
def test_it_runs_and_prints() -> None:
    """All phases end, on the production parts, and find all block sets equal."""
    result = uvloop.run(run(instances=4, steps=2, rounds=2, big_blocks=3000, resyncs=1))
    assert 2 <= len(result.rounds) <= 6
    assert all(one.blocks >= 4 * 2 * 4 * 96 * 2 for one in result.rounds)
    assert result.resync_blocks > 3000
    assert "resync" in table(result)


def test_bars_are_named_when_missed() -> None:
    """A slow result names each bar that it misses; a fast one none."""
    times = [Resync(took_s=0.1, delay_s=0.05)]
    slow = Result(1, 1.0, 9.0, 9.0, 9.0, 9.0, 1, times, [])
    assert len(missed(slow)) == 3
    assert missed(Result(1, 2e6, 0.1, 1.0, 9.0, 9.0, 1, times, [])) == []


def test_a_phase_that_misses_its_bar_is_repeated_for_a_while() -> None:
    """On a busy machine; one that meets it is over as soon as it may be."""
    assert [enough(done, 5, met=True) for done in (4, 5)] == [False, True]
    assert [enough(done, 5, met=False) for done in (5, 14, 15)] == [False, False, True]
