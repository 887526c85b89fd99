"""The command line as a person meets it: help that teaches, errors that name the flag."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from controlplane.cli.main import app
from lab.generators import KINDS
from tests.cli.commands import call


def commands(app: typer.Typer, before: str = "") -> list[str]:
    """Return every command that there is, as one types it."""
    found = [before + name_of(command) for command in app.registered_commands]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        found += commands(group.typer_instance, f"{before}{group.name} ")
    return found


def name_of(command: Any) -> str:
    """Return a command's name."""
    return str(command.name or command.callback.__name__)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("up --policy magic", "'magic' is not one of 'multiplicative'"),
        ("up --profile TPU/x", "'TPU/x' is not one of"),
        ("up --speed inf", "--speed"),
        ("up --speed nan", "--speed"),
        ("up --port 70000", "--port"),
        ("lab replay sample --duration inf", "--duration inf: give a finite number"),
        ("up --blocks 5", "--blocks 5: "),
        ("up --trace /nowhere", "--trace /nowhere"),
        ("up --engines 0", "--engines"),
        ("router --policy magic", "'magic' is not one of"),
        ("router --queue lifo", "'lifo' is not one of 'fcfs'"),
        ("router --queue edf", "--queue needs a --batch-cap"),
        ("router --port 70000", "--port"),
        ("router --admin-port -1", "--admin-port"),
        ("router --policy-option x", "--policy-option x: not NAME=NUMBER"),
        ("router --policy-option weight=1", "has no parameter weight"),
        ("router --log-level loud", "'loud' is not one of 'debug'"),
        ("router --workers 2 --port 0", "--workers needs a --port"),
        ("router --api-keys /nowhere", "No such file or directory: '/nowhere'"),
        ("router --api-keys /dev/null", "/dev/null: there is no key in it"),
        ("router --tenants /nowhere", "No such file or directory: '/nowhere'"),
        ("router --engine-key-file /nowhere", "No such file or directory: '/nowhere'"),
        ("router --tls-key /nowhere", "--tls-key needs --tls-cert"),
        ("router --tls-cert /nowhere", "No such file or directory"),
        ("router --tls-cert /dev/null", "--tls-cert /dev/null"),
        ("router --nats http://x", "not a NATS URL"),
        ("router --nats-password-file /nowhere", "--nats-password-file /nowhere"),
        ("sidecar", "give --engine URL"),
        ("sidecar --engine ftp://x", "engine_url must begin with http://"),
        ("sidecar -- sleep 1", "the command after `--`"),
        ("policy set m magic", "'magic' is not one of"),
        ("policy clear=", "No such command"),
        ("drain x --off --wait", "--off and --wait"),
        ("drain x --within-s 5", "--within-s needs --wait"),
        ("bus init --storage tape", "'tape' is not one of 'file'"),
        ("audit export out --format csv", "'csv' is not one of 'parquet'"),
        ("bus init --replicas 2", "--replicas"),
        ("instances --nats nats://127.0.0.1:1", "no NATS server answers"),
        ("lab generate nobody --out x", f"'{next(iter(KINDS))}', "),
        ("lab calibrate http://x --api-key-file /nowhere", "--api-key-file /nowhere: No such"),
        ("doctor --engine-key-file /nowhere", "--engine-key-file /nowhere: No such"),
        ("up --report x.md", "--report needs --trace"),
        ("up --trace sample --report x.txt", "ends in .md or .json"),
        ("up --trace sample --report /nowhere/x.md", "there is no folder /nowhere"),
        ("up --trace sample --blocks 100", "--blocks 100: a prompt of the trace of 131,072"),
        ("nonsense", "nonsense"),
    ],
)
def test_errors_name_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, text: str
) -> None:
    """A mistake costs one clear line and a non-zero status, never a traceback."""
    status = call(monkeypatch, *arguments.split())
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert text in said
    assert "Traceback" not in said


@pytest.mark.parametrize("command", commands(app))
def test_every_command_explains_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """`--help` of every command says what it does, with an example, and lists its options."""
    assert call(monkeypatch, *command.split(), "--help") == 0
    said = capsys.readouterr().out
    assert "Usage: multiplane" in said
    assert "Example" in said
    assert f"multiplane {command}" in said.replace("\n", " ")[20:]
    assert len(said.splitlines()) > 8


def test_the_version_is_the_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--version` prints name and number."""
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("multiplane ")
