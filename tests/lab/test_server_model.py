from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.hashing import pack_tokens
from lab import server_model
from lab.server_model import ModelError, ServedModel
from lab.tiny_model import tiny_model_dir
from schemas.openai import ChatRequest

MODEL = ServedModel(tiny_model_dir())
PROMPT = pack_tokens([5, 6, 7])


def copied(tmp_path: Path) -> Path:
    """A model folder that a test may spoil."""
    return Path(shutil.copytree(tiny_model_dir(), tmp_path / "model"))


def rewrite(path: Path, **fields: Any) -> None:
    """Change fields of a JSON file; None takes one out."""
    content = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_answers_depend_on_the_prompt_alone() -> None:
    """The same prompt gets the same answer from any copy; another prompt another one."""
    again = ServedModel(tiny_model_dir())
    assert MODEL.answer(PROMPT, 20) == again.answer(PROMPT, 20)
    assert MODEL.answer(PROMPT, 20) != MODEL.answer(pack_tokens([5, 6]), 20)


def test_answers_tokenize_to_themselves() -> None:
    """The text of an answer, put into a chat, becomes the very tokens that were generated."""
    answer = MODEL.answer(PROMPT, 500, ignore_eos=True)
    assert len(answer.token_ids) == 500
    before = "<|im_start|>assistant\n"
    whole = MODEL.encode(before + "".join(answer.texts) + "<|im_end|>\n")
    assert whole[len(MODEL.encode(before)) :][:500] == answer.token_ids


def test_long_answers_go_around_the_cycle() -> None:
    """An answer longer than the cycle of words has as many tokens as asked."""
    answer = MODEL.answer(PROMPT, 30_000, ignore_eos=True)
    assert len(answer.token_ids) == len(answer.texts) == 30_000


def test_answers_end_by_themselves_unless_told_not_to() -> None:
    """End-of-sequence comes after about the mean, never before the minimum, never if ignored."""
    lengths = [len(MODEL.answer(pack_tokens([n]), 4000).token_ids) for n in range(60)]
    assert 32 <= min(lengths) <= max(lengths) <= 98
    assert len(MODEL.answer(PROMPT, 4000, tokens_min=300).token_ids) > 300
    ignored = MODEL.answer(PROMPT, 4000, ignore_eos=True)
    assert (len(ignored.token_ids), ignored.finish_reason) == (4000, "length")


@pytest.mark.parametrize("take", [(0, 3), (2, 9), (5, 40)])
def test_stop_string_may_span_tokens(take: tuple[int, int]) -> None:
    """The text ends right before the first stop string, wherever token borders are."""
    whole = "".join(MODEL.answer(PROMPT, 60, ignore_eos=True).texts)
    stop = whole[take[0] : take[1]]
    answer = MODEL.answer(PROMPT, 60, ignore_eos=True, stop=[stop])
    assert "".join(answer.texts) == whole[: take[0]]
    assert len(answer.token_ids) == len(answer.texts)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert (
        answer.token_ids
        == MODEL.answer(PROMPT, 60, ignore_eos=True).token_ids[: len(answer.token_ids)]
    )


def chat(*texts: str, **fields: Any) -> ChatRequest:
    """A chat of user messages."""
    return ChatRequest([{"role": "user", "content": text} for text in texts], **fields)


def test_chats_are_rendered_as_the_template_says() -> None:
    """Turns, generation prompt and special tokens are where the template puts them."""
    assert MODEL.render(chat("hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert MODEL.render(chat("a", "b", add_generation_prompt=False)).count("<|im_start|>") == 2


def test_requests_may_bring_their_template() -> None:
    """A request's own template sees messages, special tokens and its own variables."""
    own = chat("x", chat_template="{{ eos_token }}{{ extra }}", chat_template_kwargs={"extra": "!"})
    assert MODEL.render(own) == "<|im_end|>!"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no') }}", "cannot be rendered: template_error"),
        ("{% if %}", "does not compile"),
    ],
)
def test_template_that_fails_is_a_model_error(template: str, says: str) -> None:
    """A template that refuses a chat, or is none, is named as the reason."""
    with pytest.raises(ModelError, match=says):
        MODEL.render(chat("x", chat_template=template))


def test_chat_template_may_be_in_the_tokenizers_settings(tmp_path: Path) -> None:
    """Without chat_template.jinja the one in tokenizer_config.json is used."""
    folder = copied(tmp_path)
    (folder / "chat_template.jinja").unlink()
    rewrite(folder / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert ServedModel(folder).render(chat("x")) == "x"


def test_model_without_stop_token_never_ends(tmp_path: Path) -> None:
    """Without an end-of-sequence token an answer goes to its limit."""
    folder = copied(tmp_path)
    (folder / "generation_config.json").unlink()
    rewrite(folder / "config.json", eos_token_id=None)
    assert ServedModel(folder).answer(PROMPT, 500).finish_reason == "length"


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json", "chat_template.jinja"])
def test_incomplete_folder_is_refused(tmp_path: Path, missing: str) -> None:
    """A folder that lacks a file says that it is no model folder."""
    folder = copied(tmp_path)
    (folder / missing).unlink()
    with pytest.raises(ModelError, match="is no usable model folder"):
        ServedModel(folder)


def test_vocabulary_without_words_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers need some whole words; a vocabulary with fewer says so."""
    monkeypatch.setattr(server_model, "_WORDS_MIN", 1 << 20)
    with pytest.raises(ModelError, match="the vocabulary has only"):
        ServedModel(tiny_model_dir())
