"""Three servers under `deploy/nats-cluster.conf`: any one of them may die."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import pytest

from controlplane.bus import BusError, NatsBus
from controlplane.bus.accounts import password, read_members, render
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import layout
from controlplane.bus.protocol import Entry
from controlplane.bus.setup import describe, ensure
from controlplane.ports import free_ports
from schemas import subjects
from tests.bus.certificates import make_certificates
from tests.bus.worlds import collect, eventually, fast

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(240)]

DEPLOY = Path(__file__).parents[2] / "deploy"
SECRET = b"a secret of many bytes"
PLAN = layout(replicas=3, storage="memory", size=0.05)
NAMES = ("n1", "n2", "n3")


def configure(folder: Path, port: int) -> Path:
    """Write one server's files: as deployed, but for where it listens and keeps its files."""
    text = (DEPLOY / "nats.conf").read_text()
    text = text.replace("/data/jetstream", str(folder / "jetstream"))
    (folder / "nats.conf").write_text(text.replace("127.0.0.1:8222", "127.0.0.1:-1"))
    text = (DEPLOY / "nats-cluster.conf").read_text()
    config = folder / "nats-cluster.conf"
    config.write_text(text.replace("0.0.0.0:6222", f"127.0.0.1:{port}"))
    members = read_members("[[service]]\nname = 'operator'\nrole = 'operator'\n")
    (folder / "users.conf").write_text(render(members, SECRET))
    return config


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[dict[str, EmbeddedNats]]:
    """Three servers that know each other."""
    make_certificates(tmp_path / "tls")
    ports = dict(zip(NAMES, free_ports("127.0.0.1", 3), strict=True))
    routes = {
        f"NATS_ROUTE_{number}": f"nats-route://127.0.0.1:{port}"
        for number, port in enumerate(ports.values(), start=1)
    }
    async with AsyncExitStack() as stack:
        servers = {}
        for name, port in ports.items():
            folder = tmp_path / name
            folder.mkdir()
            shutil.copytree(tmp_path / "tls", folder / "tls")
            server = EmbeddedNats(config=configure(folder, port), env={"NATS_NAME": name, **routes})
            servers[name] = await stack.enter_async_context(server)
        yield servers


async def until_done(work: Callable[[], Awaitable[object]], within_s: float = 60.0) -> None:
    """Repeat what may fail while the cluster elects its leaders."""
    async with asyncio.timeout(within_s):
        while True:
            with suppress(BusError):
                await work()
                return
            await asyncio.sleep(0.1)


async def client_of(server: EmbeddedNats, folder: Path) -> NatsBus:
    """Return a client that is told of one server only."""
    return await NatsBus.connect(
        [server.url],
        options=fast(
            user="operator",
            password=password(SECRET, "operator"),
            tls_ca=str(folder / "tls" / "ca.pem"),
            call_s_max=2.0,
        ),
    )


async def test_the_plane_survives_any_one_server(
    cluster: dict[str, EmbeddedNats], tmp_path: Path
) -> None:
    """Through the death of each server in turn, publishers, watches and leases go on."""
    # Each knows one server; of the others it hears from that one.
    buses = [await client_of(cluster[name], tmp_path) for name in NAMES]
    sender, receiver, keeper = buses
    await until_done(lambda: ensure(keeper, PLAN))
    subject = subjects.kv("m", "i")
    heard: list[bytes] = []
    told: list[Entry] = []
    await receiver.subscribe(subject, lambda _, payload: heard.append(payload))
    await (await (await receiver.bucket(subjects.INSTANCES)).watch(told.append)).synced(30.0)
    leases = await keeper.bucket(subjects.LEADERS)
    sent: list[bytes] = []

    async def speak() -> None:
        while True:
            sent.append(b"%d" % len(sent))
            sender.publish(subject, sent[-1])
            await asyncio.sleep(0.01)

    async def whole() -> None:
        holdings = await describe(keeper, PLAN)
        if not all(held.current == held.replicas == 3 for held in holdings):
            raise BusError("copies are still missing")

    async def recorded() -> int:
        return next(held.messages for held in await describe(keeper, PLAN) if held.name == "MP_KV")

    async def recorded_beyond(messages: int) -> None:
        if await recorded() <= messages:
            raise BusError("nothing is recorded")

    async def renew() -> None:
        entry = await leases.get("detector")
        await leases.update("detector", b"me", entry.revision if entry else 0)

    async def announce(value: bytes) -> None:
        await (await sender.bucket(subjects.INSTANCES)).put("m.i", value)

    speaking = asyncio.create_task(speak())
    for name, server in cluster.items():
        await until_done(whole)
        await server.kill()
        await eventually(lambda: all(bus.connected for bus in buses), within_s=20.0)
        mark = len(sent)
        await eventually(lambda mark=mark: heard and int(heard[-1]) > mark, within_s=20.0)
        await until_done(renew)
        await until_done(lambda name=name: announce(name.encode()))
        await eventually(lambda name=name: told and told[-1].value == name.encode(), within_s=30.0)
        await until_done(lambda: recorded_beyond(0))
        messages = await recorded()
        await until_done(lambda messages=messages: recorded_beyond(messages))
        await server.start()
    await until_done(whole)
    speaking.cancel()
    await sender.flush()

    assert heard == sorted(set(heard), key=int), "messages arrived out of order or twice"
    assert len(heard) > 0.5 * len(sent)
    numbers: list[bytes] = []

    async def read() -> None:
        numbers[:] = [record.payload for record in await collect(keeper, "MP_KV")]

    await until_done(read)
    assert numbers == sorted(set(numbers), key=int)
    assert numbers[0] == b"0", "what was recorded before the first death is still there"
    for bus in buses:
        await bus.close()
