"""How long an engine step takes: a roofline of a stated GPU and model, and KV capacity from memory.

Theory of operation. A step of vLLM runs every scheduled token through the linear layers once, and
each token attends to the tokens before it. Its time is a sum over three kinds of work, each bound
by what binds it on the hardware, plus what the host does:

- linear layers: the slower of 2 × active parameters FLOPs a token at the GPU's matrix rate, and
  reading the weights once (of a mixture of experts, those that the step's tokens reach);
- attention of prompt chunks: 4 × heads × head size × layers FLOPs for each (query, key) pair;
- attention of decoding sequences: reading their keys and values once a token;
- fixed time a step (scheduling, launches, sampling) and a little for each sequence.

Peak figures are the makers' dense BF16 rates and memory bandwidths. What of them a serving engine
reaches is taken as 60% of matrix FLOPs in linear layers, 45% in attention and 80% of bandwidth: the
middle of what published vLLM and FlashAttention measurements reach. Absolute times are therefore
within tens of percent; ratios between prefill and decode, and how both grow with length and batch,
are what the lab relies on. To measure instead, fit the coefficients of `StepTimes`.

Since every term is constant or linear in the context's length while a batch only decodes, the time
of k such steps has a closed form, which lets simulated time skip ahead.
"""

from __future__ import annotations

import math

import msgspec

GIB = 1 << 30

LINEAR_EFFICIENCY = 0.60
ATTENTION_EFFICIENCY = 0.45
BANDWIDTH_EFFICIENCY = 0.80
STEP_S = 2.5e-3  # host work of a step: scheduling, graph launch, sampling, output handling
SEQUENCE_S = 8e-6  # host work for each sequence of a step
MEMORY_SHARE = 0.9  # vLLM's gpu_memory_utilization default
ACTIVATION_BYTES = 3 * GIB  # activations, graphs and workspace at 8,192 tokens a step


class Gpu(msgspec.Struct, frozen=True):
    """One GPU: dense BF16 FLOPs a second, bytes a second, bytes."""

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float


class Model(msgspec.Struct, frozen=True):
    """What of a model determines its step times; parameters in BF16.

    Attributes:
        parameters: all of them.
        active_parameters: those that one token uses in linear layers, embeddings excluded.
        expert_parameters: those inside routed experts (0 for a dense model).
        experts: routed experts a layer.
        experts_per_token: how many of them a token reaches.
    """

    name: str
    parameters: float
    active_parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    expert_parameters: float = 0.0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers, 2 bytes each."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


class StepTimes(msgspec.Struct, frozen=True):
    """Coefficients of a step's time, seconds.

    Attributes:
        step: every step.
        sequence: each sequence in it.
        token: each token's linear layers, when compute binds them.
        weights: reading the weights that every token uses.
        experts: reading all experts' weights; a step reads the share that its tokens reach.
        expert_miss: chance that one token does not reach a given expert; 1 for dense models.
        pair: each (query, key) pair of a prompt chunk.
        kv_token: each token of context that a decoding sequence reads.
    """

    step: float
    sequence: float
    token: float
    weights: float
    experts: float
    expert_miss: float
    pair: float
    kv_token: float

    def step_s(self, tokens: int, sequences: int, pairs: int = 0, kv_tokens: int = 0) -> float:
        """Return the duration of one step, seconds.

        Args:
            tokens: scheduled in it, of prompts and of decoding sequences.
            sequences: scheduled in it.
            pairs: (query, key) pairs of its prompt chunks.
            kv_tokens: context tokens that its decoding sequences read.
        """
        return self._fixed_s(tokens, sequences) + pairs * self.pair + kv_tokens * self.kv_token

    def decode_s(self, steps: int, sequences: int, kv_tokens: int) -> float:
        """Return the duration of `steps` steps in which the same sequences decode a token each.

        Args:
            kv_tokens: context tokens that they read in the first one.
        """
        reads = steps * kv_tokens + sequences * (steps * (steps - 1) // 2)
        return steps * self._fixed_s(sequences, sequences) + reads * self.kv_token

    def decode_steps_in(self, duration_s: float, sequences: int, kv_tokens: int) -> int:
        """Return the smallest number of such steps, at least 1, that last `duration_s` or more."""
        if math.isinf(duration_s):
            return 1 << 62
        square = sequences * self.kv_token / 2
        linear = self._fixed_s(sequences, sequences) + kv_tokens * self.kv_token - square
        # The root of square × k² + linear × k = duration, in the form that is exact as square → 0.
        root = 2 * duration_s / (linear + math.sqrt(linear * linear + 4 * square * duration_s))
        return max(1, math.ceil(root))

    def scaled(self, factor: float) -> StepTimes:
        """Return a profile whose every step takes `factor` times as long.

        Raises:
            ValueError: `factor` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"factor={factor} must be positive")
        times = {name: getattr(self, name) * factor for name in self.__struct_fields__}
        return StepTimes(**{**times, "expert_miss": self.expert_miss})

    def _fixed_s(self, tokens: int, sequences: int) -> float:
        reached = 1.0 - self.expert_miss**tokens
        linear = max(tokens * self.token, self.weights + self.experts * reached)
        return self.step + self.sequence * sequences + linear


class Profile(msgspec.Struct, frozen=True):
    """A GPU with a model on it."""

    gpu: Gpu
    model: Model

    @property
    def name(self) -> str:
        """`gpu/model`, the key in `PROFILES`."""
        return f"{self.gpu.name}/{self.model.name}"

    @property
    def step_times(self) -> StepTimes:
        """The roofline's coefficients."""
        gpu, model = self.gpu, self.model
        bytes_per_s = gpu.bytes_per_s * BANDWIDTH_EFFICIENCY
        shared = model.parameters - model.expert_parameters
        attention_flops = 4 * model.heads * model.head_size * model.layers
        return StepTimes(
            step=STEP_S,
            sequence=SEQUENCE_S,
            token=2 * model.active_parameters / (gpu.flops_per_s * LINEAR_EFFICIENCY),
            weights=2 * shared / bytes_per_s,
            experts=2 * model.expert_parameters / bytes_per_s,
            expert_miss=1 - model.experts_per_token / model.experts if model.experts else 1.0,
            pair=attention_flops / (gpu.flops_per_s * ATTENTION_EFFICIENCY),
            kv_token=model.kv_bytes_per_token / bytes_per_s,
        )

    def num_blocks(self, block_size: int) -> int:
        """Return how many KV blocks fit beside weights and activations, null block included.

        Raises:
            ValueError: the weights alone do not fit.
        """
        room = self.gpu.memory_bytes * MEMORY_SHARE - 2 * self.model.parameters - ACTIVATION_BYTES
        if room <= 0:
            raise ValueError(f"{self.model.name} does not fit on one {self.gpu.name}")
        return int(room // (self.model.kv_bytes_per_token * block_size))


_GPUS = (
    # The makers' data sheets: dense BF16 rate, bandwidth, memory of the SXM (A100: 80 GB) variants.
    Gpu("a100", 312e12, 2.039e12, 80e9),
    Gpu("h20", 148e12, 4.0e12, 96e9),
    Gpu("h100", 989e12, 3.35e12, 80e9),
    Gpu("h200", 989e12, 4.8e12, 141e9),
)
_MODELS = (
    # The models' config.json and cards. Llama-3.1-8B: 8.03e9 parameters, 1.05e9 in two embeddings,
    # of which the output one is read; Qwen2.5-7B: 7.62e9, 6.53e9 without embeddings.
    Model("qwen2.5-7b", 7.62e9, 7.07e9, layers=28, heads=28, kv_heads=4, head_size=128),
    Model("llama-3.1-8b", 8.03e9, 7.50e9, layers=32, heads=32, kv_heads=8, head_size=128),
    # 48 layers × 128 experts × 3 matrices of 2,048 × 768; 8 experts a token make 3.3e9 active.
    Model(
        "qwen3-30b-a3b",
        30.5e9,
        3.0e9,
        layers=48,
        heads=32,
        kv_heads=4,
        head_size=128,
        expert_parameters=28.99e9,
        experts=128,
        experts_per_token=8,
    ),
)

PROFILES: dict[str, Profile] = {
    profile.name: profile for profile in (Profile(gpu, model) for gpu in _GPUS for model in _MODELS)
}
DEFAULT_PROFILE = "h100/qwen2.5-7b"


def find_profile(name: str) -> Profile:
    """Return the profile called `name`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise ValueError(f"no profile {name!r}; there are {', '.join(PROFILES)}") from None
