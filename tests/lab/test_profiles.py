import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.profiles import PROFILES, find_profile

TIMES = find_profile("h100/qwen2.5-7b").step_times


def test_every_gpu_runs_every_model() -> None:
    """All twelve profiles exist, with room for at least one long request."""
    assert len(PROFILES) == 12
    for profile in PROFILES.values():
        assert profile.num_blocks(16) * 16 > 32_768, profile.name


def test_unknown_profile_lists_those_there_are() -> None:
    """A misspelt profile says what could be meant."""
    with pytest.raises(ValueError, match=r"no profile 'h1'; there are a100/qwen2\.5-7b"):
        find_profile("h1")


@pytest.mark.parametrize(
    ("name", "prefill_tokens_per_s", "decode_ms"),
    [
        ("a100/llama-3.1-8b", (8_000, 16_000), (10, 18)),
        ("h100/qwen2.5-7b", (25_000, 50_000), (6, 11)),
        ("h20/qwen3-30b-a3b", (6_000, 16_000), (5, 25)),
        ("h200/qwen3-30b-a3b", (40_000, 110_000), (4, 20)),
    ],
)
def test_rates_are_those_of_the_hardware(
    name: str, prefill_tokens_per_s: tuple[float, float], decode_ms: tuple[float, float]
) -> None:
    """Prefill of an 8k prompt and a decode step of 8 × 2k contexts take what one would measure."""
    times = find_profile(name).step_times
    prefill_s = times.step_s(8192, 1, pairs=8192 * 8193 // 2)
    assert prefill_tokens_per_s[0] < 8192 / prefill_s < prefill_tokens_per_s[1]
    assert decode_ms[0] < 1e3 * times.decode_s(1, 8, 8 * 2048) < decode_ms[1]


def test_experts_are_read_as_tokens_reach_them() -> None:
    """A mixture of experts reads few weights for one sequence and nearly all for a large batch."""
    times = find_profile("h20/qwen3-30b-a3b").step_times
    alone, crowd = times.decode_s(1, 1, 100), times.decode_s(1, 128, 100)
    assert crowd - alone > 0.8 * times.experts
    assert alone < 0.2 * times.experts + times.weights + times.step


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 100_000))
def test_decode_run_is_the_sum_of_its_steps(steps: int, sequences: int, kv_tokens: int) -> None:
    """The closed form equals adding the steps up."""
    one_by_one = sum(
        TIMES.step_s(sequences, sequences, 0, kv_tokens + sequences * turn) for turn in range(steps)
    )
    assert TIMES.decode_s(steps, sequences, kv_tokens) == pytest.approx(one_by_one)


@given(st.floats(1e-4, 100.0), st.integers(1, 64), st.integers(1, 100_000))
def test_steps_in_a_duration_are_the_fewest_that_fill_it(
    duration_s: float, sequences: int, kv_tokens: int
) -> None:
    """One step fewer would end before it."""
    steps = TIMES.decode_steps_in(duration_s, sequences, kv_tokens)
    assert TIMES.decode_s(steps, sequences, kv_tokens) >= duration_s * (1 - 1e-9)
    fewer = TIMES.decode_s(steps - 1, sequences, kv_tokens)
    assert steps == 1 or fewer < duration_s * (1 + 1e-9)


def test_scaling_multiplies_every_step() -> None:
    """A profile scaled by 0.1 is ten times as fast, whatever the step."""
    fast = TIMES.scaled(0.1)
    assert fast.step_s(100, 3, 5000, 9000) == pytest.approx(TIMES.step_s(100, 3, 5000, 9000) / 10)
    with pytest.raises(ValueError, match="factor=0"):
        TIMES.scaled(0)


def test_endless_horizon_has_no_bound() -> None:
    """With nothing to come, any number of steps fits."""
    assert TIMES.decode_steps_in(math.inf, 1, 1) > 1 << 60
