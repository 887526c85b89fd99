"""Model cards from folders as Hugging Face lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab.tiny_model import tiny_model_dir
from schemas.bus import ModelCard, decode_card
from sidecar.config import SidecarConfig
from sidecar.model_card import CardError, build_card, digest_of, find_model_folder


def folder_with(path: Path, **files: Any) -> Path:
    """A model folder; `a__b` names the file `a.b`, and what is no text is written as JSON."""
    content = {"tokenizer__json": {"version": "1.0"}, **files}
    for name, value in content.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (path / name.replace("__", ".")).write_text(text)
    return path


def card_of(folder: Path, **more: Any) -> ModelCard:
    """The card of a folder."""
    told = SidecarConfig(engine_url="http://unset", **more)
    return build_card(folder, "m", block_size=16, max_model_len=100, told=told)


def test_the_tiny_models_card_holds_its_files() -> None:
    """Tokenizer, template, special tokens and limits; the digest names the content."""
    card = card_of(tiny_model_dir())
    assert card.tokenizer == (tiny_model_dir() / "tokenizer.json").read_bytes()
    assert card.chat_template == (tiny_model_dir() / "chat_template.jinja").read_text()
    assert card.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert not card.adds_special_tokens
    digest, data = digest_of(card)
    assert (len(digest), decode_card(data)) == (64, card)
    assert digest_of(card_of(tiny_model_dir()))[0] == digest


def test_a_card_says_how_its_engine_renders_chats() -> None:
    """What the sidecar was told of it is what routers need."""
    card = card_of(
        tiny_model_dir(),
        template_kwargs={"enable_thinking": False},
        content_format="openai",
        drop_unchosen_tools=True,
    )
    assert card.template_kwargs == {"enable_thinking": False}
    assert (card.content_format, card.drop_unchosen_tools) == ("openai", True)


def test_templates_are_looked_up_as_transformers_does(tmp_path: Path) -> None:
    """Override, file, processor settings, tokenizer settings, `default` of several."""
    folder_with(tmp_path, tokenizer_config__json={"chat_template": "plain"})
    assert card_of(tmp_path).chat_template == "plain"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder_with(tmp_path, tokenizer_config__json={"chat_template": several})
    assert card_of(tmp_path).chat_template == "d"
    assert card_of(tmp_path).tokenizer_config["chat_template"] == several
    folder_with(tmp_path, chat_template__json={"chat_template": "processor"})
    assert card_of(tmp_path).chat_template == "processor"
    folder_with(tmp_path, chat_template__jinja="file")
    assert card_of(tmp_path).chat_template == "file"
    (tmp_path / "mine.txt").write_text("mine")
    assert card_of(tmp_path, chat_template=str(tmp_path / "mine.txt")).chat_template == "mine"


def test_special_tokens_come_from_both_files(tmp_path: Path) -> None:
    """Tokens are texts or objects; the tokenizer's settings win; null is none."""
    folder_with(
        tmp_path,
        special_tokens_map__json={"bos_token": "<s>", "eos_token": "</s>"},
        tokenizer_config__json={"eos_token": {"content": "<end>"}, "unk_token": None},
    )
    card = card_of(tmp_path)
    assert card.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    assert card.adds_special_tokens
    assert card.chat_template is None


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer__json": "not json"}, "is no tokenizer"),
        ({"tokenizer_config__json": "[1]"}, "cannot be read"),
        ({"tokenizer_config__json": '{"a": ' + "[" * 900 + "]" * 900 + "}"}, "cannot be read"),
        ({"tokenizer_config__json": '{"a": 1' + "0" * 400 + "}"}, "cannot be read"),
    ],
)
def test_files_that_are_not_what_they_should_be(
    tmp_path: Path, files: dict[str, Any], said: str
) -> None:
    """The error names the file."""
    with pytest.raises(CardError, match=said):
        card_of(folder_with(tmp_path, **files))


def test_numbers_of_any_size_are_in_a_card(tmp_path: Path) -> None:
    """Transformers writes 10^30 where a model has no longest prompt; no message carries it."""
    text = '{"model_max_length": 1000000000000000019884624838656, "a": [{"b": -1%s}], "c": 7}'
    folder_with(tmp_path, tokenizer_config__json=text % ("0" * 20))
    card = decode_card(digest_of(card_of(tmp_path))[1])
    assert card.tokenizer_config == {"model_max_length": 1e30, "a": [{"b": -1e20}], "c": 7}


def test_templates_with_names_that_are_none_are_left_aside(tmp_path: Path) -> None:
    """Another one of the list may be meant."""
    templates = [{"name": ["x"], "template": "no"}, {"name": "default", "template": "yes"}]
    folder_with(tmp_path, tokenizer_config__json={"chat_template": templates})
    assert card_of(tmp_path).chat_template == "yes"


def test_missing_files_are_errors_that_say_what_to_do(tmp_path: Path) -> None:
    """No tokenizer, no template where one was named, no folder."""
    with pytest.raises(CardError, match=r"tokenizer.json does not exist; convert"):
        card_of(tmp_path)
    folder_with(tmp_path)
    with pytest.raises(CardError, match="nowhere does not exist"):
        card_of(tmp_path, chat_template="nowhere")
    with pytest.raises(CardError, match="is no folder"):
        find_model_folder(str(tmp_path / "no"), "", "")


def test_a_model_is_found_where_it_is(tmp_path: Path) -> None:
    """Configured folder, the engine's own folder, the hub cache by `main` or the latest."""
    assert find_model_folder(str(tmp_path), "elsewhere", "") == tmp_path
    assert find_model_folder("", str(tmp_path), "") == tmp_path
    assert find_model_folder("", "org/model", "") is None
    assert find_model_folder("", "org/model", str(tmp_path)) is None
    home = tmp_path / "models--org--model"
    for commit in ("old", "new"):
        (home / "snapshots" / commit).mkdir(parents=True)
    assert find_model_folder("", "org/model", str(tmp_path)) is None
    (home / "snapshots" / "old" / "tokenizer.json").write_text("{}")
    assert find_model_folder("", "org/model", str(tmp_path)) == home / "snapshots" / "old"
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("new\n")
    assert find_model_folder("", "org/model", str(tmp_path)) == home / "snapshots" / "new"
