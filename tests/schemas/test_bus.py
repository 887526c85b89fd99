"""The messages on the bus: their golden bytes, what decoding checks, what newer senders may add."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from schemas import bus
from schemas.codec import RemoteError, encode
from tests.schemas.golden_files import read_golden
from tests.schemas.samples import HASHES, SAMPLES, golden_text

VARIANTS = [(name, variant) for name, (_, variants) in SAMPLES.items() for variant in variants]
each_variant = pytest.mark.parametrize(("name", "variant"), VARIANTS)


@each_variant
def test_golden_bytes_mean_what_they_meant(name: str, variant: str) -> None:
    """Bytes of an earlier version decode to the message they were made of."""
    decode, messages = SAMPLES[name]
    assert decode(read_golden(name)[variant].octets) == messages[variant]


@each_variant
def test_the_encoder_still_gives_the_golden_bytes(name: str, variant: str) -> None:
    """What is sent today is what earlier receivers know, byte for byte."""
    message = SAMPLES[name][1][variant]
    golden = read_golden(name)[variant]
    assert encode(message) == golden.octets, f"today it would be\n{golden_text(name)}"
    assert msgspec.json.decode(golden.readable) == msgspec.json.decode(msgspec.json.encode(message))


def structs_in(value: Any) -> list[msgspec.Struct]:
    """Returns a message and every struct inside it."""
    if isinstance(value, msgspec.Struct):
        fields = [getattr(value, name) for name in value.__struct_fields__]
        return [value, *(inner for field in fields for inner in structs_in(field))]
    if isinstance(value, list):
        return [inner for item in value for inner in structs_in(item)]
    return []


def test_every_field_of_every_message_is_in_a_golden_file() -> None:
    """Each class of the bus occurs, and each of its fields with another value than its default."""
    classes = {
        value
        for value in vars(bus).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    } - {bus.Message}
    expected = {(cls.__name__, field.name) for cls in classes for field in fields_of(cls)}
    seen = {
        (type(struct).__name__, field.name)
        for _, variants in SAMPLES.values()
        for message in variants.values()
        for struct in structs_in(message)
        for field in fields_of(type(struct))
        if getattr(struct, field.name) != default_of(field)
    }
    assert expected - seen == set()


def fields_of(cls: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Returns the fields of a struct class."""
    return msgspec.structs.fields(cls)


def default_of(field: msgspec.structs.FieldInfo) -> Any:
    """Returns a field's default, NODEFAULT where it has none."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def as_newer(value: Any) -> Any:
    """Returns what a newer sender packs for a message: every struct has fields more."""
    if isinstance(value, list):
        return [as_newer(item) for item in value]
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {name: as_newer(getattr(value, name)) for name in value.__struct_fields__}
    config = value.__struct_config__
    if config.array_like:
        return [*fields.values(), {"new": 1}]
    tag = {} if config.tag is None else {config.tag_field: config.tag}
    return {
        "new_in_front": b"x",
        **tag,
        **fields,
        "new": [1, {"deep": None}],
    }


@each_variant
def test_fields_of_a_newer_version_are_ignored(name: str, variant: str) -> None:
    """An unknown field at any level costs nothing: routers and sidecars upgrade one by one."""
    decode, messages = SAMPLES[name]
    newer = msgspec.msgpack.encode(as_newer(messages[variant]))
    assert decode(newer) == messages[variant]


@each_variant
def test_a_view_decodes_like_bytes(name: str, variant: str) -> None:
    """Payloads need not be copied out of a buffer."""
    decode, messages = SAMPLES[name]
    assert decode(memoryview(encode(messages[variant]))) == messages[variant]


def changed(name: str, path: tuple[str | int, ...], value: Any) -> bytes:
    """Returns the full sample of a message with one value replaced."""
    tree = msgspec.msgpack.decode(encode(SAMPLES[name][1]["full"]))
    spot = tree
    for step in path[:-1]:
        spot = spot[step]
    spot[path[-1]] = value
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("kv_batch", ("epoch",), -1),
        ("kv_batch", ("seq",), -1),
        ("kv_batch", ("count",), -1),
        ("kv_batch", ("ops", 1, "hashes"), HASHES[:9]),
        ("kv_batch", ("ops", 3, "hashes"), HASHES[:-1]),
        ("kv_batch", ("ops", 2, "parent"), -5),
        ("kv_batch", ("ops", 2, "tier"), -1),
        ("kv_batch", ("ops", 0, "type"), "exploded"),
        ("kv_batch", ("type",), "load"),
        ("snapshot_chunk", ("hashes",), HASHES[:7]),
        ("snapshot_chunk", ("chunks",), -1),
        ("load_report", ("running",), -3),
        ("load_report", ("waiting",), 2**60),
        ("load_report", ("kv_usage",), math.nan),
        ("load_report", ("prefill_tokens_per_s",), math.inf),
        ("route_batch", ("events", 0, "epochs"), bytes(8)),
        ("route_batch", ("events", 1, "new_tokens"), -64),
        ("route_batch", ("events", 1, "candidates", "version"), -1),
        ("route_batch", ("events", 3, "released_tokens"), 2**63),
        ("route_batch", ("events", 4, "bookings", "gpu-1:8000"), [-1, 0, 0]),
        ("hotspot_raised", ("ttl_s",), math.nan),
        ("policy_override", ("ttl_s",), -1.0),
        ("instance_record", ("heartbeat_s",), math.nan),
        ("instance_record", ("state",), "on fire"),
        ("instance_record", ("block_size",), -16),
    ],
)
def test_what_nobody_could_use_is_refused(
    name: str, path: tuple[str | int, ...], value: Any
) -> None:
    """Negative or absurd counts, cut hashes and durations that are no number are RemoteErrors."""
    with pytest.raises(RemoteError):
        SAMPLES[name][0](changed(name, path, value))


def test_the_largest_hashes_fit() -> None:
    """Block hashes, digests and epochs use all 64 bits."""
    top = 2**64 - 1
    message = bus.KvBatch(
        "a", top, 0, 0.0, [bus.KvStored(b"\xff" * 8, parent=top)], count=1, digest=top
    )
    assert bus.decode_kv(encode(message)) == message


def test_a_cut_hash_cannot_be_sent_either() -> None:
    """Our own mistake shows where it is made."""
    with pytest.raises(ValueError, match="7 bytes, which is no multiple of 8"):
        bus.KvRemoved(b"1234567")


def test_an_error_says_what_was_expected_and_what_came() -> None:
    """The text names the message, the spot and the fault."""
    with pytest.raises(RemoteError, match=r"not a KvBatch: .*`int` >= 0.*\$\.seq"):
        bus.decode_kv(changed("kv_batch", ("seq",), -1))


def test_subjects_with_several_messages_tell_them_apart() -> None:
    """One decoder serves each of a subject's messages, by its tag."""
    drain = SAMPLES["drain"][1]["full"]
    override = SAMPLES["policy_override"][1]["full"]
    assert bus.decode_policy(encode(drain)) == drain
    assert bus.decode_policy(encode(override)) == override
    with pytest.raises(RemoteError):
        bus.decode_hotspot(encode(drain))
