"""Where a prompt's text may be cut so that the pieces' tokens, put together, are the whole's.

A tokenizer looks for its added tokens first, in the text as it is; what lies between them is then
normalised, pre-tokenized and merged piece by piece, no piece seeing another. So a cut right before
an added token is exact, whatever the rest of the pipeline does, if every occurrence of its text is
where a match begins:

- it is matched in the raw text (`normalized` off): other tokens are matched later, inside pieces;
- its match does not depend on what is before it: no `lstrip`, no `single_word`;
- no match that begins earlier can reach into it: no added token's end, short of all of it, is its
  beginning, and none contains it after its first letter;
- a `single_word` token just before the cut meets the same kind of letter as at the text's end: the
  cut token must not begin with a word letter.

The one thing in a pipeline that depends on position, a prefix at the very beginning of the text
(Metaspace), falls on the cut token itself, which is never touched. The tokenizer's JSON is what is
analysed; `router/tokenizer.py` then tries the result on random texts.

Source: tokenizers, src/tokenizer/added_vocabulary.rs and pre_tokenizer.rs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

CUTS_MAX = 4
"""More kinds of cuts than turns of a chat have ends and beginnings only cost time."""

_SHORT_CHARS = 16  # a better cut must save more text than a role's header


def _message(role: str, letter: str) -> dict[str, Any]:
    return {"role": role, "content": letter * 400}


_SYSTEM, _USER, _ANSWER, _OTHER = (
    _message("system", "s"),
    _message("user", "u"),
    _message("assistant", "a"),
    _message("user", "o"),
)
PROBES: Final = (
    ([_USER], [_USER, _ANSWER, _OTHER]),
    ([_SYSTEM, _USER], [_SYSTEM, _OTHER]),
    ([_USER, _ANSWER, _USER], [_USER, _ANSWER, _OTHER]),
)
"""Pairs of chats whose texts begin alike, by which good cuts are chosen."""


class AddedToken(msgspec.Struct, frozen=True):
    """An entry of `added_tokens` in a tokenizer.json."""

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


def safe_cuts(added: Sequence[AddedToken]) -> list[str]:
    """Return the texts of the added tokens before which any text may be cut, in their order."""
    single_words = any(token.single_word for token in added)
    endings = {token.content[at:] for token in added for at in range(1, len(token.content))}
    return [
        token.content
        for token in added
        if token.content
        and not (token.normalized or token.lstrip or token.single_word)
        and not (single_words and _is_word(token.content[0]))
        and not any(token.content[:end] in endings for end in range(1, len(token.content) + 1))
        and not any(other.content.find(token.content, 1) > 0 for other in added)
    ]


def _is_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


def choose_cuts(safe: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the fewest of `safe` that let two prompts share what they have in common.

    Args:
        safe: what `safe_cuts` returned.
        pairs: texts of two prompts that begin alike, as two turns of one chat do.

    Returns:
        At most `CUTS_MAX` texts; all the common ones of `safe` where there are no pairs.
    """
    if not pairs:
        return list(safe[:CUTS_MAX])
    common = [(first, _common_chars(first, second)) for first, second in pairs]
    present = [text for text in safe if any(text in first for first, _ in common)]
    chosen: list[str] = []
    wasted = sum(chars for _, chars in common)
    while len(chosen) < CUTS_MAX:
        left = {text: _wasted_chars(common, [*chosen, text]) for text in present}
        best = min(left, key=lambda text: left[text], default=None)
        if best is None or left[best] > wasted - _SHORT_CHARS:
            break
        wasted = left[best]
        chosen.append(best)
    return chosen


def _common_chars(first: str, second: str) -> int:
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))


def _wasted_chars(common: Sequence[tuple[str, int]], cuts: Sequence[str]) -> int:
    """Return how many common characters come after the last cut inside the common part."""
    return sum(
        chars - max(0, *(text.rfind(cut, 0, chars) for cut in cuts)) for text, chars in common
    )


class Cutter:
    """Cuts texts before every occurrence of a few added tokens."""

    def __init__(self, cuts: Sequence[str]) -> None:
        self.cuts = tuple(cuts)
        # A single one, as most templates have it, is found faster without a pattern.
        several = len(self.cuts) > 1
        self._pattern = re.compile("|".join(map(re.escape, cuts))) if several else None
        self._letters = {cut[0] for cut in cuts}

    def cut(self, text: str) -> list[str]:
        """Return the segments of a text, in order; none is empty, and joined they are the text."""
        if not text:
            return []
        starts = self._starts(text)
        if not starts:
            return [text]
        if starts[0] != 0:
            starts.insert(0, 0)
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]

    def _starts(self, text: str) -> list[int]:
        """Return where the cuts are."""
        # One letter is searched for some twenty times faster than a word or a pattern.
        if not any(letter in text for letter in self._letters):
            return []
        if self._pattern is not None:
            return [match.start() for match in self._pattern.finditer(text)]
        found: list[int] = []
        for cut in self.cuts:
            at = text.find(cut)
            while at >= 0:
                found.append(at)
                at = text.find(cut, at + len(cut))
        return found
