from __future__ import annotations

from pathlib import Path

import pytest

from lab.profiles import find_profile
from lab.server import main
from lab.server_model import ServedModel
from lab.server_options import parse
from lab.tiny_model import tiny_model_dir


def test_defaults_are_an_h100_with_the_tiny_model() -> None:
    """Without flags the engine has the GPU's blocks and the model's length, at real speed."""
    options = parse([])
    config = options.engine_config(ServedModel(options.model_dir))
    profile = find_profile("h100/qwen2.5-7b")
    assert options.names == ["tiny"]
    assert options.model_dir == tiny_model_dir()
    assert config.num_blocks == profile.num_blocks(16)
    assert config.step_times == profile.step_times
    assert config.max_model_len == 32_768
    assert config.report_events


def test_flags_reach_the_engine() -> None:
    """Speed divides step times, and limits are taken over."""
    flags = (
        "--name a --name b --lora l --profile h20/llama-3.1-8b --speed 4 --no-kv-events "
        "--blocks 100 --block-size 8 --max-model-len 500 --max-num-seqs 3 "
        "--max-num-batched-tokens 64 --no-prefix-caching"
    )
    options = parse(flags.split())
    config = options.engine_config(ServedModel(options.model_dir))
    assert (options.names, options.loras) == (["a", "b"], ["l"])
    assert config.step_times.step == find_profile("h20/llama-3.1-8b").step_times.step / 4
    assert (config.num_blocks, config.block_size, config.max_model_len) == (100, 8, 500)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (3, 64)
    assert not config.prefix_caching
    assert not config.report_events


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--speed 0", "--speed"),
        ("--blocks -1", "--blocks"),
        ("--answer-tokens -1", "--answer-tokens"),
        ("--stream-interval 0", "--stream-interval"),
        ("--profile h1", "--profile"),
        ("--port x", "--port"),
    ],
)
def test_bad_flags_are_named(flags: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bad value ends the process with the flag's name on stderr."""
    with pytest.raises(SystemExit, match="2"):
        parse(flags.split())
    assert named in capsys.readouterr().err


def test_a_folder_that_is_no_model_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the flag, in one line."""
    assert main(["--model-dir", str(tmp_path / "missing")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"lab.server: --model-dir {tmp_path / 'missing'} is no usable model")
    assert said.count("\n") == 1
