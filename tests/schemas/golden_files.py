"""Reads golden files: sections `== <variant>: json` and `== <variant>: msgpack` (hex)."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

GOLDEN = Path(__file__).parent / "golden"


class Golden(msgspec.Struct, frozen=True):
    """One variant of one file."""

    readable: bytes
    octets: bytes


def read_golden(name: str) -> dict[str, Golden]:
    """Returns the variants in `golden/<name>.txt`."""
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    parts = re.split(r"^== (.+): (json|msgpack)\n", text, flags=re.MULTILINE)[1:]
    found = {(parts[at], parts[at + 1]): parts[at + 2] for at in range(0, len(parts), 3)}
    return {
        variant: Golden(found[variant, "json"].encode(), bytes.fromhex(found[variant, "msgpack"]))
        for variant, form in found
        if form == "json"
    }
