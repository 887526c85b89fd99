"""A virtual environment with the peer's runtime and our own dependencies, made once and kept.

    python -m bench.dynamo_env      # makes it when absent; prints its interpreter

`ai-dynamo-runtime` ships NVIDIA Dynamo's Rust radix tree and its offline replayer with Python
bindings. A benchmark that runs inside this environment measures the peer and our index in the same
process; one that needs more of ours than the environment has runs the peer as a child.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PEER = "ai-dynamo-runtime==1.6.1"
OURS = ("msgspec", "numpy", "xxhash")
ROOT = Path(__file__).parents[1]


class PeerUnavailable(Exception):
    """The environment could not be made."""


def enter(module: str) -> None:
    """Run `module` anew inside the environment, unless this process is inside it already.

    Raises:
        PeerUnavailable: the environment could not be made.
    """
    if find_spec("dynamo") is not None:
        return
    python = str(interpreter())
    os.chdir(ROOT)
    os.execv(python, [python, "-m", module, *sys.argv[1:]])


def interpreter() -> Path:
    """Return the environment's interpreter, making the environment if need be.

    Whoever asks while another process makes it waits for that one.

    Raises:
        PeerUnavailable: the environment could not be made.
    """
    requirements = [PEER, *(f"{name}=={version(name)}" for name in OURS)]
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "multiplane" / f"dynamo-{key}"
    python = home / "bin" / "python"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            _run(sys.executable, "-m", "venv", "--clear", str(home))
            _run(str(python), "-m", "pip", "install", "--quiet", *requirements)
            (home / "complete").touch()
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise PeerUnavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()}")


def main() -> int:
    """Print the interpreter; return the exit status."""
    try:
        print(interpreter())
    except PeerUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
