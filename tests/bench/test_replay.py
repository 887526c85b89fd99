import json
from pathlib import Path

import pytest

from bench import replay
from bench.replay import HOUR_REQUESTS, Row, our_row, run, table
from bench.replay_peer import write_mooncake
from lab.replay_config import parse_policy
from lab.replay_metrics import Metrics
from lab.traces import read_mooncake, sample_trace


@pytest.fixture
def minute(tmp_path: Path) -> Path:
    """A minute of the packaged trace, as a file."""
    path = tmp_path / "minute.jsonl"
    write_mooncake(sample_trace().cut(0.0, 60.0), path)
    return path


def metrics(requests: int) -> Metrics:
    """Some numbers."""
    four = (1.0, 1.0, 1.0, 2.0)
    return Metrics("p", "t", 0, requests, 0, 1.0, 1.0, four, four, 0.1, 0.1, 1.0, 0.5, 0, 0.1)


def test_written_traces_read_back_as_they_were(minute: Path) -> None:
    """Requests survive the way through a file of Mooncake's format."""
    assert read_mooncake(minute).requests == sample_trace().cut(0.0, 60.0).requests


@pytest.mark.slow
def test_policies_are_measured_without_the_peer(minute: Path) -> None:
    """A short run fills a row for every policy."""
    specs = [parse_policy("round_robin"), parse_policy("multiplicative")]
    peers, rows = run(minute, specs, instances=4, rounds=2, with_peer=False)
    assert peers == []
    assert [row.policy for row in rows] == ["round_robin", "multiplicative"]
    assert all(row.cpu_s > 0 and row.ratio is None for row in rows)
    assert len(table(peers, rows).splitlines()) == 3


def test_bars_are_judged_by_time_and_ratio() -> None:
    """Each bar is reported in words when it is missed; less of the hour has to take less."""
    peer = Row(
        policy="kv_router",
        cpu_s=10.0,
        requests=HOUR_REQUESTS,
        hit_rate=0.1,
        ttft_mean_s=1.0,
        ttft_p99_s=1.0,
        tpot_mean_s=1.0,
        tpot_p99_s=1.0,
    )
    assert our_row("p", 15.0, metrics(HOUR_REQUESTS), peer).missed == []
    slow = our_row("p", 25.1, metrics(HOUR_REQUESTS), peer)
    assert slow.missed == ["25.1 s > 25.0 s", "2.51 of the peer > 1.5"]
    assert our_row("p", 13.0, metrics(HOUR_REQUESTS // 2), None).missed == ["13.0 s > 12.5 s"]


@pytest.mark.slow
def test_the_command_prints_json(
    minute: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is one document with the trace, the settings and every row."""
    argv = ["replay", "--no-peer", "--json", "--trace", str(minute), "--policies", "round_robin"]
    monkeypatch.setattr("sys.argv", argv)
    status = replay.main()
    document = json.loads(capsys.readouterr().out)
    assert document["peer"] is None
    assert document["requests"] == len(read_mooncake(minute).requests)
    assert [row["policy"] for row in document["rows"]] == ["round_robin"]
    assert status == any(row["missed"] for row in document["rows"])


@pytest.mark.parametrize("argv", [["--policies", "nobody"], ["--trace", "/nowhere.jsonl"]])
def test_what_cannot_be_used_is_named(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong policy or file ends in one line and status 2."""
    monkeypatch.setattr("sys.argv", ["replay", "--no-peer", *argv])
    assert replay.main() == 2
    assert argv[1] in capsys.readouterr().err


@pytest.mark.peer
def test_times_are_held_against_the_peers(minute: Path) -> None:
    """Each policy is compared with the peer's router of its kind, in the same run."""
    specs = [parse_policy("round_robin"), parse_policy("multiplicative")]
    peers, rows = run(minute, specs, instances=4, rounds=1, with_peer=True)
    assert [row.policy for row in peers] == ["kv_router", "round_robin"]
    assert [row.peer for row in rows] == ["round_robin", "kv_router"]
    assert all(row.ratio is not None and row.ratio > 0 for row in rows)
