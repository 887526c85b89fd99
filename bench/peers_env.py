"""A virtual environment with the peer routers, made once and kept.

Both are Rust HTTP servers behind a thin Python launcher. Their versions are pinned, so that numbers
can be compared over time; the name of the environment's folder carries a hash of them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

PEERS = ("vllm-router==0.1.17", "sglang-router==0.3.2")


class PeersUnavailable(Exception):
    """The environment could not be made."""


def peers_python() -> Path:
    """Return the environment's interpreter, making the environment if need be.

    Raises:
        PeersUnavailable: the environment could not be made.
    """
    key = hashlib.sha256("\n".join([sys.version, *PEERS]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = cache / "multiplane" / f"peers-{key}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        _run(sys.executable, "-m", "venv", "--clear", str(home))
        _run(str(python), "-m", "pip", "install", "--quiet", *PEERS)
        (home / "complete").touch()
    return python


def _run(*command: str) -> None:
    """Run a command to its end.

    Raises:
        PeersUnavailable: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise PeersUnavailable(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
