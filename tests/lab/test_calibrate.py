from __future__ import annotations

import sys

import numpy as np
import pytest

from lab.calibrate import (
    CalibrationError,
    Decode,
    Experiment,
    Prefill,
    Samples,
    calibrate,
    error_of,
    fit,
)
from lab.children import Child
from lab.profiles import PROFILES, StepTimes, find_profile

DENSE = [name for name in PROFILES if "a3b" not in name]

PROBES = {
    "a short prompt": (512, 1, 512 * 513 // 2, 0),
    "a long prompt": (8192, 1, 8192 * 8193 // 2, 0),
    "one request": (1, 1, 0, 4096),
    "a batch": (32, 32, 0, 32 * 2000),
    "a large batch": (128, 128, 0, 128 * 2000),
}
"""Steps by which profiles are compared: tokens, sequences, pairs, context."""


def samples_of(times: StepTimes, *, transport_s: float = 0.0, noise: float = 0.0) -> Samples:
    """What a perfect engine with these times would show."""
    chance = np.random.default_rng(0)
    experiment = Experiment()

    def disturbed(value: float) -> float:
        return value * (1 + noise * float(chance.random()))

    prefills = tuple(
        Prefill(n, disturbed(times.step_s(n, 1, n * (n + 1) // 2)) + transport_s)
        for n in experiment.prompt_tokens
    )
    decodes = tuple(
        Decode(batch, context, disturbed(times.step_s(batch, batch, 0, round(batch * context))))
        for context in experiment.contexts
        for batch in experiment.batches
    )
    return Samples(prefills, decodes)


def worst(found: StepTimes, true: StepTimes) -> float:
    """The largest relative difference over the probes."""
    return max(abs(found.step_s(*probe) / true.step_s(*probe) - 1) for probe in PROBES.values())


@pytest.mark.parametrize("name", DENSE)
def test_every_dense_profile_is_found_again(name: str) -> None:
    """From what it would show, whatever the transport takes."""
    true = find_profile(name).step_times
    found = fit(samples_of(true, transport_s=0.002))
    assert worst(found, true) < 0.01


def test_noise_moves_a_profile_little() -> None:
    """Up to 3% of noise on every sample."""
    true = find_profile("a100/llama-3.1-8b").step_times
    noisy = samples_of(true, transport_s=0.001, noise=0.03)
    found = fit(noisy)
    assert worst(found, true) < 0.06
    assert 0 < error_of(found, noisy) < 0.1


def test_no_coefficient_is_negative() -> None:
    """Samples that no engine could show still give a profile that can be used."""
    prefills = tuple(Prefill(n, 1.0 / n) for n in (8, 512, 1024, 4096))
    decodes = tuple(Decode(b, c, 1.0 / (b + c)) for b in (1, 8) for c in (10, 1000))
    found = fit(Samples(prefills, decodes))
    assert all(getattr(found, name) >= 0 for name in found.__struct_fields__)


def test_too_few_samples_are_refused() -> None:
    """A line needs points."""
    whole = samples_of(find_profile("h100/qwen2.5-7b").step_times)
    with pytest.raises(CalibrationError, match="too few samples"):
        fit(Samples(whole.prefills[:2], whole.decodes))


async def test_a_server_that_is_not_there_is_an_error() -> None:
    """The message names it."""
    with pytest.raises(CalibrationError, match="127"):
        await calibrate("http://127.0.0.1:9")


@pytest.mark.slow
@pytest.mark.live
async def test_a_running_server_shows_its_profile() -> None:
    """Measured over HTTP, an emulated engine's steps are found, within a quarter."""
    name, speed = "h100/qwen2.5-7b", 0.5
    command = [sys.executable, "-m", "lab.server", "--profile", name, "--speed", str(speed)]
    server = Child("engine", [*command, "--no-kv-events"])
    await server.start()
    experiment = Experiment(
        prompt_tokens=(8, 512, 2048, 5000, 8000),
        batches=(1, 16),
        contexts=(64, 4000),
        answers=(4, 28),
    )
    try:
        found = await calibrate(server.ready["url"], experiment=experiment)
    finally:
        await server.stop()
        server.close()
    true = find_profile(name).step_times.scaled(1 / speed)
    assert worst(found.step_times, true) < 0.25
    assert found.error < 0.25
    assert found.kv_tokens == server.ready["num_blocks"] * 16
    assert found.name == "measured/tiny"
