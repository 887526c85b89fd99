"""Reading a stream: every doubt ends a feed, so that its reader begins again from firm ground."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from controlplane.bus import jetstream
from controlplane.bus.inbox import Answer, NoAnswerError
from controlplane.bus.jetstream import ALL, BATCH, Caller, Feed, JetStream, JetStreamError
from controlplane.bus.protocol import BusError, WrongRevision

CREATED = "2026-01-02T03:04:05.678901234Z"


class ScriptedLink:
    """A connection to a server that says what the test wants, things a real one rarely does."""

    def __init__(self) -> None:
        self.inbox = "_INBOX.me"
        self.lost = asyncio.Event()
        self.on_loss: set[Callable[[], None]] = set()
        self.sent: list[tuple[str, Any]] = []
        self.deliver: Callable[..., None] = lambda *_: None

    async def subscribe(self, subject: str, handler: Callable[..., None]) -> str:
        """Take the reader's handler."""
        self.deliver = handler
        return subject

    async def unsubscribe(self, subscription: str) -> None:
        """Nothing to do."""

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Note what the reader asks for."""
        self.sent.append((subject, msgspec.json.decode(payload) if payload else None))

    def message(self, order: int, pending: int = 0, reply: str | None = None) -> None:
        """Deliver one message."""
        metadata = f"$JS.ACK.S.C.1.{order + 100}.{order}.1700000000000000000.{pending}"
        self.deliver("a", metadata if reply is None else reply, b"%d" % order, None)


class ScriptedBus:
    """Answers every call with what the test wants."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[str] = []

    async def call(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> Answer:
        """Answer."""
        self.calls.append(subject)
        return Answer(self.answer if isinstance(self.answer, bytes) else encoded(self.answer), {})


def encoded(value: Any) -> bytes:
    """Return JSON."""
    return msgspec.json.encode(value)


async def opened(pending: int = 3) -> tuple[Feed, ScriptedLink]:
    """Return an open feed and its connection."""
    link = ScriptedLink()
    js = JetStream(ScriptedBus({"num_pending": pending, "created": CREATED}))  # type: ignore[arg-type]
    feed = Feed(js, link, "S", "a", ALL)  # type: ignore[arg-type]
    assert await feed.open() == pending
    return feed, link


async def test_it_asks_for_bounded_batches_and_reads_in_order() -> None:
    """It asks when it has nothing, never for more than it may hold."""
    feed, link = await opened()
    reading = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    assert [question["batch"] for _, question in link.sent] == [BATCH]
    for order in range(1, BATCH + 1):
        link.message(order, pending=BATCH - order)
    assert (await reading).payload == b"1"
    rest = [await feed.next() for _ in range(BATCH - 1)]
    assert [message.seq for message in rest] == list(range(102, 101 + BATCH))
    assert (rest[-1].pending, rest[-1].at_wall_s) == (0, 1.7e9)
    assert len(link.sent) == 1
    reading = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    assert len(link.sent) == 2
    reading.cancel()


async def test_an_expired_question_is_asked_again() -> None:
    """A question has an end; a reader that waits puts it anew. Heartbeats change nothing."""
    feed, link = await opened()
    reading = asyncio.create_task(feed.next())
    for status, questions in (("100", 1), ("408", 2), ("404", 3)):
        await asyncio.sleep(0)
        link.deliver("_INBOX.me", "", b"", {"Status": status})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(link.sent) == questions
    link.message(1)
    assert (await reading).payload == b"1"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (lambda link: link.message(2), "1 messages were lost"),
        (lambda link: link.message(1, reply="$JS.ACK.S.C.x"), "without metadata"),
        (lambda link: link.message(1, reply=""), "without metadata"),
        (lambda link: link.deliver("i", "", b"", {"Status": "409"}), "status 409"),
        (lambda link: [call() for call in link.on_loss], "connection was lost"),
    ],
)
async def test_doubts_end_a_feed(event: Callable[[ScriptedLink], None], reason: str) -> None:
    """A gap, nonsense, a consumer that is gone, a lost connection: the reader learns at once."""
    feed, link = await opened()
    reading = asyncio.create_task(feed.next())
    await asyncio.sleep(0)
    event(link)
    with pytest.raises(BusError, match=reason):
        await reading
    with pytest.raises(BusError, match=reason):
        await feed.next()
    await feed.close()
    assert link.on_loss == set()


async def test_silence_ends_a_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not even send heartbeats has lost our consumer."""
    monkeypatch.setattr(jetstream, "HEARTBEAT_S", 0.01)
    feed, _ = await opened()
    with pytest.raises(BusError, match="silent"):
        await feed.next()


async def test_metadata_with_a_domain_is_understood() -> None:
    """Servers with accounts or domains put more into the metadata."""
    feed, link = await opened()
    link.message(1, reply="$JS.ACK.hub.ACCOUNT.S.C.1.101.1.1700000000000000000.7.random")
    message = await feed.next()
    assert (message.seq, message.order, message.pending) == (101, 1, 7)


@pytest.mark.parametrize(
    ("answer", "error", "reason"),
    [
        (b"no JSON", BusError, "not JSON"),
        (b"[]", BusError, "not a JSON object"),
        (
            {"error": {"code": 404, "err_code": 10059, "description": "gone"}},
            JetStreamError,
            "gone",
        ),
        ({"error": {"code": 400, "err_code": 10071, "description": "9"}}, WrongRevision, "9"),
        ({"error": {"code": 400, "err_code": 10164, "description": "9"}}, WrongRevision, "9"),
    ],
)
async def test_bad_answers_are_errors(answer: Any, error: type[BusError], reason: str) -> None:
    """Whatever the server answers is a result or a BusError."""
    with pytest.raises(error, match=reason):
        await JetStream(ScriptedBus(answer)).store("s", b"")  # type: ignore[arg-type]


class _Mute:
    """A bus whose server takes requests and does not answer them."""

    async def call(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> Answer:
        """Wait in vain."""
        raise NoAnswerError("no answer within 5.0 s")


async def test_a_server_that_cannot_write_is_told_from_one_that_is_away() -> None:
    """With a full disk it answers all but what is to be stored; the error says where to look."""
    with pytest.raises(BusError, match=r"not stored: no answer within 5\.0 s; if the server's log"):
        await JetStream(cast("Caller", _Mute())).store("subject", b"")
