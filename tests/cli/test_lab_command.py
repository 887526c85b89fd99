"""`multiplane lab`, as a person meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from controlplane.cli.main import run
from lab.calibrate import Calibration, Samples
from lab.profiles import find_profile


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Results are kept in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str, width: int = 200) -> int:
    """Run the command line in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["multiplane", "lab", *arguments])
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(SystemExit) as ended:
        run()
    return ended.value.code if isinstance(ended.value.code, int) else 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("replay /nowhere", "/nowhere is no file, nor `sample`, nor one of the kinds chatbot"),
        ("replay sample --policies magic", "no policy 'magic'; there are"),
        ("replay sample --policies linear:x=1", "has no parameter x"),
        ("replay sample --profile TPU/x", "--profile TPU/x: no file, nor one of a100/"),
        ("replay sample --speed fast", "--speed fast: positive numbers"),
        ("replay sample --speed 1 --qps 2", "give --speed or --qps, not both"),
        ("replay sample --qps 0", "--qps 0: positive numbers"),
        ("replay sample --seeds a", "--seeds a: whole numbers"),
        ("replay sample --start 9999", "no request within the part"),
        ("replay sample --instances 0", "--instances"),
        ("replay sample --queue edf", "--queue needs a --batch-cap"),
        ("replay sample --queue lifo --batch-cap 4", "'lifo' is not one of 'fcfs'"),
        ("replay sample --budget-ttft-s soon", "--budget-ttft-s soon: numbers from 0 on"),
        ("replay sample --budget-ttft-s 1,-2", "--budget-ttft-s 1,-2: numbers from 0 on"),
        ("capacity sample", "--ttft-p99, --tpot-p99: ask for a TTFT, a TPOT or both"),
        ("generate novels --out x", "'novels' is not one of 'chatbot'"),
        ("calibrate http://127.0.0.1:9", "127.0.0.1:9"),
    ],
)
def test_errors_name_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, text: str
) -> None:
    """A mistake costs one clear line and a non-zero status, never a traceback."""
    assert call(monkeypatch, *arguments.split()) in (1, 2)
    said = capsys.readouterr().err
    assert text in said
    assert "Traceback" not in said


def test_a_file_that_is_no_trace_is_refused_by_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The message has the file and the line."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0}\n')
    assert call(monkeypatch, "replay", str(file)) == 2
    assert f"{file}:1:" in capsys.readouterr().err


def test_a_replay_with_a_queue_tells_of_waits_and_goodput(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The title says how requests wait; the row, how long, how many were shed, how many in time."""
    asked = "replay agent --duration 4 --qps 8 --instances 2 --policies multiplicative --json"
    queue = "--batch-cap 4 --queue edf+klpm --queue-k 3 --budget-ttft-s 0.5,5 --jobs 1"
    assert call(monkeypatch, *asked.split(), *queue.split()) == 0
    said = capsys.readouterr()
    assert "at most 4 on each, queue edf+klpm" in said.err
    assert "goodput/s" in said.err
    (row,) = json.loads(said.out)
    assert row["shed_rate"] > 0 < row["wait_s"][3]
    assert 0 < row["in_time_rate"] <= 1 - row["shed_rate"]
    assert row["goodput_rps"] > 0


def test_a_predictor_without_its_library_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is replayed; it says what to install."""
    monkeypatch.setitem(sys.modules, "xgboost", None)
    asked = "replay agent --batch-cap 4 --queue edf --predictor"
    assert call(monkeypatch, *asked.split()) == 2
    assert "pip install 'multiplane[predictor]'" in capsys.readouterr().err


def test_a_replay_tells_of_each_tenant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row more for each, and what they wait for is said; nonsense is refused by its name."""
    asked = "replay agent --duration 4 --qps 8 --instances 2 --policies multiplicative --json"
    flags = "--batch-cap 4 --queue klpm --queue-hold-s 1 --coalesce 512 --jobs 1 --tenants"
    assert call(monkeypatch, *asked.split(), *flags.split(), "a:share=1:budget=1,b:share=3") == 0
    said = capsys.readouterr()
    assert "queue klpm, coalescing" in said.err
    rows = json.loads(said.out)
    assert [row["policy"] for row in rows] == [
        "multiplicative",
        "multiplicative · a",
        "multiplicative · b",
    ]
    assert sum(row["requests"] for row in rows[1:]) == rows[0]["requests"]
    assert rows[2]["in_time_rate"] is None
    assert call(monkeypatch, *asked.split(), *flags.split(), "a:size=1") == 2
    assert "no 'size'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_replay_prints_a_table_and_writes_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A row a policy; the report names the command that made it."""
    asked = "replay api --duration 4 --qps 4 --instances 2 --policies multiplicative,round_robin"
    out = tmp_path / "out"
    assert call(monkeypatch, *asked.split(), "--jobs", "1", "--out", str(out)) == 0
    said = capsys.readouterr().out
    assert "api, 4 requests/s, 2 × h100/qwen2.5-7b" in said
    for name in ("multiplicative", "round_robin", "TTFT, s", "hits"):
        assert name in said
    assert asked in (out / "report.html").read_text(encoding="utf-8")


def test_a_table_too_wide_for_the_terminal_goes_on_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No number is cut off, however many columns there are."""
    asked = (
        "replay api --duration 2 --qps 2 --instances 1 --policies round_robin --seeds 0,1 --jobs 1"
    )
    queue = ("--queue", "edf", "--batch-cap", "4", "--budget-ttft-s", "0.5,4")
    assert call(monkeypatch, *asked.split(), *queue, width=80) == 0
    said = capsys.readouterr().out
    assert "…" not in said
    assert said.count("round_robin") > 1
    assert max(map(len, said.splitlines())) <= 80


def test_a_report_that_cannot_be_written_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nobody waits for a replay, and then learns that a library is missing."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert call(monkeypatch, "replay", "sample", "--out", str(tmp_path)) == 2
    told = capsys.readouterr()
    assert "--out needs matplotlib: pip install 'multiplane[lab]'" in told.err
    assert not told.out


def test_numbers_are_printed_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object a run, on standard output alone; the table goes elsewhere."""
    asked = "replay api --duration 4 --instances 2 --policies round_robin --seeds 1,2 --json"
    assert call(monkeypatch, *asked.split(), "--jobs", "1") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["seed"] for row in rows] == [1, 2]
    assert all(row["policy"] == "round_robin" for row in rows)


def test_a_generated_file_is_what_would_be_replayed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The file has the same requests as the kind with the same seed."""
    file = tmp_path / "chat.jsonl"
    made = f"generate chatbot --qps 2 --duration 8 --seed 5 --out {file}"
    assert call(monkeypatch, *made.split()) == 0
    policies = "--policies round_robin --instances 1 --json --jobs 1"
    capsys.readouterr()
    call(monkeypatch, *f"replay {file} {policies}".split())
    (of_file,) = json.loads(capsys.readouterr().out)
    call(monkeypatch, *f"replay chatbot --qps 2 --duration 8 --seeds 5 {policies}".split())
    (of_kind,) = json.loads(capsys.readouterr().out)
    assert of_file["requests"] == of_kind["requests"]
    assert of_file["hit_rate"] == pytest.approx(of_kind["hit_rate"])


@pytest.mark.slow
def test_capacity_names_a_fleet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row a policy, with the sizes that were tried."""
    asked = "capacity api --qps 40 --duration 6 --tpot-p99 0.012 --max 8 --policies round_robin"
    assert call(monkeypatch, *asked.split()) == 0
    said = capsys.readouterr().out
    assert "round_robin" in said
    assert "✓" in said
    assert "1✗" in said


def test_a_measured_profile_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Step times and capacity come from the file; one without a capacity is refused."""
    slow = find_profile("h100/qwen2.5-7b").step_times.scaled(10.0)
    measured = Calibration("measured/x", slow, 400_000, 0.01, Samples((), ()))
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(measured))
    text = "replay api --duration 4 --policies round_robin --json --jobs 1"
    asked = text.split()
    call(monkeypatch, *asked)
    (usual,) = json.loads(capsys.readouterr().out)
    call(monkeypatch, *asked, "--profile", str(file))
    (slower,) = json.loads(capsys.readouterr().out)
    assert slower["tpot_s"][1] > 8 * usual["tpot_s"][1]
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(measured, kv_tokens=0)))
    assert call(monkeypatch, *asked, "--profile", str(file)) == 2
    assert "give --kv-tokens" in capsys.readouterr().err
    file.write_text("{}")
    assert call(monkeypatch, *asked, "--profile", str(file)) == 2
    assert "not written by `lab calibrate`" in capsys.readouterr().err
