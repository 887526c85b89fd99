"""The policies: Multiplane's own, and the rivals to compare it with on one's own traffic.

    name             score(i), the smallest wins                         parameters
    --------------   -------------------------------------------------   -------------------------
    multiplicative   P^α × (B + 1)^β                                     moe_factor, smooth_tokens
    round_robin      0: equal scores rotate                              –
    least_requests   B                                                   –
    linear           λ × new / prompt + (1 − λ) × B / max(B)             weight = λ
    dynamo_cost      w × (queued + new) / block + context / block        weight = w, block_size
    simulated_ttft   P / rate + ⌈P / chunk⌉ × (step + B × decode)        rates of an engine

new(i) = max(prompt − hit(i), 1); P(i) = queued(i) + new(i).

Sources: LMetric (arXiv 2603.15202) for the product and as a survey of the others; `linear` after
BAILIAN, the hit ratio against the load; `dynamo_cost` after NVIDIA Dynamo's classic router.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from controlplane.core.scoring import (
    FleetView,
    FloatArray,
    IntArray,
    Policy,
    Request,
    new_tokens,
    product,
)
from controlplane.core.scoring import queued_tokens as queued

_ONE = np.array(1)  # as an array, because numpy takes longer to make one than to add it

_Above = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Multiplicative(msgspec.Struct, frozen=True):
    """New prefill tokens × batch size: the default.

    Attributes:
        moe_factor: what a new token costs relative to a queued one. Above 1 for mixtures of
            experts, whose small prefills waste more of each step.
        smooth_tokens: P beyond this grows only with its logarithm, so that very long contexts do
            not outweigh any batch; None never smooths.
    """

    moe_factor: _Above = 1.0
    smooth_tokens: _Above | None = None
    name: ClassVar[str] = "multiplicative"

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return P^α × (B + 1)^β."""
        new = new_tokens(request)
        waiting = queued(view) if view.backlog is None else view.backlog
        p: Any = waiting + (new if self.moe_factor == 1.0 else new * self.moe_factor)
        if view.network_tokens is not None:
            p = p + view.network_tokens
        if view.speed is not None:
            p = p / view.speed
        if self.smooth_tokens is not None:
            p = smoothed(p, self.smooth_tokens)
        b: Any = view.batch_size + _ONE if view.weight is None else view.weight
        if request.alpha != 1.0 or request.beta != 1.0:
            return _weighted(p, request.alpha, b, request.beta)
        if p.dtype == np.int64:
            return product(p, b)
        scores: FloatArray = np.multiply(p, b, out=p)
        return scores


class RoundRobin(msgspec.Struct, frozen=True):
    """Everybody is equally good: the rotation among equals does the rest."""

    name: ClassVar[str] = "round_robin"

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return zeros."""
        return np.zeros(len(view))


class LeastRequests(msgspec.Struct, frozen=True):
    """The smallest batch."""

    name: ClassVar[str] = "least_requests"

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return B."""
        return view.batch_size.astype(np.float64)


class Linear(msgspec.Struct, frozen=True):
    """A weighted sum of the miss ratio and the relative load.

    Attributes:
        weight: λ of the miss ratio, 0 to 1; 0.7 was best for chat in LMetric's evaluation.
    """

    weight: _Share = 0.7
    name: ClassVar[str] = "linear"

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return λ × new / prompt + (1 − λ) × B / max(B)."""
        miss = new_tokens(request) / max(request.prompt_tokens, 1)
        load = view.batch_size / max(int(view.batch_size.max()), 1)
        return self.weight * miss + (1.0 - self.weight) * load


class DynamoCost(msgspec.Struct, frozen=True):
    """Blocks to prefill plus blocks being decoded.

    Attributes:
        weight: of the prefill blocks.
        block_size: tokens a block.
    """

    weight: _Amount = 1.0
    block_size: _Above = 16
    name: ClassVar[str] = "dynamo_cost"

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return w × (queued + new) / block + context / block."""
        prefill = queued(view) + new_tokens(request)
        blocks: FloatArray = np.divide(
            self.weight * prefill + view.context_tokens, self.block_size, dtype=np.float64
        )
        return blocks


class SimulatedTtft(msgspec.Struct, frozen=True):
    """The time to first token of a simple engine: chunks of prefill that share steps with decodes.

    Attributes:
        prefill_tokens_per_s: of an otherwise idle instance with speed 1.
        chunk_tokens: the engine's token budget a step.
        step_s: what a step costs whatever is in it.
        decode_s: what each decoding request adds to a step.
    """

    prefill_tokens_per_s: _Above = 16_000.0
    chunk_tokens: _Above = 8_192
    step_s: _Amount = 0.004
    decode_s: _Amount = 0.0002
    name: ClassVar[str] = "simulated_ttft"

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return the estimated seconds to the first token."""
        p = queued(view) + new_tokens(request)
        rate = self.prefill_tokens_per_s * (1.0 if view.speed is None else view.speed)
        steps = np.ceil(p / self.chunk_tokens)
        scores: FloatArray = p / rate + steps * (self.step_s + view.batch_size * self.decode_s)
        return scores


POLICIES: dict[str, type[Any]] = {
    kind.name: kind
    for kind in (Multiplicative, RoundRobin, LeastRequests, Linear, DynamoCost, SimulatedTtft)
}
"""Every policy by its name, for configuration."""

READS_CONTEXT = frozenset({DynamoCost.name})
"""Policies whose scores depend on `context_tokens`."""


def make_policy(name: str, /, **parameters: Any) -> Policy:
    """Return the policy of this name.

    Args:
        parameters: as the policy's attributes; what is left out has its default.

    Raises:
        ValueError: there is no such policy or parameter, or a value is of the wrong type or makes
            no sense, such as a block of 0 tokens.
    """
    kind = POLICIES.get(name)
    if kind is None:
        raise ValueError(f"no policy {name!r}: choose one of {', '.join(sorted(POLICIES))}")
    known = kind.__struct_fields__
    unknown = sorted(set(parameters) - set(known))
    if unknown:
        raise ValueError(
            f"policy {name} has no parameter {', '.join(unknown)}; "
            f"it has {', '.join(known) or 'none'}"
        )
    try:
        policy: Policy = msgspec.convert(parameters, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"policy {name}: {error}") from error
    return policy


def _weighted(p: FloatArray, alpha: float, b: IntArray, beta: float) -> FloatArray:
    """Return p^α × b^β; not finite, silently, where that is beyond float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        scores: FloatArray = np.power(p, alpha) * np.power(b, beta)
    return scores


def smoothed(p: FloatArray, threshold: float) -> FloatArray:
    """Return P, beyond `threshold` replaced by threshold × (1 + ln(P / threshold))."""
    excess = np.maximum(p / threshold, 1.0)
    return np.where(p > threshold, threshold * (1.0 + np.log(excess)), p)
