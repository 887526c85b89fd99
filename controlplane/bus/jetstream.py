"""JetStream as the plane uses it: requests in JSON, and reading a stream through a pull consumer.

Everything is read the same way, by a `Feed`: an ephemeral consumer that we ask for messages, so
that the reader sets the pace, whether it wants a few keys or a week of history. A feed lives and
dies with its link, and ends with an error at any doubt (silence, a gap, a consumer that is gone);
whoever needs more opens the next one from where it stood.

Source: the JetStream wire API reference of the NATS documentation, ADR-8 (buckets), ADR-20
(object stores).
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from controlplane.bus.inbox import Answer, NoAnswerError
from controlplane.bus.protocol import BusError, Record, WrongRevision

if TYPE_CHECKING:
    from controlplane.bus.nats_link import Link

log = logging.getLogger(__name__)

Json = dict[str, Any]

_API = "$JS.API"
_NOT_FOUND = 404
_NO_MESSAGE = 10037
_NO_STREAM = 10059
_WRONG_SEQUENCE = (10071, 10164)
_NS = 1_000_000_000

BATCH = 64
"""Messages asked for at a time: what a feed holds at most."""

HEARTBEAT_S = 1.0
"""The server says so when it has nothing to say; three missing beats end a feed."""

_BEATS_MISSED_MAX = 3
_EXPIRES_S = 30.0  # of one question for messages; then it is asked again
_INACTIVE_S = 30.0  # the server forgets the consumer of a reader that vanished


class JetStreamError(BusError):
    """The server refused an operation.

    Attributes:
        code: HTTP-like: 404 is not found.
        err_code: the precise reason.
    """

    def __init__(self, error: Json) -> None:
        self.code = int(error.get("code", 0))
        self.err_code = int(error.get("err_code", 0))
        advice = ": is `multiplane bus init` done?" if self.err_code == _NO_STREAM else ""
        super().__init__(f"JetStream: {error.get('description', 'unknown error')}{advice}")


class Message(msgspec.Struct, frozen=True):
    """One message of a stream.

    Attributes:
        seq: its place in the stream.
        order: its place in what the consumer delivered, from 1.
        pending: how many more match the consumer now.
    """

    subject: str
    payload: bytes
    headers: dict[str, str]
    seq: int
    order: int = 0
    pending: int = 0
    at_wall_s: float = 0.0


class Caller(Protocol):
    """What JetStream needs of a bus."""

    async def call(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request that has one answer."""

    def link(self) -> Link:
        """Return the open connection, or raise BusError."""

    async def next_link(self) -> Link:
        """Return the open connection, waiting for it."""

    def pause_s(self, attempt: int) -> float:
        """Return how long to wait after a failed attempt."""


def _decoded(answer: Answer) -> Json:
    try:
        reply = msgspec.json.decode(answer.payload)
    except msgspec.DecodeError as error:
        raise BusError(f"the server's answer is not JSON: {error}") from error
    if not isinstance(reply, dict):
        raise BusError("the server's answer is not a JSON object")
    if (failure := reply.get("error")) is None:
        return reply
    wrong = failure.get("err_code") in _WRONG_SEQUENCE
    raise WrongRevision(failure["description"]) if wrong else JetStreamError(failure)


class JetStream:
    """Requests to JetStream over a bus."""

    def __init__(self, bus: Caller) -> None:
        self.bus = bus

    async def api(self, verb: str, body: Json | None = None) -> Json:
        """Ask for one operation. Raises JetStreamError, or BusError without an answer."""
        payload = b"" if body is None else msgspec.json.encode(body)
        return _decoded(await self.bus.call(f"{_API}.{verb}", payload))

    async def store(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> int:
        """Store a message in the stream of its subject; returns its sequence number.

        Raises:
            WrongRevision: the headers expected another last sequence.
            BusError: no stream takes the subject, or it is full.
        """
        try:
            answer = await self.bus.call(subject, payload, headers)
        except NoAnswerError as error:
            raise BusError(
                f"not stored: {error}; if the server's log says that it cannot write, make room "
                "on its disk and restart it"
            ) from error
        return int(_decoded(answer)["seq"])

    async def last(self, stream: str, subject: str) -> Message | None:
        """Read the last message on a subject, from the stream's leader; None if there is none."""
        try:
            reply = await self.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
        except JetStreamError as error:
            if error.err_code == _NO_MESSAGE:
                return None
            raise
        raw = reply["message"]
        return Message(
            subject=raw["subject"],
            payload=base64.b64decode(raw.get("data") or ""),
            headers=_headers(base64.b64decode(raw.get("hdrs") or "")),
            seq=raw["seq"],
        )

    async def read(
        self, stream: str, subject: str, policy: Json, *, headers_only: bool = False
    ) -> list[Message]:
        """Read everything that a stream holds now on a subject, by a delivery policy."""
        messages: list[Message] = []
        feed = Feed(self, self.bus.link(), stream, subject, policy, headers_only=headers_only)
        try:
            pending = await feed.open()
            while pending:
                messages.append(await feed.next())
                pending = messages[-1].pending
        finally:
            await feed.close()
        return messages

    async def history(
        self, stream: str, subject: str, from_seq: int, since_wall_s: float, *, follow: bool
    ) -> AsyncIterator[Record]:
        """See `Bus.history`."""
        position, attempt = from_seq, 0
        while True:
            link = await self.bus.next_link() if follow else self.bus.link()
            skip_to_time = since_wall_s > 0 and position == from_seq
            policy = since(since_wall_s) if skip_to_time else from_sequence(position)
            feed = Feed(self, link, stream, subject, policy)
            try:
                pending = await feed.open()
                while pending or follow:
                    message = await feed.next()
                    pending, attempt = message.pending, 0
                    if message.seq >= position and message.at_wall_s >= since_wall_s:
                        position = message.seq + 1
                        yield Record(
                            message.subject, message.payload, message.seq, message.at_wall_s
                        )
                return
            except BusError as error:
                if not follow or (isinstance(error, JetStreamError) and error.code == _NOT_FOUND):
                    raise
                log.debug("reading %s again from %d: %s", stream, position, error)
            finally:
                await feed.close()
            await asyncio.sleep(self.bus.pause_s(attempt))
            attempt += 1


ALL: Json = {"deliver_policy": "all"}
LAST_PER_SUBJECT: Json = {"deliver_policy": "last_per_subject"}


def from_sequence(seq: int) -> Json:
    """Delivery policy: from a sequence number on."""
    if seq <= 1:
        return ALL
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": seq}


def since(wall_s: float) -> Json:
    """Delivery policy: from a moment on, and a little before: a float is not exact to 1 ns."""
    moment = datetime.fromtimestamp(wall_s - 0.001, UTC).isoformat()
    return {"deliver_policy": "by_start_time", "opt_start_time": moment}


def _wall_s(moment: str) -> float:
    """Return a time as the server writes it (RFC 3339, nanoseconds) in Unix seconds."""
    try:
        return msgspec.convert(moment, datetime).timestamp()
    except msgspec.ValidationError as error:
        raise BusError(f"the server's time is not one: {moment!r}") from error


def _headers(raw: bytes) -> dict[str, str]:
    lines = raw.decode("utf-8", "replace").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


class Feed:
    """Reads a stream on one link, in order, without gaps; an async context is its owner's job.

    Attributes:
        opened_wall_s: when it was opened, by the server's clock.

    Args:
        policy: where to begin: ALL, LAST_PER_SUBJECT, `from_sequence` or `since`.
        headers_only: leave the payloads out.
    """

    def __init__(
        self,
        js: JetStream,
        link: Link,
        stream: str,
        subject: str,
        policy: Json,
        *,
        headers_only: bool = False,
    ) -> None:
        self._js = js
        self._link = link
        self._stream = stream
        self._name = f"mp-{secrets.token_hex(8)}"
        self._inbox = f"{link.inbox}.{self._name}"
        self._subject = subject
        self._config = policy | ({"headers_only": True} if headers_only else {})
        self._ready: deque[Message] = deque()
        self._news = asyncio.Event()
        self._subscription: Any = None
        self._asked = 0
        self._order = 0
        self._problem = ""
        self.opened_wall_s = 0.0

    async def open(self) -> int:
        """Create the consumer; returns how many messages wait. Raises BusError."""
        self._link.on_loss.add(self._on_loss)
        self._subscription = await self._link.subscribe(self._inbox, self._receive)
        every = self._subject == ">"
        config = self._config | {
            "name": self._name,
            "ack_policy": "none",
            "inactive_threshold": int(_INACTIVE_S * _NS),
            "mem_storage": True,
            "num_replicas": 1,
            **({} if every else {"filter_subject": self._subject}),
        }
        where = f"{self._stream}.{self._name}" + ("" if every else f".{self._subject}")
        reply = await self._js.api(
            f"CONSUMER.CREATE.{where}", {"stream_name": self._stream, "config": config}
        )
        self.opened_wall_s = _wall_s(str(reply["created"]))
        return int(reply["num_pending"])

    async def next(self) -> Message:
        """Return the next message, as long as it takes. Raises BusError at any doubt."""
        while not self._ready:
            if self._problem:
                raise BusError(f"reading {self._stream} stopped: {self._problem}")
            self._news.clear()
            if not self._asked:
                await self._ask()
            try:
                async with asyncio.timeout(HEARTBEAT_S * _BEATS_MISSED_MAX):
                    await self._news.wait()
            except TimeoutError:
                self._problem = "the server is silent"
        return self._ready.popleft()

    async def close(self) -> None:
        """Give the consumer back."""
        self._link.on_loss.discard(self._on_loss)
        if self._subscription is None or self._link.lost.is_set():
            return
        await self._link.unsubscribe(self._subscription)
        try:
            await self._link.publish(f"{_API}.CONSUMER.DELETE.{self._stream}.{self._name}", b"")
        except BusError as error:
            log.debug("a consumer is left to time out: %s", error)

    def _on_loss(self) -> None:
        self._problem = "the connection was lost"
        self._news.set()

    async def _ask(self) -> None:
        self._asked = BATCH
        question = {
            "batch": BATCH,
            "expires": int(_EXPIRES_S * _NS),
            "idle_heartbeat": int(HEARTBEAT_S * _NS),
        }
        await self._link.publish(
            f"{_API}.CONSUMER.MSG.NEXT.{self._stream}.{self._name}",
            msgspec.json.encode(question),
            self._inbox,
        )

    def _receive(
        self, subject: str, reply: str, payload: bytes, headers: dict[str, str] | None
    ) -> None:
        status = (headers or {}).get("Status", "")
        if status in ("404", "408"):  # the question expired
            self._asked = 0
        elif status and status != "100":
            self._problem = f"status {status} from the server"
        elif not status:
            self._take(subject, reply, payload, headers or {})
        self._news.set()

    def _take(self, subject: str, reply: str, payload: bytes, headers: dict[str, str]) -> None:
        tokens = reply.split(".")
        try:
            # $JS.ACK.[DOMAIN.HASH.]STREAM.CONSUMER.DELIVERED.SEQ.ORDER.TIME.PENDING[.RANDOM]
            first = 5 if len(tokens) == 9 else 7
            seq, order, time_ns, pending = (int(token) for token in tokens[first : first + 4])
        except ValueError:
            self._problem = f"a message without metadata ({reply!r})"
            return
        if order != self._order + 1:
            self._problem = f"{order - self._order - 1} messages were lost"
            return
        self._order = order
        self._asked -= 1
        self._ready.append(Message(subject, payload, headers, seq, order, pending, time_ns / _NS))
