"""Every way of tokenizing gives the library's ids, cut or whole, at once or in steps."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer

from controlplane.core.hashing import pack_tokens
from router.segments import Cutter
from router.tokenizer import TextError, Tokenizer, TokenizerError
from router.words import words_of
from tests.router import tokenizer_samples as samples
from tests.router.test_loop_lag import LagWatch

BY_WORDS = ("gpt2", "cased", "packaged")
OTHERS = ("prefix_space", "metaspace", "prepending", "wordpiece", "unigram", "greedy_space")

# Odd letters in odd company: words, runs of spaces, marks that compose, tokens and their halves.
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            (
                *(
                    "the",
                    " fox",
                    "It's",
                    "I'LL",
                    "\u017ft",
                    "'\u017f",
                    "x_y",
                    "caf\u00e9",
                    "e\u0301",
                ),
                *("\u4f60\u597d", "\u0645\u0631", "\U0001f600", "\u00bd", "12345", "\u0665", " "),
                *("  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x00"),
                *("...", "!?", "<|", "|>", "im_end", "[INST]", "\u2581", "[CLS]", "<s>", "</s>"),
                *samples.SPECIALS,
            )
        ),
        st.text(max_size=4),
        st.text("ab '\n1.", max_size=6),
    ),
    max_size=12,
).map("".join)
KINDS = pytest.mark.parametrize("kind", sorted(samples.ALL))


def library(data: bytes) -> Callable[[str], bytes]:
    """Returns the library's own encoding, as packed ids."""
    tokenizer = LibraryTokenizer.from_buffer(data)
    return lambda text: pack_tokens(tokenizer.encode(text, add_special_tokens=False).ids)


@cache
def loaded(kind: str) -> tuple[Tokenizer, Callable[[str], bytes]]:
    """Returns a sample tokenizer, and the truth about it."""
    return Tokenizer(samples.ALL[kind]()), library(samples.ALL[kind]())


@KINDS
@given(text=TEXTS)
def test_ids_are_the_librarys(kind: str, text: str) -> None:
    """Whichever way a text goes, its ids are what the library says."""
    tokenizer, truth = loaded(kind)
    assert tokenizer.encode(text) == truth(text)


@pytest.mark.slow
@pytest.mark.parametrize("kind", BY_WORDS)
def test_every_settled_letter_is_the_librarys(kind: str) -> None:
    """Each letter that goes by words is cut as the library cuts it, wherever it stands."""
    tokenizer, truth = loaded(kind)
    words = tokenizer._words
    assert words is not None
    codes = (*range(0xD800), *range(0xE000, 0x10000), *range(0x1F300, 0x1FA00))
    letters = map(chr, codes)
    settled = [letter for letter in letters if not words._unsettled.search(letter)]
    taken = 0
    for start in range(0, len(settled), 8):
        text = "".join(f"a{x}b{x} {x}1{x}\n{x} {x}{x}" for x in settled[start : start + 8])
        tokens = words.encode(text)
        taken += tokens is not None
        assert tokens is None or tokens == truth(text), ascii(settled[start : start + 8])
    assert taken > 0.9 * len(settled) / 8 > 5_000


@KINDS
@given(text=TEXTS)
def test_cut_texts_give_the_wholes_ids(kind: str, text: str) -> None:
    """Segments tokenized apart and put together are the whole text's ids."""
    tokenizer, truth = loaded(kind)
    segments = Cutter(tokenizer.safe).cut(text)
    assert b"".join(map(tokenizer.encode, segments)) == truth(text)


@KINDS
def test_the_way_is_chosen_by_kind(kind: str) -> None:
    """Byte-level BPE goes by words; any other goes by the library, and most can still be cut."""
    tokenizer, _ = loaded(kind)
    assert tokenizer.by_words == (kind in BY_WORDS)
    assert set(tokenizer.safe) >= set(samples.SPECIALS) or kind == "greedy_space"
    assert tokenizer.safe or kind == "greedy_space"


@pytest.mark.parametrize(
    ("kind", "opening", "closing"),
    [("metaspace", ["<s>"], []), ("wordpiece", ["[CLS]"], ["[SEP]"]), ("gpt2", [], [])],
)
def test_special_tokens_around_a_prompt_are_known(
    kind: str, opening: list[str], closing: list[str]
) -> None:
    """What the post-processor puts around a prompt is found out at load."""
    tokenizer, _ = loaded(kind)
    ids = LibraryTokenizer.from_buffer(samples.ALL[kind]())
    assert tokenizer.opening == pack_tokens([ids.token_to_id(text) for text in opening])
    assert tokenizer.closing == pack_tokens([ids.token_to_id(text) for text in closing])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "metaspace"])
@settings(max_examples=15)
@given(text=st.lists(TEXTS, max_size=3).map(lambda parts: "\nline ".join([*parts, ""]) * 300))
def test_long_texts_give_the_same_ids_in_steps(kind: str, text: str) -> None:
    """A text tokenized without holding up the loop has the ids of one tokenized at once."""
    tokenizer, truth = loaded(kind)
    with ThreadPoolExecutor(1) as executor:
        assert asyncio.run(tokenizer.encode_long(text, executor)) == truth(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["many words " * 9_000, "x y\n" * 9_000 + "z" * 99_000, "z" * 99_000]
)
async def test_words_of_any_length_give_the_same_ids_in_steps(text: str) -> None:
    """Cut between words where there are some, left to the library where there are none."""
    tokenizer, truth = loaded("gpt2")
    with ThreadPoolExecutor(1) as executor:
        assert await tokenizer.encode_long(text, executor) == truth(text)


@given(text=TEXTS)
def test_a_text_has_as_many_tokens_as_its_length_says_at_least(text: str) -> None:
    """What is refused by its length alone would have been refused by its tokens."""
    tokenizer, truth = loaded("gpt2")
    assert tokenizer.chars_a_token_max is not None
    assert len(text) <= len(truth(text)) // 4 * tokenizer.chars_a_token_max


async def test_a_long_text_lets_others_run() -> None:
    """While a long text is tokenized by words, other tasks get their turns."""
    tokenizer, _ = loaded("gpt2")
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    with ThreadPoolExecutor(1) as executor:
        await tokenizer.encode_long("some words in a line\n" * 40_000, executor)
    task.cancel()
    assert turns >= 10


def test_the_memory_of_words_is_bounded() -> None:
    """However many words come by, no more than the bound are kept, and ids stay right."""
    tokenizer = Tokenizer(samples.gpt2(), words_max=100)
    truth = library(samples.gpt2())
    words = tokenizer._words
    assert words is not None
    for start in range(0, 2_000, 20):
        text = " ".join(f"w{i}" for i in range(start, start + 20))
        assert tokenizer.encode(text) == truth(text)
        assert len(words._memory) + len(words._memory._before) <= 100


def test_words_can_be_turned_off() -> None:
    """Without a memory everything goes by the library."""
    assert not Tokenizer(samples.gpt2(), words_max=0).by_words


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"not json",
        b'{"model": {"type": "BPE"}, "added_tokens": 5}',
        json.dumps({"model": {"type": "none such"}}).encode(),
    ],
)
def test_what_is_no_tokenizer_is_refused(data: bytes) -> None:
    """Unreadable bytes are an error that says so."""
    with pytest.raises(TokenizerError, match=r"cannot be read"):
        Tokenizer(data)


def test_a_tokenizer_that_rolls_dice_is_refused() -> None:
    """With BPE dropout the same text has different ids each time."""
    config = json.loads(samples.gpt2())
    config["model"]["dropout"] = 0.1
    with pytest.raises(TokenizerError, match="at random"):
        Tokenizer(json.dumps(config).encode())


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    """As in transformers, which sets both anew for every call."""
    config = json.loads(samples.gpt2())
    config["truncation"] = {
        "max_length": 2,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    tokenizer = Tokenizer(json.dumps(config).encode(), words_max=0)
    assert tokenizer.encode("one two three") == loaded("gpt2")[1]("one two three")


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        None,
        {"type": "Whitespace"},
        {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True},
        {"type": "Sequence", "pretokenizers": []},
        *(
            {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            }
            for pattern in (
                {"String": " "},
                *(
                    {"Regex": regex}
                    for regex in (r"\w+", r".", r"[[a-z]&&[b]]", r"a{2}+", r"(?<=a)")
                ),
                *({"Regex": regex} for regex in (r"\p{P}+", r"[^\S]", r"\p{Lx}", r"(", r"^a")),
            )
        ),
    ],
)
def test_patterns_that_could_mean_something_else_are_not_followed(
    pre_tokenizer: dict[str, object] | None,
) -> None:
    """What `re` may read differently is left to the library."""
    assert words_of(None, pre_tokenizer, "BPE", [], lambda word: [len(word)]) is None


def test_config_that_changes_the_tokenizer_is_noticed() -> None:
    """Tokens that tokenizer_config.json adds or changes make the ids differ, so it is said."""
    tokenizer, _ = loaded("gpt2")
    end = {"content": "<|im_end|>", "normalized": False, "lstrip": False, "special": True}
    assert tokenizer.explain_mismatch({}, {}) is None
    same = {"added_tokens_decoder": {"1": end}}
    assert tokenizer.explain_mismatch({"eos_token": "<|im_end|>"}, same) is None
    assert "eos_token" in str(tokenizer.explain_mismatch({"eos_token": "</s>"}, {}))
    changed = {"added_tokens_decoder": {"1": {**end, "lstrip": True}}}
    assert "<|im_end|>" in str(tokenizer.explain_mismatch({}, changed))
    assert "None" in str(tokenizer.explain_mismatch({}, {"added_tokens_decoder": {"1": 5}}))


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["7", "ﬁ\u0344ẛ\u0323"])
async def test_a_long_text_without_words_lets_others_run(piece: str) -> None:
    """What is left to the library, in a thread, does not stop the whole process meanwhile."""
    tokenizer, truth = loaded("gpt2")
    text = piece * (600_000 // len(piece))
    with ThreadPoolExecutor(1) as executor:
        async with LagWatch() as watch:
            await asyncio.sleep(0)  # in which it begins
            tokens = await tokenizer.encode_long(text, executor)
    assert watch.worst_s < 0.4
    assert tokens == truth(text)


async def test_half_of_a_surrogate_pair_is_no_text_in_a_thread_either() -> None:
    """It is told as what it is, whichever way of the library finds it."""
    tokenizer, _ = loaded("gpt2")
    with ThreadPoolExecutor(1) as executor, pytest.raises(TextError):
        await tokenizer.encode_long("\ud800" * 20_000, executor)
