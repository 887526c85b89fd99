"""Runs the command line in this process."""

from __future__ import annotations

import sys

import pytest

from controlplane.cli.main import run


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["multiplane", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    # Log handlers would outlive the captured stream that they write to.
    monkeypatch.setattr("controlplane.runtime.log_to_stderr", lambda level: None)
    with pytest.raises(SystemExit) as ended:
        run()
    code = ended.value.code
    return code if isinstance(code, int) else 1
