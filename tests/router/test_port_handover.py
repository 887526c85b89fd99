"""A port changes hands between processes without a reset."""

from __future__ import annotations

import asyncio
import socket

import pytest

from router.port_handover import ignore_handshakes
from tests.router.http_rig import PROBE, Rig, on_uvloop, parse_answers


def connect_all(port: int, count: int) -> list[socket.socket]:
    """Connect and send a request, without a turn of the loop in between."""
    clients = []
    for _ in range(count):
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        client.sendall(PROBE)
        client.setblocking(False)
        clients.append(client)
    return clients


async def answer_of(client: socket.socket) -> int:
    """Return the status that a client gets; raises ConnectionError if it is reset."""
    loop = asyncio.get_running_loop()
    raw = b""
    while part := await loop.sock_recv(client, 4096):
        raw += part
    client.close()
    (answer,) = parse_answers(raw)
    return answer.status


async def late_client(port: int) -> int:
    """Connect while the first server is stopping."""
    client = socket.socket()
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(client, PROBE)
    return await answer_of(client)


@pytest.mark.slow
@on_uvloop
async def test_connections_that_wait_to_be_accepted_are_not_lost() -> None:
    """A server that leaves a shared port answers whoever the kernel had dealt to it."""
    async with Rig() as rig, Rig() as other:
        _, port = await rig.server.start("127.0.0.1", 0, reuse_port=True)
        await other.server.start("127.0.0.1", port, reuse_port=True)
        early = connect_all(port, 40)
        stopping = asyncio.create_task(rig.server.stop(grace_s=5))
        await asyncio.sleep(0)
        late = [late_client(port) for _ in range(40)]
        answers = await asyncio.gather(*map(answer_of, early), *late)
        assert answers == [200] * 80
        await stopping
        served = [each.server.stats.connections for each in (rig, other)]
        assert sum(served) == 80
        assert min(served) > 5, "the kernel deals connections to both"


@on_uvloop
async def test_a_port_of_its_own_is_closed_at_once() -> None:
    """Without other listeners there is nobody to hand over to: clients are refused."""
    async with Rig() as rig:
        stopping = asyncio.create_task(rig.server.stop(grace_s=5))
        await asyncio.sleep(0)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", rig.port), timeout=5)
        await stopping


def test_what_cannot_be_filtered_is_told() -> None:
    """A socket that takes no filter is reported, so that it is closed as ever."""
    sock = socket.socket()
    sock.close()
    assert not ignore_handshakes(sock)
