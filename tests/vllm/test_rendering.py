"""Our rendering and tokenization of chats against vLLM's own code, request by request.

vLLM's classes run in its environment without a server (`render_probe.py`); the random chats hold
tools, calls, thoughts, parts, quoted special tokens, empty texts and several scripts.
"""

import json
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.hashing import chain, pack_tokens
from lab.tiny_model import tiny_model_dir
from router.chat_template import RenderOptions
from router.prefix_cache import PrefixCache
from router.prompt import Inexact, Reason
from router.tokens import PromptReader
from schemas.bus import ModelCard
from schemas.openai import decode_chat
from tests.router import chat_samples

PROBE = Path(__file__).with_name("render_probe.py")
CASES = 600
TINY = tiny_model_dir()
TEMPLATES = {
    **chat_samples.TEMPLATES,
    "tiny": (TINY / "chat_template.jinja").read_text(encoding="utf-8"),
}
OPTIONS: list[dict[str, Any]] = [
    *({}, {}, {}, {"content_format": "string"}, {"content_format": "openai"}),
    {"template_kwargs": {"enable_thinking": False, "custom": "C"}},
    {"drop_unchosen_tools": True},
]


def cases(seed: int) -> list[dict[str, Any]]:
    """Returns random requests, each with a template and an engine's options."""
    chance = random.Random(seed)
    return [
        {
            "template": TEMPLATES[chance.choice(sorted(TEMPLATES))],
            "options": chance.choice(OPTIONS),
            "body": chat_samples.body(chance),
        }
        for _ in range(CASES)
    ]


def reader(case: dict[str, Any], cache: PrefixCache) -> PromptReader:
    """Returns a reader of the tiny model with a case's template and options."""
    card = ModelCard(
        "m",
        (TINY / "tokenizer.json").read_bytes(),
        case["template"],
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        block_size=1,
    )
    options = RenderOptions(**case["options"])
    return PromptReader(card, cache, ThreadPoolExecutor(1), options=options)


@pytest.mark.parametrize("seed", [1, 2])
def test_prompts_are_vllms(seed: int, vllm_python: Path) -> None:
    """Every chat that vLLM accepts has vLLM's token ids here; none is given up on."""
    requests = cases(seed)
    probe = subprocess.run(
        [str(vllm_python), str(PROBE), str(TINY)],
        input=json.dumps(requests).encode(),
        capture_output=True,
        check=True,
    )
    answers = json.loads(probe.stdout.splitlines()[-1])
    readers: dict[str, PromptReader] = {}
    cache = PrefixCache()
    accepted = 0
    for case, answer in zip(requests, answers, strict=True):
        key = json.dumps([case["template"], case["options"]])
        read = readers.get(key) or readers.setdefault(key, reader(case, cache))
        prompt = read.read_chat_now(decode_chat(chat_samples.encoded(case["body"])))
        if "ids" not in answer:
            refused = (Reason.TEMPLATE_ERROR, Reason.INVALID)
            assert isinstance(prompt, Inexact), (answer["error"], case)
            assert prompt.reason in refused, (answer["error"], case)
            continue
        accepted += 1
        assert not isinstance(prompt, Inexact), (prompt, case)
        assert prompt.hashes == chain(pack_tokens(answer["ids"]), 1), case
    assert accepted > CASES // 2
