import io

import msgspec
import pytest

from bench import memory
from bench.caches import FleetCaches, Shape
from bench.memory import Result, missed, table

SMALL = Shape(5, 8_000, prompt_tokens=(1_024, 8_192))


def test_batches_survive_the_file():
    """What is written for the measuring process is what the content says."""
    caches, file = FleetCaches(SMALL), io.BytesIO()
    memory.write_batches(caches, file)
    file.seek(0)
    index = memory.empty_index(SMALL.instances)
    blocks, spent_s = memory.fill(index, file)
    assert blocks == sum(len(stored.hashes) for stored in caches.stores)
    assert len(index) == caches.distinct
    assert spent_s > 0
    index.check()


@pytest.mark.slow
def test_one_fleet_is_measured(monkeypatch: pytest.MonkeyPatch):
    """A small fleet gives a whole result, resync included."""
    monkeypatch.setitem(memory.CASES, "16", SMALL)
    file = io.BytesIO()
    memory.write_batches(FleetCaches(SMALL), file)
    file.seek(0)
    result = memory.measure("16", file)
    assert result.distinct_blocks < result.holdings
    assert result.intake_blocks_per_s > 0
    assert result.resync_s > 0
    assert len(table([result]).splitlines()) == 2


def test_bars_are_judged():
    """Each bar is judged where it applies, and reported in words when it is missed."""
    good = Result("256", 256, 1, 1, 160.0, 90.0, 1.6e6, 0.2, 4.9)
    bad = Result("256", 256, 1, 1, 161.0, 90.0, 1.4e6, 0.4, 5.5)
    assert missed(good) == []
    assert missed(bad) == [
        "161 bytes a block > 160",
        "1.40 M blocks/s < 1.5",
        "resync 0.40 s > 0.3",
        "step of 5.5 ms > 5.0",
    ]
    assert missed(msgspec.structs.replace(good, instances=16, bytes_a_block=500.0)) == []
    assert missed(msgspec.structs.replace(good, holdings=3, intake_blocks_per_s=1e6)) == []
