"""`multiplane sidecar -- vllm serve …` starts real vLLM with the flags that a sidecar needs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from controlplane.http_client import HttpClient
from lab.stack import LocalStack, StackOptions
from lab.tiny_model import write_tiny_model
from tests.vllm.launch import ENVIRONMENT, free_ports, tail

START_S_MAX = 180.0


def _processes_of(port: int) -> list[str]:
    """Return the command lines of living processes that name a port."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        if "--port" in words and str(port) in words and "sidecar" not in words:
            found.append(" ".join(words))
    return found


async def test_the_sidecar_starts_vllm_serves_it_and_ends_it(
    vllm_python: Path, tmp_path: Path
) -> None:
    """Given only `vllm serve MODEL`, its blocks are routed by, and SIGTERM leaves nothing."""
    model = write_tiny_model(tmp_path / "tiny", max_model_len=2048)
    (port,) = free_ports(1)
    engine = [
        *(str(vllm_python.parent / "vllm"), "serve", str(model), "--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"),
        *("--dtype", "bfloat16", "--enforce-eager", "--block-size", "32"),
        *("--max-model-len", "2048", "--kv-cache-memory-bytes", "64M"),
    ]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM", "PYTEST"))}
    # What vLLM learns about a model class is kept between runs; learning it costs 10 s.
    cache = {"VLLM_CACHE_ROOT": str(vllm_python.parents[1].with_suffix(".state"))}
    async with LocalStack(StackOptions(engines=0, routers=1)) as stack:
        command = [sys.executable, "-m", "controlplane.cli.main", "sidecar"]
        flags = ["--nats", stack.nats_url, "--instance-id", "launched", "--drain-s", "5"]
        with (tmp_path / "log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(*command, *flags, "--", *engine),
                stdout=log,
                stderr=log,
                env={**kept, **ENVIRONMENT, **cache},
            )
        try:
            await _ready(stack, process, tmp_path / "log")
            await _serves(stack)
        finally:
            process.send_signal(signal.SIGTERM)
            status = await asyncio.wait_for(process.wait(), 60.0)
    assert status == 0, tail(tmp_path / "log")
    said = (tmp_path / "log").read_text()
    assert '"endpoint":"tcp://127.0.0.1:' in said, "its events stay on this machine"
    assert "came by replay only" not in said, "and come as they happen"
    assert "cannot be compared" not in said, "it said what it makes of a chat"
    assert not _processes_of(port)


async def _ready(stack: LocalStack, process: asyncio.subprocess.Process, log: Path) -> None:
    end_s = time.monotonic() + START_S_MAX
    async with HttpClient() as http:
        while True:
            state = await http.get(f"{stack.admin_urls[0]}/debug/state")
            seen = [i for model in state["models"].values() for i in model["instances"]]
            cards = all(model["card"] for model in state["models"].values())
            if cards and [i["trust"] for i in seen] == ["exact"]:
                return
            said = tail(log)
            assert process.returncode is None, said
            assert time.monotonic() < end_s, said
            await asyncio.sleep(0.2)


async def _serves(stack: LocalStack) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "one two three four " * 20}],
        "max_tokens": 4,
    }
    async with HttpClient(timeout_s=60.0) as http:
        url = f"{stack.url}/v1/chat/completions"
        await http.post(url, body)
        explained = {"candidates": [{"hit_tokens": 0}]}
        end_s = time.monotonic() + 20.0
        while not explained["candidates"][0]["hit_tokens"]:
            assert time.monotonic() < end_s, "the engine's blocks never came"
            explained = await http.post(f"{stack.admin_urls[0]}/debug/explain", body)
        usage = (await http.post(url, body))["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached == explained["candidates"][0]["hit_tokens"] > 0
