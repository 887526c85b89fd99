"""What a replay came to: a value a request, and samples of every instance."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One replay. Arrays of requests are in order of arrival, of those that ended.

    Attributes:
        at_s: (n,) arrivals.
        ttft_s: (n,) from arrival to first token.
        end_s: (n,) when the last token came.
        prompt_tokens: (n,), likewise `output_tokens`.
        promised_tokens: (n,) what the router believed to be cached.
        cached_tokens: (n,) what the engine found cached.
        instance: (n,) which one.
        wait_s: (n,) of the TTFT, spent in the router's queue.
        budget_s: (n,) within which a first token is in time; infinite where none was set.
        queue: order of the routers' queues; empty where nobody queues.
        tenants: names of those whose requests came; one empty name for nobody in particular.
        tenant: (n,) whose, by place in `tenants`.
        shed_at_s: (m,) arrivals of the requests that were refused.
        shed_tenant: (m,) whose.
        left_tenant: (u,) whose those were that had not ended when the replay was cut off.
        sample_s: (t,) when the fleet was looked at.
        batch: (t, instances) requests running and waiting.
        kv_usage: (t, instances) share of blocks in use.
        busy_s: (instances,) time spent stepping.
        preemptions: requests sent back to a queue.
        steps: engine steps, all instances.
        span_s: from the first arrival to the last one.
        lasted_s: to the last end of anybody's.
        counts: what the plane and the detector counted.
    """

    policy: str
    trace: str
    seed: int
    at_s: Floats
    ttft_s: Floats
    end_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    promised_tokens: Ints
    cached_tokens: Ints
    instance: Ints
    wait_s: Floats
    budget_s: Floats
    queue: str
    tenants: tuple[str, ...]
    tenant: Ints
    shed_at_s: Floats
    shed_tenant: Ints
    left_tenant: Ints
    sample_s: Floats
    batch: Ints
    kv_usage: Floats
    busy_s: Floats
    preemptions: int
    steps: int
    span_s: float
    lasted_s: float
    cpu_s: float
    counts: dict[str, int]

    @property
    def unfinished(self) -> int:
        """Requests that had not ended when the replay was cut off."""
        return len(self.left_tenant)

    def of_tenant(self, place: int) -> Result:
        """Return what the replay was for one tenant's requests; the instances are everybody's."""
        own, shed = self.tenant == place, self.shed_tenant == place
        columns = (
            *("at_s", "ttft_s", "end_s", "prompt_tokens", "output_tokens", "promised_tokens"),
            *("cached_tokens", "instance", "wait_s", "budget_s", "tenant"),
        )
        return msgspec.structs.replace(
            self,
            policy=f"{self.policy} · {self.tenants[place]}",
            **{name: getattr(self, name)[own] for name in columns},
            shed_at_s=self.shed_at_s[shed],
            shed_tenant=self.shed_tenant[shed],
            left_tenant=self.left_tenant[self.left_tenant == place],
        )

    @property
    def tpot_s(self) -> Floats:
        """(n,) mean time a token after the first; NaN for answers of one token."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(
                self.output_tokens > 1,
                (self.end_s - self.at_s - self.ttft_s) / (self.output_tokens - 1),
                np.nan,
            )


def encode(result: Result) -> bytes:
    """Return a result as bytes."""
    return msgspec.msgpack.encode(result, enc_hook=_packed)


def decode(data: bytes) -> Result:
    """Return the result that `encode` was given.

    Raises:
        msgspec.DecodeError: it was another's.
    """
    return msgspec.msgpack.decode(data, type=Result, dec_hook=_unpacked)


def _packed(value: Any) -> Any:
    assert isinstance(value, np.ndarray)
    return {"dtype": value.dtype.str, "shape": value.shape, "data": value.tobytes()}


def _unpacked(_: type, value: Any) -> Any:
    array = np.frombuffer(value["data"], value["dtype"])
    return array.reshape(value["shape"])
