from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.hashing import chain, pack_tokens
from lab.traces import (
    FIRST_TOKEN,
    TINY_VOCABULARY,
    Trace,
    TraceError,
    TraceRequest,
    read_azure,
    read_bailian,
    read_mooncake,
    read_trace,
    sample_trace,
)

LINE = {"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}


def written(tmp_path: Path, *lines: Any, name: str = "trace.jsonl") -> Path:
    """A file with these lines, JSON unless they are text."""
    path = tmp_path / name
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_packaged_trace_is_ten_minutes_of_conversations() -> None:
    """The sample has 1,750 requests, all of which begin with the same block."""
    trace = sample_trace()
    assert len(trace.requests) == 1750
    assert 590 < trace.duration_s < 600
    assert trace.input_tokens == 24_486_514
    assert {request.block_ids[0] for request in trace.requests} == {0}


def test_mooncake_lines_become_requests(tmp_path: Path) -> None:
    """Milliseconds become seconds after the first request, in order; blank lines are skipped."""
    trace = read_mooncake(written(tmp_path, {**LINE, "timestamp": 4000}, "", LINE))
    assert trace.block_tokens == 512
    assert [request.at_s for request in trace.requests] == [0.0, 1.5]
    assert trace.requests[0] == TraceRequest(0.0, 600, 7, (0, 5))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "trace.jsonl:2: "),
        ({"timestamp": 1}, "trace.jsonl:2: Object missing required field `input_length`"),
        ({**LINE, "input_length": "x"}, r"trace.jsonl:2: Expected `int`, got `str`"),
        ({**LINE, "hash_ids": [1]}, "trace.jsonl:2: 600 prompt tokens make 2 blocks of 512, but"),
        ({**LINE, "hash_ids": [1, -2]}, "trace.jsonl:2: block ids must not be negative"),
        ({**LINE, "output_length": 0}, "trace.jsonl:2: a request needs at least one prompt"),
        ({**LINE, "hash_ids": [1, 10**30]}, "trace.jsonl:2: block ids must be at most"),
        ({**LINE, "timestamp": 1.7e15}, "over a year: are its times in the unit"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, says: str) -> None:
    """An error names file, line and reason."""
    with pytest.raises(TraceError, match=says):
        read_mooncake(written(tmp_path, LINE, line))


def test_azure_lines_with_prompts_of_any_length_are_refused(tmp_path: Path) -> None:
    """Before their blocks are named, which would fill the memory."""
    path = tmp_path / "trace.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    path.write_text(f"{head}\n2023-11-16 18:15:46.0,{10**15},1\n")
    with pytest.raises(TraceError, match=r"trace.csv:2: .* more than any model's"):
        read_azure(path)


def test_unreadable_and_empty_files_are_named(tmp_path: Path) -> None:
    """A missing or binary file, and one without requests, say so."""
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    for reader in (read_trace, read_mooncake):
        with pytest.raises(TraceError, match="cannot be read"):
            reader(tmp_path / "binary")
    with pytest.raises(TraceError, match="no request in it"):
        read_mooncake(written(tmp_path, ""))


def test_bailian_chats_form_sessions(tmp_path: Path) -> None:
    """A chat belongs to the session of its first parent."""
    shape = {"input_length": 20, "output_length": 3, "hash_ids": [7, 8], "type": "text", "turn": 1}
    trace = read_bailian(
        written(
            tmp_path,
            {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, **shape},
            {"chat_id": 2, "parent_chat_id": 1, "timestamp": 62.0, **shape},
            {"chat_id": 3, "parent_chat_id": 2, "timestamp": 63.0, **shape},
            {"chat_id": 4, "parent_chat_id": 99, "timestamp": 64.0, **shape},
        )
    )
    assert trace.block_tokens == 16
    assert [request.session for request in trace.requests] == ["1", "1", "1", "4"]
    assert [request.at_s for request in trace.requests] == [0.0, 0.5, 1.5, 2.5]


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    """CSV rows become requests whose blocks are their own."""
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,1000,44",
        "2023-11-16 18:15:50.9951690,30,5",
        name="azure.csv",
    )
    first, second = read_azure(path).requests
    assert second.at_s == pytest.approx(4.314579)
    assert (first.input_tokens, first.output_tokens, len(first.block_ids)) == (1000, 44, 2)
    assert not set(first.block_ids) & set(second.block_ids)
    bad = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", "today,1,1", name="bad.csv")
    with pytest.raises(TraceError, match=r"bad.csv:2: not an Azure trace line"):
        read_azure(bad)


def test_what_is_no_trace_at_all_says_which_there_are(tmp_path: Path) -> None:
    """A file of something else names the formats, not what a parser stumbled over."""
    path = written(tmp_path, "hello\n")
    with pytest.raises(TraceError, match=r":1: neither a trace in Mooncake's, Qwen-Bailian's or"):
        read_trace(path)


@pytest.mark.parametrize(
    ("first", "block_tokens"),
    [
        (LINE, 512),
        (
            {"chat_id": 1, "timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": [1]},
            16,
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,9,1", 512),
    ],
)
def test_format_is_recognised(tmp_path: Path, first: Any, block_tokens: int) -> None:
    """The first line tells which format a file has."""
    assert read_trace(written(tmp_path, first)).block_tokens == block_tokens


def test_traces_can_be_cut_and_sped_up() -> None:
    """A cut begins at 0; twice as fast halves the gaps; what is too long can be left out."""
    requests = tuple(TraceRequest(float(n), 10 * n + 1, 5, (n,)) for n in range(10))
    trace = Trace("t", 512, requests)
    cut = trace.cut(3.0, 4.0)
    assert [request.at_s for request in cut.requests] == [0.0, 1.0, 2.0, 3.0]
    assert [request.block_ids for request in trace.cut(requests_max=2).requests] == [(0,), (1,)]
    assert cut.faster(2.0).duration_s == 1.5
    assert [request.input_tokens for request in trace.within(26).requests] == [1, 11, 21]
    with pytest.raises(ValueError, match="speed=0"):
        trace.faster(0)


def test_equal_ids_give_equal_tokens_and_hashes() -> None:
    """Prompts share tokens and hashes exactly as far as they share ids, then nothing."""
    one = TraceRequest(0.0, 1500, 5, (3, 4, 5))
    other = TraceRequest(0.0, 1400, 5, (3, 9, 5))
    trace = Trace("t", 512, (one, other))
    tokens, tokens_other = trace.prompt_ids(one), trace.prompt_ids(other)
    assert (len(tokens), len(tokens_other)) == (1500, 1400)
    assert tokens[:512] == tokens_other[:512]
    assert tokens[1024:1400] == tokens_other[1024:]
    assert min(tokens) >= FIRST_TOKEN
    assert max(tokens) < TINY_VOCABULARY
    assert trace.prompt_ids(one, vocabulary=100_000) != tokens
    hashes, hashes_other = trace.prompt_hashes(one, 16), trace.prompt_hashes(other, 16)
    assert (len(hashes), len(hashes_other)) == (93, 87)
    assert hashes[:32] == hashes_other[:32]
    assert not set(hashes[32:]) & set(hashes_other)


@pytest.mark.parametrize("block_size", [16, 32, 512, 1024])
def test_hashes_without_tokens_match_like_those_of_tokens(block_size: int) -> None:
    """For any two prompts the shared number of blocks is the same by name and by token hash."""
    trace = sample_trace().cut(requests_max=40)
    named = [trace.prompt_hashes(each, block_size) for each in trace.requests]
    hashed = [chain(pack_tokens(trace.prompt_ids(each)), block_size) for each in trace.requests]
    for i in range(40):
        assert len(named[i]) == len(hashed[i])
        for j in range(i):
            assert shared(named[i], named[j]) == shared(hashed[i], hashed[j])


def shared(one: list[int], other: list[int]) -> int:
    """How many hashes two chains have in common from the start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_block_sizes_that_do_not_fit_are_refused() -> None:
    """A block that straddles the trace's own blocks has no name."""
    trace = sample_trace().cut(requests_max=1)
    with pytest.raises(ValueError, match="blocks of 48 tokens do not fit"):
        trace.prompt_hashes(trace.requests[0], 48)


def test_engine_requests_have_answers_of_their_own() -> None:
    """Two requests with the same prompt share its blocks, not those of their answers."""
    request = TraceRequest(0.0, 40, 40, (3,))
    trace = Trace("t", 512, (request, request))
    one, other = trace.engine_request(0, 16), trace.engine_request(1, 16)
    assert len(one.block_hashes) == 5
    assert one.block_hashes[:2] == other.block_hashes[:2]
    assert not set(one.block_hashes[2:]) & set(other.block_hashes[2:])
    assert (one.request_id, one.prompt_tokens, one.output_tokens) == ("0", 40, 40)
