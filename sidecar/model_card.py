"""The model card: the tokenizer and chat template that turn requests into the engine's tokens.

Everything is read from a folder on this machine: the one configured, the one that the engine was
started with, or the model's entry in the Hugging Face cache. Nothing is fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from schemas.bus import ModelCard
from schemas.codec import encode
from sidecar.config import SidecarConfig

TOKENIZER = "tokenizer.json"
FILE_BYTES_MAX = 256 * 1024 * 1024
_SPECIAL = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)


class CardError(Exception):
    """A model folder cannot be read; says which file, and why."""


def default_hub_cache(environment: Mapping[str, str]) -> str:
    """Return where the Hugging Face libraries keep what they fetched."""
    if environment.get("HF_HUB_CACHE"):
        return environment["HF_HUB_CACHE"]
    home = environment.get("HF_HOME") or "~/.cache/huggingface"
    return str(Path(home).expanduser() / "hub")


def find_model_folder(model_path: str, root: str, hub_cache: str) -> Path | None:
    """Return the folder of a model's files; None if it is not on this machine.

    Args:
        model_path: as configured; empty to look for it.
        root: what the engine was started with: a folder, or a name on the hub.
        hub_cache: folder of the Hugging Face cache; empty for none.

    Raises:
        CardError: `model_path` is given, and is no folder.
    """
    if model_path:
        folder = Path(model_path).expanduser()
        if not folder.is_dir():
            raise CardError(f"{model_path} is no folder")
        return folder
    if root and Path(root).is_dir():
        return Path(root)
    if root and hub_cache:
        return _in_hub_cache(root, Path(hub_cache).expanduser())
    return None


def _in_hub_cache(name: str, cache: Path) -> Path | None:
    """Return the snapshot of a hub model that `main` names, or the latest one with a tokenizer."""
    home = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (home / "refs" / "main").read_text().strip()
    except OSError:
        commit = ""
    if commit and (home / "snapshots" / commit).is_dir():
        return home / "snapshots" / commit
    try:
        snapshots = sorted((home / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime)
    except OSError:
        return None
    return next((path for path in reversed(snapshots) if (path / TOKENIZER).exists()), None)


def build_card(
    folder: Path,
    model: str,
    *,
    block_size: int,
    max_model_len: int | None,
    told: SidecarConfig,
) -> ModelCard:
    """Return the card of a model, without what only its engine can say.

    Args:
        folder: with at least `tokenizer.json`.
        told: how the engine was started: a template that replaces the model's own, and its
            variables.

    Raises:
        CardError: a file is missing, too large, or not what it should be.
    """
    config = _json(folder / "tokenizer_config.json")
    names = {**_json(folder / "special_tokens_map.json"), **config}
    special = {key: text for key in _SPECIAL if (text := _token_text(names.get(key))) is not None}
    return ModelCard(
        model=model,
        tokenizer=read_tokenizer(folder),
        chat_template=_template(folder, config, told.chat_template),
        special_tokens=special,
        adds_special_tokens=config.get("add_bos_token") is not False
        or bool(config.get("add_eos_token")),
        block_size=block_size,
        max_model_len=max_model_len,
        tokenizer_config=config,
        template_kwargs=told.template_kwargs,
        content_format=told.content_format,
        drop_unchosen_tools=told.drop_unchosen_tools,
    )


def digest_of(card: ModelCard) -> tuple[str, bytes]:
    """Return (name in the object store, content) of a card."""
    data = encode(card)
    return hashlib.sha256(data).hexdigest(), data


def read_tokenizer(folder: Path) -> bytes:
    """Return a model's tokenizer, as its file has it.

    Raises:
        CardError: there is none, or it is not JSON.
    """
    path = folder / TOKENIZER
    data = _bytes(path)
    if data is None:
        raise CardError(
            f"{path} does not exist; convert the model's tokenizer "
            "(AutoTokenizer.from_pretrained(…).save_pretrained(…)) and give its folder"
        )
    try:
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CardError(f"{path} is no tokenizer: {error}") from error
    return data


def _template(folder: Path, config: dict[str, Any], override: str) -> str | None:
    """Return the chat template that the engine uses, None if there is none.

    A file of its own comes before the tokenizer's settings; of several templates in the settings
    `default` is meant (transformers: tokenization_utils_base.get_chat_template).
    """
    if override:
        text = _bytes(Path(override).expanduser())
        if text is None:
            raise CardError(f"chat template {override} does not exist")
        return _text(text, override)
    own = folder / "chat_template.jinja"
    text = _bytes(own)
    if text is not None:
        return _text(text, str(own))
    template = _json(folder / "chat_template.json").get("chat_template")
    if template is None:
        template = config.get("chat_template")
    if isinstance(template, list):
        named = {
            each["name"]: each.get("template")
            for each in template
            if isinstance(each, dict) and isinstance(each.get("name"), str)
        }
        template = named.get("default")
    return template if isinstance(template, str) else None


def _carried(value: Any) -> Any:
    """Return a JSON value with integers of any size as numbers that a message carries.

    Where a model has no longest prompt, transformers writes 10^30 for it.
    """
    if isinstance(value, dict):
        return {key: _carried(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_carried(each) for each in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return float(value)
    return value


def _token_text(token: Any) -> str | None:
    """Return a special token's text, given as text or as an added-token object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty if there is no such file."""
    data = _bytes(path)
    if data is None:
        return {}
    try:
        content = msgspec.json.decode(data, type=dict[str, Any])
        return {key: _carried(value) for key, value in content.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CardError(f"{path} cannot be read: {error}") from error


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CardError(f"{name} is not UTF-8: {error}") from error


def _bytes(path: Path) -> bytes | None:
    """Return a file's content, None if there is no such file."""
    try:
        size = path.stat().st_size
        if size > FILE_BYTES_MAX:
            raise CardError(f"{path} has {size} bytes, more than {FILE_BYTES_MAX}")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CardError(f"{path}: {error.strerror}") from error
