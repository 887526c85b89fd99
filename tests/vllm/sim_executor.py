"""An executor for the unmodified `vllm serve` in which only the forward pass is simulated.

    PYTHONPATH=tests/vllm vllm serve MODEL --distributed-executor-backend sim_executor.SimExecutor

API server, tokenizer, scheduler, block pool, KV events and metrics are vLLM's own. A step takes

    MULTIPLANE_SIM_STEP_S                                 default 0.006 s
    + MULTIPLANE_SIM_PREFILL_TOKEN_S x prefill tokens     default 6e-5 s
    + MULTIPLANE_SIM_SEQUENCE_S x sequences               default 2e-5 s

and samples the tokens of token_rule, seeded by the prompt: equal prompts get equal answers on every
instance, as at temperature 0. The end-of-sequence token never comes, so answers end at `max_tokens`
or at a stop string. Any block size works. No log probabilities, structured output or speculation.
Tied to vLLM 0.32.
"""

import os
import time
from concurrent.futures import Future
from typing import Any

import torch
from block_probe import BlockProbe
from token_rule import prompt_seed, sampled_token
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

PLENTY_BYTES = 1 << 40  # nothing is allocated: --num-gpu-blocks-override sets the size


class SimWorker(BlockProbe):
    """What vLLM's engine asks of a worker, by the names under which it asks."""

    def __init__(self, config: VllmConfig) -> None:
        self._block_size = config.cache_config.block_size
        self._step_s = _seconds("MULTIPLANE_SIM_STEP_S", 0.006)
        self._prefill_token_s = _seconds("MULTIPLANE_SIM_PREFILL_TOKEN_S", 6e-5)
        self._sequence_s = _seconds("MULTIPLANE_SIM_SEQUENCE_S", 2e-5)
        self._prompts: dict[str, tuple[str, int]] = {}  # request id -> (seed, prompt length)
        self._loras: set[int] = set()

    def get_kv_cache_spec(self) -> dict[str, FullAttentionSpec]:
        """Returns one attention layer with the smallest block there is."""
        spec = FullAttentionSpec(
            block_size=self._block_size, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
        )
        return {"layer": spec}

    def determine_available_memory(self) -> int:
        """Returns more bytes than any test asks for."""
        return PLENTY_BYTES

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Returns vLLM's default layout."""
        return ["LBHNC"]

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns that text is generated."""
        return ("generate",)

    def supports_draft_weight_updates(self) -> bool:
        """Returns that there is no draft model."""
        return False

    def add_lora(self, lora_request: Any) -> bool:
        """Accepts any adapter: it only changes block hashes."""
        self._loras.add(lora_request.lora_int_id)
        return True

    def list_loras(self) -> set[int]:
        """Returns the adapters added so far."""
        return self._loras

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Waits as long as the step would take and returns a token for each request that is due."""
        for request_id in scheduled.finished_req_ids:
            self._prompts.pop(request_id, None)
        due = self._positions_due(scheduled)
        request_ids = list(scheduled.num_scheduled_tokens)
        if not request_ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        decoded = sum(1 for count in scheduled.num_scheduled_tokens.values() if count == 1)
        prefilled = scheduled.total_num_scheduled_tokens - decoded
        time.sleep(
            self._step_s + self._prefill_token_s * prefilled + self._sequence_s * len(request_ids)
        )
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[
                [sampled_token(self._prompts[request_id][0], due[request_id])]
                if request_id in due
                else []
                for request_id in request_ids
            ],
        )

    def _positions_due(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Returns the position of the next token of each request that this step fully computes."""
        due = {}
        counts = scheduled.num_scheduled_tokens
        for new in scheduled.scheduled_new_reqs:
            prompt = new.prompt_token_ids
            assert prompt is not None, "prompts given as embeddings are not simulated"
            self._prompts[new.req_id] = (prompt_seed(prompt), len(prompt))
            position = new.num_computed_tokens + counts[new.req_id]
            if position >= len(prompt):
                due[new.req_id] = position
        again = scheduled.scheduled_cached_reqs
        for request_id, computed, answered in zip(
            again.req_ids, again.num_computed_tokens, again.num_output_tokens, strict=True
        ):
            position = computed + counts[request_id]
            if position >= self._prompts[request_id][1] + answered:
                due[request_id] = position
        return due

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """Has no model, memory or device to do it to."""

    set_kv_cache_layout = initialize_from_config = check_health = shutdown = _nothing
    reset_mm_cache = reset_encoder_cache = sleep = wake_up = profile = _nothing


class SimExecutor(Executor):
    """Runs one simulated worker in the engine's own process."""

    def _init_executor(self) -> None:
        self._worker = SimWorker(self.vllm_config)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Calls the worker; what it cannot do fails with the name of what was asked."""
        del timeout
        results = [getattr(self._worker, method)(*args, **(kwargs or {}))]
        if not non_block:
            return results
        future: Future[Any] = Future()
        future.set_result(results)
        return future

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Runs one step; the tokens come with it, so `sample_tokens` is never asked."""
        output = self._worker.execute_model(scheduler_output)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def compile_or_warm_up_model(self) -> None:
        """Has nothing to compile."""

    def check_health(self) -> None:
        """Is healthy as long as the process lives."""


def _seconds(name: str, default: float) -> float:
    value = float(os.environ.get(name, default))
    if value < 0:
        raise ValueError(f"{name}={value} must not be negative")
    return value
