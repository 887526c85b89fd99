"""The peer's offline replayer beside ours: the same trace, fleet, engine limits and step times.

NVIDIA Dynamo's replayer (`ai-dynamo-runtime`) schedules a trace on emulated vLLM engines in
simulated time, written in Rust. It runs as a child in an environment of its own
(`bench.dynamo_env`), so it is no dependency of ours. Its step times are its own and cannot be
replaced; so `PeerTimes` gives them to our engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import msgspec
import numpy as np

from bench import dynamo_env
from lab.profiles import StepTimes
from lab.replay_config import ReplayConfig
from lab.replay_result import Floats, Ints
from lab.traces import Trace

CHILD_S_MAX = 600.0
_HORIZON_S_MAX = 3600.0
_STEPS_MAX = 1 << 20


class PeerTimes(StepTimes, frozen=True):
    """The step times of the peer's engines, as single requests and pairs of them show.

    A step takes the sum of two polynomials: of the prompt tokens that it computes, and of the
    share that the decoding sequences' contexts have of the cache. Caches of a million tokens keep
    that share far below 1, where the second one still rises.

    Attributes:
        capacity_tokens: of one engine's cache.
    """

    capacity_tokens: int = 1

    def step_s(self, tokens: int, sequences: int, pairs: int = 0, kv_tokens: int = 0) -> float:
        """Return the duration of one step, seconds.

        How many of the sequences decode is not said; nearly always one of them is a prompt.
        """
        duration_s = 0.0
        if pairs:
            new = tokens - (sequences - 1)
            duration_s += 1e-3 * (4.209989e-07 * new * new + 1.518344e-02 * new + 16.50142)
        if kv_tokens:
            duration_s += self.decode_s(1, sequences, kv_tokens)
        return duration_s

    def decode_s(self, steps: int, sequences: int, kv_tokens: int) -> float:
        """Return the duration of `steps` steps in which the same sequences decode a token each."""
        # Sums over t < steps of kv_tokens + sequences × t, and of its square.
        ones = steps * (steps - 1) // 2
        squares = (steps - 1) * steps * (2 * steps - 1) // 6
        first = steps * kv_tokens + sequences * ones
        second = (
            steps * kv_tokens * kv_tokens
            + 2 * kv_tokens * sequences * ones
            + sequences * sequences * squares
        )
        share, share_squared = first / self.capacity_tokens, second / self.capacity_tokens**2
        return 1e-3 * (-25.74 * share_squared + 54.01 * share + 5.74 * steps)

    def decode_steps_in(self, duration_s: float, sequences: int, kv_tokens: int) -> int:
        """Return the smallest number of such steps, at least 1, that last `duration_s` or more."""
        if duration_s > _HORIZON_S_MAX:
            return _STEPS_MAX
        steps = max(1, int(duration_s / self.decode_s(1, sequences, kv_tokens)))
        while self.decode_s(steps, sequences, kv_tokens) < duration_s:
            steps += 1
        while steps > 1 and self.decode_s(steps - 1, sequences, kv_tokens) >= duration_s:
            steps -= 1
        return steps


def peer_config(instances: int, block_size: int, blocks: int) -> ReplayConfig:
    """Return a fleet as the peer has it: `blocks` a cache, and the peer's step times."""
    capacity = blocks * block_size
    return ReplayConfig(
        instances=instances,
        block_size=block_size,
        kv_tokens=capacity + block_size,  # our count has vLLM's null block
        step_times=PeerTimes(*(0.0,) * 8, capacity_tokens=capacity),
        event_lag_s=0.0,
    )


class PeerOutcome(msgspec.Struct, frozen=True):
    """What the peer made of a trace; requests in order of arrival, times in seconds.

    Attributes:
        cpu_s: of the process, all threads, reading the trace included; `wall_s` likewise.
        instance: (n,) which one served.
    """

    cpu_s: float
    wall_s: float
    at_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    prompt_tokens: Ints
    cached_tokens: Ints
    instance: Ints

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens over all."""
        return float(self.cached_tokens.sum() / self.prompt_tokens.sum())


def write_mooncake(trace: Trace, path: Path) -> None:
    """Write a trace in Mooncake's format, with blocks of its own size."""
    with path.open("w", encoding="utf-8") as file:
        for each in trace.requests:
            line = {
                "timestamp": each.at_s * 1e3,
                "input_length": each.input_tokens,
                "output_length": each.output_tokens,
                "hash_ids": each.block_ids,
            }
            file.write(json.dumps(line) + "\n")


def run_peer(trace: Trace, config: ReplayConfig, router: str = "round_robin") -> PeerOutcome:
    """Return what the peer makes of a trace on a fleet of `peer_config`.

    Args:
        router: `round_robin` or `kv_router`.

    Raises:
        PeerUnavailable: there is no peer here.
        subprocess.SubprocessError: it failed.
    """
    python = dynamo_env.interpreter()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("trace.jsonl", "setup.json", "outcome.json")]
        write_mooncake(trace, paths[0])
        setup = {
            "trace": str(paths[0]),
            "trace_block_tokens": trace.block_tokens,
            "instances": config.instances,
            "router": router,
            "engine": {
                "backend": "vllm",
                "block_size": config.block_size,
                "num_gpu_blocks": config.kv_tokens // config.block_size - 1,
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
            },
        }
        paths[1].write_text(json.dumps(setup))
        subprocess.run(
            [str(python), "-m", "bench.replay_peer_child", *map(str, paths[1:])],
            cwd=dynamo_env.ROOT,
            env={**os.environ, "DYN_LOG": "error"},
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=CHILD_S_MAX,
        )
        outcome = json.loads(paths[2].read_bytes())
    rows = np.array(sorted(outcome["requests"]), float)
    at, ttft, whole, prompt, output, cached, instance = rows.T
    return PeerOutcome(
        cpu_s=outcome["cpu_s"],
        wall_s=outcome["wall_s"],
        at_s=at / 1e3,
        ttft_s=ttft / 1e3,
        tpot_s=np.where(output > 1, (whole - ttft) / np.maximum(output - 1, 1) / 1e3, np.nan),
        prompt_tokens=prompt.astype(np.int64),
        cached_tokens=cached.astype(np.int64),
        instance=instance.astype(np.int64),
    )
