"""Small tokenizers of every kind that matters here, trained in a moment: tokenizer.json bytes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from tokenizers import processors as post

from lab.tiny_model import tiny_model_dir

CORPUS = (
    "the quick brown fox jumps over the lazy dog and then it's done, isn't it? I'LL say so.\n"
    "def f(x_y):\n    return [1, 2.5, 300]  # caf\u00e9 na\u00efve \u4f60\u597d\u4e16\u754c\n"
    "user assistant system tool [INST] hello world \u0645\u0631\u062d\u0628\u0627 \U0001f600\r\n"
) * 4
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")

# GPT-4o's way of cutting words: letters by case, marks with them.
CASED_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _specials(*texts: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False, **flags) for text in texts]


def _trained(tokenizer: Tokenizer, trainer: Any, specials: list[AddedToken]) -> bytes:
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens(specials)
    return bytes(tokenizer.to_str(), "utf-8")


def _byte_level_bpe(pre_tokenizer: Any, specials: list[AddedToken]) -> bytes:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    return _trained(tokenizer, trainer, specials)


@cache
def gpt2() -> bytes:
    """Returns a byte-level BPE with GPT-2's own pattern."""
    return _byte_level_bpe(pre.ByteLevel(add_prefix_space=False), _specials(*SPECIALS))


@cache
def cased() -> bytes:
    """Returns a byte-level BPE with GPT-4o's pattern."""
    steps = pre.Sequence(
        [
            pre.Split(Regex(CASED_PATTERN), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return _byte_level_bpe(steps, _specials(*SPECIALS))


@cache
def prefix_space() -> bytes:
    """Returns a byte-level BPE that puts a space before every piece."""
    return _byte_level_bpe(pre.ByteLevel(add_prefix_space=True), _specials(*SPECIALS))


@cache
def metaspace() -> bytes:
    """Returns a BPE as Llama 2's: a mark at the very beginning, byte fallback, BOS around."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_special_tokens(_specials(*SPECIALS))
    tokenizer.post_processor = post.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    plain = json.loads(tokenizer.to_str())
    for token in plain["added_tokens"]:
        token["normalized"] = False
    return json.dumps(plain).encode()


@cache
def prepending() -> bytes:
    """Returns the older form of `metaspace`: a normalizer prepends and replaces."""
    plain = json.loads(metaspace())
    tokenizer = Tokenizer.from_str(json.dumps({**plain, "pre_tokenizer": None}))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return bytes(tokenizer.to_str(), "utf-8")


@cache
def wordpiece() -> bytes:
    """Returns BERT's kind: lower case, punctuation apart, [CLS] and [SEP] around."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    ids = [(text, tokenizer.token_to_id(text)) for text in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = post.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    tokenizer.add_special_tokens(_specials(*SPECIALS))
    return bytes(tokenizer.to_str(), "utf-8")


@cache
def unigram() -> bytes:
    """Returns SentencePiece's kind: compatibility forms, a mark before every piece."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", show_progress=False)
    return _trained(tokenizer, trainer, _specials(*SPECIALS))


@cache
def greedy_space() -> bytes:
    """Returns a BPE none of whose special tokens is a safe cut: all take the spaces before them."""
    return _byte_level_bpe(pre.ByteLevel(add_prefix_space=False), _specials(*SPECIALS, lstrip=True))


@cache
def packaged() -> bytes:
    """Returns the packaged tiny model's tokenizer: Qwen's pattern, NFC."""
    return (tiny_model_dir() / "tokenizer.json").read_bytes()


ALL = {
    f.__name__: f
    for f in (
        *(gpt2, cased, prefix_space, metaspace, prepending, wordpiece, unigram, greedy_space),
        packaged,
    )
}
