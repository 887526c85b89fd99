"""`multiplane audit` over recordings: what it prints, and what its exit status says."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from controlplane.audit.recording import RecordingWriter
from controlplane.cli.audit_command import app
from controlplane.cli.audit_source import since_wall_s
from controlplane.cli.errors import UsageError
from lab.traces import read_trace
from schemas.bus import Routed
from tests.audit.tape import Tape
from tests.audit.test_verify import rewritten, story, with_fields


def audit(*words: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=True)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Return a recording of a small true story."""
    return _write(tmp_path / "true", story())


def _write(path: Path, tape: Tape) -> Path:
    with RecordingWriter(path) as writer:
        for each in tape.records:
            writer.write(each)
    return path


def test_tail_prints_what_is_chosen(recording: Path) -> None:
    """As text or as JSON lines."""
    everything = audit("tail", "--from", recording)
    assert everything.exit_code == 0
    assert len(everything.output.splitlines()) == 15
    lines = audit("tail", "--from", recording, "--instance", "a", "--json").output.splitlines()
    assert {json.loads(line)["instance_id"] for line in lines} == {"a"}
    key = json.loads(lines[0])["classes"][0]["key"]
    assert audit("tail", "--from", recording, "--class", key).output


def test_show_tells_one_request(recording: Path) -> None:
    """Text or JSON; a request that is not there is said, with status 1."""
    lines = audit("tail", "--from", recording, "--json").output.splitlines()
    request = json.loads(lines[0])["request_id"]
    shown = audit("show", request, "--from", recording)
    assert shown.exit_code == 0
    assert f"request   {request}" in shown.output
    as_json = json.loads(audit("show", request, "--from", recording, "--json").output)
    assert as_json["attempts"][0]["routed"]["request_id"] == request
    missing = audit("show", "nobody", "--from", recording)
    assert missing.exit_code == 1
    assert "no request nobody" in missing.output


def test_verify_says_that_nothing_is_unexplained(recording: Path) -> None:
    """With status 0, and in JSON likewise."""
    done = audit("verify", "--from", recording)
    assert done.exit_code == 0
    assert "nothing is unexplained" in done.output
    assert "as promised" in done.output
    report = json.loads(audit("verify", "--from", recording, "--json").output)
    assert (report["clean"], report["decisions"], report["chosen"]) == (True, 5, 5)


def test_verify_names_a_changed_decision(tmp_path: Path) -> None:
    """With status 1, the request, the router and both values."""
    tape = story()
    tape.records = rewritten(tape.records, Routed, with_fields(score=1.5))
    path = _write(tmp_path / "forged", tape)
    done = audit("verify", "--from", path)
    assert done.exit_code == 1
    assert "by router router-a, place" in done.output
    assert "the score is 1.5, but computes to" in done.output
    assert "5 decisions whose score does not follow from their numbers" in done.output
    assert not json.loads(audit("verify", "--from", path, "--json").output)["clean"]


def test_verify_says_that_an_empty_record_holds_nothing(tmp_path: Path) -> None:
    """Nothing checked is not everything right."""
    path = tmp_path / "empty"
    with RecordingWriter(path):
        pass
    assert "there is no decision in the record" in audit("verify", "--from", path).output


def test_export_writes_parquet_and_traces(recording: Path, tmp_path: Path) -> None:
    """Both say how much they wrote."""
    done = audit("export", tmp_path / "out", "--from", recording, "--candidates")
    assert "5 decisions, 0 of them without an end, in 1 files" in done.output
    (path,) = (tmp_path / "out").rglob("*.parquet")
    assert pq.ParquetFile(path).metadata.num_rows == 5
    done = audit("export", tmp_path / "trace", "--from", recording, "--format", "trace")
    assert "5 requests" in done.output
    assert len(read_trace(tmp_path / "trace").requests) == 5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("tail", "--class", "xyz"), "16 hexadecimal digits"),
        (("show", ""), "give the id of a request"),
        (("record", "out", "--kinds", "kv,all"), "choose of kv, load, route, hotspot, policy"),
        (("verify", "--from", "nowhere"), "nowhere: No such file"),
        (("verify", "--since", "yesterday"), "write 90s, 15m"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], problem: str) -> None:
    """With the flag and what to write instead."""
    done = audit(*words)
    assert isinstance(done.exception, UsageError)
    assert problem in str(done.exception)


def test_stretches_of_time_are_read() -> None:
    """Ago, or a moment."""
    assert since_wall_s("", 1000.0) == 0.0
    assert since_wall_s("90s", 1000.0) == 910.0
    assert since_wall_s("1.5h", 10_000.0) == 4600.0
    assert since_wall_s("2026-11-29T12:00+00:00", 0.0) == 1795953600.0
