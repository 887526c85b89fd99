"""Subjects and bucket keys: made and parsed in one place, matched by the wildcards beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import subjects
from schemas.codec import RemoteError

ids = st.text(min_size=1)
WITH_LAST: dict[str, Callable[[str, str], str]] = {
    "kv": subjects.kv,
    "load": subjects.load,
    "route": subjects.route,
    "snapshot": subjects.snapshot,
}
OF_MODEL: dict[str, Callable[[str], str]] = {
    "hotspot": subjects.hotspot,
    "policy": subjects.policy,
}


def matches(pattern: str, subject: str) -> bool:
    """Says whether a NATS subscription to `pattern` gets a message on `subject`."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        return len(tokens) >= len(wanted) and tokens[: len(wanted) - 1] == wanted[:-1]
    return tokens == wanted


def test_the_kinds_are_those_with_a_function() -> None:
    """No kind of subject is without its maker here."""
    assert {kind: kind in WITH_LAST for kind in WITH_LAST | OF_MODEL} == subjects.KINDS


@given(st.sampled_from(sorted(WITH_LAST)), ids, ids)
def test_subjects_of_instances_and_routers_come_back(kind: str, model: str, last: str) -> None:
    """Parsing gives the kind and the ids that made the subject, whatever they hold."""
    assert subjects.parse(WITH_LAST[kind](model, last)) == (kind, model, last)


@given(st.sampled_from(sorted(OF_MODEL)), ids)
def test_subjects_of_models_come_back(kind: str, model: str) -> None:
    """Parsing gives an empty last part where the kind has none."""
    assert subjects.parse(OF_MODEL[kind](model)) == (kind, model, "")


@given(ids, ids, ids)
def test_wildcards_match_their_subjects_and_no_others(model: str, other: str, last: str) -> None:
    """A subscription gets every message of its kind and model, and only those."""
    made = {kind: make(model, last) for kind, make in WITH_LAST.items()}
    made |= {kind: make(model) for kind, make in OF_MODEL.items()}
    for kind, subject in made.items():
        for wanted in subjects.KINDS:
            assert matches(subjects.all_of(wanted), subject) == (wanted == kind)
            of_model = subjects.all_of(wanted, other)
            assert matches(of_model, subject) == (wanted == kind and other == model)


@given(ids, ids)
def test_keys_come_back(model: str, part: str) -> None:
    """A bucket key gives the ids that made it, and its prefix is the model's token."""
    key = subjects.key(model, part)
    assert subjects.parse_key(key) == (model, part)
    assert key.count(".") == 1


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "mp",
        "mp.v1",
        "mp.v1.kv",
        "mp.v1.kv.m",
        "mp.v1.kv.m.i.x",
        "mp.v1.kv..i",
        "mp.v1.kv.m.",
        "mp.v1.kv.m.=zz",
        "mp.v1.hotspot.m.i",
        "mp.v1.weather.m",
        "mp.v2.kv.m.i",
        "xmp.v1.kv.m.i",
        "_INBOX.abc.def",
    ],
)
def test_foreign_subjects_are_refused(subject: str) -> None:
    """A subject that no function here makes is a RemoteError, never a guess."""
    with pytest.raises(RemoteError):
        subjects.parse(subject)


@given(st.text(st.characters()))
def test_any_text_is_a_subject_or_a_remote_error(text: str) -> None:
    """Parsing raises nothing else."""
    for parse in (subjects.parse, subjects.parse_key):
        with pytest.raises(RemoteError):
            parse(f"mp.v1.kv.{text}.=")
        try:
            parse(text)
        except RemoteError:
            continue


@pytest.mark.parametrize("key", ["", "m", "m.", ".i", "m.i.x", "m.=2f"])
def test_foreign_keys_are_refused(key: str) -> None:
    """A bucket key that `key` did not make is a RemoteError."""
    with pytest.raises(RemoteError):
        subjects.parse_key(key)


def test_the_audit_log_records_every_published_kind() -> None:
    """Each kind but the request/reply one is in exactly one stream."""
    patterns = sorted(subjects.STREAMS.values())
    assert patterns == sorted(
        subjects.all_of(kind) for kind in subjects.KINDS if kind != "snapshot"
    )
