"""What an operator reads and says, on a real server: whole, in order, and never a traceback."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.bus.layout import layout
from controlplane.bus.setup import ensure
from schemas import subjects
from schemas.bus import (
    Blacklist,
    Drain,
    InstanceRecord,
    LoadReport,
    PolicyOverride,
    RegisteredPrefix,
    RouterLease,
    TenantPrefixes,
)
from schemas.codec import encode
from schemas.ids import encode_token
from tests.cli.commands import call

pytestmark = pytest.mark.live

MODEL = "org/model"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def server() -> Iterator[EmbeddedNats]:
    """A server that holds nothing yet."""
    made = EmbeddedNats()
    asyncio.run(made.start())
    yield made
    asyncio.run(made.stop())


@pytest.fixture
def run(
    server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run a command against the server; returns its status, output and errors."""
    monkeypatch.setenv("MULTIPLANE_NATS", server.url)

    def ran(*arguments: str) -> tuple[int, str, str]:
        status = call(monkeypatch, *arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out, said.err

    return ran


def on_bus(server: EmbeddedNats, work: Callable[[NatsBus], Awaitable[None]]) -> None:
    """Do something on the bus, once it is set up."""

    async def done() -> None:
        bus = await NatsBus.connect(server.url)
        await ensure(bus, layout(storage="memory", size=0.05), missing_only=True)
        await work(bus)
        await bus.flush()
        await bus.close()

    asyncio.run(done())


async def put(bus: NatsBus, bucket: str, key: str, value: bytes) -> None:
    """Write an entry."""
    await (await bus.bucket(bucket)).put(key, value)


def record(name: str, **fields: Any) -> InstanceRecord:
    """Return a record that was sent just now."""
    given = {"url": f"http://10.0.0.1/{name}", "sent_wall_s": time.time(), "epoch": 1, **fields}
    return InstanceRecord(name, given.pop("model", MODEL), **given)


async def register(bus: NatsBus, *records: InstanceRecord) -> None:
    """Put records where sidecars put them."""
    for each in records:
        key = subjects.key(each.model, each.instance_id)
        await put(bus, subjects.INSTANCES, key, encode(each))


async def junk(bus: NatsBus) -> None:
    """Put nonsense into every bucket: no message, another message, a strange key, a wrong place."""
    for bucket in (subjects.INSTANCES, subjects.ROUTERS, subjects.VERDICTS, subjects.PREFIXES):
        await put(bus, bucket, "m.bytes", b"\xc1\xff")
        await put(bus, bucket, "m.other", encode(LoadReport("i", 1, 0, 0.0, 0, 0)))
        await put(bus, bucket, "nodot", b"x")
        await put(bus, bucket, "=ZZ.lower=2f", encode(record("i")))
        await put(bus, bucket, "m.empty", b"")
    await put(bus, subjects.INSTANCES, "m.misfiled", encode(record("somebody-else")))


LISTS = (("instances",), ("routers",), ("prefixes",), ("blacklist", "list"), ("policy", "list"))


@pytest.mark.parametrize("command", LISTS)
def test_junk_on_the_bus_hides_nothing(
    server: EmbeddedNats, run: Run, command: tuple[str, ...]
) -> None:
    """Entries that mean nothing are named on standard error, and the rest is listed."""

    async def fill(bus: NatsBus) -> None:
        await junk(bus)
        await register(bus, record("engine-0"))
        now_wall_s = time.time()
        lease = RouterLease("router-0", 1, 0, now_wall_s, address="a:1", admin="b:2")
        await put(bus, subjects.ROUTERS, subjects.key(MODEL, "router-0"), encode(lease))
        drained = Drain("engine-0", True, 0, now_wall_s, "ann", "disk")
        await put(bus, subjects.VERDICTS, subjects.key(MODEL, "drain-engine-0"), encode(drained))
        policy = PolicyOverride("linear", 0, now_wall_s, 600.0, "ann")
        await put(bus, subjects.VERDICTS, subjects.key(MODEL, "policy"), encode(policy))
        prefixes = TenantPrefixes("chat", 1, [RegisteredPrefix("pfx_1", MODEL, 70, 4, 1)])
        await put(bus, subjects.PREFIXES, encode_token("chat"), encode(prefixes))

    on_bus(server, fill)
    status, out, err = run(*command)
    assert status == 0
    assert MODEL in out
    for key in ("m.bytes", "m.other", "nodot", "=ZZ.lower=2f", "m.empty"):
        assert f"unreadable entry {key} in" in err
    status, out, _ = run(*command, "--json")
    answer = json.loads(out)
    assert status == 0
    assert len(answer["rows"]) == 1
    assert len(answer["unreadable"]) >= 5


def test_registered_prefixes_are_listed_as_of_now(server: EmbeddedNats, run: Run) -> None:
    """All tenants', with what is left of their time; a record under another's key is nonsense."""
    one = RegisteredPrefix("pfx_1", MODEL, 70, 4, 1, pin=True, spread=True, idle_s=50.0, ttl_s=60.0)
    two = RegisteredPrefix("pfx_2", MODEL, 16, 1, 2, references=3, idle_s=100.0, ttl_s=60.0)

    async def fill(bus: NatsBus) -> None:
        for tenant, prefixes in (("b", [two]), ("a", [one]), ("empty", [])):
            record = TenantPrefixes(tenant, 1, prefixes)
            await put(bus, subjects.PREFIXES, encode_token(tenant), encode(record))
        await put(bus, subjects.PREFIXES, "c", encode(TenantPrefixes("a", 9, [one])))

    on_bus(server, lambda bus: asyncio.sleep(0))
    assert "no prefix is registered" in run("prefixes")[2]
    on_bus(server, fill)
    status, out, err = run("prefixes")
    assert status == 0
    assert "unreadable entry c in mp_prefixes: it speaks of tenant 'a'" in err
    header, first, second = (line.split() for line in out.splitlines())
    assert header[:3] == ["TENANT", "HANDLE", "MODEL"]
    assert first[:6] == ["a", "pfx_1", MODEL, "70", "4", "1"]
    assert first[-2:] == ["pin,", "spread"]
    assert second[:6] == ["b", "pfx_2", MODEL, "16", "1", "3"]
    rows = json.loads(run("prefixes", "--json")[1])["rows"]
    assert 50.0 <= rows[0]["idle_s"] < 60.0
    assert rows[0]["ends_s"] == pytest.approx(60.0 - rows[0]["idle_s"])
    assert rows[1]["ends_s"] == 0.0


def test_statements_are_made_and_lifted_beside_junk(server: EmbeddedNats, run: Run) -> None:
    """A drain, a blacklist and an override work where the buckets hold nonsense as well."""

    async def fill(bus: NatsBus) -> None:
        await junk(bus)
        await put(bus, subjects.VERDICTS, subjects.key(MODEL, "policy"), b"junk")
        await register(bus, record("engine-0"), record("engine-1"))

    on_bus(server, fill)
    assert run("drain", "engine-0", "--reason", "disk")[0] == 0
    assert run("blacklist", "add", "engine-1", "--ttl-s", "60")[0] == 0
    assert run("policy", "set", MODEL, "round_robin", "--ttl-s", "60")[0] == 0
    _, out, err = run("instances")
    assert "draining" in out
    assert ": disk" in out
    assert "blacklisted" in out
    assert f"{MODEL}: policy round_robin" in err
    assert run("drain", "engine-0", "--off")[0] == 0
    assert run("blacklist", "remove", "engine-1")[0] == 0
    assert run("policy", "clear", MODEL)[0] == 0
    assert run("blacklist", "list")[1] == ""


def test_what_is_gone_can_be_taken_back(server: EmbeddedNats, run: Run) -> None:
    """A drain of an instance that left is lifted; lifting what does not stand is said."""

    async def fill(bus: NatsBus) -> None:
        drained = Drain("gone", True, 0, time.time(), "ann")
        await put(bus, subjects.VERDICTS, subjects.key(MODEL, "drain-gone"), encode(drained))

    on_bus(server, fill)
    assert run("drain", "gone", "--off")[:2] == (0, "gone is taken back\n")
    status, _, err = run("drain", "gone", "--off")
    assert status == 1
    assert "nothing to take back" in err
    status, _, err = run("drain", "gone")
    assert status == 1
    assert "no instance 'gone'; registered: none" in err


def test_one_id_in_two_models_needs_the_model(server: EmbeddedNats, run: Run) -> None:
    """Where an id is not enough, the message says what is."""
    both = (record("a"), record("a", model="second", url="http://10.0.0.2"))
    on_bus(server, lambda bus: register(bus, *both))
    status, _, err = run("drain", "a")
    assert status == 1
    assert "--model" in err
    assert run("drain", "a", "--model", "second")[0] == 0
    rows = json.loads(run("instances", "--json")[1])["rows"]
    assert {row["model"]: row["state"] for row in rows} == {MODEL: "ready", "second": "draining"}


def test_doubles_are_shown(server: EmbeddedNats, run: Run) -> None:
    """Two sidecars with one id, one url under two ids and silent sidecars are told of."""

    async def fill(bus: NatsBus) -> None:
        await register(
            bus,
            record("twice"),
            record("restarted"),
            record("left", url="http://one"),
            record("right", url="http://one"),
            record("here", url="http://127.0.0.1:8000", host="gpu-1"),
            record("there", url="http://127.0.0.1:8000", host="gpu-2"),
            record("silent", heartbeat_s=0.001),
            record("blind", blind=True),
            record("late", mirror_complete=False),
        )
        for name, epochs in (("twice", (1, 2, 1, 2)), ("restarted", (1, 1, 2, 2))):
            for seq, epoch in enumerate(epochs):
                report = LoadReport(name, epoch, seq, time.time(), 0, 0)
                bus.publish(subjects.load(MODEL, name), encode(report))
        bus.publish(subjects.load(MODEL, "twice"), b"junk")

    on_bus(server, fill)
    rows = json.loads(run("instances", "--json")[1])["rows"]
    told = {row["instance"]: "; ".join(row["notes"]) for row in rows}
    assert "two sidecars use this id" in told["twice"]
    assert told["restarted"] == ""
    assert told["left"].startswith("right has the same url")
    assert told["right"].startswith("left has the same url")
    assert told["here"] == told["there"]
    assert told["here"].startswith("1 on other machines have the same loopback url: give each an")
    assert "not heard" in told["silent"]
    assert "none of its engine's KV events applies" in told["blind"]
    assert "began too late" in told["late"]
    well = {row["instance"] for row in rows if not row["broken"]}
    assert well == {"restarted", "late"}


def test_what_ran_out_is_not_in_force(server: EmbeddedNats, run: Run) -> None:
    """A blacklist whose time is over is neither listed nor shown as a state."""

    async def fill(bus: NatsBus) -> None:
        await register(bus, record("engine-0"))
        old = Blacklist("engine-0", True, 0, time.time(), 0.001, "ann")
        await put(bus, subjects.VERDICTS, subjects.key(MODEL, "blacklist-engine-0"), encode(old))

    on_bus(server, fill)
    assert "ready" in run("instances")[1]
    status, out, err = run("blacklist", "list")
    assert (status, out) == (0, "")
    assert "nothing is in force" in err


def test_other_machines_clocks_do_not_matter(server: EmbeddedNats, run: Run) -> None:
    """How long ago something was said is the server's to say, not its sender's."""

    async def fill(bus: NatsBus) -> None:
        await register(bus, record("slow", sent_wall_s=0.0), record("fast", sent_wall_s=4e9))
        said = Blacklist("fast", True, 0, 0.0, 600.0, "ann")
        await put(bus, subjects.VERDICTS, subjects.key(MODEL, "blacklist-fast"), encode(said))

    on_bus(server, fill)
    rows = json.loads(run("instances", "--json")[1])["rows"]
    states = {row["instance"]: (row["state"], row["heard_s"] < 60.0) for row in rows}
    assert states == {"slow": ("ready", True), "fast": ("blacklisted", True)}


def test_a_policy_for_nobody_is_warned_of(server: EmbeddedNats, run: Run) -> None:
    """An override for a model without instances is made, and its likely mistake is said."""
    on_bus(server, lambda bus: register(bus, record("engine-0")))
    status, out, err = run("policy", "set", "org/modle", "linear")
    assert (status, out) == (0, "org/modle is routed by linear\n")
    assert f"no instance of org/modle is registered; models that have some: {MODEL}" in err


def test_the_last_instance_is_warned_of(server: EmbeddedNats, run: Run) -> None:
    """A drain that leaves nobody says what clients get."""
    on_bus(server, lambda bus: register(bus, record("engine-0"), record("engine-1")))
    assert "warning" not in run("drain", "engine-0")[2]
    assert "clients get a 503 until one does" in run("drain", "engine-1")[2]


def test_a_pipe_gets_whole_rows(server: EmbeddedNats, run: Run) -> None:
    """Without a terminal no cell is cut, and foreign text cannot move the cursor."""
    name = "engine-" + "x" * 300
    evil = record(name, url="http://\x1b[2J\n[red]x")
    on_bus(server, lambda bus: register(bus, evil))
    _, out, _ = run("instances")
    assert name in out
    assert len(out.splitlines()) == 2
    assert "\x1b" not in out
    assert "http://\\x1b[2J\\n[red]x" in out


COMMANDS = (
    *LISTS,
    ("drain", "engine-0"),
    ("drain", "engine-0", "--off"),
    ("drain", "engine-0", "--wait", "--within-s", "1"),
    ("blacklist", "add", "engine-0"),
    ("blacklist", "remove", "engine-0"),
    ("policy", "set", MODEL, "linear"),
    ("policy", "clear", MODEL),
    ("audit", "tail", "-F"),
    ("audit", "show", "r"),
    ("audit", "verify"),
    ("bus", "status"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_buckets_name_what_makes_them(run: Run, command: tuple[str, ...]) -> None:
    """On an empty server every command says `multiplane bus init`."""
    status, _, err = run(*command)
    assert status == 1
    assert "`multiplane bus init`" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", [*COMMANDS, ("bus", "init")])
def test_without_a_server_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """NATS being away is one clear line."""
    monkeypatch.setattr("controlplane.cli.options.CONNECT_S", 0.1)
    assert call(monkeypatch, *command, "--nats", "nats://127.0.0.1:1") == 1
    said = capsys.readouterr().err
    assert said.startswith("multiplane: no NATS server answers at nats://127.0.0.1:1")
    assert len(said.splitlines()) == 1


def test_wrong_credentials_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that refuses who we say we are is told apart from one that is away."""
    config = tmp_path / "nats.conf"
    config.write_text(
        'jetstream { store_dir: "js" }\n'
        "authorization { users: [ { user: ann, password: right-password } ] }\n"
    )
    secret = tmp_path / "secret"
    secret.write_text("wrong-password")
    server = EmbeddedNats(config=config)
    asyncio.run(server.start())
    try:
        flags = ("--nats", server.url, "--nats-user", "ann", "--nats-password-file", str(secret))
        assert call(monkeypatch, "instances", *flags) == 1
        said = capsys.readouterr().err
    finally:
        asyncio.run(server.stop())
    assert said.startswith("multiplane: ")
    assert "authorization" in said.lower()
    assert "password" not in said.replace("--nats-password-file", "")
    assert len(said.splitlines()) == 1


def test_the_shell_completes_from_the_bus(
    server: EmbeddedNats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instances and models are offered, and nothing where the bus is away."""
    on_bus(server, lambda bus: register(bus, record("engine-0"), record("other")))

    def completed(words: str, url: str) -> list[str]:
        for name, value in (
            ("MULTIPLANE_NATS", url),
            ("_MULTIPLANE_COMPLETE", "complete_bash"),
            ("COMP_WORDS", words),
            ("COMP_CWORD", str(len(words.split(" ")) - 1)),
        ):
            monkeypatch.setenv(name, value)
        call(monkeypatch)
        return capsys.readouterr().out.split()

    assert completed("multiplane drain eng", server.url) == ["engine-0"]
    assert completed("multiplane policy clear ", server.url) == [MODEL]
    assert completed("multiplane drain eng", "nats://127.0.0.1:1") == []
    assert sys.argv == ["multiplane"]
