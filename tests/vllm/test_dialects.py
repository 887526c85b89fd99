"""The prompts of messages and responses against vLLM's own code, request by request."""

import asyncio
import json
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.hashing import chain, pack_tokens
from controlplane.core.plane import Plane
from lab.tiny_model import tiny_model_dir
from router.directory import ServedModel
from router.prefix_cache import PrefixCache
from router.prompt import Inexact, Prompt, Reason
from router.reading import Reading, Rest, read
from router.surface import Asked
from router.template_habits import habits_of
from router.tokens import PromptReader
from schemas.anthropic import decode_messages
from schemas.bus import ModelCard
from schemas.openai import decode_responses
from tests.router import chat_samples
from tests.router.dialect_samples import messages_body, responses_body

PROBE = Path(__file__).with_name("dialect_probe.py")
CASES = 300
TINY = tiny_model_dir()
TEMPLATES = {
    **chat_samples.TEMPLATES,
    "tiny": (TINY / "chat_template.jinja").read_text(encoding="utf-8"),
}
DIALECTS = {
    "messages": (messages_body, decode_messages),
    "responses": (responses_body, decode_responses),
}
REFUSED = {Reason.TEMPLATE_ERROR, Reason.INVALID, Reason.UNSUPPORTED}


def cases(kind: str) -> list[dict[str, Any]]:
    """Returns random requests, each with a template."""
    chance = random.Random(kind)
    body = DIALECTS[kind][0]
    return [
        {
            "kind": kind,
            "template": TEMPLATES[chance.choice(sorted(TEMPLATES))],
            "body": body(chance),
        }
        for _ in range(CASES)
    ]


def served(template: str, cache: PrefixCache) -> ServedModel:
    """Returns the tiny model as a router serves it, with one of the templates."""
    card = ModelCard(
        "m",
        (TINY / "tokenizer.json").read_bytes(),
        template,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        block_size=1,
    )
    model = ServedModel("m", Plane("m", "r", 1))
    reader = PromptReader(card, cache, ThreadPoolExecutor(1))
    model.use("digest", card, reader, habits_of(card))
    return model


async def whole(rest: Rest) -> Reading:
    """Return what a reading that has begun comes to."""
    return await rest


@pytest.mark.parametrize("kind", sorted(DIALECTS))
def test_prompts_are_vllms(kind: str, vllm_python: Path) -> None:
    """Every request that vLLM accepts has vLLM's token ids here; none is given up on."""
    requests = cases(kind)
    probe = subprocess.run(
        [str(vllm_python), str(PROBE), str(TINY)],
        input=json.dumps(requests).encode(),
        capture_output=True,
        check=True,
    )
    answers = json.loads(probe.stdout.splitlines()[-1])
    models: dict[str, ServedModel] = {}
    cache = PrefixCache()
    accepted = 0
    for case, answer in zip(requests, answers, strict=True):
        template = case["template"]
        model = models.get(template) or models.setdefault(template, served(template, cache))
        asked = Asked(DIALECTS[kind][1](chat_samples.encoded(case["body"])), 0)
        prompt = read(model, asked, None)
        if isinstance(prompt, Rest):  # A long text of odd letters is tokenized in a thread.
            prompt = asyncio.run(whole(prompt))
        if "ids" not in answer:
            assert isinstance(prompt, Inexact), (answer["error"], case)
            assert prompt.reason in REFUSED, (answer["error"], case)
            continue
        accepted += 1
        assert isinstance(prompt, Prompt), (prompt, case)
        assert prompt.hashes == chain(pack_tokens(answer["ids"]), 1), case
    assert accepted > CASES // 2
