"""The balancer's configuration lets routers see what clients do."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from controlplane.ports import PortTakenError, check_free, free_port
from tests.router.fake_engine import Behaviour, Mode
from tests.router.http_rig import Rig, on_uvloop, parse_answers, request, until

FILE = Path(__file__).parents[2] / "deploy/compose/haproxy.cfg"
HAPROXY = shutil.which("haproxy")

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed"),
]


def _listens(port: int) -> bool:
    try:
        check_free("127.0.0.1", port)
    except PortTakenError:
        return True
    return False


@asynccontextmanager
async def balancer(port: int, folder: Path) -> AsyncIterator[int]:
    """Runs HAProxy with the file's defaults before one router; gives its own port."""
    own = free_port("127.0.0.1")
    defaults = FILE.read_text().partition("\ndefaults\n")[2].partition("\nresolvers")[0]
    path = folder / "haproxy.cfg"
    path.write_text(
        f"defaults\n{defaults}\nfrontend clients\n    bind 127.0.0.1:{own}\n"
        f"    default_backend routers\nbackend routers\n    server router 127.0.0.1:{port}\n"
    )
    assert HAPROXY is not None
    process = await asyncio.create_subprocess_exec(HAPROXY, "-db", "-f", str(path))
    try:
        await until(lambda: _listens(own))
        yield own
    finally:
        process.kill()
        await process.wait()


@on_uvloop
async def test_an_engine_stops_for_a_client_that_leaves_before_its_answer(tmp_path: Path) -> None:
    """The balancer tells the router, which asks and is told so; whoever stays is answered."""
    async with Rig(Behaviour(mode=Mode.NEVER)) as rig, balancer(rig.port, tmp_path) as port:
        stays = await rig.connect(port)
        stays.send(request("/hold", b"", "Connection: close"))
        leaves = await rig.connect(port)
        leaves.send(request("/v1"))
        await until(lambda: rig.held and rig.engines[0].requests)
        leaves.close()
        await until(lambda: rig.engines[0].aborted)
        assert rig.server.stats.clients_gone == 1
        rig.held[0].respond(200, [], b"late")
        (answer,) = parse_answers(await stays.read_all())
        assert answer.body == b"late"
