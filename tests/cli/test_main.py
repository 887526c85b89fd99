"""The command line as a person meets it: help that teaches, errors that name the flag."""

from __future__ import annotations

import sys

import pytest

from controlplane.cli.main import run

COMMANDS = (
    *("up", "router", "sidecar", "doctor", "instances", "routers", "drain"),
    *("blacklist add", "blacklist remove", "blacklist list", "policy set", "policy clear"),
    *("bus init", "bus status"),
)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["multiplane", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    # Log handlers would outlive the captured stream that they write to.
    monkeypatch.setattr("controlplane.runtime.log_to_stderr", lambda level: None)
    with pytest.raises(SystemExit) as ended:
        run()
    return ended.value.code if isinstance(ended.value.code, int) else 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("up --policy magic", "--policy magic: choose one of dynamo_cost"),
        ("up --profile TPU/x", "--profile TPU/x: choose one of"),
        ("up --trace /nowhere", "--trace /nowhere"),
        ("up --engines 0", "--engines"),
        ("router --policy magic", "--policy: no policy 'magic'"),
        ("router --policy-option x", "--policy-option x: not NAME=NUMBER"),
        ("router --policy-option weight=1", "has no parameter weight"),
        ("router --log-level loud", "--log-level loud: choose one of debug"),
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
        ("policy set m magic", "POLICY magic: choose one of"),
        ("bus init --storage tape", "--storage tape: choose file or memory"),
        ("bus init --replicas 2", "--replicas"),
        ("instances --nats nats://127.0.0.1:1", "no NATS server answers"),
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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """`--help` of every command says what it does and lists its options."""
    assert call(monkeypatch, *command.split(), "--help") == 0
    said = capsys.readouterr().out
    assert "Usage: multiplane" in said
    assert len(said.splitlines()) > 8


def test_the_version_is_the_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--version` prints name and number."""
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("multiplane ")
