"""Any bytes whatever give a message or a RemoteError: no decoder raises anything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas import bus, openai, vllm_events
from schemas.codec import RemoteError, decoder, encode
from tests.schemas.golden_files import read_golden
from tests.schemas.samples import SAMPLES

BUS: list[Callable[[bytes], Any]] = [
    getattr(bus, name) for name in vars(bus) if name.startswith("decode_")
]
OPENAI: list[Callable[[bytes], Any]] = [openai.decode_chat, openai.decode_completion]

GOOD = [encode(message) for _, variants in SAMPLES.values() for message in variants.values()]
GOOD += [golden.octets for golden in read_golden("vllm_0_32").values()]
GOOD_JSON = [
    b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"n":2,"tools":[{}]}',
    b'{"model":"m","prompt":[[1,2],[3]],"stream_options":{"include_usage":true},"max_tokens":9}',
]

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=17)
    | st.datetimes(timezones=st.timezones())
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=17))
)
keys = st.text(max_size=6) | st.sampled_from(
    ["type", "ops", "events", "hashes", "epoch", "seq", "messages", "prompt", "model", "bookings"]
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(st.integers() | st.binary(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@st.composite
def damaged(draw: st.DrawFn, good: list[bytes]) -> bytes:
    """Returns good bytes with a stretch cut out, replaced or put in."""
    data = draw(st.sampled_from(good))
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(start + 8, len(data))))
    return data[:start] + draw(st.binary(max_size=8)) + data[end:]


def packed(tree: Any) -> bytes:
    """Returns a value in msgpack; what msgpack cannot carry becomes nil."""
    try:
        return msgspec.msgpack.encode(tree)
    except (OverflowError, ValueError):
        return b"\xc0"


def survive(decode: Callable[[bytes], Any], payload: bytes) -> Any:
    """Returns what a decoder makes of bytes; None for a RemoteError."""
    try:
        return decode(payload)
    except RemoteError:
        return None


@pytest.mark.slow
@settings(max_examples=300)
@given(st.binary(max_size=64) | damaged(GOOD) | trees.map(packed))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\x91" * 5000 + b"\x01")
@example(b"\x81" * 5000 + b"\x01")
def test_any_bytes_give_a_message_or_a_remote_error(payload: bytes) -> None:
    """Random, damaged and merely strange msgpack; what decodes is fit to be sent again."""
    survive(vllm_events.decode_batch, payload)
    for decode in BUS:
        message = survive(decode, payload)
        if message is not None:
            again = encode(message)
            assert encode(decode(again)) == again


@pytest.mark.slow
@settings(max_examples=300)
@given(st.binary(max_size=64) | damaged(GOOD_JSON))
@example(b"[" * 100_000)
@example(b'{"messages":[{"a":' + b"[" * 100_000)
@example(b'{"messages":[],"prompt":"\\ud800"}')
@example(b'{"messages":[],"prompt":"\xed\xa0\x80"}')
@example(b'{"messages":[],"prompt":' + b"9" * 5000 + b',"n":' + b"9" * 5000 + b"}")
@example(b'{"messages":[],"n":1e999}')
def test_any_body_is_a_request_or_a_remote_error(payload: bytes) -> None:
    """Random and damaged JSON; texts that decode have a UTF-8 form, as hashing needs."""
    for decode in OPENAI:
        request = survive(decode, payload)
        if request is not None:
            for text in (request.model, request.user or "", request.cache_salt or ""):
                assert text.encode().decode() == text


def test_the_error_keeps_its_cause() -> None:
    """Our error names the message and carries the library's, for whoever debugs."""
    decode = decoder(bus.Drain)
    with pytest.raises(RemoteError, match="not a Drain: Input data was truncated") as caught:
        decode(b"")
    assert isinstance(caught.value.__cause__, msgspec.DecodeError)
