"""How large a layout fits a server: found without being told, and true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import Storage, layout
from controlplane.bus.room import fitting_size
from controlplane.bus.setup import NoRoomError, ensure
from tests.bus.worlds import fast
from tests.cli.commands import call

pytestmark = pytest.mark.live

GIB = 1 << 30


def config_for(folder: Path, *, nbytes: int) -> Path:
    """Return a configuration of a server that may store so much."""
    path = folder / "nats.conf"
    path.write_text(
        f'jetstream {{ store_dir: "js", max_file_store: {nbytes}, max_memory_store: {nbytes} }}\n'
    )
    return path


@pytest.mark.parametrize("storage", ["file", "memory"])
@pytest.mark.parametrize("nbytes", [GIB, GIB // 7])
@pytest.mark.parametrize("begun", [False, True])
async def test_what_is_said_to_fit_does_and_a_little_more_does_not(
    tmp_path: Path, storage: Storage, nbytes: int, begun: bool
) -> None:
    """Whatever the server may store, and also where a part of the plan is there already."""
    async with EmbeddedNats(config=config_for(tmp_path, nbytes=nbytes)) as server:
        bus = await NatsBus.connect(server.url, options=fast())
        if begun:
            await ensure(bus, layout(storage=storage, size=0.01))
        plan = layout(storage=storage)
        with pytest.raises(NoRoomError):
            await ensure(bus, plan)
        size = await fitting_size(bus, plan)
        assert size is not None
        assert size == pytest.approx(nbytes / plan.nbytes_max, rel=0.12)
        await ensure(bus, layout(storage=storage, size=size))
        with pytest.raises(NoRoomError):
            await ensure(bus, layout(storage=storage, size=1.15 * size))
        await bus.close()


async def test_a_server_without_any_room(tmp_path: Path) -> None:
    """There is no size that fits, and none is invented."""
    async with EmbeddedNats(config=config_for(tmp_path, nbytes=1 << 20)) as server:
        bus = await NatsBus.connect(server.url, options=fast())
        assert await fitting_size(bus, layout()) is None
        await bus.close()


def test_bus_init_tells_the_size_that_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command that it names then works."""
    server = EmbeddedNats(config=config_for(tmp_path, nbytes=GIB // 2))
    asyncio.run(server.start())
    try:
        command = ["bus", "init", "--nats", server.url]
        assert call(monkeypatch, *command) == 1
        said = capsys.readouterr().err
        assert "stream MP_KV" in said
        size = said.partition("--size ")[2].partition(" fits")[0]
        assert float(size) == pytest.approx(GIB / 2 / layout().nbytes_max, rel=0.1)
        assert call(monkeypatch, *command, "--size", size) == 0
    finally:
        asyncio.run(server.stop())
