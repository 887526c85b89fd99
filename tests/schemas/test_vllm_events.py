"""vLLM's KV events: both encodings, every age of them, and a bad event among good ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import RemoteError
from schemas.vllm_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
    encode_batch,
)
from tests.schemas.golden_files import read_golden

TOP = 2**64 - 1
STORED = ["BlockStored", [11, TOP], None, [1, 2, 3, 4], 2]
REMOVED = ["BlockRemoved", [11]]
CLEARED = ["AllBlocksCleared"]

pack = msgspec.msgpack.encode
captured = read_golden("vllm_0_32")


def batch(*events: Any, rank: Any = 0) -> bytes:
    """Returns a payload as vLLM frames it, of events in any form."""
    return pack([1.5, list(events), rank])


def as_map(event: Event) -> dict[str, Any]:
    """Returns an event as vLLM 0.24 and later send it: a map with the tag among its keys."""
    return {"type": kind(event), **msgspec.structs.asdict(event)}


def as_array(event: Event) -> list[Any]:
    """Returns an event as vLLM 0.23 and earlier sent it: an array that begins with the tag."""
    return [kind(event), *msgspec.structs.astuple(event)]


def kind(event: Event) -> str:
    """Returns vLLM's tag of an event."""
    kinds = (BlockStored, BlockRemoved, AllBlocksCleared)
    return next(cls.__name__ for cls in kinds if isinstance(event, cls))


def read(payload: bytes) -> list[dict[str, Any]]:
    """Returns the decoded events in a form that compares by content."""
    return [as_map(event) for event in decode_batch(payload).events]


@pytest.mark.parametrize("name", captured)
def test_events_of_vllm_0_32_decode(name: str) -> None:
    """What a real engine sent is understood whole, and means what it shows in JSON."""
    ts, events, rank = msgspec.json.decode(captured[name].readable)
    decoded = decode_batch(captured[name].octets)
    assert (decoded.ts, decoded.rejected, decoded.data_parallel_rank) == (ts, 0, rank)
    for event, fields in zip(decoded.events, events, strict=True):
        assert as_map(event) == {**dict.fromkeys(as_map(event)), **fields}


@pytest.mark.parametrize("name", captured)
def test_our_encoder_speaks_as_vllm_0_32(name: str) -> None:
    """What the emulated engine publishes is what vLLM would, byte for byte."""
    decoded = decode_batch(captured[name].octets)
    again = encode_batch(decoded.ts, decoded.events, decoded.data_parallel_rank)
    assert again == captured[name].octets


def test_a_cold_prompt_of_vllm_0_32_in_full() -> None:
    """The fields that the mirror lives on, spelled out once."""
    (event,) = decode_batch(captured["a chain at the root"].octets).events
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [
        702757842669265042,
        12727516518541667169,
        15631151903963918176,
    ]
    assert event.parent_block_hash is None
    assert event.token_ids == list(range(100, 196))
    assert (event.block_size, event.medium, event.lora_name) == (32, "GPU", None)
    assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
    (salted,) = decode_batch(captured["with a cache salt"].octets).events
    assert isinstance(salted, BlockStored)
    assert salted.extra_keys == [["tenant-a"], None, None]


WHOLE = BlockStored(
    [11, TOP],
    7,
    [1, 2, 3, 4],
    2,
    lora_id=3,
    medium="GPU",
    lora_name="adapter-a",
    extra_keys=[["adapter-a", "salt"], ["adapter-a"]],
    group_idx=1,
    kv_cache_spec_kind="full_attention",
    kv_cache_spec_sliding_window=512,
    locality="LOCAL",
    ownership="disk",
    session_id="s-9",
)


@pytest.mark.parametrize("length", range(5, len(BlockStored.__struct_fields__) + 2))
def test_arrays_of_every_age_decode(length: int) -> None:
    """An older vLLM knew fewer fields and sent shorter arrays; the rest keeps its default."""
    (event,) = decode_batch(batch(as_array(WHOLE)[:length])).events
    known = BlockStored(*msgspec.structs.astuple(WHOLE)[: length - 1])
    assert as_map(event) == as_map(known)


def test_bare_arrays_decode() -> None:
    """The shortest form of each event, as the first versions sent them."""
    assert read(batch(STORED, REMOVED, CLEARED)) == [
        as_map(BlockStored([11, TOP], None, [1, 2, 3, 4], 2)),
        as_map(BlockRemoved([11])),
        as_map(AllBlocksCleared()),
    ]


def test_bare_maps_decode() -> None:
    """A map needs no more than what has no default."""
    stored = {
        "type": "BlockStored",
        "block_hashes": [11, TOP],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
    }
    payload = batch(
        stored, {"type": "BlockRemoved", "block_hashes": [11]}, {"type": "AllBlocksCleared"}
    )
    assert read(payload) == read(batch(STORED, REMOVED, CLEARED))


def test_what_a_newer_vllm_adds_is_ignored() -> None:
    """Unknown keys in maps, more elements in arrays and in the batch itself cost nothing."""
    stored = {**as_map(WHOLE), "temperature": {"of": ["the", "block"]}}
    stored = {"colour": 1, **stored}
    array = [*as_array(WHOLE), "more", {"and": "more"}]
    payload = pack(
        [1.5, [stored, array, [*CLEARED, 1], {"type": "AllBlocksCleared", "x": 2}], 1, "new"]
    )
    decoded = decode_batch(payload)
    assert decoded.rejected == 0
    assert [as_map(event) for event in decoded.events[:2]] == [as_map(WHOLE)] * 2
    assert len(decoded.events) == 4
    assert decoded.data_parallel_rank == 1


BAD = {
    "unknown tag in an array": ["BlockTeleported", [1]],
    "unknown tag in a map": {"type": "BlockTeleported", "block_hashes": [1]},
    "no tag": {"block_hashes": [1]},
    "empty array": [],
    "empty map": {},
    "no event at all": None,
    "a number": 5,
    "a text": "BlockStored",
    "bytes": b"\x91",
    "hashes are missing": ["BlockRemoved"],
    "block size is missing": STORED[:4],
    "a hash is a text": ["BlockRemoved", ["11"]],
    "a hash is a float": ["BlockRemoved", [1.5]],
    "tokens are texts": ["BlockStored", [1], None, ["a"], 1],
    "block size is a text": {**as_map(WHOLE), "block_size": "16"},
    "extra keys are no lists": {**as_map(WHOLE), "extra_keys": [1, 2]},
    "extra keys hold an unhashable key": [
        *as_array(WHOLE)[:8],
        msgspec.Raw(b"\x91\x91\x81\x80\x01"),
    ],
    "a text is no UTF-8": ["BlockRemoved", [1], msgspec.Raw(b"\xa2\xff\xff")],
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_event_costs_only_itself(name: str) -> None:
    """Its neighbours are kept in order, and it is counted."""
    decoded = decode_batch(batch(STORED, BAD[name], REMOVED, BAD[name], as_map(AllBlocksCleared())))
    assert [kind(event) for event in decoded.events] == [
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    ]
    assert decoded.rejected == 2


@pytest.mark.parametrize("name", [0, TOP, -(2**63), b"", b"\x00" * 32, b"\xff" * 32])
@pytest.mark.parametrize("form", [as_map, as_array])
def test_any_name_of_a_block_is_kept_as_it_is(form: Any, name: int | bytes) -> None:
    """Engine hashes are opaque: integers of either sign and size, or bytes."""
    stored = BlockStored([name], name, [], 16)
    (event, removed) = decode_batch(batch(form(stored), form(BlockRemoved([name])))).events
    assert isinstance(event, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert (event.block_hashes, event.parent_block_hash) == ([name], name)
    assert removed.block_hashes == [name]


@pytest.mark.parametrize("form", [as_map, as_array])
def test_absurd_token_ids_are_left_to_the_mirror(form: Any) -> None:
    """A token id outside 32 bits is well-formed msgpack; hashing refuses it later."""
    (event,) = decode_batch(batch(form(BlockStored([1], None, [-1, TOP], 2)))).events
    assert isinstance(event, BlockStored)
    assert event.token_ids == [-1, TOP]


@pytest.mark.parametrize(
    ("payload", "rank"),
    [
        (pack([1.5, []]), None),
        (pack([1.5, [], None]), None),
        (pack([1, [], 3]), 3),
    ],
)
def test_the_rank_may_be_absent(payload: bytes, rank: int | None) -> None:
    """Old versions sent none; a time stamp without a fraction is a number too."""
    decoded = decode_batch(payload)
    assert (decoded.data_parallel_rank, decoded.events, decoded.rejected) == (rank, [], 0)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93",
        pack({}),
        pack([]),
        pack([1.5]),
        pack(["now", []]),
        pack([1.5, {}]),
        pack([1.5, [], "rank"]),
        pack([1.5, [], 0]) + b"\x00",
        batch(STORED)[:-3],
        batch(msgspec.Raw(b"\x91" * 9999 + b"\x01")),
        b"\x92\x01\xdd\xff\xff\xff\xff",
    ],
)
def test_what_is_no_batch_is_a_remote_error(payload: bytes) -> None:
    """A broken frame is refused whole, with the reason; a huge announced length takes no memory."""
    with pytest.raises(RemoteError, match="not a KV event batch: "):
        decode_batch(payload)


names = st.integers(-(2**63), TOP) | st.binary(max_size=32)
texts = st.none() | st.text(max_size=8)
numbers = st.none() | st.integers(0, 2**31)
stored_events = st.builds(
    BlockStored,
    st.lists(names, max_size=4),
    st.none() | names,
    st.lists(st.integers(0, 2**32 - 1), max_size=8),
    st.integers(1, 256),
    lora_id=numbers,
    medium=texts,
    lora_name=texts,
    extra_keys=st.none()
    | st.lists(
        st.none() | st.lists(st.text(max_size=4) | st.integers(0, 9), max_size=3), max_size=4
    ),
    group_idx=numbers,
    kv_cache_spec_kind=texts,
    kv_cache_spec_sliding_window=numbers,
    locality=texts,
    ownership=texts,
    session_id=texts,
)
removed_events = st.builds(
    BlockRemoved,
    st.lists(names, max_size=4),
    medium=texts,
    group_idx=numbers,
    locality=texts,
    ownership=texts,
)
events = st.lists(stored_events | removed_events | st.builds(AllBlocksCleared), max_size=4)


@pytest.mark.slow
@given(events, st.none() | st.integers(0, 64), st.floats(0, 4e9))
def test_both_encodings_say_the_same(sent: list[Event], rank: int | None, ts: float) -> None:
    """What either encoding carries comes back as it was, as a view or as bytes."""
    for encoding in ("map", "array"):
        payload = encode_batch(ts, sent, rank, encoding)
        decoded = decode_batch(memoryview(payload))
        assert [as_map(event) for event in decoded.events] == [as_map(event) for event in sent]
        assert (decoded.ts, decoded.data_parallel_rank, decoded.rejected) == (ts, rank, 0)
        assert encode_batch(ts, decoded.events, rank, encoding) == payload
