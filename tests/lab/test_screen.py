"""The live view: it fits its terminal whatever happens, and hides nothing that is wrong."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from controlplane.bus import MemoryBroker
from lab.screen import draw, plain
from lab.view import SILENT_S, BusView
from schemas import subjects
from schemas.bus import (
    Blacklist,
    Drain,
    Finished,
    HotspotRaised,
    InstanceRecord,
    KvBatch,
    LoadReport,
    PolicyOverride,
    RouteBatch,
    Routed,
    RouterTotals,
)
from schemas.codec import encode
from tests.bus.worlds import eventually

MODEL = "m"


def record(name: str, **fields: Any) -> bytes:
    """Return the bytes of an instance's record."""
    return encode(InstanceRecord(name, MODEL, "http://x", 1, **fields))


class Rig:
    """A bus, a view that follows it, and a way to say things."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = self.broker.bus()
        self.seen = self.broker.bus()
        self.view = BusView()
        self.told = 0

    async def start(self, *names: str) -> Rig:
        """Follow the bus, with these instances on it."""
        await self.view.follow(self.seen)
        bucket = await self.bus.bucket(subjects.INSTANCES)
        for name in names:
            await bucket.put(subjects.key(MODEL, name), record(name))
            self.bus.publish(subjects.kv(MODEL, name), encode(KvBatch(name, 1, 0, 0.0, count=7)))
        await eventually(lambda: len(self.view.instances) == len(names))
        return self

    async def state(self, part: str, statement: Any) -> None:
        """Put a statement into the verdicts bucket."""
        bucket = await self.bus.bucket(subjects.VERDICTS)
        before = len(self.view.standing)
        await bucket.put(subjects.key(MODEL, part), encode(statement))
        await eventually(lambda: len(self.view.standing) > before)

    async def route(self, *events: Any) -> None:
        """Let a router say something."""
        batch = RouteBatch("r", 1, 0, 0.0, list(events))
        self.bus.publish(subjects.route(MODEL, "r"), encode(batch))
        self.told += sum(not isinstance(event, RouterTotals) for event in events)
        await eventually(lambda: "r" in self.view.routers and self._heard() == self.told)

    def _heard(self) -> int:
        """Return how many events of routers the view took."""
        return self.view.decisions + sum(v.finished for v in self.view.instances.values())

    def drawn(
        self, width: int = 80, height: int = 24, dead: tuple[str, ...] = (), later_s: float = 0.0
    ) -> list[str]:
        """Return the picture's lines, checked to fit."""
        console = Console(
            file=io.StringIO(), width=width, height=height, force_terminal=True, no_color=True
        )
        now_s = time.monotonic() + later_s
        with console.capture() as captured:
            console.print(draw(self.view, "title", dead, size=(width, height), now_s=now_s))
        lines = [line for line in captured.get().split("\n") if line]
        assert len(lines) <= height
        assert all(cell_len(_bare(line)) <= width for line in lines)
        return [_bare(line) for line in lines]


def _bare(line: str) -> str:
    """Return a line without what sets colours."""
    out, skip = [], False
    for character in line:
        skip = skip or character == "\x1b"
        if not skip:
            out.append(character)
        skip = skip and character != "m"
    return "".join(out)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 15), (40, 10), (110, 30), (200, 60)])
@pytest.mark.parametrize("count", [0, 1, 3, 40])
async def test_it_fits(width: int, height: int, count: int) -> None:
    """With few instances or many, long names, decisions and statements, all is inside."""
    names = [f"instance-{'x' * 40 * (n % 2)}-{n}" for n in range(count)]
    rig = await Rig().start(*names)
    for n in range(20):
        name = names[n % count] if count else "gone"
        await rig.route(Routed(f"request-{n}", name, 0.0, prompt_tokens=10**6, score=1e12))
    await rig.state("policy", PolicyOverride("round_robin", 0, 0.0, by="x" * 100))
    lines = rig.drawn(width, height, dead=tuple(names[:1]))
    assert any("title" in line for line in lines)


async def test_at_80_columns_every_number_is_whole() -> None:
    """The columns' heads and a busy instance's numbers are not cut."""
    rig = await Rig().start("engine-0", "engine-1", "engine-2")
    report = LoadReport("engine-0", 1, 0, 0.0, 123, 45, kv_usage=0.97)
    rig.bus.publish(subjects.load(MODEL, "engine-0"), encode(report))
    for n in range(200):
        await rig.route(Routed(f"r{n}", "engine-0", 0.0, prompt_tokens=600, new_tokens=600))
    ended = Finished("r0", "engine-0", "ok", 200, 0.0, prompt_tokens=600, hit_tokens=300)
    await rig.route(ended)
    text = "\n".join(rig.drawn())
    for word in ("instance", "state", "batch", "queued", "run+wait", "KV", "blocks", "hits"):
        assert word in text
    (row,) = [line for line in rig.drawn() if "engine-0" in line and "ready" in line]
    for number in ("199", "120,000", "123+45", "97%", "50%"):
        assert number in row


async def test_what_is_wrong_is_seen() -> None:
    """Dead, gone and silent instances, drains, blacklists, hotspots and overrides all show."""
    names = ("died", "left", "mute", "drained", "listed", "fine")
    rig = await Rig().start(*names)
    now_wall_s = time.time()
    await rig.state("drain-drained", Drain("drained", True, 0, now_wall_s, "ann"))
    await rig.state("blacklist-listed", Blacklist("listed", True, 0, now_wall_s, 60.0, "bob"))
    await rig.state("policy", PolicyOverride("linear", 0, now_wall_s, 60.0, "cat"))
    await rig.state("hotspot-1", HotspotRaised(1, 1, ["fine"], 0, now_wall_s, 60.0))
    await (await rig.bus.bucket(subjects.INSTANCES)).delete(subjects.key(MODEL, "left"))
    await eventually(lambda: not rig.view.instances["left"].state)
    for name in names:
        if name != "mute":
            rig.view.instances[name].heard_s = time.monotonic() + SILENT_S + 1.0
    lines = rig.drawn(100, 30, dead=("died", "router-1"), later_s=SILENT_S + 1.0)
    states = {line.split()[1]: line.split()[2] for line in lines if len(line.split()) > 8}
    assert {name: states[name] for name in names} == {
        "died": "dead",
        "left": "gone",
        "mute": "silent",
        "drained": "draining",
        "listed": "blacklisted",
        "fine": "ready",
    }
    text = "\n".join(lines)
    assert "DEAD: died, router-1" in text
    assert "drained drained by ann" in text
    assert "listed blacklisted by bob" in text
    assert "policy linear by cat" in text
    assert "1 hotspots" in text
    rig.view.expire(now_wall_s + 61.0, time.monotonic())
    assert len(rig.view.standing) == 1, "a drain has no end of its own"


async def test_bookings_of_a_silent_router_no_longer_count() -> None:
    """What it had booked ends with it; what it says of itself heals what was missed."""
    rig = await Rig().start("a", "b")
    view = rig.view
    await rig.route(*(Routed(f"{n}", "a", 0.0, new_tokens=5) for n in range(3)))
    assert (view.instances["a"].batch, view.instances["a"].queued) == (3, 15)
    await rig.route(Finished("0", "a", "ok", 200, 0.0, released_tokens=5))
    assert (view.instances["a"].batch, view.instances["a"].queued) == (2, 10)
    await rig.route(RouterTotals({"b": (1, 7, 9)}), Routed("9", "b", 0.0, new_tokens=1))
    booked = {name: (each.batch, each.queued) for name, each in view.instances.items()}
    assert booked == {"a": (0, 0), "b": (2, 8)}
    now_s = time.monotonic()
    view.expire(0.0, now_s)
    assert view.instances["b"].batch == 2
    view.expire(0.0, now_s + SILENT_S + 1.0)
    assert (view.instances["b"].batch, view.instances["b"].queued) == (0, 0)


async def test_what_is_wrong_is_shown_first_when_there_is_no_room() -> None:
    """Of many instances those in trouble are drawn, and how many are not is said."""
    rig = await Rig().start(*(f"engine-{n:02}" for n in range(50)))
    text = "\n".join(rig.drawn(80, 16, dead=("engine-49",)))
    assert "engine-49" in text
    assert "more" in text
    assert "1 dead, 49 ready" in text


async def test_a_lost_bus_is_seen() -> None:
    """The view says that NATS is away, and for how long, until it is back."""
    rig = await Rig().start("engine-0")
    assert "bus ok" in "\n".join(rig.drawn())
    rig.seen.cut()
    await eventually(lambda: not rig.view.connected)
    assert "BUS DOWN for 7 s" in "\n".join(rig.drawn(later_s=7.1))
    assert "silent" not in "\n".join(rig.drawn(later_s=60.0)), "nobody can be heard then"
    rig.seen.heal()
    await eventually(lambda: rig.view.connected)
    assert "bus ok" in "\n".join(rig.drawn())


async def test_junk_on_the_bus_changes_nothing() -> None:
    """Entries and messages that mean nothing are passed over."""
    rig = await Rig().start("engine-0")
    for bucket in (subjects.INSTANCES, subjects.VERDICTS):
        for key in ("m.junk", "nodot", "m.engine-0x"):
            await (await rig.bus.bucket(bucket)).put(key, b"\xc1")
    for subject in (subjects.kv("m", "i"), subjects.load("m", "i"), subjects.route("m", "r")):
        rig.bus.publish(subject, b"\xc1")
    await rig.route()
    assert list(rig.view.instances) == ["engine-0"]
    assert rig.view.standing == {}


async def test_one_line_says_it_all() -> None:
    """Without a terminal the same is said in a line."""
    rig = await Rig().start("engine-0", "engine-1")
    await rig.state("drain-engine-1", Drain("engine-1", True, 0, time.time(), "ann"))
    line = plain(rig.view, {"engine-0"}, time.monotonic())
    assert "\n" not in line
    assert "bus ok" in line
    assert "engine-0:dead/0 engine-1:draining/0" in line
