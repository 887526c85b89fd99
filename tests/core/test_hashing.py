"""Block hashes: both sides of the wire give a block the same name, and different prompts differ."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.core.hashing import (
    NO_EXTRAS,
    ROOT,
    Extras,
    chain,
    event_extras,
    extras_bytes,
    hash_block,
    pack_hashes,
    pack_tokens,
    unpack_hashes,
)

token_ids = st.integers(0, 2**32 - 1)
prompts = st.lists(token_ids, max_size=40)
names = st.none() | st.text(max_size=6)
extras_of_requests = st.builds(Extras, lora=names, salt=names)
hashes = st.integers(0, 2**64 - 1)


def engine_keys(extras: Extras, position: int) -> list[Any] | None:
    """Returns `extra_keys` of a block as vLLM's events have them: untagged, None where none."""
    keys = [] if extras.lora is None else [extras.lora]
    if extras.salt is not None and position == 0:
        keys.append(extras.salt)
    return keys or None


@given(prompts, st.integers(1, 8), hashes, extras_of_requests, st.integers(0, 3))
def test_a_chain_is_its_blocks_one_by_one(
    tokens: list[int], block_size: int, parent: int, extras: Extras, first_block: int
) -> None:
    """A router hashes a prompt in one go, a sidecar block by block: the names are equal."""
    expected = []
    seed = parent
    for number in range(len(tokens) // block_size):
        block = tokens[number * block_size : (number + 1) * block_size]
        keys = engine_keys(extras, first_block + number)
        seed = hash_block(pack_tokens(block), event_extras(extras.lora, keys), seed)
        expected.append(seed)
    assert chain(pack_tokens(tokens), block_size, parent, extras, first_block) == expected


@given(prompts, st.integers(1, 8), extras_of_requests, st.integers(0, 5))
def test_a_chain_can_be_continued_anywhere(
    tokens: list[int], block_size: int, extras: Extras, at: int
) -> None:
    """Hashing the new blocks of a next turn gives what hashing the whole prompt gives."""
    packed = pack_tokens(tokens)
    whole = chain(packed, block_size, extras=extras)
    at = min(at, len(whole))
    parent = whole[at - 1] if at else ROOT
    rest = memoryview(packed)[4 * block_size * at :]
    assert whole[:at] + chain(rest, block_size, parent, extras, at) == whole


@given(prompts, st.integers(1, 8), prompts)
def test_equal_hashes_mean_equal_prefixes(
    tokens: list[int], block_size: int, other: list[int]
) -> None:
    """Two prompts share the names of the blocks up to the first that differs, and none after."""
    mine, theirs = (chain(pack_tokens(ids), block_size) for ids in (tokens, tokens[:16] + other))
    same = len(tokens[:16]) // block_size
    assert mine[:same] == theirs[:same]
    for number, (one, another) in enumerate(zip(mine, theirs, strict=False)):
        end = (number + 1) * block_size
        assert (one == another) == (tokens[:end] == (tokens[:16] + other)[:end])


def test_a_partial_block_has_no_name() -> None:
    """Only whole blocks are cached, so only they are named."""
    for length in range(9):
        assert len(chain(pack_tokens(range(length)), 4)) == length // 4


def test_an_unknown_block_size_is_refused() -> None:
    """An instance that publishes no blocks says 0; hashing for it is a caller's mistake."""
    with pytest.raises(ValueError, match="must not be zero"):
        chain(pack_tokens([1, 2]), 0)


def test_order_and_position_matter() -> None:
    """Swapped tokens, swapped blocks and a repeated block all have names of their own."""
    blocks = [
        chain(pack_tokens(tokens), 2) for tokens in ([1, 2, 3, 4], [2, 1, 3, 4], [3, 4, 1, 2])
    ]
    repeated = chain(pack_tokens([5, 5, 5, 5, 5, 5]), 2)
    assert len({name for names in blocks for name in names}) == 6
    assert len(set(repeated)) == 3


GOLDEN = [
    (NO_EXTRAS, [0xF033_F5A9_C961_C83E, 0x6E2A_D6C7_678B_DC12, 0x38DE_6B04_2AA0_D622]),
    (
        Extras(lora="adapter-a"),
        [0x5CB5_8303_D801_59A1, 0x7415_1D1A_877A_6466, 0x656D_6CBB_2410_7B90],
    ),
    (
        Extras(salt="tenant-a"),
        [0xD1D4_4892_8E77_8227, 0x0E56_07BE_5502_B6FE, 0xBFB0_EDFA_C44A_66A9],
    ),
    (
        Extras("adapter-a", "tenant-a"),
        [0x32A8_8851_3B0A_29DE, 0xCABB_122B_9137_3873, 0xB51C_074B_6D35_C57F],
    ),
]


@pytest.mark.parametrize(("extras", "expected"), GOLDEN)
def test_the_names_on_the_wire_never_change(extras: Extras, expected: list[int]) -> None:
    """Routers and sidecars of all versions must agree: these values are the protocol."""
    tokens = pack_tokens([*range(100, 147), 2**32 - 1])
    assert chain(tokens, 16, extras=extras) == expected


def test_the_forms_under_the_names_never_change() -> None:
    """What goes into the hash, byte by byte."""
    assert pack_tokens([1, 258, 2**32 - 1]).hex(" ") == "01 00 00 00 02 01 00 00 ff ff ff ff"
    assert extras_bytes(None, []) == b""
    assert extras_bytes("a", []).hex(" ") == "92 a1 61 90"
    assert extras_bytes(None, ["s"]).hex(" ") == "92 c0 91 a1 73"
    assert extras_bytes("a", [["img", 3], "s"]).hex(" ") == "92 a1 61 92 92 a3 69 6d 67 03 a1 73"
    assert pack_hashes([1, 2**64 - 1]).hex(" ") == "01" + " 00" * 7 + " ff" * 8
    assert sys.byteorder == "little"


@given(extras_of_requests, extras_of_requests, st.integers(0, 1))
def test_adapters_and_salts_never_mix(one: Extras, other: Extras, position: int) -> None:
    """Requests of different adapters share nothing, of different salts nothing from the start."""
    tokens = pack_tokens(range(8))
    same = one.lora == other.lora and (position == 1 or one.salt == other.salt)
    names = [chain(tokens, 4, extras=extras, first_block=position) for extras in (one, other)]
    assert (names[0] == names[1]) == same
    assert same or not set(names[0]) & set(names[1])


@given(extras_of_requests, st.integers(0, 2))
def test_an_engines_untagged_keys_mean_the_requests_extras(extras: Extras, position: int) -> None:
    """An event lists the adapter's name and the salt untagged; taken apart, they hash alike."""
    keys = engine_keys(extras, position)
    assert event_extras(extras.lora, keys) == extras.of_block(position)


def test_a_salt_like_an_adapter_is_still_a_salt() -> None:
    """The adapter's name is taken out of the keys once; what is left over is told apart."""
    twice = event_extras("same", ["same", "same"])
    assert twice == Extras(lora="same", salt="same").of_block(0)
    assert len({twice, event_extras("same", ["same"]), event_extras(None, ["same"])}) == 3


def test_the_adapter_counts_even_where_the_keys_are_missing() -> None:
    """Versions of vLLM before `extra_keys` still name the adapter."""
    assert event_extras("a", None) == event_extras("a", []) == event_extras("a", ["a"])
    assert event_extras(None, None) == b""


def test_multimodal_items_count_in_the_engines_order() -> None:
    """(identifier, offset) pairs come as lists or tuples, before the salt, and order matters."""
    as_lists = event_extras(None, [["img-1", 3], ["img-2", 9], "salt"])
    assert as_lists == event_extras(None, [("img-1", 3), ("img-2", 9), "salt"])
    assert as_lists != event_extras(None, [["img-2", 9], ["img-1", 3], "salt"])
    assert as_lists != event_extras(None, [["img-1", 3], ["img-2", 9]])


@pytest.mark.parametrize("key", [object(), {1: 2}, {("a",): 1}])
def test_keys_without_a_canonical_form_are_refused(key: Any) -> None:
    """Rather no name than one that the other side may form differently."""
    with pytest.raises(TypeError):
        event_extras(None, [key])


@given(st.lists(hashes))
def test_hashes_come_back_from_the_wire(values: list[int]) -> None:
    """Packing and unpacking are inverse, also through a view."""
    packed = pack_hashes(values)
    assert len(packed) == 8 * len(values)
    assert unpack_hashes(packed) == unpack_hashes(memoryview(packed)) == values


@pytest.mark.parametrize("length", [1, 7, 9, 63])
def test_a_cut_hash_is_refused(length: int) -> None:
    """Bytes that are no whole number of hashes are not read as fewer."""
    with pytest.raises(ValueError, match="multiple"):
        unpack_hashes(b"x" * length)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1, 2, 2**64]])
def test_token_ids_need_32_bits(tokens: list[int]) -> None:
    """An id that cannot be one is refused, not cut to size."""
    with pytest.raises(OverflowError):
        pack_tokens(tokens)


@pytest.mark.parametrize("tokens", [["a"], [1.5], [None]])
def test_token_ids_are_integers(tokens: list[Any]) -> None:
    """Texts and fractions among the ids are refused."""
    with pytest.raises(TypeError):
        pack_tokens(tokens)


@pytest.mark.slow
def test_a_million_blocks_have_a_million_names() -> None:
    """Similar and repeated blocks do not collide, and the low half alone is as good as random."""
    counting = chain(pack_tokens(range(600_000)), 1)
    constant = chain(pack_tokens([7] * 400_000), 1)
    names = set(counting) | set(constant)
    assert len(names) == 1_000_000
    assert ROOT not in names
    low = len({name & 0xFFFF_FFFF for name in names})
    assert 999_700 < low < 1_000_000  # 2^32 values: about 116 pairs are expected to meet
