"""The model an emulated engine serves: its tokenizer, its chat template, and what it answers.

The tokenizer and the template come from a model folder, as a real engine's would. Chats are
rendered by the router's own code, which is checked against real vLLM: the lab adds no check of it.

There are no weights: an answer is a run of words from the vocabulary, a function of the prompt
alone, so that the same prompt gets the same answer on every instance and after every restart. Only
words that tokenize to exactly one token, also beside others, are used: an answer that comes back in
the next turn's prompt makes the very tokens, and so the very blocks, that the engine generated.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from lab.engine_types import FinishReason, digest
from router.chat_template import ChatTemplate, TemplateSyntaxError
from router.prompt import Inexact
from router.template_habits import habits_of
from schemas.bus import ModelCard
from schemas.openai import ChatRequest

_POOL_TOKENS = 8192  # answers are runs of this cycle of words
_WORDS_MIN = 16
_WORD_LETTERS_MIN = 3
_ANSWER_TOKENS_MEAN = 64


class ModelError(ValueError):
    """The model folder, or what a request asks of the model, makes no sense; says why."""


class Answer(msgspec.Struct, frozen=True):
    """What the model says to one prompt.

    Attributes:
        token_ids: all generated tokens, an end-of-sequence token included.
        texts: (tokens,) the text that each adds; the last one is cut where a stop string begins.
        stop_reason: the stop string that ended it.
    """

    token_ids: list[int]
    texts: list[str]
    finish_reason: FinishReason
    stop_reason: str | None = None


class ServedModel:
    """A tokenizer with a chat template and answers; immutable after construction.

    Attributes:
        habits: how Anthropic's messages become chats.
        max_model_len: the longest context, as the model's configuration has it.
    """

    def __init__(self, folder: Path, answer_tokens_mean: int = _ANSWER_TOKENS_MEAN) -> None:
        """Read a model folder.

        Raises:
            ModelError: a file is missing or unreadable, or the vocabulary has too few words.
        """
        self.folder = folder
        self._answer_tokens_mean = answer_tokens_mean
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = _read_json(folder / "config.json")
            settings = _read_json(folder / "tokenizer_config.json")
            self._special_tokens = _special_tokens(settings)
            source = _template_source(folder, settings)
            self._template = self._compile(source)
        except Exception as error:  # the tokenizer's library raises bare Exception
            raise ModelError(f"{folder} is no usable model folder: {error}") from error
        card = ModelCard(folder.name, b"", source, self._special_tokens)
        self.habits = habits_of(card)
        self.max_model_len = int(config["max_position_embeddings"])
        self._stops = _stop_ids(folder, config)
        words = _words(self._tokenizer)
        if len(words) < _WORDS_MIN:
            raise ModelError(f"{folder}: the vocabulary has only {len(words)} whole words")
        self._cycle = random.Random(0).choices(words, k=_POOL_TOKENS)
        self._text_of = {token: self._tokenizer.decode([token]) for token in words}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, special ones included unless told otherwise."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, token_ids: list[int]) -> list[str | None]:
        """Return each token as the vocabulary spells it."""
        return [self._tokenizer.id_to_token(token) for token in token_ids]

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""
        return int(self._tokenizer.get_vocab_size())

    def render(self, chat: ChatRequest) -> str:
        """Return a chat as the prompt that the chat template makes of it.

        Raises:
            ModelError: vLLM or the template would refuse it, or it is not emulated.
        """
        template = self._template
        if chat.chat_template is not None:
            template = self._compile(chat.chat_template)
            chat = msgspec.structs.replace(chat, chat_template=None)
        text = template.render(chat)
        if isinstance(text, Inexact):
            raise ModelError(f"the chat cannot be rendered: {text.reason} {text.detail}".strip())
        return text

    def answer(
        self,
        prompt_bytes: bytes,
        tokens_max: int,
        *,
        tokens_min: int = 0,
        ignore_eos: bool = False,
        stop: list[str] | None = None,
    ) -> Answer:
        """Return what the model says to a prompt, at most `tokens_max` tokens of it.

        Args:
            prompt_bytes: packed token ids, the answer's only source of chance.
            ignore_eos: go on to `tokens_max`.
            stop: strings that end the text before they appear.
        """
        seed = digest(prompt_bytes)
        mean = self._answer_tokens_mean
        natural = max(1, mean // 2, tokens_min) + seed % max(1, mean)
        ends = not ignore_eos and natural < tokens_max and bool(self._stops)
        count = natural if ends else tokens_max
        start = (seed >> 32) % _POOL_TOKENS
        ids = self._cycle[start : start + count]
        while len(ids) < count:
            ids += self._cycle[: count - len(ids)]
        texts = [self._text_of[token] for token in ids]
        if ends:
            ids.append(self._stops[0])
            texts.append("")
        answer = Answer(ids, texts, "stop" if ends else "length")
        return _cut_at_stop(answer, stop) if stop else answer

    def _compile(self, source: str) -> ChatTemplate:
        try:
            return ChatTemplate(source, self._special_tokens)
        except TemplateSyntaxError as error:
            raise ModelError(str(error)) from error


def _cut_at_stop(answer: Answer, stop: list[str]) -> Answer:
    """End an answer with the token that completes the first stop string."""
    text = ""
    for position, piece in enumerate(answer.texts):
        text += piece
        found = [(text.find(each), each) for each in stop if each in text]
        if found:
            at, reason = min(found)
            before = len(text) - len(piece)
            texts = [*answer.texts[:position], piece[: max(0, at - before)]]
            _trim(texts, at)
            return Answer(answer.token_ids[: position + 1], texts, "stop", reason)
    return answer


def _trim(texts: list[str], length: int) -> None:
    """Shorten pieces of text from the end until they have `length` characters in all."""
    excess = sum(map(len, texts)) - length
    for position in range(len(texts) - 1, -1, -1):
        if excess <= 0:
            return
        kept = texts[position][: max(0, len(texts[position]) - excess)]
        excess -= len(texts[position]) - len(kept)
        texts[position] = kept


def _words(tokenizer: Any) -> list[int]:
    """Return the tokens that spell a space and a word and are what that text tokenizes to."""
    words = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token])
        letters = text[1:]
        if text[:1] != " " or not (letters.isascii() and letters.isalpha()):
            continue
        if len(letters) < _WORD_LETTERS_MIN:
            continue
        if tokenizer.encode(text, add_special_tokens=False).ids == [token]:
            words.append(token)
    return words


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _stop_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """Return the tokens that end an answer, as vLLM finds them."""
    generation = folder / "generation_config.json"
    found = _read_json(generation).get("eos_token_id") if generation.exists() else None
    found = config.get("eos_token_id") if found is None else found
    if found is None:
        return []
    return [int(each) for each in found] if isinstance(found, list) else [int(found)]


def _template_source(folder: Path, settings: dict[str, Any]) -> str:
    beside = folder / "chat_template.jinja"
    source: str | None = (
        beside.read_text(encoding="utf-8") if beside.exists() else settings.get("chat_template")
    )
    if source is None:
        raise ModelError("it has no chat template")
    return source


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return name → text of the tokens that a template may name."""
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
