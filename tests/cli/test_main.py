"""The command line as a person meets it: help that teaches, errors that name the flag."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
import typer

from controlplane.cli.app import app
from controlplane.ports import free_port
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
        ("router --batch-cap 2 --queue-k 3", "--queue-k needs --queue"),
        ("router --queue-requests-max 9", "--queue-requests-max needs --queue"),
        ("router --queue-wait-s-max 9", "--queue-wait-s-max needs --queue"),
        ("router --queue fcfs --batch-cap 2 --queue-k 3", "--queue-k is of klpm and edf+klpm"),
        ("router --queue klpm --batch-cap 2 --queue-band-s 3", "--queue-band-s is of edf+klpm"),
        ("router --queue edf --batch-cap 2 --queue-hold-s 0", "--queue-hold-s is of klpm"),
        ("router --coalesce-tokens 9", "--coalesce-tokens needs --coalesce"),
        ("router --port 70000", "--port"),
        ("router --admin-port -1", "--admin-port"),
        ("router --policy-option x", "--policy-option x: not NAME=NUMBER"),
        ("router --policy-option weight=1", "has no parameter weight"),
        ("router --log-level loud", "'loud' is not one of 'debug'"),
        ("router --workers 2 --port 0 --admin-port 0", "--workers needs a --port"),
        ("router --api-keys /nowhere", "--api-keys /nowhere: No such file"),
        ("router --api-keys /dev/null", "/dev/null: there is no key in it"),
        ("router --tenants /nowhere", "--tenants /nowhere: No such file"),
        ("router --engine-key-file /nowhere", "--engine-key-file /nowhere: No such file"),
        ("router --engine-key-file /dev/null", "--engine-key-file /dev/null: this is no key"),
        ("router --batch-cap 99999999999999999999", "--batch-cap 99999999999999999999: give at"),
        ("router --tls-key /nowhere", "--tls-key needs --tls-cert"),
        ("router --tls-cert /nowhere", "--tls-cert /nowhere: No such file"),
        ("router --tls-cert /dev/null", "--tls-cert /dev/null"),
        ("router --nats http://x --port 0 --admin-port 0", "not a NATS URL"),
        ("router --nats-password-file /nowhere", "--nats-password-file /nowhere"),
        ("sidecar", "give --engine URL"),
        ("sidecar --engine ftp://x", "--engine ftp://x: not a URL of the form http://"),
        ("sidecar --engine http://x:99999", "--engine http://x:99999: Port out of range"),
        ("sidecar --engine http://x --advertise-url x:1", "--advertise-url x:1: not a URL"),
        ("doctor --admin http://[::1", "--admin http://[::1: "),
        ("policy set \udcff linear", "this is no UTF-8 text"),
        ("audit verify --model \udcff", "this is no UTF-8 text"),
        ("policy set m linear --ttl-s 1e300", "--ttl-s"),
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


@pytest.mark.parametrize(
    "command",
    [
        "router --host 127.0.0.1 --admin-port 0 --port",
        "router --host 127.0.0.1 --port 0 --admin-port",
        "dashboard --port",
        "detector --metrics-port",
        "predictor --metrics-port",
        "sidecar --engine http://127.0.0.1:1 --metrics-port",
        "up --no-live --port",
    ],
)
def test_a_port_in_use_is_named_with_its_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Whoever cannot have a port says so before anything starts."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert call(monkeypatch, *command.split(), str(port)) == 2
    flag = command.split()[-1]
    said = capsys.readouterr().err
    assert said.startswith(f"multiplane: {flag} {port}: 127.0.0.1:{port}: somebody else serves")


def test_passwords_in_urls_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that names the server leaves out who we are."""
    monkeypatch.setattr("controlplane.cli.options.CONNECT_S", 0.1)
    assert call(monkeypatch, "instances", "--nats", "nats://ann:secret@127.0.0.1:1") == 1
    said = capsys.readouterr().err
    assert "at nats://127.0.0.1:1;" in said
    assert "secret" not in said


def test_the_version_is_the_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--version` prints name and number."""
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("multiplane ")


_INTERRUPTED = """
import os, signal, sys
from controlplane.cli.main import run

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "controlplane.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
run()
"""


def test_ctrl_c_before_anything_runs_ends_without_a_word() -> None:
    """While modules are imported there is nothing to clean up, and nothing to say."""
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_the_operators_port_goes_with_the_clients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each router of a machine has its own; a taken one is told with who has it and what to do."""
    with socket.socket() as other:
        port = _port_before(other)
        other.listen()
        command = f"router --host 127.0.0.1 --port {port} --nats nats://127.0.0.1:1"
        assert call(monkeypatch, *command.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"multiplane: --admin-port {port + 1}: 127.0.0.1:{port + 1}: somebody")
    assert f"(process {os.getpid()})" in said
    assert "give another --admin-port: 0 takes a free one" in said


def _port_before(other: socket.socket) -> int:
    """Bind a socket to a port whose predecessor is free, and return that one."""
    for _ in range(100):
        port = free_port("127.0.0.1")
        try:
            other.bind(("127.0.0.1", port + 1))
        except OSError:
            continue
        return port
    raise AssertionError("no two neighbouring ports are free")


def test_a_predictor_without_its_library_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`up --predictor` names the extra to install, instead of failing when all else runs."""
    monkeypatch.setattr("controlplane.predictor.trees.find_spec", lambda name: None)
    monkeypatch.setattr("lab.up.up", None)  # what would start something
    assert call(monkeypatch, "up", "--predictor", "--no-live") == 2
    said = capsys.readouterr().err
    assert said.startswith("multiplane: --predictor: ")
    assert "pip install 'multiplane[predictor]'" in said
