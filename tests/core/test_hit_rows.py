"""Hits by row: whoever holds what, however slots lie and however masks are spread."""

import numpy as np
import pytest

from controlplane.core import hit_rows
from controlplane.core.hit_rows import SlotRows
from controlplane.core.index import NO_MATCH, PrefixIndex
from tests.core.test_index import chain, live_slot


def test_hits_are_depths_by_row_and_zero_for_no_slot():
    """Rows may lie otherwise than slots, and have none; slots may belong to no row."""
    index, prompt = PrefixIndex(), chain(1, 100)
    for held in (100, 40, 0, 7):
        live_slot(index, prompt[:held])
    match = index.match(prompt)
    assert SlotRows(np.array([3, -1, 0, 2])).hits(match, 16).tolist() == [112, 0, 1600, 0]
    assert SlotRows(np.array([2, 1])).hits(match).tolist() == [0, 40]
    assert SlotRows(np.array([-1])).hits(match).tolist() == [0]
    assert SlotRows(np.array([], np.int64)).hits(match).tolist() == []
    assert SlotRows(np.arange(4)).hits(NO_MATCH).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("slots", [3, 7, 64, 300])
def test_hits_agree_however_masks_are_spread(slots: int):
    """Few slots or many, staggered or in crowds: every way of writing the array is right."""
    index, prompt = PrefixIndex(), chain(1, 64)
    rng = np.random.default_rng(slots)
    held = np.array([int(rng.choice([0, 5, 6, 33, rng.integers(64), 64])) for _ in range(slots)])
    for depth in held:
        live_slot(index, prompt[:depth])
    order = rng.permutation(slots)[: slots - 1]  # one slot has no row
    rows = SlotRows(order)
    for block_tokens in (1, 1, 16):  # the second time, masks are remembered
        hits = rows.hits(index.match(prompt), block_tokens)
        assert hits.tolist() == (held[order] * block_tokens).tolist()


def test_what_is_returned_for_many_cannot_be_spoilt():
    """An array that is remembered refuses to be written to."""
    index, prompt = PrefixIndex(), chain(1, 9)
    for _ in range(hit_rows.SCATTER_BITS_MAX + 1):
        live_slot(index, prompt)
    hits = SlotRows(np.arange(index.slots)).hits(index.match(prompt))
    with pytest.raises(ValueError, match="read-only"):
        hits[0] = 1


def test_arrays_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch):
    """Beyond the bound they are made anew, and are the same."""
    monkeypatch.setattr(hit_rows, "MASKS_MAX", 2)
    index, prompts = PrefixIndex(), [chain(seed, 9) for seed in range(3)]
    for prompt in prompts:
        for depth in [4] * 10 + [9] * 10:
            live_slot(index, prompt[:depth])
    rows = SlotRows(np.arange(60))
    for _ in range(3):
        for number, prompt in enumerate(prompts):
            expected = [0] * 20 * number + [4] * 10 + [9] * 10 + [0] * 20 * (2 - number)
            assert rows.hits(index.match(prompt)).tolist() == expected
            assert len(rows._indicators) <= 2
            assert len(rows._filled) <= 2
