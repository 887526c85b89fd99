"""A virtual environment with the peer's index and our own dependencies, made once and kept.

`ai-dynamo-runtime` ships NVIDIA Dynamo's Rust radix tree with Python bindings; a benchmark that
runs inside this environment measures it and our index in the same process.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PEER = "ai-dynamo-runtime==1.6.1"
OURS = ("msgspec", "numpy", "xxhash")


class PeerUnavailable(Exception):
    """The environment could not be made."""


def enter(module: str) -> None:
    """Run `module` anew inside the environment, unless this process is inside it already.

    Raises:
        PeerUnavailable: the environment could not be made.
    """
    if find_spec("dynamo") is not None:
        return
    root = str(Path(__file__).parents[1])
    python = str(_python())
    os.chdir(root)
    os.execv(python, [python, "-m", module, *sys.argv[1:]])


def _python() -> Path:
    """Return the environment's interpreter, making the environment if need be."""
    requirements = [PEER, *(f"{name}=={version(name)}" for name in OURS)]
    key = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "multiplane" / f"dynamo-{key}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(home))
        _run(str(python), "-m", "pip", "install", "--quiet", *requirements)
        (home / "complete").touch()
    return python


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise PeerUnavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
