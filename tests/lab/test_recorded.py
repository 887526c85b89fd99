from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from controlplane.audit.recording import MAGIC, RecordingWriter
from controlplane.bus.protocol import Record
from lab import replay as replays
from lab.replay_config import ReplayConfig, parse_policy
from lab.traces import Trace, TraceError, read_trace
from schemas import subjects
from schemas.bus import KvBatch, RouteBatch
from schemas.codec import encode
from tests.lab.replay_helpers import agents

CONFIG = ReplayConfig(instances=3, routers=2, through_sidecars=True, kv_tokens=60_000)
MODEL = "replayed"


class Recorded(replays.Replay):
    """A replay whose messages are recorded, as `multiplane audit record` does on a real bus."""

    writer: RecordingWriter

    def _publish(self, batch: KvBatch) -> None:
        self._write(subjects.kv(MODEL, batch.instance_id), batch)
        super()._publish(batch)

    def _told(self, batch: RouteBatch) -> None:
        self._write(subjects.route(MODEL, batch.router_id), batch)
        super()._told(batch)

    def _write(self, subject: str, message: KvBatch | RouteBatch) -> None:
        self.writer.write(Record(subject, encode(message), 1, self._agenda.now_s))


def record(trace: Trace, path: Path) -> None:
    """Replay a trace and record what the bus would have said."""
    config = CONFIG.resolved(trace.block_tokens)
    world = Recorded(trace, parse_policy("multiplicative"), config, None)
    with RecordingWriter(path) as world.writer:
        world.run()


@pytest.mark.slow
def test_own_traffic_is_replayed_from_a_recording(tmp_path: Path) -> None:
    """What a fleet's streams say of a stretch of traffic is enough to live through it again."""
    original = agents(duration_s=20.0)
    path = tmp_path / "own.mprec"
    record(original, path)
    again = read_trace(path)
    assert again.block_tokens == 16
    lengths = [(each.input_tokens, each.output_tokens) for each in again.requests]
    assert sorted(lengths) == sorted(
        (each.input_tokens, each.output_tokens) for each in original.requests
    )
    # Block events come a little late, so two prompts that ask within a moment may swap.
    spread = [
        each.at_s - own.at_s for each, own in zip(again.requests, original.requests, strict=True)
    ]
    assert np.ptp(spread) < 0.1

    spec = parse_policy("round_robin")
    first = replays.replay(original, spec, ReplayConfig(instances=3, kv_tokens=60_000))
    second = replays.replay(again, spec, ReplayConfig(instances=3, kv_tokens=60_000))
    hits = [result.cached_tokens.sum() / result.prompt_tokens.sum() for result in (first, second)]
    assert hits[0] > 0.1
    assert hits[1] == pytest.approx(hits[0], abs=0.02)
    assert second.ttft_s.mean() == pytest.approx(first.ttft_s.mean(), rel=0.1)


def test_recordings_without_requests_say_so(tmp_path: Path) -> None:
    """An empty one, and a damaged one, are named with what is wrong."""
    path = tmp_path / "empty.mprec"
    path.write_bytes(MAGIC)
    with pytest.raises(TraceError, match=r"empty\.mprec: no request whose tokens are known"):
        read_trace(path)
    path.write_bytes(MAGIC + b"\xff\xff\xff\xff")
    with pytest.raises(TraceError, match="byte 23 is damaged"):
        read_trace(path)
    path.write_bytes(MAGIC.replace(b"1", b"9"))
    with pytest.raises(TraceError, match="not a recording"):
        read_trace(path)
