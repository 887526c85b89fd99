"""What a router answers by itself."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.router.service_rig import MODEL, ServiceRig

pytestmark = pytest.mark.slow


async def test_requests_about_models_are_in_the_access_log_and_probes_are_not(
    tmp_path: Path,
) -> None:
    """Whoever asks brings a key; whoever probes does so every second."""
    log = tmp_path / "access.log"
    async with ServiceRig({"access_log": str(log)}) as rig, aiohttp.ClientSession() as session:
        await rig.instance("a")
        for path in ("/health", "/ready", "/version", "/v1/models", f"/v1/models/{MODEL}"):
            async with session.get(rig.url + path) as answer:
                assert answer.status == 200
        async with session.options(f"{rig.url}/v1/models") as answer:
            assert answer.status == 204
        async with session.get(f"{rig.url}/v1/models/nothing") as answer:
            assert answer.status == 404
    lines = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
    assert [(line["endpoint"], line["outcome"], line["status"]) for line in lines] == [
        ("models", "ok", 200),
        ("models", "ok", 200),
        ("models", "rejected:unknown_model", 404),
    ]
