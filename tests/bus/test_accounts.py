"""Least permissions: what the generator prints, and what a real server makes of it, over TLS."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from controlplane.bus import BusError, NatsBus, NatsOptions
from controlplane.bus.accounts import main, password, permissions, read_members, render
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.protocol import Bus, Entry
from controlplane.bus.setup import describe, ensure
from schemas import subjects
from tests.bus.certificates import make_certificates
from tests.bus.worlds import ON_DISK, answers, collect, eventually, fast

DEPLOY = Path(__file__).parents[2] / "deploy"
SECRET = b"a secret of many bytes"
MODEL = "Qwen/Qwen3-8B"
MEMBERS = f"""
[[sidecar]]
name = "gpu-1"
model = "{MODEL}"
instances = ["gpu-1", "gpu-1.r1"]

[[sidecar]]
name = "gpu-2"
model = "{MODEL}"
instances = ["gpu-2"]

[[router]]
name = "router-a"
ids = ["router-a"]
""" + "".join(
    f'\n[[service]]\nname = "{role}"\nrole = "{role}"\n'
    for role in ("detector", "predictor", "auditor", "operator")
)


# --- the generator


def test_passwords_are_stable_and_apart() -> None:
    """A member's password depends on the secret and its name only."""
    assert password(SECRET, "a") == password(SECRET, "a")
    assert len({password(SECRET, "a"), password(SECRET, "b"), password(SECRET + b"x", "a")}) == 3
    with pytest.raises(ValueError, match="16 bytes"):
        password(b"short", "a")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[sidecar]]\nname = 'a'\nmodel = 'm'\n", "instances"),
        ("[[service]]\nname = 'a'\nrole = 'king'\n", "king"),
        ("[[service]]\nname = 'a.b'\nrole = 'auditor'\n", "letters"),
        ("[[service]]\nname = 'a'\nrole = 'auditor'\n" * 2, "twice"),
        ("[[sidecars]]\n", "sidecars"),
        ("nonsense", "nonsense|Expected"),
    ],
)
def test_mistakes_in_the_list_are_named(text: str, reason: str) -> None:
    """A list that is not right is refused with what is wrong."""
    with pytest.raises(ValueError, match=reason):
        read_members(text)


def test_the_command_prints_users_and_passwords(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints for a member is what it prints among the users."""
    (tmp_path / "members.toml").write_text(MEMBERS)
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    arguments = [str(tmp_path / "members.toml"), "--secret-file", str(tmp_path / "secret")]
    assert main(arguments) == 0
    users = capsys.readouterr().out
    assert main([*arguments, "--password-of", "gpu-1"]) == 0
    assert capsys.readouterr().out == password(SECRET, "gpu-1") + "\n"
    assert f'user: "gpu-1", password: "{password(SECRET, "gpu-1")}"' in users
    assert main([*arguments, "--password-of", "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
    assert main(["/nowhere", "--secret-file", "/nowhere"]) == 2
    assert "/nowhere" in capsys.readouterr().err


def test_replicas_may_share_an_account() -> None:
    """A router without ids speaks for any router, and for nobody else."""
    (replicas,) = read_members("[[router]]\nname = 'routers'\n")
    allowed = set(permissions(replicas).publish)
    assert {"mp.v1.route.*.*", "$KV.mp_routers.*.*"} <= allowed
    assert allowed == {
        each.replace(".one", ".*")
        for each in permissions(read_members("[[router]]\nname = 'r'\nids = ['one']\n")[0]).publish
    }


# --- the real server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`deploy/nats.conf` with the files that it expects beside it."""
    folder = tmp_path / "nats"
    folder.mkdir()
    make_certificates(folder / "tls")
    text = (DEPLOY / "nats.conf").read_text()
    text = text.replace("/data/jetstream", str(folder / "jetstream"))
    (folder / "nats.conf").write_text(text.replace("127.0.0.1:8222", "127.0.0.1:-1"))
    (folder / "users.conf").write_text(render(read_members(MEMBERS), SECRET))
    return folder


class Guarded:
    """A server under `deploy/nats.conf`, and its members' connections."""

    def __init__(self, server: EmbeddedNats, ca: Path) -> None:
        self.server = server
        self.ca = ca
        self.buses: list[NatsBus] = []

    async def connect(self, name: str, **options: object) -> NatsBus:
        """Connect a member."""
        given = {"user": name, "password": password(SECRET, name), "tls_ca": str(self.ca)}
        bus = await NatsBus.connect(self.server.url, options=fast(**(given | options)), wait_s=5.0)
        self.buses.append(bus)
        return bus


@pytest.fixture
async def guarded(folder: Path) -> AsyncIterator[Guarded]:
    """A guarded server on which the plane is set up."""
    async with EmbeddedNats(config=folder / "nats.conf") as server:
        guarded = Guarded(server, folder / "tls" / "ca.pem")
        await ensure(await guarded.connect("operator"), ON_DISK)
        yield guarded
        for bus in guarded.buses:
            await bus.close()


async def refused(bus: Bus, subject: str) -> bool:
    """Return whether the server refuses a publication."""
    before = bus.stats().refused
    bus.publish(subject, b"forged")
    await bus.flush()
    return bus.stats().refused == before + 1


@pytest.mark.live
async def test_who_is_not_a_member_stays_out(guarded: Guarded) -> None:
    """No anonymous, no wrong password, nobody in the clear, and no server we do not trust."""
    ca = str(guarded.ca)
    for options in (
        {"tls_ca": ca},
        {"tls_ca": ca, "user": "gpu-1", "password": password(SECRET, "gpu-2")},
    ):
        with pytest.raises(BusError, match=r"(?i)authorization"):
            await NatsBus.connect(guarded.server.url, options=fast(**options), wait_s=5.0)
    distrustful = await NatsBus.connect(
        guarded.server.url,
        options=fast(user="gpu-1", password=password(SECRET, "gpu-1")),
        wait_s=0.3,
    )
    assert not distrustful.connected
    await distrustful.close()


@pytest.mark.live
def test_tls_on_the_loop_of_production(folder: Path) -> None:
    """On uvloop, TLS connections are made, lost and made again as well."""

    async def run() -> list[bytes]:
        got: list[bytes] = []
        async with EmbeddedNats(config=folder / "nats.conf") as server:
            guarded = Guarded(server, folder / "tls" / "ca.pem")
            bus = await guarded.connect("operator")
            await bus.subscribe("s", lambda _, payload: got.append(payload))
            bus.publish("s", b"x" * 900_000)
            await eventually(lambda: len(got) == 1)
            await server.kill()
            await eventually(lambda: not bus.connected)
            await server.start()
            await eventually(lambda: bus.connected)
            bus.publish("s", b"2")
            await eventually(lambda: len(got) == 2)
            await bus.close()
        return got

    assert uvloop.run(run()) == [b"x" * 900_000, b"2"]


@pytest.mark.live
async def test_credentials_are_not_sent_in_the_clear(guarded: Guarded) -> None:
    """A client that wants TLS does not talk to a server without it."""
    async with EmbeddedNats() as open_server:
        options = fast(user="gpu-1", password="p", tls_ca=str(guarded.ca))
        bus = await NatsBus.connect(open_server.url, options=options, wait_s=0.3)
        assert not bus.connected
        await bus.close()


@pytest.mark.live
async def test_members_can_do_their_work(guarded: Guarded) -> None:
    """Everything that the plane needs of each member is permitted."""
    sidecar = await guarded.connect("gpu-1")
    router = await guarded.connect("router-a")
    detector = await guarded.connect("detector")
    predictor = await guarded.connect("predictor")
    auditor = await guarded.connect("auditor")
    heard: list[str] = []
    for bus in (router, detector, auditor):
        await bus.subscribe(subjects.all_of("kv"), lambda subject, _: heard.append(subject))
    told: list[Entry] = []
    await (await (await router.bucket(subjects.INSTANCES)).watch(told.append)).synced(5.0)

    async def serve(payload: bytes) -> AsyncIterator[bytes]:
        for _ in range(100):
            yield payload * 1000

    for instance in ("gpu-1", "gpu-1.r1"):
        await sidecar.serve(subjects.snapshot(MODEL, instance), serve)
        sidecar.publish(subjects.kv(MODEL, instance), b"blocks")
        sidecar.publish(subjects.load(MODEL, instance), b"load")
        records = await sidecar.bucket(subjects.INSTANCES)
        revision = await records.create(subjects.key(MODEL, instance), b"record")
        await records.update(subjects.key(MODEL, instance), b"record 2", revision)
    await (await sidecar.objects(subjects.MODELS)).put("card", b"x" * 300_000)
    await sidecar.flush()
    await eventually(lambda: len(heard) == 6 and len(told) == 4)
    assert len(await answers(router, subjects.snapshot(MODEL, "gpu-1.r1"), b"q")) == 100
    assert await (await router.objects(subjects.MODELS)).get("card") == b"x" * 300_000

    router.publish(subjects.route(MODEL, "router-a"), b"routed")
    leases = await router.bucket(subjects.ROUTERS)
    await leases.put(subjects.key(MODEL, "router-a"), b"lease")
    await router.flush()
    prefixes = await router.bucket(subjects.PREFIXES)
    written: list[bytes] = []
    other = await guarded.connect("router-a")
    await (await other.bucket(subjects.PREFIXES)).follow(lambda _, value: written.append(value))
    revision = await prefixes.create("tenant", b"one")
    await prefixes.update("tenant", b"two", revision)
    assert (await prefixes.get("tenant")).value == b"two"
    await eventually(lambda: written == [b"one", b"two"])
    verdicts = await detector.bucket(subjects.VERDICTS)
    await verdicts.put(subjects.key(MODEL, "hot"), b"verdict")
    assert await (await detector.bucket(subjects.ROUTERS)).keys() == [
        subjects.key(MODEL, "router-a")
    ]
    detector.publish(subjects.hotspot(MODEL), b"raised")
    detector.publish(subjects.policy(MODEL), b"round robin")
    for bus, service in ((detector, "detector"), (predictor, "predictor")):
        leaders = await bus.bucket(subjects.LEADERS)
        revision = await leaders.create(service, b"me")
        await leaders.update(service, b"me still", revision)
    models = await predictor.objects(subjects.PREDICTORS)
    await models.put("m", b"old")
    await models.put("m", b"new")
    assert await (await router.objects(subjects.PREDICTORS)).get("m") == b"new"
    assert [r.payload for r in await collect(predictor, "MP_ROUTE")] == [b"routed"]
    assert [r.payload for r in await collect(auditor, "MP_KV")] == [b"blocks"] * 2
    assert {held.name for held in await describe(auditor, ON_DISK)} >= {"MP_KV", "mp_leaders"}
    assert [bus.stats().refused for bus in guarded.buses] == [0] * len(guarded.buses)


@pytest.mark.live
async def test_forgeries_are_refused(guarded: Guarded) -> None:
    """A sidecar speaks for its own instances, a router for itself, an auditor for nobody."""
    sidecar = await guarded.connect("gpu-1")
    router = await guarded.connect("router-a")
    auditor = await guarded.connect("auditor")
    heard: list[str] = []
    await auditor.subscribe(f"{subjects.PREFIX}.>", lambda subject, _: heard.append(subject))
    for bus, subject in (
        (sidecar, subjects.kv(MODEL, "gpu-2")),
        (sidecar, subjects.kv("other model", "gpu-1")),
        (sidecar, subjects.load(MODEL, "gpu-2")),
        (sidecar, subjects.route(MODEL, "router-a")),
        (sidecar, subjects.policy(MODEL)),
        (router, subjects.kv(MODEL, "gpu-1")),
        (router, subjects.route(MODEL, "router-b")),
        (router, subjects.hotspot(MODEL)),
        (auditor, subjects.policy(MODEL)),
        (auditor, subjects.snapshot(MODEL, "gpu-1")),
        (sidecar, "_INBOX.router-a.x.1"),
    ):
        assert await refused(bus, subject), f"{subject} was let through"
    assert heard == []

    records = await sidecar.bucket(subjects.INSTANCES)
    with pytest.raises(BusError, match="refuses"):
        await records.put(subjects.key(MODEL, "gpu-2"), b"hijacked")
    with pytest.raises(BusError, match="refuses"):
        await (await router.bucket(subjects.VERDICTS)).put("m.x", b"verdict")
    with pytest.raises(BusError, match="refuses"):
        await (await auditor.bucket(subjects.LEADERS)).delete("detector")
    for bus in (sidecar, auditor):
        with pytest.raises(BusError, match="refuses"):
            await (await bus.bucket(subjects.PREFIXES)).put("tenant", b"nothing")
    with pytest.raises(BusError, match="refuses"):  # it writes there: see the module
        await (await router.bucket(subjects.PREFIXES)).keys()
    for bus in (sidecar, router, auditor):
        with pytest.raises(BusError, match="refuses"):
            await bus.jetstream.api("STREAM.DELETE.MP_KV")
    with pytest.raises(BusError, match="refuses"):
        await sidecar.jetstream.read("KV_mp_instances", "$KV.mp_instances.>", {})


@pytest.mark.live
async def test_answers_are_private(guarded: Guarded) -> None:
    """A member cannot listen in on another's inbox, nor answer for another's instance."""
    spy, router = await guarded.connect("gpu-2"), await guarded.connect("router-a")
    heard: list[bytes] = []

    async def serve(_: bytes) -> AsyncIterator[bytes]:
        yield b"false"

    for subject in ("_INBOX.>", "_INBOX.router-a.>", ">"):
        await spy.subscribe(subject, lambda _, payload: heard.append(payload))
    await spy.serve(subjects.snapshot(MODEL, "gpu-1"), serve)
    assert spy.stats().refused == 4
    with pytest.raises(BusError, match="nobody answers"):
        await answers(router, subjects.snapshot(MODEL, "gpu-1"))
    assert heard == []


def test_options_stay_out_of_representations() -> None:
    """A password is nothing to print."""
    assert "hush" not in repr(NatsOptions(user="u", password="hush", token="hush"))
