"""Real vLLM servers for the tests: start, stop, kill, restart, reset, and look into their caches.

Two kinds (`VllmSpec.forward`). `simulated`: the unmodified server whose forward pass is a step-time
model (sim_executor), any block size. `real`: also a real forward pass, of a tiny model with random
weights on the CPU; the block size is a multiple of 32. Servers are forked from one process that has
imported vLLM (nursery); `forked=False` executes `vllm serve` afresh, which takes half a minute.

    with Nursery(python, directory) as nursery:
        server = VllmServer(VllmSpec(), nursery)
        server.start()
        server.wait_ready()
        server.post("/v1/completions", {"model": server.model, "prompt": "Hello", "max_tokens": 4})
        server.cached_blocks()  # the engine's true prefix cache
        server.stop()

Everything here is synchronous: tests on an event loop call it through `asyncio.to_thread`, or block
for the few milliseconds that a control request takes.
"""

import http.client
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from lab.tiny_model import write_tiny_model
from tests.vllm.launch import STOP_S_MAX, Nursery, VllmError, free_ports, tail

READY_S_MAX = 120.0  # a cold start on a busy machine of two cores takes 60 s
REQUEST_S_MAX = 60.0
POLL_S = 0.02

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class VllmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of server to start.

    Attributes:
        forward: Whether the forward pass is simulated or real.
        block_size: Tokens a block; None takes 16 (simulated) or 32 (real).
        num_blocks: Physical blocks, vLLM's null block included. They must hold one request of
            `max_model_len` tokens, or vLLM refuses to start.
        max_model_len: Prompt and answer together, in tokens.
        max_num_seqs: Requests that run at once; more wait.
        max_num_batched_tokens: Tokens a step; longer prompts are computed in chunks.
        step_s: Simulated time of a step, in seconds, before the two terms below.
        prefill_token_s: Simulated time a prefill token adds.
        sequence_s: Simulated time a running request adds.
        hash_algo: vLLM's `--prefix-caching-hash-algo`.
        loras: Names of adapters to serve (simulated only: they change hashes, nothing else).
        data_parallel: Engines behind the one URL, each with its own cache and event stream.
        forked: Fork from the nursery instead of executing `vllm serve` afresh.
        extra_arguments: More arguments for `vllm serve`.
    """

    forward: Literal["simulated", "real"] = "simulated"
    block_size: int | None = None
    num_blocks: int = 1024
    max_model_len: int = 4096
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    step_s: float = 0.006
    prefill_token_s: float = 6e-5
    sequence_s: float = 2e-5
    hash_algo: str = "sha256"
    loras: tuple[str, ...] = ()
    data_parallel: int = 1
    forked: bool = True
    extra_arguments: tuple[str, ...] = ()

    @property
    def block_size_tokens(self) -> int:
        """Tokens a block."""
        return self.block_size or {"simulated": 16, "real": 32}[self.forward]


class VllmServer:
    """One vLLM server: its addresses, its life, and a look into its cache.

    The addresses stay the same over restarts.

    Attributes:
        spec: What it was started as.
        url: Of the HTTP server.
        kv_endpoints: Where each data-parallel rank's KV events are published (ZMQ PUB; subscribers
            connect).
        replay_endpoints: Where each rank's past KV events are asked for (ZMQ ROUTER).
        topic: Of the KV events.
        model: The served model's name.
        model_dir: Its folder, with tokenizer and chat template.
        log: The file that its output goes to.
    """

    topic = "kv-events"
    model = "tiny"

    def __init__(self, spec: VllmSpec, nursery: Nursery) -> None:
        self.spec = spec
        self._nursery = nursery
        self._group: int | None = None
        name = nursery.new_name()
        ranks = range(spec.data_parallel)
        # vLLM adds the rank to both event ports.
        self._http_port, self._kv_port, self._replay_port = free_ports(3, spec.data_parallel)
        self.url = f"http://127.0.0.1:{self._http_port}"
        self.kv_endpoints = [f"tcp://127.0.0.1:{self._kv_port + rank}" for rank in ranks]
        self.replay_endpoints = [f"tcp://127.0.0.1:{self._replay_port + rank}" for rank in ranks]
        self.log = nursery.directory / f"{name}.log"
        self.model_dir = write_tiny_model(
            nursery.directory / name, max_model_len=spec.max_model_len
        )

    @property
    def kv_endpoint(self) -> str:
        """Where the KV events of rank 0 are published."""
        return self.kv_endpoints[0]

    @property
    def replay_endpoint(self) -> str:
        """Where past KV events of rank 0 are asked for."""
        return self.replay_endpoints[0]

    # Life

    def start(self) -> None:
        """Starts the processes; `wait_ready` waits for them."""
        if self.alive:
            raise VllmError(f"{self.url} runs already")
        environment = {
            "MULTIPLANE_SIM_STEP_S": str(self.spec.step_s),
            "MULTIPLANE_SIM_PREFILL_TOKEN_S": str(self.spec.prefill_token_s),
            "MULTIPLANE_SIM_SEQUENCE_S": str(self.spec.sequence_s),
        }
        self._group = self._nursery.launch(
            {
                "run": "forked" if self.spec.forked else "fresh",
                "arguments": self._arguments(),
                "environment": environment,
                "log": str(self.log),
            }
        )

    def wait_ready(self, timeout_s: float = READY_S_MAX) -> None:
        """Returns once /health answers.

        Raises:
            VllmError: It ended, or was not ready in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self._healthy():
            if not self.alive:
                raise VllmError(f"{self.url} ended while starting; its log:\n{tail(self.log)}")
            if time.monotonic() > deadline_s:
                raise VllmError(
                    f"{self.url} not ready in {timeout_s} s; its log:\n{tail(self.log)}"
                )
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ends it politely, after 10 s by force; returns when no process is left."""
        self._signal(signal.SIGTERM)
        try:
            self._wait_gone()
        except VllmError:
            self.kill()

    def kill(self) -> None:
        """Kills all its processes at once, as a machine that fails would."""
        self._signal(signal.SIGKILL)
        self._wait_gone()

    def restart(self) -> None:
        """Stops it and starts it again, empty, on the same ports; returns when it is ready."""
        self.stop()
        self.start()
        self.wait_ready()

    def freeze(self) -> None:
        """Stops its processes from running, connections left open: an instance that hangs."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen server go on."""
        self._signal(signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """Whether any of its processes exists."""
        return self._group is not None and self._signal(0)

    # Requests

    def get(self, path: str) -> Any:
        """Returns the decoded JSON answer of a GET, or its text where it is not JSON."""
        return self._request(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
        """Returns the decoded JSON answer of a POST.

        Raises:
            VllmError: The status is not 2xx, or there is no answer.
        """
        data = json.dumps(body or {}).encode()
        headers = {"content-type": "application/json", **headers}
        return self._request(urllib.request.Request(self.url + path, data, headers))

    def tokenize(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        """Returns the token ids of a text, or of a chat with the chat template applied."""
        key = "prompt" if isinstance(prompt, str) else "messages"
        return list(self.post("/tokenize", {"model": self.model, key: prompt})["tokens"])

    def reset_prefix_cache(self, *, announce: bool = True) -> None:
        """Empties the prefix cache.

        Args:
            announce: Also run a request too short to fill a block. vLLM sends AllBlocksCleared only
                with the next engine step, so an idle engine's reset is invisible until then.

        Raises:
            VllmError: Requests are running.
        """
        if not self.post("/reset_prefix_cache")["success"]:
            raise VllmError(f"{self.url} has running requests, so its cache cannot be reset")
        if announce:
            request = {"model": self.model, "prompt": [1], "max_tokens": 1}
            self.post("/v1/completions", request)

    def cached_blocks(self) -> dict[int, int]:
        """Returns the engine's true prefix cache: vLLM's hash of each full block, and its copies.

        Read from the block pool itself between two engine steps (block_probe), so it is what a
        request arriving now would hit. The hashes are those in the KV events. With data
        parallelism vLLM gives the answer of rank 0 alone.
        """
        (pairs,) = self.post("/collective_rpc", {"method": "cached_blocks"})["results"]
        return dict(pairs)

    # Details

    def _arguments(self) -> list[str]:
        spec = self.spec
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            # Only an endpoint with a `*` is bound; vLLM would connect to any other.
            "endpoint": f"tcp://*:{self._kv_port}",
            "replay_endpoint": f"tcp://127.0.0.1:{self._replay_port}",
            "topic": self.topic,
        }
        common = f"""
            {self.model_dir} --served-model-name {self.model} --host 127.0.0.1
            --port {self._http_port} --load-format dummy --dtype bfloat16 --enforce-eager
            --enable-prefix-caching --prefix-caching-hash-algo {spec.hash_algo}
            --block-size {spec.block_size_tokens} --num-gpu-blocks-override {spec.num_blocks}
            --max-model-len {spec.max_model_len} --max-num-seqs {spec.max_num_seqs}
            --max-num-batched-tokens {spec.max_num_batched_tokens}
            --enable-server-load-tracking --enable-prompt-tokens-details
            --scheduler-cls block_probe.ObservedScheduler
        """.split()
        forward = {
            "simulated": ["--distributed-executor-backend", "sim_executor.SimExecutor"],
            "real": [
                *("--worker-extension-cls", "block_probe.BlockProbe"),
                *("--kv-cache-memory-bytes", "64M"),
            ],
        }[spec.forward]
        loras = [f"{name}={self.model_dir}" for name in spec.loras]
        adapters = ["--enable-lora", "--lora-modules", *loras] if loras else []
        ranks = ["--data-parallel-size", str(spec.data_parallel), "--api-server-count", "1"]
        return [
            *common,
            *forward,
            *("--kv-events-config", json.dumps(events)),
            *adapters,
            *(ranks if spec.data_parallel > 1 else []),
            *spec.extra_arguments,
        ]

    def _signal(self, number: int) -> bool:
        """Sends a signal to its process group and returns whether there is one."""
        if self._group is None:
            return False
        try:
            os.killpg(self._group, number)
        except ProcessLookupError:
            return False
        return True

    def _wait_gone(self) -> None:
        deadline_s = time.monotonic() + STOP_S_MAX
        while self.alive:
            if time.monotonic() > deadline_s:
                raise VllmError(f"{self.url} did not end; its log:\n{tail(self.log)}")
            time.sleep(POLL_S)
        self._group = None

    def _healthy(self) -> bool:
        try:
            with _direct.open(self.url + "/health", timeout=1.0):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except (OSError, http.client.HTTPException):
            return False

    def _request(self, request: urllib.request.Request) -> Any:
        try:
            with _direct.open(request, timeout=REQUEST_S_MAX) as response:
                text = response.read().decode()
                is_json = "json" in response.headers.get("content-type", "")
        except urllib.error.HTTPError as error:
            with error:
                answer = error.read().decode(errors="replace")[:500]
            raise VllmError(f"{request.full_url}: {error.code} {answer}") from error
        except (OSError, http.client.HTTPException) as error:
            raise VllmError(f"{request.full_url}: {error}; log:\n{tail(self.log)}") from error
        return json.loads(text) if is_json else text


def start_all(servers: Iterable[VllmServer]) -> None:
    """Starts servers side by side and returns when all are ready."""
    servers = list(servers)
    for server in servers:
        server.start()
    for server in servers:
        server.wait_ready()
