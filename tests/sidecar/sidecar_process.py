"""Runs a sidecar as a process of its own: `python sidecar_process.py CONFIG_JSON [COMMAND …]`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from controlplane import runtime
from sidecar.config import SidecarConfig
from sidecar.main import run_sidecar

if __name__ == "__main__":
    runtime.log_to_stderr("debug")
    config = msgspec.json.decode(sys.argv[1], type=SidecarConfig)
    sys.exit(run_sidecar(config, sys.argv[2:]))
