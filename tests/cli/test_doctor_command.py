"""The doctor on planes that are not there, or only half."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import layout
from controlplane.bus.setup import ensure
from schemas import subjects
from schemas.bus import InstanceRecord, RouterLease
from schemas.codec import encode
from tests.cli.commands import call

pytestmark = pytest.mark.live


def doctor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> dict[str, dict[str, object]]:
    """Run it; returns what is wrong, by `where what`. Each finding says how to mend it."""
    status = call(monkeypatch, "doctor", "--json", *flags)
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    answer = json.loads(said.out)
    assert answer["well"] == (status == 0)
    wrong = [finding for finding in answer["findings"] if not finding["ok"]]
    assert all(finding["found"] and finding["mend"] for finding in wrong)
    return {f"{finding['where']} {finding['what']}": finding for finding in wrong}


def test_without_nats(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It says that NATS is away, and what to do."""
    monkeypatch.setattr("controlplane.cli.doctor_command.CONNECT_S", 0.1)
    wrong = doctor(monkeypatch, capsys, "--nats", "nats://127.0.0.1:1")
    assert set(wrong) == {"bus connection"}


def test_with_wrong_credentials(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A refusal is told apart from silence."""
    config = tmp_path / "nats.conf"
    config.write_text("authorization { user: ann, password: right }\n")
    server = EmbeddedNats(config=config)
    asyncio.run(server.start())
    try:
        wrong = doctor(monkeypatch, capsys, "--nats", server.url)
    finally:
        asyncio.run(server.stop())
    assert "--nats-user" in str(wrong["bus connection"]["mend"])


def test_on_a_half_built_plane(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing buckets, then nobody there, then nonsense, silence and routers that are gone."""
    server = EmbeddedNats()
    asyncio.run(server.start())
    try:
        wrong = doctor(monkeypatch, capsys, "--nats", server.url)
        assert set(wrong) == {"bus holds what the plane needs"}
        assert "`multiplane bus init`" in str(wrong["bus holds what the plane needs"]["mend"])
        asyncio.run(_build(server.url))
        wrong = doctor(monkeypatch, capsys, "--nats", server.url)
        assert set(wrong) == {"bus instances", "router answers"}
        asyncio.run(_spoil(server.url))
        wrong = doctor(monkeypatch, capsys, "--nats", server.url)
        assert set(wrong) == {"bus entries", "old registered", "router answers"}
        assert "127.0.0.1:1" in str(wrong["router answers"]["found"])
    finally:
        asyncio.run(server.stop())


async def _build(url: str) -> None:
    bus = await NatsBus.connect(url)
    await ensure(bus, layout(storage="memory", size=0.05))
    await bus.close()


async def _spoil(url: str) -> None:
    bus = await NatsBus.connect(url)
    instances = await bus.bucket(subjects.INSTANCES)
    await instances.put("m.junk", b"\xc1")
    await instances.put(
        "m.old", encode(InstanceRecord("old", "m", "http://x", 1, heartbeat_s=0.001))
    )
    routers = await bus.bucket(subjects.ROUTERS)
    lease = RouterLease("r", 1, 0, 4e9, address="127.0.0.1:1", admin="127.0.0.1:1")
    await routers.put("m.r", encode(lease))
    await bus.close()
