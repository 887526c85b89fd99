"""Routers' events whose times follow a rule, for tests of the predictor."""

from __future__ import annotations

import random

from schemas.bus import Finished, RouteBatch, Routed


def times(rng: random.Random, new_tokens: int, batch_size: int) -> tuple[float, float]:
    """Returns what such a request takes: to its first byte, to its end."""
    noise = rng.lognormvariate(0.0, 0.2)
    return new_tokens / 20_000 * noise, (new_tokens / 20_000 + 0.05 * (batch_size + 1)) * noise


def batches(
    count: int, *, seed: int = 1, router: str = "r", each: int = 50, scale: float = 1.0
) -> list[RouteBatch]:
    """Returns events of so many requests, all of which ended well."""
    rng = random.Random(seed)
    made: list[RouteBatch] = []
    for first in range(0, count, each):
        batch = RouteBatch(router, 1, len(made), 0.0)
        for number in range(first, min(first + each, count)):
            tokens, size = rng.randrange(10, 8000), rng.randrange(16)
            ttft_s, total_s = times(rng, tokens, size)
            name = f"{seed}-{number}"
            batch.events.append(
                Routed(
                    name, "i", 0.0, prompt_tokens=tokens, new_tokens=tokens, batch_size=size,
                    queue_s=0.5, tokenize_s=0.25,
                )
            )  # fmt: skip
            batch.events.append(
                Finished(
                    name, "i", "ok", 200, 0.0, prompt_tokens=tokens,
                    ttft_s=0.75 + scale * ttft_s, duration_s=scale * total_s,
                )
            )  # fmt: skip
        made.append(batch)
    return made
