"""Fits a step-time profile to a running server, by what its answers take.

Theory of operation. Two experiments see one coefficient each where it matters:

- *prefill*: prompts of n new tokens, one token of answer, nothing else running. Once n is large
  enough that compute binds, T(n) = a + token × n + pair × n(n+1)/2, where `a` holds a step's fixed
  cost and whatever lies between here and the engine. A prompt so short that reading the weights
  binds takes a + weights.
- *decode*: b requests at once whose prompts (C tokens each) are cached, and answers of two lengths;
  the difference is that of decode steps alone, transport cancels: step + sequence × b +
  max(weights, token × b) + kv_token × b × C a step.

Disturbances only ever add time, so of each point the least of several tries counts; fits are least
squares of relative errors, no coefficient below 0. A mixture of experts is fitted as a dense model
whose `sequence` holds what more sequences read of its weights.

Measure an engine that nobody else uses; its prefix cache must be on and hold b × C tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.http_client import HttpClient, HttpError
from lab.profiles import StepTimes
from lab.traces import FIRST_TOKEN, TINY_VOCABULARY
from sidecar.engine_http import EngineError, EngineHttp

COMPUTE_BOUND_TOKENS = 512
"""Prompts from this length on are bound by compute: every GPU reads its weights sooner."""


class CalibrationError(Exception):
    """The server cannot be measured; says why."""


class Prefill(msgspec.Struct, frozen=True):
    """How long a prompt of new tokens took, its one token of answer included."""

    tokens: int
    duration_s: float


class Decode(msgspec.Struct, frozen=True):
    """How long a step took in which `batch` requests decoded, with `context` tokens each."""

    batch: int
    context: float
    step_s: float


class Samples(msgspec.Struct, frozen=True):
    """What was measured."""

    prefills: tuple[Prefill, ...]
    decodes: tuple[Decode, ...]


class Calibration(msgspec.Struct, frozen=True):
    """A profile, as `--profile FILE` reads it.

    Attributes:
        kv_tokens: what the engine's cache holds; 0 if it does not say.
        error: mean relative difference between what was measured and what is predicted.
    """

    name: str
    step_times: StepTimes
    kv_tokens: int
    error: float
    samples: Samples


class Experiment(msgspec.Struct, frozen=True):
    """What to measure.

    Attributes:
        prompt_tokens: lengths; the first one is bound by the weights, the others by compute, and
            none is longer than the engine's token budget.
        batches: of decoding.
        contexts: tokens of context of each.
        answers: two lengths.
        tries: of each point.
    """

    prompt_tokens: tuple[int, ...] = (8, 512, 1024, 2048, 4096, 6144, 8000)
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 4096)
    answers: tuple[int, int] = (8, 72)
    tries: int = 3


def fit(samples: Samples) -> StepTimes:
    """Return the coefficients that explain the samples best.

    Raises:
        CalibrationError: there are too few.
    """
    short = [each for each in samples.prefills if each.tokens < COMPUTE_BOUND_TOKENS]
    long = [each for each in samples.prefills if each.tokens >= COMPUTE_BOUND_TOKENS]
    if not short or len(long) < 3 or len(samples.decodes) < 3:
        raise CalibrationError("too few samples: 1 short and 3 long prompts, 3 kinds of batches")
    tokens = np.array([each.tokens for each in long], float)
    took_s = np.array([each.duration_s for each in long])
    rows = np.stack([np.ones(len(long)), tokens, tokens * (tokens + 1) / 2], axis=1)
    fixed, token, pair = _solve(rows, took_s, took_s)
    batch = np.array([each.batch for each in samples.decodes], float)
    context = np.array([each.context for each in samples.decodes])
    took_s = np.array([each.step_s for each in samples.decodes])
    weights = min(each.duration_s for each in short) - fixed
    weights = min(max(weights, 0.0), float(took_s.min()))
    rows = np.stack([np.ones(len(batch)), batch, batch * context], axis=1)
    step, sequence, kv_token = _solve(rows, took_s - np.maximum(batch * token, weights), took_s)
    return StepTimes(
        step=step,
        sequence=sequence,
        token=token,
        weights=weights,
        experts=0.0,
        expert_miss=1.0,
        pair=pair,
        kv_token=kv_token,
    )


def error_of(times: StepTimes, samples: Samples) -> float:
    """Return the mean relative difference between predicted and measured times."""
    errors = []
    for prefill in samples.prefills:
        pairs = prefill.tokens * (prefill.tokens + 1) // 2
        predicted = times.step_s(prefill.tokens, 1, pairs)
        errors.append(abs(predicted / prefill.duration_s - 1))
    for decode in samples.decodes:
        context = round(decode.batch * decode.context)
        predicted = times.step_s(decode.batch, decode.batch, kv_tokens=context)
        errors.append(abs(predicted / decode.step_s - 1))
    return float(np.mean(errors))


def _solve(
    rows: NDArray[np.float64], values: NDArray[np.float64], whole: NDArray[np.float64]
) -> list[float]:
    """Return the coefficients ≥ 0 of least error; columns that want to be less are 0.

    Args:
        whole: (n,) what the errors are relative to.
    """
    columns = list(range(rows.shape[1]))
    while True:
        scaled = rows[:, columns] / whole[:, None]
        scale = np.abs(scaled).max(axis=0)
        found, *_ = np.linalg.lstsq(scaled / scale, values / whole, rcond=None)
        if found.min() >= 0 or len(columns) == 1:
            break
        del columns[int(found.argmin())]
    solution = np.zeros(rows.shape[1])
    solution[columns] = np.maximum(found / scale, 0.0)
    result: list[float] = solution.tolist()
    return result


async def calibrate(
    url: str,
    *,
    model: str = "",
    api_key: str = "",
    experiment: Experiment = Experiment(),  # noqa: B008
    seed: int = 0,
) -> Calibration:
    """Measure a server and fit its profile.

    Raises:
        CalibrationError: it does not answer, refuses what is asked, or says too little.
    """
    try:
        async with EngineHttp(url, api_key=api_key) as engine:
            served = await engine.models()
            caches = (await engine.metrics()).caches
        async with HttpClient(timeout_s=600.0, bearer=api_key or None) as client:
            server = _Server(client, url, model or served[0].id, random.Random(seed))
            samples = await _measure(server, experiment)
    except (EngineError, HttpError) as error:
        raise CalibrationError(f"{url}: {error}") from error
    times = fit(samples)
    kv_tokens = sum(cache.block_size * (cache.num_blocks or 0) for cache in caches.values())
    name = f"measured/{model or served[0].id}"
    return Calibration(name, times, kv_tokens, error_of(times, samples), samples)


class _Server:
    """The server, as a source of durations."""

    def __init__(self, client: HttpClient, url: str, model: str, chance: random.Random) -> None:
        self._client = client
        self._url = url
        self._model = model
        self._chance = chance

    def prompt(self, tokens: int) -> list[int]:
        """Return a prompt that was never asked before."""
        return [self._chance.randrange(FIRST_TOKEN, TINY_VOCABULARY) for _ in range(tokens)]

    async def ask(self, prompt: Sequence[int], answer_tokens: int) -> float:
        """Return how long an answer takes."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": answer_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        began_s = time.perf_counter()
        await self._client.post(f"{self._url}/v1/completions", body)
        return time.perf_counter() - began_s

    async def ask_at_once(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> float:
        """Return how long it takes until all are answered."""
        return max(await asyncio.gather(*(self.ask(each, answer_tokens) for each in prompts)))


async def _measure(server: _Server, experiment: Experiment) -> Samples:
    await server.ask(server.prompt(16), 2)  # connections, and whatever is lazy
    prefills: list[Prefill] = []
    for tokens in experiment.prompt_tokens:
        durations = [await server.ask(server.prompt(tokens), 1) for _ in range(experiment.tries)]
        prefills.append(Prefill(tokens, min(durations)))
    decodes: list[Decode] = []
    for context in experiment.contexts:
        prompts = [server.prompt(context) for _ in range(max(experiment.batches))]
        for prompt in prompts:
            await server.ask(prompt, 1)
        decodes += [
            await _decode(server, prompts[:batch], context, experiment)
            for batch in experiment.batches
        ]
    return Samples(tuple(prefills), tuple(decodes))


async def _decode(
    server: _Server, prompts: Sequence[Sequence[int]], context: int, experiment: Experiment
) -> Decode:
    """Return what a decode step takes: the difference between longer and shorter answers."""
    few, many = experiment.answers
    least_s = [
        min([await server.ask_at_once(prompts, answer) for _ in range(experiment.tries)])
        for answer in (few, many)
    ]
    step_s = (least_s[1] - least_s[0]) / (many - few)
    if step_s <= 0:
        raise CalibrationError("longer answers took no longer: is somebody else using the engine?")
    return Decode(len(prompts), context + (few + many) / 2, step_s)
