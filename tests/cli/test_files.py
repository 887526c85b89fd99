"""Files that flags name: one line says which flag, which file, what is wrong and what to give."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import call

ROUTER = "router --port 0 --admin-port 0 --nats nats://127.0.0.1:1"
SIDECAR = "sidecar --engine http://127.0.0.1:1 --nats nats://127.0.0.1:1"
CALIBRATE = "lab calibrate http://127.0.0.1:1"


READ = [
    (ROUTER, "--api-keys", "a file of API keys"),
    (ROUTER, "--tenants", "a TOML file of tables"),
    (ROUTER, "--engine-key-file", "a file that holds one key"),
    (ROUTER, "--nats-password-file", "a file that holds the password"),
    (SIDECAR, "--api-key-file", "a file that holds one key"),
    (SIDECAR, "--chat-template", "a file that holds a Jinja template"),
    ("doctor", "--engine-key-file", "a file that holds one key"),
    (CALIBRATE, "--api-key-file", "a file that holds one key"),
    ("up --no-live", "--trace", "a trace file, or `sample`"),
    *(
        (command, "--nats-password-file", "a file that holds the password")
        for command in ("detector", "predictor", "dashboard --port 0", "instances", SIDECAR)
    ),
]
PEM = [
    (ROUTER, "--tls-cert", "a PEM file with the certificate chain"),
    (ROUTER, "--nats-ca", "the PEM file of the authority"),
    *((command, "--nats-ca", "the PEM file of the authority") for command in ("detector", SIDECAR)),
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of files that are of no use to anybody."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00\n")
    (tmp_path / "empty").touch()
    (tmp_path / "two").write_text("first line\nsecond line\n")
    return tmp_path


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> str:
    """Run a command that is mistaken; returns the one line that it says."""
    assert call(monkeypatch, *command) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("multiplane: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(("command", "flag", "wanted"), READ)
@pytest.mark.parametrize("name", ["missing", "folder", "bytes"])
def test_a_file_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: Path,
    name: str,
    command: str,
    flag: str,
    wanted: str,
) -> None:
    """Missing, a folder, no text: each is told with the flag and with what to give instead."""
    line = said(monkeypatch, capsys, [*command.split(), flag, str(files / name)])
    assert line.startswith(f"multiplane: {flag} {files / name}: ")
    assert f"; give {wanted}" in line
    assert re.search("No such file|Is a directory|no text", line)


@pytest.mark.parametrize(("command", "flag", "wanted"), PEM)
@pytest.mark.parametrize("name", ["missing", "folder", "bytes", "empty"])
def test_certificates_that_are_none(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: Path,
    name: str,
    command: str,
    flag: str,
    wanted: str,
) -> None:
    """Whatever is no certificate is told by its flag, without OpenSSL's source lines."""
    line = said(monkeypatch, capsys, [*command.split(), flag, str(files / name)])
    assert line.startswith(f"multiplane: {flag} {files / name}: ")
    assert f"; give {wanted}" in line
    assert "_ssl.c" not in line


@pytest.mark.parametrize(
    ("command", "flag", "name", "text"),
    [
        (ROUTER, "--api-keys", "empty", "there is no key in it"),
        (ROUTER, "--tenants", "two", "this is no TOML"),
        (ROUTER, "--engine-key-file", "two", "one line of ASCII, no spaces"),
        (ROUTER, "--nats-password-file", "two", "it has 2 lines"),
        (ROUTER, "--nats-password-file", "empty", "it is empty"),
        (SIDECAR, "--api-key-file", "empty", "one line of ASCII, no spaces"),
        (SIDECAR, "--model-path", "missing", "there is no such folder"),
        (SIDECAR, "--model-path", "empty", "this is no folder"),
        (SIDECAR, "--model-path", "folder", "tokenizer.json does not exist"),
        ("doctor", "--engine-key-file", "two", "one line of ASCII, no spaces"),
        (CALIBRATE, "--api-key-file", "empty", "one line of ASCII, no spaces"),
        ("audit verify", "--from", "two", "not a recording"),
        ("audit verify", "--from", "missing", "No such file"),
        ("lab replay sample", "--profile", "missing", "no file, nor one of"),
        ("lab replay sample", "--profile", "two", "not written by `lab calibrate`"),
    ],
)
def test_a_file_that_holds_something_else(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: Path,
    command: str,
    flag: str,
    name: str,
    text: str,
) -> None:
    """What a file should hold, and does not, is told by its flag before anything starts."""
    line = said(monkeypatch, capsys, [*command.split(), flag, str(files / name)])
    assert f"{flag} {files / name}: " in line
    assert text in line


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (f"{ROUTER} --access-log", "--access-log"),
        (f"{CALIBRATE} --out", "--out"),
        ("lab generate chatbot --out", "--out"),
        ("audit record", "OUT"),
        ("audit export --format trace", "OUT"),
        ("up --trace sample --report", "--report"),
    ],
)
def test_a_file_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: Path,
    command: str,
    flag: str,
) -> None:
    """Results that would be lost are told of before the work begins."""
    (files / "made.md").mkdir()
    nowhere = files / "missing" / "made.md"
    for path, reason in (
        (files / "made.md", "this is a folder"),
        (nowhere, f"there is no folder {nowhere.parent}"),
    ):
        line = said(monkeypatch, capsys, [*command.split(), str(path)])
        assert line.startswith(f"multiplane: {flag} {path}: {reason}; give ")


@pytest.mark.parametrize(
    ("command", "flag"), [("lab replay sample --out", "--out"), ("audit export", "OUT")]
)
def test_a_folder_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    files: Path,
    command: str,
    flag: str,
) -> None:
    """A file in the way is named."""
    path = files / "two" / "below"
    line = said(monkeypatch, capsys, [*command.split(), str(path)])
    assert line.startswith(f"multiplane: {flag} {path}: {files / 'two'} is a file; give ")


def test_a_private_key_that_is_missing_is_told_by_its_own_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    """The certificate is not blamed for it."""
    flags = ["--tls-cert", str(files / "two"), "--tls-key", str(files / "missing")]
    line = said(monkeypatch, capsys, [*ROUTER.split(), *flags])
    assert line.startswith(f"multiplane: --tls-key {files / 'missing'}: No such file")


def test_each_of_two_bad_files_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: Path
) -> None:
    """Keys and tenants belong together, and so do their mistakes."""
    flags = ["--api-keys", str(files / "empty"), "--tenants", str(files / "two")]
    line = said(monkeypatch, capsys, [*ROUTER.split(), *flags])
    assert f"--tenants {files / 'two'}: this is no TOML" in line
    assert f"--api-keys {files / 'empty'}: there is no key in it" in line
