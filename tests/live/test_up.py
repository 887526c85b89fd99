"""A whole plane of real processes: it serves, compares, diagnoses itself, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from controlplane.bus import NatsBus
from controlplane.doctor import doctor
from controlplane.running import running_planes
from lab.children import ChildStartError
from lab.generators import generate
from lab.load import Planned, plan, run_load
from lab.stack import LocalStack, StackOptions
from lab.summary import Summary, summarize
from lab.traces import sample_trace
from lab.view import BusView
from tests.live.chaos_rig import agree

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300)]

UP = [sys.executable, "-m", "controlplane.cli.main", "up", "--port", "0", "--no-live"]


def until(condition: Callable[[], object], deadline_s: float = 30.0) -> None:
    """Wait until something holds; fail when it does not in time."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "still waiting"
        time.sleep(0.05)


def descendants(pid: int) -> set[int]:
    """Return all living processes below one."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            fields = stat.rpartition(")")[2].split()
            if fields[0] != "Z":
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


def alive(pid: int) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> str:
    """Return a process's command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def start_up(*flags: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Start `multiplane up` and return it once it serves, with what it printed so far."""
    process = subprocess.Popen(
        [*UP, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "curl" in line:
            return process, lines
    raise AssertionError("".join(lines))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_and_stopping_it_leaves_nothing_running(number: signal.Signals) -> None:
    """Ctrl-C ends every process that `up` started."""
    process, lines = start_up("--engines", "2", "--routers", "1")
    started = descendants(process.pid)
    assert len(started) == 8, "nats, two engines and sidecars, a router, detector and dashboard"
    assert any("ready" in line for line in lines)
    assert [plane.pid for plane in running_planes()] == [process.pid]
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    until(lambda: not any(map(alive, started)))
    assert running_planes() == []


def test_other_commands_find_the_plane_that_runs() -> None:
    """In a second terminal nobody needs to say where it is, and nobody is told of a dead one."""
    command = [sys.executable, "-m", "controlplane.cli.main", "instances", "--json"]
    process, _ = start_up("--engines", "2", "--routers", "1", "--no-dashboard")
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(json.loads(found.stdout)["rows"]) == 2
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not running_planes())


def test_the_port_of_another_plane_is_refused() -> None:
    """A second `up` on the same port says so in one line, and leaves nothing and harms nobody."""
    process, lines = start_up("--engines", "1", "--routers", "1")
    port = next(line for line in lines if "clients" in line).rpartition(":")[2].strip()
    again = subprocess.run(
        [*UP[:-3], "--port", port, "--no-live"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 2
    assert again.stderr.startswith(f"multiplane: --port {port}: 127.0.0.1:{port}: somebody else")
    assert len(again.stderr.splitlines()) == 1
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=60)


def test_without_a_view_there_is_a_line_now_and_then() -> None:
    """`--no-live` says what the view would show, and at once when an engine dies."""
    process, _ = start_up("--engines", "2", "--routers", "1")
    assert process.stdout is not None
    assert any("2 ready" in process.stdout.readline() for _ in range(10))
    engine = next(pid for pid in descendants(process.pid) if "lab.server" in command_of(pid))
    os.kill(engine, signal.SIGKILL)
    assert any("1 dead" in process.stdout.readline() for _ in range(10))
    process.terminate()
    process.communicate(timeout=60)


def test_stopping_up_while_it_starts_leaves_nothing() -> None:
    """Ctrl-C does not wait for the start."""
    process = subprocess.Popen(
        [*UP, "--engines", "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until(lambda: len(descendants(process.pid)) >= 3)
    started = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "ready" not in said
    until(lambda: not any(map(alive, started)))


async def test_a_failed_start_leaves_nothing() -> None:
    """When one engine cannot start, what has started ends before the error is raised."""
    before = descendants(os.getpid())
    options = StackOptions(engines=2, routers=1, engine_flags=("--blocks", "2"), detector=True)
    stack = LocalStack(options)
    with pytest.raises(ChildStartError, match="engine-0 did not start"):
        await stack.__aenter__()
    assert descendants(os.getpid()) <= before
    assert not [child.name for child in (*stack.routers, *stack.services) if child.running]


def test_killing_up_leaves_nothing_either() -> None:
    """After kill -9 of `up` the kernel ends its children."""
    process, _ = start_up("--engines", "1", "--routers", "1")
    started = descendants(process.pid)
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not any(map(alive, started)))


def test_a_trace_is_replayed_and_compared(tmp_path: Path) -> None:
    """`up --trace` replays real traffic under two policies, and ends with a table and JSON."""
    report = tmp_path / "table.md"
    done = subprocess.run(
        [
            *UP,
            *("--engines", "4", "--routers", "2", "--trace", "sample"),
            *("--duration", "30", "--speed", "4", "--json"),
            *("--report", str(report)),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hit rate" in done.stdout
    assert "1/2 multiplicative: 0 of" in done.stdout
    assert "s left" in done.stdout
    assert report.read_text().startswith("|  | multiplicative | round_robin | ratio |\n| --- |")
    runs = json.loads(done.stdout[done.stdout.index("[\n") : done.stdout.rindex("]") + 1])
    assert [run["name"] for run in runs] == ["multiplicative", "round_robin"]
    assert [run["failed"] for run in runs] == [0, 0]
    assert runs[0]["requests"] == runs[1]["requests"] > 50


async def _run(policy: str, planned: tuple[Planned, ...]) -> Summary:
    """Put requests through four engines and two routers."""
    options = StackOptions(
        engines=4,
        routers=2,
        engine_flags=("--speed", "10"),
        router_flags=("--policy", policy),
    )
    async with LocalStack(options) as stack:
        view = BusView()
        bus = await NatsBus.connect(stack.nats_url, name="view")
        await view.follow(bus)
        results = await run_load(stack.url, planned)
        await bus.close()
    return summarize(policy, results, view.routed_by_instance(), seconds=1.0)


async def test_sessions_hit_far_more_than_under_round_robin() -> None:
    """Agents' growing contexts stay where they are cached, over two routers, without failures."""
    trace = generate("agent", seed=1, duration_s=60.0, requests_per_s=2.5, tokens_max=12_000)
    planned = plan(trace.faster(4.0), "tiny")
    ours = await _run("multiplicative", planned)
    theirs = await _run("round_robin", planned)
    assert ours.failed == theirs.failed == 0
    assert ours.hit_rate > theirs.hit_rate + 0.15
    assert ours.balance < 3.0


async def _chat(client: AsyncOpenAI, text: str, **more: Any) -> Any:
    return await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=12, **more
    )


async def test_two_routers_agree_and_answer_clients() -> None:
    """Both routers see the same blocks and load; real clients stream; the doctor finds nothing."""
    options = StackOptions(engines=3, routers=2, engine_flags=("--speed", "20"))
    async with LocalStack(options) as stack:
        async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="x", max_retries=0) as client:
            answers = await asyncio.gather(*(_chat(client, f"chat {n} " * 30) for n in range(24)))
            assert all(answer.usage.completion_tokens == 12 for answer in answers)
            stream = await _chat(client, "stream " * 30, stream=True)
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        await agree(stack, within_s=20.0)
        bus = await NatsBus.connect(stack.nats_url, name="doctor")
        findings = [finding async for finding in doctor(bus, stack.admin_urls[0])]
        await bus.close()
        assert not [finding for finding in findings if not finding.ok], findings
        (noted,) = [finding for finding in findings if finding.mend]
        assert (noted.where, noted.found) == ("detector", "none is heard")
        assert len(findings) == 1 + 3 + 1 + 1 + 5 * 3


async def test_ports_that_were_taken_meanwhile_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As by another plane that starts at the same time: only the clients' port is insisted on."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with ExitStack() as taken:
        others = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        nats, admin, dashboard = (each.getsockname()[1] for each in others)
        options = StackOptions(
            engines=1, routers=1, nats_port=nats, admin_port=admin, dashboard_port=dashboard
        )
        async with LocalStack(options) as stack:
            for url, port in (
                (stack.nats_url, nats),
                (stack.admin_urls[0], admin),
                (stack.dashboard_url, dashboard),
            ):
                assert f":{port}" not in url
    assert os.listdir(tmp_path) == [], "the server that found its port taken is gone, too"


async def test_the_load_generator_counts_what_fails() -> None:
    """A run against a plane whose engines all died reports failures, and ends."""
    options = StackOptions(engines=1, routers=1, engine_flags=("--speed", "20"))
    async with LocalStack(options) as stack:
        view = BusView()
        bus = await NatsBus.connect(stack.nats_url, name="view")
        await view.follow(bus)
        await stack.fleet.instances[0].kill()
        planned = plan(sample_trace().cut(0.0, 30.0).faster(30.0).within(8000), "tiny")[:5]
        results = await run_load(stack.url, planned)
        await bus.close()
    summary = summarize("dead", results, view.routed_by_instance(), seconds=1.0)
    assert (summary.requests, summary.failed) == (len(planned), len(planned))
    assert all(result.status in (502, 503) for result in results)
