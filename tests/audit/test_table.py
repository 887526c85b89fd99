"""Decisions as rows, as Parquet, and as a trace that the lab reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from controlplane.audit.heard import Unreadable
from controlplane.audit.lines import clock
from controlplane.audit.parquet import ParquetFiles
from controlplane.audit.table import DecisionRow, Table
from controlplane.audit.trace import TraceLine, TraceWriter
from controlplane.core.hashing import pack_hashes
from lab.traces import Trace, read_trace
from schemas import subjects
from schemas.bus import ClassCoverage, Finished, KvStored, RouteBatch, Routed
from tests.audit.tape import Tape
from tests.core.plane_helpers import prompt


def rows_of(tape: Tape, **options: object) -> tuple[Table, list[DecisionRow]]:
    """Return the rows of a tape."""
    table = Table(**options)  # type: ignore[arg-type]
    rows = [row for heard in tape.heard() for row in table.hear(heard)]
    return table, [*rows, *table.end()]


def _tape() -> Tape:
    tape = Tape()
    tape.publish(tape.publishers["a"].store(prompt(1, 2)))
    tape.ask(1, 2, 3, name="q1", tenant="gold", cached=16)
    tape.begin(9, name="q2")
    return tape


def test_a_row_has_the_decision_and_its_end() -> None:
    """Joined by request, router and instance; one that did not end is there without."""
    table, (first, second) = rows_of(_tape())
    assert (first.request_id, first.instance_id, first.tenant) == ("q1", "a", "gold")
    assert (first.hit_tokens, first.cached_tokens, first.outcome) == (32, 16, "ok")
    assert (first.next_instance_id, first.next_score, first.eligible, first.ties) == (
        "b",
        53.0,
        2,
        1,
    )
    assert first.class_depths == [1, 2]
    assert first.candidates is None
    assert (second.request_id, second.ended, second.outcome) == ("q2", False, None)
    assert table.counts == {"rows": 2, "rows without an end": 1}


def test_candidates_are_kept_where_they_are_wanted() -> None:
    """By name, as each decision saw them."""
    _, (first, _) = rows_of(_tape(), with_candidates=True)
    assert first.candidates is not None
    assert [each.instance_id for each in first.candidates] == ["a", "b"]


def test_open_rows_are_bounded() -> None:
    """The oldest leave without their ends, which then have no decision."""
    tape = Tape()
    tickets = [tape.begin(number, name=f"q{number}") for number in range(3)]
    for ticket in tickets:
        tape.finish(ticket)
    table, rows = rows_of(tape, open_max=2)
    assert [(row.request_id, row.ended) for row in rows] == [
        ("q0", False),
        ("q1", True),
        ("q2", True),
    ]
    assert table.counts["ends without a decision"] == 1
    assert list(table.hear(Unreadable("s", "why", 0.0))) == []
    assert table.counts["unreadable"] == 1


@pytest.mark.parametrize("with_candidates", [False, True])
def test_parquet_files_are_partitioned_and_read_back(tmp_path: Path, with_candidates: bool) -> None:
    """By day and model; every column with its type and value."""
    _, rows = rows_of(_tape(), with_candidates=with_candidates)
    files = ParquetFiles(tmp_path, "run", with_candidates=with_candidates)
    for row in rows:
        files.add(row)
        files.add(msgspec.structs.replace(row, model="Qwen/Qwen3", at_wall_s=1.8e9))
    files.close()
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet"))
    assert found == [
        "day=2023-11-14/model=m/run-0000.parquet",
        "day=2027-01-15/model=Qwen=2FQwen3/run-0001.parquet",
    ]
    read = pq.ParquetFile(tmp_path / found[0]).read().to_pylist()
    assert [each["request_id"] for each in read] == ["q1", "q2"]
    first = read[0]
    assert first["at_wall_s"].timestamp() == pytest.approx(rows[0].at_wall_s, abs=1e-6)
    assert first["prompt_key"] == prompt(1, 2, 3)[-1]
    assert first["class_keys"] == prompt(1, 2)
    assert ("candidates" in first) == with_candidates
    for name in DecisionRow.__struct_fields__:
        if name not in ("model", "at_wall_s", "candidates"):
            assert first[name] == getattr(rows[0], name), name


def test_files_open_at_once_are_bounded(tmp_path: Path) -> None:
    """A partition that comes again gets a file of its own."""
    _, (row, _) = rows_of(_tape())
    files = ParquetFiles(tmp_path, "run")
    for number in range(40):
        files.add(msgspec.structs.replace(row, model=f"m{number}"))
    files.close()
    assert len(files.files) == 40
    assert all(pq.ParquetFile(path).metadata.num_rows == 1 for path in files.files)


# --- traces


def trace_of(tape: Tape, tmp_path: Path, **options: object) -> tuple[TraceWriter, Trace]:
    """Return a tape as the lab reads it."""
    writer = TraceWriter(**options)  # type: ignore[arg-type]
    lines: list[TraceLine] = [line for heard in tape.heard() for line in writer.hear(heard)]
    lines += writer.end()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    return writer, read_trace(path)


def _store(tape: Tape, *numbers: int) -> None:
    """Let an instance store what is new of a prompt, with the block before it named."""
    publisher = tape.publishers["a"]
    chain = prompt(*numbers)
    new = [block for block in chain if block not in publisher.blocks]
    if new:
        first = chain.index(new[0])
        publisher.blocks.update(new)
        parent = chain[first - 1] if first else None
        tape.publish(publisher.batch(KvStored(pack_hashes(new), parent)))


def test_a_record_becomes_a_trace_with_the_same_prefixes(tmp_path: Path) -> None:
    """Blocks are shared exactly where prompts were; conversations are told by their parents."""
    tape = Tape()
    for numbers in ((1, 2), (1, 2, 3), (1, 9), (1, 2, 3, 4)):
        ticket = tape.begin(*numbers)
        _store(tape, *numbers)
        tape.finish(ticket, output=5)
        tape.now_s += 1.0
    writer, trace = trace_of(tape, tmp_path)
    assert trace.block_tokens == 16
    first, second, third, fourth = trace.requests
    assert [each.input_tokens for each in trace.requests] == [37, 53, 37, 69]
    assert first.output_tokens == 5
    assert first.block_ids[:2] == second.block_ids[:2] == fourth.block_ids[:2]
    assert second.block_ids[:3] == fourth.block_ids[:3]
    assert third.block_ids[0] == first.block_ids[0]
    assert third.block_ids[1] != first.block_ids[1]
    last = {each.block_ids[-1] for each in trace.requests}
    assert len(last) == 4, "blocks that are not whole are nobody else's"
    assert first.session == second.session == fourth.session != third.session
    assert second.at_s == pytest.approx(1.0, abs=0.2)
    assert writer.counts["requests"] == 4
    assert writer.counts["blocks_unknown"] == 0


def test_blocks_from_before_the_record_keep_prefixes_equal(tmp_path: Path) -> None:
    """They get ids that follow from the first block that is known."""
    tape = Tape()
    before = range(1, 8)
    tape.publishers["a"].blocks.update(prompt(*before))
    for numbers in ((*before, 8), (*before, 8, 9), before):
        ticket = tape.begin(*numbers)
        _store(tape, *numbers)
        tape.finish(ticket)
    writer, trace = trace_of(tape, tmp_path)
    first, second, third = trace.requests
    assert first.block_ids[:8] == second.block_ids[:8]
    assert len(set(second.block_ids)) == 10
    assert third.block_ids[:7] == first.block_ids[:7]
    assert writer.counts["blocks_unknown"] == 3 * 3, "3, 5 and 6; decisions name 1, 2 and 4"


def test_requests_of_which_nothing_is_stored_share_what_decisions_name(tmp_path: Path) -> None:
    """Everything was cached before the record: prefixes are equal up to a depth that is told."""
    tape = Tape()
    shared = range(1, 7)
    for ending in (7, 8):
        tape.ask(*shared, ending)
    writer, trace = trace_of(tape, tmp_path)
    first, second = trace.requests
    assert first.block_ids[:4] == second.block_ids[:4]
    assert first.block_ids[6] != second.block_ids[6]
    assert writer.counts["blocks_unknown"] == 2 * 3, "3, 5 and 6"


def test_a_prompt_shorter_than_a_block_is_in_the_trace(tmp_path: Path) -> None:
    """It has no key, and takes its place in a batch like any other."""
    tape = Tape()
    tape.ask()
    tape.ask(1)
    writer, trace = trace_of(tape, tmp_path)
    assert [request.input_tokens for request in trace.requests] == [5, 21]
    assert writer.counts["requests"] == 2


def test_what_a_trace_cannot_hold_is_left_out_and_counted(tmp_path: Path) -> None:
    """Prompts without tokens, odd block sizes, retries' first attempts, too many under way."""
    tape = Tape()
    tape.ask(1, name="kept")
    tape.ask(by_load="inexact:images", exact=False)
    tape.ask(3, block_size=24)
    tickets = [tape.begin(number) for number in (4, 5, 6)]
    for ticket in tickets:
        tape.finish(ticket, "retried" if ticket is tickets[2] else "ok")
    writer, trace = trace_of(tape, tmp_path, waiting_max=2)
    assert writer.counts["left out: no tokens known"] == 1
    assert writer.counts["left out: blocks of 24 tokens"] == 1
    assert writer.counts["left out: too many under way"] == 1
    assert len(trace.requests) == 2
    assert list(writer.hear(Unreadable("s", "why", 0.0))) == []


def test_remembered_blocks_are_bounded(tmp_path: Path) -> None:
    """What was stored long ago is forgotten, and then counts as not in the record."""
    tape = Tape()
    _store(tape, *range(1, 8))
    _store(tape, *range(11, 18))
    tape.ask(*range(1, 8))
    tape.ask(*range(11, 18))
    writer, _ = trace_of(tape, tmp_path, blocks_max=7)
    assert writer.counts["blocks_unknown"] == 3, "3, 5 and 6 of the first"


ABSURD = [
    {"at_wall_s": float("nan")},
    {"at_wall_s": 1e308},
    {"at_wall_s": -1.0},
    {"prompt_tokens": 1 << 53},
    {"kv_seq": (-1, 0)},
    {"kv_seq": (1, (1 << 64) - 1)},
    {"classes": [ClassCoverage(1, 1 << 53, 1)]},
]


@pytest.mark.parametrize("absurd", ABSURD, ids=str)
def test_what_no_router_would_say_is_left_out(absurd: dict[str, Any], tmp_path: Path) -> None:
    """One forged message would end every export as long as the record keeps it."""
    tape = _tape()
    event = Routed("forged", "a", **{"at_wall_s": 0.0, "block_size": 16, "prompt_key": 1} | absurd)
    told = [event, Finished("forged", "a", "ok", 200, 1.0)]
    tape.write(subjects.route("m", "forger"), RouteBatch("forger", 1, 0, 0.0, told))
    table, rows = rows_of(tape)
    assert table.counts["implausible"] == 1
    assert [row.request_id for row in rows] == ["q1", "q2"]
    files = ParquetFiles(tmp_path, "run")
    for row in rows:
        files.add(row)
    files.close()
    writer, trace = trace_of(tape, tmp_path)
    assert writer.counts["left out: no router would say that"] == 1
    assert len(trace.requests) == 1


def test_an_end_at_no_time_keeps_no_other_from_the_trace(tmp_path: Path) -> None:
    """It would be waited for to the end of the record, and beyond."""
    tape = Tape()
    asked = Routed("q0", "a", 0.0, prompt_tokens=16, block_size=16, prompt_key=1)
    told = [asked, Finished("q0", "a", "ok", 200, float("nan"))]
    tape.write(subjects.route("m", "forger"), RouteBatch("forger", 1, 0, 0.0, told))
    tape.ask(1, name="q1")
    assert len(trace_of(tape, tmp_path)[1].requests) == 1


@pytest.mark.parametrize("wall_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_what_is_no_time_is_shown_as_dashes(wall_s: float) -> None:
    """Lines go on, whatever somebody said the time was."""
    assert clock(wall_s) == "--:--:--.---"
