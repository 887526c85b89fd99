"""Byte-level BPE a word at a time, from memory: most words of a text were merged before.

Nearly all of a tokenizer's time goes into cutting a text into words and spelling their bytes. For
the common family (GPT-2's, Llama 3's, Qwen's: one regular expression, then byte-level BPE) both are
done here by Python's `re` and a dict; only a word never seen goes to the BPE model. About eight
times faster, and the same ids: `router/tokenizer.py` compares both on random texts before use.

Exact by construction for texts of *settled* letters: those whose Unicode class was the same in
Unicode 3.2 as today, so that no two libraries disagree about them; plus emoji. A text with any
other letter, or one that the normaliser would change, is left to the tokenizer itself.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

from router.segments import AddedToken

WORDS_MAX_DEFAULT = 65_536
_ASCII, _BASIC_PLANE = 0x80, 0x10000
_WORD_CHARS_MAX = 64  # longer words are rare and would make the memory's size unpredictable

_GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WHITE_SPACE: Final = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's property
)
# Case folding ties these to ASCII letters, and libraries fold differently.
_FOLDING: Final = frozenset("\u0130\u0131\u017f\u212a\u212b") | {
    chr(c) for c in range(0xFB00, 0xFB07)
}
# Blocks of emoji: symbols all, today and in every version that knows them.
_EMOJI: Final = ((0x1F300, 0x1F64F), (0x1F680, 0x1F6FF), (0x1F900, 0x1F9FF))

# One step of a pattern: what may stand outside and inside a class. All else is not followed.
_STEP: Final = re.compile(
    r"(?P<prop>\\p\{(?P<name>L[ultmo]?|M[nce]?|N[dlo]?)\})|(?P<space>\\s)|(?P<solid>\\S)"
    r"|(?P<escape>\\[rnt'/\\-])|(?P<open>\[\^?)|(?P<close>\])|(?P<group>\(\?(?:i:|!|=|:)|[()|?*+])"
    r"|(?P<count>\{\d+(?:,\d*)?\}(?![?+]))|(?P<plain>[A-Za-z0-9 '!\"#%,/:;<=>@_`-])"
)


class _NotFollowed(ValueError):
    """A tokenizer that is not of the family."""


class _Alphabet:
    """The settled letters below `end`, by Unicode class."""

    def __init__(self, end: int) -> None:
        now, then = unicodedata.category, unicodedata.ucd_3_2_0.category
        self._classes: dict[str, list[int]] = {}
        self._all: list[int] = []
        for code in range(end):
            letter = chr(code)
            kind = now(letter)
            if kind == then(letter) and kind not in ("Cn", "Co", "Cs") and letter not in _FOLDING:
                self._all.append(code)
                self._classes.setdefault(kind, []).append(code)

    def letters(self, name: str) -> str:
        """Return the letters of a class (`L`, `Lu` …) as ranges for a class of `re`."""
        kinds = [codes for kind, codes in self._classes.items() if kind.startswith(name)]
        return _ranges(sorted(code for codes in kinds for code in codes))

    def settled(self) -> str:
        """Return all letters as ranges, emoji with them."""
        emoji = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in _EMOJI)
        return _ranges(self._all) + emoji


@cache
def _alphabet(end: int) -> _Alphabet:
    return _Alphabet(end)


def _ranges(codes: Sequence[int]) -> str:
    if not codes:
        return "\\uffff"  # no settled letter; keeps a class from being empty
    out: list[str] = []
    start = previous = codes[0]
    for code in [*codes[1:], -1]:
        if code != previous + 1:
            out.append(f"\\u{start:04x}-\\u{previous:04x}")
            start = code
        previous = code
    return "".join(out)


def _translate(pattern: str, alphabet: _Alphabet) -> str:
    """Return an Oniguruma pattern as one for `re`, for texts of the alphabet's letters.

    Raises:
        _NotFollowed: it has something whose meaning may differ between the two.
    """
    out: list[str] = []
    at, inside = 0, False
    while at < len(pattern):
        step = _STEP.match(pattern, at)
        if step is None or (inside and step.lastgroup in ("solid", "open")):
            raise _NotFollowed(f"pattern at {at}")
        kind, text = step.lastgroup, step.group()
        if step["name"]:
            ranges = alphabet.letters(step["name"])
            text = ranges if inside else f"[{ranges}]"
        elif kind == "space":
            text = _WHITE_SPACE if inside else f"[{_WHITE_SPACE}]"
        elif kind == "solid":
            text = f"[^{_WHITE_SPACE}]"
        elif inside and kind in ("group", "count"):
            text = re.escape(text)
        elif text == "(":
            text = "(?:"
        inside = (inside or kind == "open") and kind != "close"
        out.append(text)
        at = step.end()
    return "".join(out)


def _byte_letters() -> str:
    """Return the letters by which byte-level vocabularies spell the 256 bytes, in their order.

    Source: Radford et al. 2019 (GPT-2), bytes_to_unicode.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(spare)) for byte in range(256))


_LETTERS: Final = _byte_letters()
_SPACE: Final = _LETTERS[0x20]


def _spell(word: str) -> str:
    """Return a word's bytes in a byte-level vocabulary's letters."""
    if word.isascii():
        if word.isalnum():
            return word
        if word[0] == " " and word[1:].isalnum():
            return _SPACE + word[1:]
    # Latin-1 makes each byte the letter of its number, which is its place in the table.
    return word.encode().decode("latin-1").translate(_LETTERS)


def _split_pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the regular expression that cuts words, for a pre-tokenizer of the family."""
    steps = pre_tokenizer or {}
    parts = steps.get("pretokenizers", []) if steps.get("type") == "Sequence" else [steps]
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space", True):
        raise _NotFollowed("the pre-tokenizer")
    own_regex = parts[-1].get("use_regex", True)
    if len(parts) == 1 and own_regex:
        return _GPT2_PATTERN
    if len(parts) != 2 or own_regex or parts[0].get("type") != "Split":
        raise _NotFollowed("the pre-tokenizer")
    split = parts[0]
    pattern = (split.get("pattern") or {}).get("Regex")
    if not isinstance(pattern, str) or split.get("behavior") != "Isolated" or split.get("invert"):
        raise _NotFollowed("the pre-tokenizer")
    return pattern


class _Memory(dict[str, bytes]):
    """Word → token ids (u32 bytes). When full, words unused since the last time are forgotten."""

    def __init__(self, merge: Callable[[str], Sequence[int]], words_max: int) -> None:
        super().__init__()
        self._merge = merge
        self._before: dict[str, bytes] = {}
        self._words_max = words_max // 2

    def __missing__(self, word: str) -> bytes:
        tokens = self._before.get(word)
        if tokens is None:
            tokens = array("I", self._merge(_spell(word))).tobytes()
        if len(word) <= _WORD_CHARS_MAX:
            if len(self) >= self._words_max:
                self._before = dict(self)
                self.clear()
            self[word] = tokens
        return tokens


class Words:
    """A tokenizer of the family, by words. Not thread-safe."""

    def __init__(
        self,
        pattern: str,
        added: Sequence[AddedToken],
        merge: Callable[[str], Sequence[int]],
        normalizes: bool,
        words_max: int = WORDS_MAX_DEFAULT,
    ) -> None:
        wide = _alphabet(_BASIC_PLANE)
        self._ascii = re.compile(_translate(pattern, _alphabet(_ASCII)))
        self._wide = re.compile(_translate(pattern, wide))
        self._unsettled = re.compile(f"[^{wide.settled()}]")
        self._normalizes = normalizes
        self._memory = _Memory(merge, words_max)
        longest_first = sorted((t.content for t in added), key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if added else None
        self._ids = {token.content: array("I", [token.id]).tobytes() for token in added}

    def encode(self, text: str) -> bytes | None:
        """Return the token ids of a text (u32 bytes), or None if the text is not for this."""
        if text.isascii():
            pattern = self._ascii
        elif self._unsettled.search(text) or (
            self._normalizes and not unicodedata.is_normalized("NFC", text)
        ):
            return None
        else:
            pattern = self._wide
        if self._added is None:
            return self._plain(pattern, text)
        out: list[bytes] = []
        for at, part in enumerate(self._added.split(text)):
            if at % 2:
                out.append(self._ids[part])
            elif part:
                tokens = self._plain(pattern, part)
                if tokens is None:
                    return None
                out.append(tokens)
        return b"".join(out)

    def _plain(self, pattern: re.Pattern[str], text: str) -> bytes | None:
        words = pattern.findall(text)
        if "".join(words) != text:
            return None  # the pattern passed letters by: they would be words of their own
        return b"".join(map(self._memory.__getitem__, words))


def words_of(
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    model: str,
    added: Sequence[AddedToken],
    merge: Callable[[str], Sequence[int]],
    words_max: int = WORDS_MAX_DEFAULT,
) -> Words | None:
    """Return a `Words` for a tokenizer of the family, None for any other.

    Args:
        normalizer: as in the tokenizer.json.
        pre_tokenizer: likewise.
        model: the type of its model.
        added: its added tokens.
        merge: the model: spelled word → token ids.
        words_max: most words that are remembered.
    """
    if model != "BPE" or (normalizer is not None and normalizer.get("type") != "NFC"):
        return None
    if any(t.normalized or t.lstrip or t.rstrip or t.single_word or not t.content for t in added):
        return None
    try:
        pattern = _split_pattern(pre_tokenizer)
        return Words(pattern, added, merge, normalizer is not None, words_max)
    except (_NotFollowed, re.error):
        return None
