"""vLLM's own Scheduler and KVCacheManager in a loop, driven step by step over JSON lines.

No server and no model. It runs inside vLLM's environment, forked by the nursery; tests talk to it
through tests/vllm/probe.py. Real: queueing, continuous batching, chunked prefill, preemption, block
hashes, block pool, eviction and the KV events. A step takes no time. Sampled tokens follow
token_rule, so the driver knows them: the token at position p of a request is
`sampled_token(seed, p)`, its seed being its id unless given.

Protocol: an object a line on standard input, an object a line on standard output. A refused
operation answers `{"error": ...}`.

`{"op": "open", "num_blocks": N, ...}` makes an engine, replacing the one before. Also block_size,
    max_num_seqs, max_num_batched_tokens, max_model_len, watermark, hash_algo (see `DEFAULTS`).
    Answers the limits in force. num_blocks includes vLLM's null block.
`{"op": "add", "id": S, "tokens": [...], "max_tokens": N}` also cache_salt, seed, report_hits
    (kv_cache_report_mode "full"), arrival_step (it arrives before that step; default the next).
`{"op": "step"}` runs one engine step and answers

    {"step": N,                        counted from 0
     "scheduled": [[id, tokens]...],   in the order of the batch
     "preempted": [id...],
     "sampled": {id: token},
     "cached_tokens": {id: N},         prefix hit, with a request's first token
     "finished": {id: reason},
     "events": [...],                  vLLM's, as maps, in order; a hash is the low 64 bits
     "running": [id...], "waiting": [id...],
     "free_blocks": N}

`{"op": "run", "steps_max": N}` runs steps until nothing is left, one answer a step, then
    `{"idle": bool}`.
`{"op": "abort", "ids": [...]}`, `{"op": "reset", "running_too": bool}` (answers `success`),
`{"op": "blocks"}` answers `{"blocks": [[hash, copies]...]}`, the true prefix cache.

Tied to vLLM 0.32.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import msgspec
import torch
from block_probe import block_copies
from token_rule import sampled_token
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_events import EventBatch, EventPublisher
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

DEFAULTS = {
    "num_blocks": 1024,
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": 8192,
    "watermark": SchedulerConfig.watermark,
    "hash_algo": "sha256",
}
MODEL_LENGTH_MAX = 1 << 20


class EventTap(EventPublisher):
    """Keeps the events of a step for the answer instead of publishing them."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[Any] = []

    def publish(self, events: EventBatch) -> None:
        """Keeps a batch."""
        self._events += events.events

    def shutdown(self) -> None:
        """Holds nothing open."""

    def take(self) -> list[Any]:
        """Returns the events since the last call, as vLLM would write them."""
        events, self._events = self._events, []
        return list(msgspec.to_builtins(events))


class Engine:
    """One engine core without a model."""

    def __init__(self, model: Path, limits: dict[str, Any]) -> None:
        unknown = limits.keys() - DEFAULTS.keys()
        if unknown:
            raise ValueError(f"unknown limits {sorted(unknown)}; there are {sorted(DEFAULTS)}")
        self.limits = {**DEFAULTS, **limits}
        config = _config(model, self.limits)
        block_size = config.cache_config.block_size
        hash_function = get_hash_fn_by_name(self.limits["hash_algo"])
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(block_size, hash_function)
        layer = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=self.limits["num_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
            ),
            block_size=block_size,
            hash_block_size=block_size,
            structured_output_manager=StructuredOutputManager(config),
        )
        self._tap = self.scheduler.kv_event_publisher = EventTap()
        self._seeds: dict[str, str] = {}
        self._arriving: list[tuple[int, Request]] = []
        self._step = 0

    @property
    def busy(self) -> bool:
        """Whether a request has not ended or not arrived."""
        return bool(self._arriving) or self.scheduler.has_requests()

    def add(self, request: dict[str, Any]) -> None:
        """Takes a request, to arrive before its step."""
        name = request["id"]
        if name in self._seeds:
            raise ValueError(f"request {name!r} exists already")
        report = {"kv_cache_report_mode": "full"} if request.get("report_hits") else None
        made = Request(
            name,
            list(request["tokens"]),
            SamplingParams(
                max_tokens=request["max_tokens"],
                temperature=0.0,
                ignore_eos=True,
                extra_args=report,
            ),
            None,
            cache_salt=request.get("cache_salt"),
            block_hasher=self._hasher,
        )
        self._seeds[name] = request.get("seed", name)
        self._arriving.append((request.get("arrival_step", self._step), made))

    def step(self) -> dict[str, Any]:
        """Runs one step and returns what happened in it."""
        due = [request for step, request in self._arriving if step <= self._step]
        self._arriving = [(step, request) for step, request in self._arriving if step > self._step]
        for request in due:
            self.scheduler.add_request(request)
        plan = self.scheduler.schedule()
        names = list(plan.num_scheduled_tokens)
        sampled = {name: token for name in names if (token := self._sample(name)) is not None}
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[sampled[name]] if name in sampled else [] for name in names],
        )
        outputs = [
            one
            for several in self.scheduler.update_from_output(plan, output).values()
            for one in several.outputs
        ]
        self._step += 1
        return {
            "step": self._step - 1,
            "scheduled": [[name, plan.num_scheduled_tokens[name]] for name in names],
            "preempted": sorted(plan.preempted_req_ids or ()),
            "sampled": sampled,
            "cached_tokens": {
                one.request_id: one.prefill_stats.num_cached_tokens
                for one in outputs
                if one.prefill_stats is not None
            },
            "finished": {
                one.request_id: str(one.finish_reason)
                for one in outputs
                if one.finish_reason is not None
            },
            "events": self._tap.take(),
            "running": [request.request_id for request in self.scheduler.running],
            "waiting": [request.request_id for request in self.scheduler.waiting],
            "free_blocks": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }

    def _sample(self, name: str) -> int | None:
        """Returns a request's next token when this step computes all its tokens."""
        request = self.scheduler.requests[name]
        # schedule() has advanced num_computed_tokens by what this step computes.
        if request.num_computed_tokens < request.num_tokens:
            return None
        return sampled_token(self._seeds[name], request.num_tokens)


def _config(model: Path, limits: dict[str, Any]) -> VllmConfig:
    """Returns vLLM's configuration for these limits, or fails when vLLM would change one."""
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=limits["max_model_len"],
        ),
        cache_config=CacheConfig(
            block_size=limits["block_size"],
            enable_prefix_caching=True,
            prefix_caching_hash_algo=limits["hash_algo"],
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=limits["max_num_seqs"],
            max_num_batched_tokens=limits["max_num_batched_tokens"],
            max_model_len=limits["max_model_len"],
            watermark=limits["watermark"],
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    config.cache_config.num_gpu_blocks = limits["num_blocks"]
    scheduling = config.scheduler_config
    in_force = {
        "block_size": config.cache_config.block_size,
        "max_num_seqs": scheduling.max_num_seqs,
        "max_num_batched_tokens": scheduling.max_num_batched_tokens,
    }
    for name, value in in_force.items():
        if value != limits[name]:
            raise ValueError(f"vLLM turned {name}={limits[name]} into {value}")
    return config


class Probe:
    """Carries out the operations of one driver."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._engine: Engine | None = None

    def handle(self, operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the answers to one operation."""
        fields = dict(operation)
        name = fields.pop("op")
        if name == "open":
            if self._engine is not None:
                self._engine.scheduler.shutdown()
            self._engine = Engine(self._model, fields)
            yield self._engine.limits
            return
        if self._engine is None:
            raise ValueError("no engine is open")
        yield from self._drive(self._engine, name, fields)

    def _drive(self, engine: Engine, name: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        match name:
            case "add":
                engine.add(fields)
                yield {}
            case "step":
                yield engine.step()
            case "run":
                for _ in range(fields["steps_max"]):
                    if not engine.busy:
                        break
                    yield engine.step()
                yield {"idle": not engine.busy}
            case "abort":
                engine.scheduler.finish_requests(fields["ids"], RequestStatus.FINISHED_ABORTED)
                yield {}
            case "reset":
                running_too = fields.get("running_too", False)
                yield {"success": engine.scheduler.reset_prefix_cache(running_too)}
            case "blocks":
                yield {"blocks": block_copies(engine.scheduler.kv_cache_manager.block_pool)}
            case _:
                raise ValueError(f"unknown operation {name!r}")


def main() -> None:
    """Answers operations until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output
    with tempfile.TemporaryDirectory(prefix="scheduler-probe-") as folder:
        _write_model(Path(folder))
        probe = Probe(Path(folder))
        for line in sys.stdin:
            try:
                for answer in probe.handle(json.loads(line)):
                    _answer(replies, answer)
            except (AssertionError, KeyError, TypeError, ValueError, RuntimeError) as error:
                _answer(replies, {"error": f"{type(error).__name__}: {error}"})


def _answer(replies: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=replies)


def _write_model(folder: Path) -> None:
    """Writes the one file of a model that the scheduler's configuration reads."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 4096,
        "max_position_embeddings": MODEL_LENGTH_MAX,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()
