"""What a replay is: which policy over which instances, routers and delays."""

from __future__ import annotations

import math

import msgspec

from controlplane.core.coalesce import CoalesceConfig
from controlplane.core.detector import BLIND_POLICIES
from controlplane.core.policies import POLICIES, make_policy
from controlplane.core.queue_lines import QueueConfig
from lab.baselines import BASELINES
from lab.engine_types import EngineConfig
from lab.profiles import DEFAULT_PROFILE, StepTimes, find_profile
from lab.replay_tenants import TenantShare

COARSEST = 512
"""Largest block size that is taken over from a trace."""


class PolicySpec(msgspec.Struct, frozen=True):
    """A policy by name, with what differs from its defaults."""

    name: str
    parameters: dict[str, float] = {}

    @property
    def label(self) -> str:
        """The policy as `parse` reads it."""
        if not self.parameters:
            return self.name
        return ":".join([self.name, *(f"{key}={v:g}" for key, v in self.parameters.items())])


def parse_policy(text: str) -> PolicySpec:
    """Return the policy that `name` or `name:parameter=value:…` stands for.

    Raises:
        ValueError: there is no such policy or parameter, or a value is no number.
    """
    name, *parts = text.split(":")
    parameters: dict[str, float] = {}
    for part in parts:
        key, _, value = part.partition("=")
        try:
            parameters[key] = float(value)
        except ValueError:
            raise ValueError(f"policy {text!r}: {part!r} is not parameter=number") from None
    if name in BASELINES:
        known = BASELINES[name].parameters
        unknown = sorted(set(parameters) - set(known))
        if unknown:
            listed = ", ".join(known) or "none"
            raise ValueError(f"policy {name} has no parameter {unknown[0]!r}; it has {listed}")
    elif name in POLICIES:
        make_policy(name, **_whole(parameters))
    else:
        listed = ", ".join(policy_names())
        raise ValueError(f"no policy {name!r}; there are {listed}")
    return PolicySpec(name, parameters)


def policy_names() -> list[str]:
    """Return every policy that can be replayed: the plane's own, then the lab's."""
    return [*sorted(POLICIES), *sorted(BASELINES)]


def looks_at_blocks(spec: PolicySpec) -> bool:
    """Whether a policy looks at what instances cache."""
    if spec.name in BASELINES:
        return BASELINES[spec.name].uses_index
    return spec.name not in BLIND_POLICIES


def plane_parameters(spec: PolicySpec) -> dict[str, float]:
    """Return the parameters as `make_policy` takes them."""
    return _whole(spec.parameters)


def _whole(parameters: dict[str, float]) -> dict[str, float]:
    """Return whole numbers as ints: some parameters are counts."""
    return {key: int(v) if v == math.floor(v) else v for key, v in parameters.items()}


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The surroundings of a replay; times in seconds.

    Attributes:
        instances: emulated engines, all alike.
        profile: GPU/MODEL, for step times and KV capacity.
        step_times: measured ones instead of the profile's (`lab.calibrate`).
        kv_tokens: KV capacity of each; 0 for what the GPU's memory has room for.
        block_size: tokens a block; 0 for the trace's own, but at most `COARSEST`: a trace that says
            what is shared by the 512 tokens has nothing finer to tell (docs/evaluation.md).
        max_model_len: longest prompt and answer together; longer requests are left out.
        routers: each request goes to one of them, in turns.
        event_lag_s: from the end of an engine's step until a router has its block events, and
            from one router's message to another's ear. Several routers differ by ± half of it.
        report_s: how often engines' own counts reach routers.
        batch_cap: largest batch of an instance that routers accept; 0 for no cap.
        queue: how requests wait at each router while every instance is at the cap; None to send
            them on regardless.
        coalesce: how requests follow each other that share a new prefix; None for not at all.
        tenants: whose requests they are; empty for nobody's in particular.
        budgets_ttft_s: seconds to the first token, waits included, within which an answer is in
            time; each request has one of them, by the seed; 0 for a request without.
        detector: whether the hotspot detector watches.
        predictor: whether the predictor learns how long requests take, for the queues.
        promise_s: how long blocks count as cached before they are there, see
            `PlaneConfig.promise_s`; 0 for not at all. Routers and `lab replay` take 5 s unless told
            otherwise; the bare planes that docs/evaluation.md compares promise nothing.
        through_sidecars: let block events take the whole way through the sidecar's mirror and
            relay, tokens hashed; slow, and the same decisions.
        coast_s_max: longest run of decode steps that is one event: how late the block events of
            decoding may be, beside the lag.
        sample_s: how often batch sizes are noted for plots.
        drain_s_max: how long after the last arrival requests may end; what has not ended by then
            counts as unfinished.
    """

    instances: int = 8
    profile: str = DEFAULT_PROFILE
    step_times: StepTimes | None = None
    kv_tokens: int = 0
    block_size: int = 0
    max_model_len: int = 131_072
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    routers: int = 1
    event_lag_s: float = 0.005
    report_s: float = 0.1
    tick_s: float = 0.25
    batch_cap: int = 0
    queue: QueueConfig | None = None
    coalesce: CoalesceConfig | None = None
    tenants: tuple[TenantShare, ...] = ()
    budgets_ttft_s: tuple[float, ...] = ()
    detector: bool = False
    predictor: bool = False
    promise_s: float = 0.0
    through_sidecars: bool = False
    coast_s_max: float = 0.25
    sample_s: float = 1.0
    drain_s_max: float = 3600.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: names the setting.
        """
        for name in ("instances", "routers", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        for name in ("report_s", "tick_s", "coast_s_max", "sample_s", "drain_s_max"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive: {getattr(self, name)}")
        for name in ("event_lag_s", "promise_s", "batch_cap", "kv_tokens", "block_size"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative: {getattr(self, name)}")
        if not all(budget_s >= 0 for budget_s in self.budgets_ttft_s):
            raise ValueError(f"budgets_ttft_s must not be negative: {self.budgets_ttft_s}")
        if self.queue is not None and not self.batch_cap:
            raise ValueError("a queue needs a batch cap: without one, every instance has room")
        if self.predictor and self.queue is None:
            raise ValueError("a predictor needs a queue: nobody else asks it")

    @property
    def fleet(self) -> str:
        """The instances and routers, for people."""
        routers = f", {self.routers} routers" if self.routers > 1 else ""
        cap = f", at most {self.batch_cap} on each" if self.batch_cap else ""
        queue = "" if self.queue is None else f", queue {self.queue.order}"
        follow = "" if self.coalesce is None else ", coalescing"
        return f"{self.instances} × {self.profile}{routers}{cap}{queue}{follow}"

    def resolved(self, trace_block_tokens: int) -> ReplayConfig:
        """Return these settings with a block size for a trace."""
        size = self.block_size or math.gcd(trace_block_tokens, COARSEST)
        return msgspec.structs.replace(self, block_size=size)

    @property
    def engine(self) -> EngineConfig:
        """The limits of each engine, once the block size is resolved.

        Raises:
            ValueError: the model does not fit, or not one request would.
        """
        step_times, num_blocks = self.step_times, self.kv_tokens // self.block_size
        if step_times is None or not num_blocks:
            profile = find_profile(self.profile)
            step_times = step_times or profile.step_times
            num_blocks = num_blocks or profile.num_blocks(self.block_size)
        room = (num_blocks - 1) * self.block_size
        return EngineConfig(
            num_blocks=num_blocks,
            step_times=step_times,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=min(self.max_model_len, room),
        )
