"""The simulation of a large fleet, small: its numbers mean what they say."""

import pytest

from bench.scale import measure, record_bytes, show

pytestmark = pytest.mark.slow


def test_the_numbers_are_there_and_make_sense(capsys: pytest.CaptureFixture[str]) -> None:
    """Every router hears every instance; routers that know at once promise nothing in vain."""
    found = measure(instances=12, routers=3, rate=30.0, seconds=4.0)
    kv, route = found["volume"]["kv"], found["volume"]["route"]
    assert kv["messages_per_s"] > 10
    assert kv["blocks_per_s"] > 100
    assert kv["bytes_per_s"] > 8 * kv["blocks_per_s"]
    assert route["messages_per_s"] > 5
    assert found["lags"]["0"]["broken_share"] < 0.001
    assert 0 < found["lags"]["0.5"]["hit_rate"] < 1
    show(found)
    assert "promised in vain" in capsys.readouterr().out


def test_candidates_are_what_a_record_weighs() -> None:
    """A record with every candidate grows with the fleet; one without does not."""
    small, large = record_bytes(10), record_bytes(200)
    assert large["every_candidate"] > small["every_candidate"] + 190 * 8
    assert large["no_candidates"] < small["no_candidates"] + 32
