"""vLLM's own load generator against a router, in both of its usual forms."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lab.stack import LocalStack, StackOptions
from lab.tiny_model import tiny_model_dir

PROMPTS = 60


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
async def test_vllm_bench_serve_completes(
    vllm_python: Path, tmp_path: Path, backend: str, endpoint: str
) -> None:
    """Every request of the benchmark is answered in full, with every token it asked for."""
    options = StackOptions(engines=2, routers=1, engine_flags=("--speed", "20"))
    command = [
        *(str(vllm_python.with_name("vllm")), "bench", "serve"),
        *("--backend", backend, "--endpoint", endpoint, "--model", "tiny"),
        *("--tokenizer", str(tiny_model_dir()), "--dataset-name", "random"),
        *("--random-input-len", "300", "--random-output-len", "16", "--ignore-eos"),
        *("--num-prompts", str(PROMPTS), "--request-rate", "40", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
    ]
    async with LocalStack(options) as stack:
        process = await asyncio.create_subprocess_exec(
            *(*command, "--base-url", stack.url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == PROMPTS, said.decode()[-3000:]
    assert result["total_output_tokens"] == PROMPTS * 16
