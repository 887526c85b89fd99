"""A card that reads otherwise than its engine is found out, and its prompts go by load."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as LibraryTokenizer

from lab.tiny_model import tiny_model_dir
from router.chat_template import ChatTemplate, RenderOptions
from router.prefix_cache import PrefixCache
from router.prompt import Inexact, Prompt, Reason
from router.tokens import PromptReader
from schemas.bus import ModelCard, TokenProbe
from schemas.openai import ChatRequest, CompletionRequest
from sidecar.card_probe import CHAT, PROMPT
from tests.router import tokenizer_samples as samples

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}no thoughts{% endif %}"
)
OTHER = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def probes(data: bytes, template: str, **options: Any) -> list[TokenProbe]:
    """Returns what an engine says that has this tokenizer and template."""
    library = LibraryTokenizer.from_buffer(data)
    text = ChatTemplate(template, {}, RenderOptions(**options)).render(ChatRequest(messages=CHAT))
    assert isinstance(text, str)
    return [
        TokenProbe(library.encode(PROMPT, add_special_tokens=True).ids, prompt=PROMPT),
        TokenProbe(library.encode(text, add_special_tokens=False).ids, messages=CHAT),
    ]


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    """Yields a thread for long texts."""
    with ThreadPoolExecutor(1) as threads:
        yield threads


def read(card: ModelCard, executor: Executor) -> tuple[Prompt | Inexact, Prompt | Inexact, str]:
    """Returns what a card's reader makes of a chat and of a prompt, and its problem."""
    reader = PromptReader(card, PrefixCache(), executor)
    chat = reader.read_chat_now(ChatRequest(messages=[{"role": "user", "content": "hi"}]))
    return chat, reader.read_completion_now(CompletionRequest(prompt="hi")), reader.problem


@pytest.mark.parametrize("kind", samples.ALL)
def test_a_card_that_is_the_engines_is_believed(kind: str, executor: Executor) -> None:
    """Whatever the tokenizer, and whatever it adds to plain prompts."""
    data = samples.ALL[kind]()
    card = ModelCard("m", data, THINKING, block_size=4, probes=probes(data, THINKING))
    chat, prompt, problem = read(card, executor)
    assert isinstance(chat, Prompt)
    assert isinstance(prompt, Prompt)
    assert problem == ""


def test_another_template_is_found_out(executor: Executor) -> None:
    """Chats are not read any more; plain prompts have no part in it."""
    data = samples.gpt2()
    card = ModelCard("m", data, OTHER, block_size=4, probes=probes(data, THINKING))
    chat, prompt, problem = read(card, executor)
    assert chat == Inexact(Reason.CARD_DIFFERS)
    assert isinstance(prompt, Prompt)
    assert "a chat otherwise (from token 0 of " in problem
    assert "--chat-template" in problem


def test_variables_that_the_engine_was_started_with_must_be_the_cards(executor: Executor) -> None:
    """The same template gives other tokens with other variables, late in the prompt."""
    data = samples.gpt2()
    quiet = {"enable_thinking": False}
    said = probes(data, THINKING, template_kwargs=quiet)
    card = ModelCard("m", data, THINKING, block_size=4, probes=said)
    chat, _, problem = read(card, executor)
    assert chat == Inexact(Reason.CARD_DIFFERS)
    assert f"from token {len(probes(data, THINKING)[1].token_ids)} of" in problem
    chat, _, problem = read(msgspec.structs.replace(card, template_kwargs=quiet), executor)
    assert isinstance(chat, Prompt)
    assert problem == ""


def test_another_tokenizer_is_found_out(executor: Executor) -> None:
    """Then neither chats nor prompts can be read."""
    said = probes((tiny_model_dir() / "tokenizer.json").read_bytes(), THINKING)
    card = ModelCard("m", samples.gpt2(), THINKING, block_size=4, probes=said)
    chat, prompt, problem = read(card, executor)
    assert chat == prompt == Inexact(Reason.CARD_DIFFERS)
    assert problem


def test_special_tokens_that_the_engine_does_not_add_are_found_out(executor: Executor) -> None:
    """A plain prompt is one token longer or shorter."""
    data = samples.gpt2()
    extra = msgspec.structs.replace(
        probes(data, OTHER)[0], token_ids=[0, *probes(data, OTHER)[0].token_ids]
    )
    card = ModelCard("m", data, OTHER, block_size=4, probes=[extra])
    chat, prompt, _ = read(card, executor)
    assert isinstance(chat, Prompt)
    assert prompt == Inexact(Reason.CARD_DIFFERS)


def test_what_cannot_be_read_here_proves_nothing(executor: Executor) -> None:
    """A chat that the template refuses, and a text that is no Unicode, are passed over."""
    odd = [
        TokenProbe([1], messages=[{"role": "user", "content": ""}]),
        TokenProbe([1], prompt="\ud800"),
    ]
    picky = "{{ raise_exception('no') }}"
    assert read(ModelCard("m", samples.gpt2(), picky, probes=odd), executor)[2] == ""
