"""Trains the tokenizer that lab/assets/tiny ships, from texts that are not shipped.

    python -m tests.vllm_env.train_tokenizer OUT.json FILE...

It ran once; this file says how, and what to run to make another. HTML files are read as their
text, everything else as UTF-8. The result is byte-level, so any text round-trips, seen or unseen.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from lab.tiny_model import PRETOKENIZE_PATTERN, SPECIAL_TOKENS

VOCABULARY_SIZE = 4096
FILE_CHARACTERS_MAX = 200_000  # so that no one text dominates


def main(arguments: list[str]) -> None:
    """Trains on the named files and writes the tokenizer."""
    out, *files = arguments
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(files), trainer)
    tokenizer.save(out, pretty=False)


def texts(files: list[str]) -> Iterator[str]:
    """Yields the text of each file, bounded in length."""
    for name in files:
        raw = Path(name).read_text(encoding="utf-8")
        yield (_text_of(raw) if name.endswith(".html") else raw)[:FILE_CHARACTERS_MAX]


class _TextOnly(HTMLParser):
    """Collects what a page shows."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Notes that what follows is not shown."""
        self._hidden = self._hidden or tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        """Notes that what follows is shown again."""
        self._hidden = self._hidden and tag not in ("script", "style")

    def handle_data(self, data: str) -> None:
        """Keeps the text of a shown element."""
        if not self._hidden:
            self.parts.append(data)


def _text_of(html: str) -> str:
    page = _TextOnly()
    page.feed(html)
    return "".join(page.parts)


if __name__ == "__main__":
    main(sys.argv[1:])
