"""Who else speaks for an instance."""

from __future__ import annotations

from sidecar.rivals import Rivals
from tests.core.plane_helpers import record


def test_only_what_was_never_said_here_is_a_rivals_word() -> None:
    """An earlier epoch of our own, a stopped record, and what was there before us are not."""
    rivals = Rivals()
    assert rivals.look(record("a", epoch=1)) == "", "the word of an earlier life"
    for epoch in (10, 20):
        rivals.said(record("a", epoch=epoch))
        assert rivals.look(record("a", epoch=10)) == ""
    assert rivals.look(record("a", epoch=15, state="stopped")) == ""
    assert rivals.look(record("b", epoch=15)) == ""


def test_a_rival_is_named_once_until_it_is_gone() -> None:
    """The complaint says of which engine the other one speaks, and what to do."""
    rivals = Rivals()
    rivals.said(record("a", epoch=10))
    said = [rivals.look(record("a", epoch=15 + n, url="http://other:1")) for n in range(3)]
    assert "the engine at http://other:1, speaks for a too" in said[0]
    assert "--instance-id" in said[0]
    assert said[1:] == ["", ""]
    assert rivals.look(record("a", epoch=10)) == ""
    assert not rivals.known
    assert rivals.look(record("a", epoch=30))


def test_the_epochs_that_are_remembered_are_bounded() -> None:
    """An engine that restarts for ever costs no memory; the latest ones are known."""
    rivals = Rivals()
    for epoch in range(1000):
        rivals.said(record("a", epoch=epoch))
    assert rivals.look(record("a", epoch=990)) == ""
    assert rivals.look(record("a", epoch=500))
