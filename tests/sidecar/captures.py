"""Reads the recorded streams in `golden/`."""

from __future__ import annotations

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def capture(name: str) -> list[tuple[int, bytes]]:
    """Return (seq, payload) of each message of a recorded stream."""
    lines = (GOLDEN / f"vllm_0.32_{name}.txt").read_text().splitlines()
    return [(int(seq), bytes.fromhex(payload)) for seq, payload in map(str.split, lines)]
