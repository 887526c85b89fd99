"""Texts are cut only where the pieces' tokens are the whole's, and where it is of use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.segments import CUTS_MAX, AddedToken, Cutter, choose_cuts, safe_cuts


def added(content: str, **flags: bool) -> AddedToken:
    """Returns an added token that is matched in the raw text."""
    return AddedToken(1, content, **{"normalized": False, **flags})


@pytest.mark.parametrize("flag", ["normalized", "lstrip", "single_word"])
def test_a_token_that_looks_to_its_left_is_no_cut(flag: str) -> None:
    """Flags that make a match depend on what is before it rule a token out."""
    assert safe_cuts([added("<a>"), added("<b>", **{flag: True})]) == ["<a>"]


def test_a_token_that_strips_to_its_right_is_a_cut() -> None:
    """What follows a token is in its own segment, so `rstrip` does no harm."""
    assert safe_cuts([added("<a>", rstrip=True)]) == ["<a>"]


@pytest.mark.parametrize(
    ("token", "other"),
    [("<a>", "x<a"), ("<a>", "x<a>"), ("<a>", "x<a>y"), ("aba", "zzz"), ("<a>", "y<")],
)
def test_a_token_into_which_another_match_reaches_is_no_cut(token: str, other: str) -> None:
    """A match that begins earlier could swallow the token, or its own earlier copy could."""
    assert token not in safe_cuts([added(token), added(other)])


@pytest.mark.parametrize("other", ["<a>b", "<", "a", "<a", "<aa>"])
def test_tokens_that_begin_alike_are_cuts(other: str) -> None:
    """A longer or shorter match that begins at the same place leaves the cut where it is."""
    assert "<a>" in safe_cuts([added("<a>"), added(other)])


def test_a_word_token_is_no_cut_beside_single_words() -> None:
    """A `single_word` token before the cut would see a word letter instead of the text's end."""
    tokens = [added("word"), added("<a>"), added("one", single_word=True)]
    assert safe_cuts(tokens) == ["<a>"]


def test_the_fewest_cuts_are_chosen() -> None:
    """One token that begins every turn is enough; one at the turns' ends adds nothing."""
    safe = ["<e>", "<s>", "<never>"]
    first = "<s>system" + "x" * 99 + "<e>\n<s>user" + "y" * 99 + "<e>\n<s>answer"
    assert choose_cuts(safe, [(first, first + "z")]) == ["<s>"]


def test_more_cuts_are_chosen_where_they_share_more() -> None:
    """Without a token that begins all turns, those that begin some are taken together."""
    opening = "<b>system" + "x" * 99
    turn = opening + "<U>" + "u" * 99 + "<A>"
    pairs = [(turn, turn + "a" * 99 + "<U>"), (opening + "<U>one", opening + "<U>two")]
    assert choose_cuts(["<b>", "<U>", "<A>"], pairs) == ["<U>", "<A>"]


def test_without_an_example_all_cuts_are_taken_up_to_a_bound() -> None:
    """A model without a chat template is cut at its first few special tokens."""
    assert choose_cuts([f"<{i}>" for i in range(9)], []) == [f"<{i}>" for i in range(CUTS_MAX)]


def test_useless_cuts_are_left_out() -> None:
    """Prompts with nothing to share, or without any of the tokens, choose no cut."""
    assert choose_cuts(["<a>"], [("abc", "xyz"), ("long" * 99, "long" * 99)]) == []


@given(st.text("ab<>", max_size=40))
def test_segments_make_up_the_text(text: str) -> None:
    """No letter is lost, no segment is empty, and each after the first begins with a cut."""
    segments = Cutter(["<a>", "<b>"]).cut(text)
    assert "".join(segments) == text
    assert all(segments)
    assert all(segment.startswith(("<a>", "<b>")) for segment in segments[1:])
    assert sum(segment.count("<a>") + segment.count("<b>") for segment in segments) <= len(segments)


@given(st.text("ab<>", max_size=20), st.text("ab<>", max_size=20))
def test_a_longer_text_has_the_same_first_segments(text: str, more: str) -> None:
    """Whatever follows a cut, the segments before it stay as they are."""
    cutter = Cutter(["<a>"])
    before = cutter.cut(text + "<a>")[:-1]
    assert cutter.cut(text + "<a>" + more)[: len(before)] == before
