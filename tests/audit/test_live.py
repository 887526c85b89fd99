"""The audit over a live plane of real processes: all is explained, and a forgery is found."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from controlplane.audit.heard import Heard, understand
from controlplane.audit.source import recorded
from controlplane.bus import NatsBus
from lab.load import run_load
from lab.stack import LocalStack, StackOptions
from lab.traces import read_trace
from schemas.bus import KvBatch, KvStored, RouteBatch, Routed
from schemas.codec import encode
from tests.audit.load import chats

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

REQUESTS = 80


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[LocalStack]:
    """Yield a plane that has served some chats."""
    async with LocalStack(StackOptions(engines=3, routers=2)) as made:
        results = await run_load(made.url, chats(REQUESTS, 25.0))
        assert all(result.ok for result in results)
        yield made


async def audit(stack: LocalStack, *words: object) -> tuple[int, str]:
    """Run a command against the plane; returns its status and output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", "audit"),
        *map(str, words),
        *("--nats", stack.nats_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def settled(stack: LocalStack) -> dict[str, object]:
    """Return the report once every request's end is recorded; fail if that takes too long."""
    async with asyncio.timeout(20.0):
        while True:
            status, output = await audit(stack, "verify", "--json")
            report: dict[str, object] = json.loads(output)
            assert status == 0, report["findings"]
            if not report["unchecked"].get("end of the request not in the record"):  # type: ignore[attr-defined]
                return report


async def test_every_decision_of_a_live_plane_is_explained(stack: LocalStack) -> None:
    """Choices, hits of every instance, and most promises, over two routers and real streams."""
    report = await settled(stack)
    assert report["decisions"] == report["chosen"] == report["hits"] == REQUESTS
    assert report["instances"] == 3 * REQUESTS
    assert report["promised"]["as promised"]["requests"] > REQUESTS / 2  # type: ignore[index]


async def test_the_record_is_followed_shown_and_exported(stack: LocalStack, tmp_path: Path) -> None:
    """Every command works against real streams."""
    status, output = await audit(stack, "tail", "--since", "1h", "--no-follow", "--json")
    assert status == 0
    routed = [
        each for line in output.splitlines() if (each := json.loads(line))["type"] == "routed"
    ]
    assert len(routed) == REQUESTS
    assert all(len(each["candidates"]) == 3 for each in routed)
    status, output = await audit(stack, "show", routed[-1]["request_id"])
    assert status == 0
    assert "as promised" in output or "against the promise" in output
    status, output = await audit(stack, "export", tmp_path / "trace", "--format", "trace")
    assert status == 0
    trace = read_trace(tmp_path / "trace")
    assert len(trace.requests) == REQUESTS
    assert "100.0% of their blocks" in output


async def test_a_recording_of_a_running_plane_stands_by_itself(
    stack: LocalStack, tmp_path: Path
) -> None:
    """Snapshots at its beginning say what the streams before it said."""
    path = tmp_path / "recording"
    recording = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", "audit", "record", str(path)),
        *("--nats", stack.nats_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(30.0):
            while not path.exists() or path.stat().st_size < 2_000:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await run_load(stack.url, chats(20, 20.0, seed=1))
        await said_by_now(stack)
    finally:
        recording.send_signal(signal.SIGINT)
        said, _ = await asyncio.wait_for(recording.communicate(), 30.0)
    assert recording.returncode == 0, said.decode()
    status, output = await audit_file("verify", path)
    report = json.loads(output)
    assert status == 0, report
    assert report["decisions"] == report["chosen"] >= 20
    assert report["hits"] >= 20
    await run_again(path, tmp_path / "trace", report["decisions"])


async def said_by_now(stack: LocalStack) -> None:
    """Return once what was said so far has reached those who listen."""
    bus = await NatsBus.connect(stack.nats_url, name="test")
    heard = asyncio.Event()
    await bus.subscribe("mp.v1.kv.>", lambda *_: heard.set())
    await asyncio.wait_for(heard.wait(), 10.0)  # a heartbeat that was sent after all of it
    await bus.close()


async def run_again(recording: Path, trace: Path, requests: int) -> None:
    """Run what was recorded again, in simulated time, under the policy that was used and a rival.

    The same requests with the same common prefixes: prefixes are found again.
    """
    status, output = await multiplane(
        *("audit", "export", trace, "--format", "trace", "--from", recording)
    )
    assert status == 0, output
    status, output = await multiplane(
        *("lab", "replay", trace, "--policies", "multiplicative,round_robin"),
        *("--instances", 3, "--json"),
    )
    assert status == 0, output
    runs = {run["policy"]: run for run in json.loads(output)}
    (replayed,) = {run["requests"] + run["unfinished"] for run in runs.values()}
    assert requests - 2 <= replayed <= requests, "the last may end after the record"
    assert runs["multiplicative"]["hit_rate"] > 0.5


async def audit_file(command: str, path: Path) -> tuple[int, str]:
    """Run a command on a recording."""
    return await multiplane("audit", command, "--json", "--from", path)


async def multiplane(*words: object) -> tuple[int, str]:
    """Run a command that needs no bus; returns its status and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_forged_events_on_the_bus_are_found_and_named(stack: LocalStack) -> None:
    """A decision and a block event that somebody changed and published again, as if they were true.

    Runs last: the streams hold the forgeries from then on.
    """
    bus = await NatsBus.connect(stack.nats_url, name="forger")
    kv, route = await _genuine(bus)
    forged = msgspec.structs.replace(route, router_id="forger", seq=0)
    bus.publish("mp.v1.route.tiny.forger", encode(forged))
    op = next(op for op in kv.ops if isinstance(op, KvStored))
    spoilt = KvStored(bytes([op.hashes[0] ^ 1]) + op.hashes[1:], op.parent)
    epoch = kv.epoch + (1 << 40)
    whole = msgspec.structs.replace(kv, instance_id="forged", epoch=epoch, seq=0, ops=[spoilt])
    bus.publish("mp.v1.kv.tiny.forged", encode(whole))
    await bus.flush()
    await bus.close()
    status, output = await audit(stack, "verify", "--json")
    assert status == 1
    findings = json.loads(output)["findings"]
    named = {finding["kind"]: finding["where"] for finding in findings}
    assert "by router forger" in named["score"]
    assert f"forged epoch {epoch} seq 0" in named["kv"]


async def _genuine(bus: NatsBus) -> tuple[KvBatch, RouteBatch]:
    """Return a block event that stores, and a routed event with its rows and another score."""
    kv: KvBatch | None = None
    rows, routed = None, None
    async for record in recorded(bus, ("kv", "route")):
        heard = understand(record)
        assert isinstance(heard, Heard)
        message = heard.message
        if isinstance(message, KvBatch):
            stores = any(isinstance(op, KvStored) for op in message.ops)
            kv = kv or (message if stores else None)
        elif isinstance(message, RouteBatch):
            for event in message.events:
                if isinstance(event, Routed) and event.candidates is not None:
                    routed = routed or event
                elif not isinstance(event, Routed) and hasattr(event, "instance_ids"):
                    rows = rows or event
            if routed is not None and rows is not None and kv is not None:
                break
    assert kv is not None
    assert rows is not None
    assert routed is not None
    changed = msgspec.structs.replace(routed, score=routed.score + 1.0)
    return kv, RouteBatch("", 1, 0, 0.0, [rows, changed])
