"""One connection to one NATS server, from handshake to loss: the only file that imports nats-py.

nats-py brings the handshake, TLS, authentication, pings and writing. Four of its habits do not suit
a router, and `_Client` and `_Parser` replace them:

- it reconnects by itself, and some errors leave it closed or silent for good. A `Link` ends at the
  first error, at once, and `NatsBus` opens the next one: a single way in, for start and restart;
- it closes a connection in order even when the peer is frozen, which waits for as long as the peer
  is. A `Link` aborts (`NatsBus.close` flushes before);
- it parses with regular expressions and hands each message to a task by a queue: 22 µs a message,
  and 30 ms without a turn of the loop when many small ones arrive. `_Parser` cuts frames by hand,
  calls handlers straight (3 µs) and lets the loop turn every millisecond. A reader that is too
  slow pushes back through TCP; there is no queue here to overflow;
- its `flush` overtakes what it should wait for: the ping skips the queue of commands. And a pong
  that comes after a `flush` gave up kills the reading task.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from controlplane.bus.guard import Guard
from controlplane.bus.nats_options import LinkOptions
from controlplane.bus.protocol import BusError


@contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Let the import of an optional library find nothing, unless it is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


# nats-py would import it for WebSockets, which we do not speak. A router needs it for nothing else,
# and its workers start in three quarters of the time without it, with 8 MiB less.
with _hidden("aiohttp"):
    from nats import errors
    from nats.aio.client import PING_PROTO, Client
    from nats.protocol.parser import Parser

log = logging.getLogger(__name__)

Headers = dict[str, str]
RawHandler = Callable[[str, str, bytes, Headers | None], None]
"""Called with (subject, reply, payload, headers)."""

SLICE_S = 0.001
"""Longest time spent on received messages before the loop turns."""

_FRAMES_PER_CHECK = 16
_UNSENT_BYTES_MAX = 64 * 1024
_CONTROL_BYTES_MAX = 64 * 1024
_SIZE_DIGITS_MAX = 10
_CONNECT_WAIT_S = 0.05  # nats-py tries a server twice; this is between the two
_PINGS_OUTSTANDING_MAX = 2
_REFUSALS_LOGGED_MAX = 20  # of one connection; all are counted


class LinkError(BusError):
    """No connection could be made.

    Attributes:
        credentials: because the server refuses who we say we are.
    """

    def __init__(self, message: str, *, credentials: bool = False) -> None:
        super().__init__(message)
        self.credentials = credentials


def parse_headers(raw: bytes) -> Headers:
    """Return the headers of a message; `Status` is the number in its first line, if any."""
    first, *lines = raw.decode("utf-8", "replace").split("\r\n")
    headers: Headers = {}
    status = first.partition(" ")[2]
    if status:
        headers["Status"] = status[:3]
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip()] = value.strip()
    return headers


def _is_size(word: bytes) -> bool:
    return word.isdigit() and len(word) <= _SIZE_DIGITS_MAX


class _Parser(Parser):
    """Cuts what was received into frames; hands messages out, control lines to nats-py."""

    nc: _Client

    def reset(self) -> None:
        super().reset()
        self._rest = bytearray()
        self._needed = 0

    async def parse(self, data: bytes = b"") -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
            self._rest.clear()
        position = frames = 0
        pause_at = time.perf_counter() + SLICE_S
        while position < len(data):
            words, body, end = self._frame(data, position)
            if end > len(data):
                self._rest += memoryview(data)[position:]
                self._needed = end - position
                return
            if words[0] == b"MSG":
                reply = words[3] if len(words) == 5 else b""
                self._deliver(words, reply, data[body : end - 2], None)
            elif words[0] == b"HMSG":
                reply = words[3] if len(words) == 6 else b""
                split = body + int(words[-2])
                headers = parse_headers(data[body:split])
                self._deliver(words, reply, data[split : end - 2], headers)
            else:
                await self._control(data[position:end])
            position = end
            frames += 1
            if frames % _FRAMES_PER_CHECK == 0 and time.perf_counter() >= pause_at:
                await asyncio.sleep(0)
                pause_at = time.perf_counter() + SLICE_S

    async def _control(self, line: bytes) -> None:
        try:
            await super().parse(line)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise errors.ProtocolError from error  # else the reading task would end in silence

    def _frame(self, data: bytes, start: int) -> tuple[list[bytes], int, int]:
        """Measure the frame at `start`.

        Returns:
            The words of its first line, where its body begins, where it ends: beyond the data if
            it is not whole yet.
        """
        line_end = data.find(b"\r\n", start)
        if line_end < 0:
            if len(data) - start > _CONTROL_BYTES_MAX:
                raise errors.ProtocolError
            return [], start, len(data) + 1
        # Only spaces part words: whoever publishes may put other blanks into a subject.
        words = data[start:line_end].split(b" ")
        body = line_end + 2
        if words == [b""]:
            raise errors.ProtocolError
        if words[0] not in (b"MSG", b"HMSG"):
            return words, body, body
        if not 4 <= len(words) <= 6 or not _is_size(words[-1]):
            raise errors.ProtocolError
        if words[0] == b"HMSG" and not _is_size(words[-2]):
            raise errors.ProtocolError
        return words, body, body + int(words[-1]) + 2

    def _deliver(
        self, words: list[bytes], reply: bytes, payload: bytes, headers: Headers | None
    ) -> None:
        handler = self.nc.handlers.get(words[2])
        if handler is not None:
            # Subjects may be any bytes; one that is no text is nobody's, as handlers will see.
            subject, reply_to = (
                words[1].decode("utf-8", "replace"),
                reply.decode("utf-8", "replace"),
            )
            self.nc.guard.call(handler, subject, reply_to, payload, headers)


class _Client(Client):
    """nats-py's client, with our parser, and lost at the first error."""

    def __init__(self, guard: Guard, on_loss: Callable[[], None], *, tls: bool) -> None:
        super().__init__()
        self.handlers: dict[bytes, RawHandler] = {}
        self.guard = guard
        self._on_loss = on_loss
        self._tls_wanted = tls
        self._ps = _Parser(self)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self._on_loss()
        self._pending.clear()
        self._pending_data_size = 0
        if (transport := self._socket) is not None:
            transport.abort()
        await super()._close(status, do_cbs)

    @property
    def is_clear(self) -> bool:
        """Whether nothing waits to be sent: no command of nats-py, and little in the socket."""
        transport = self._socket
        return (
            self.is_connected
            and not self._pending_data_size
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() < _UNSENT_BYTES_MAX
        )

    def send_now(self, data: bytes) -> None:
        """Write to the socket, past nats-py's queue and the task that empties it."""
        if (transport := self._socket) is not None:
            transport.write(data)

    @property
    def _socket(self) -> asyncio.WriteTransport | None:
        writer = getattr(self._transport, "_io_writer", None)
        return None if writer is None else writer.transport

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pings_outstanding = 0
        else:
            await super()._process_pong()

    def _connect_command(self) -> bytes:
        writer = getattr(self._transport, "_io_writer", None)
        if self._tls_wanted and writer is not None and not writer.get_extra_info("ssl_object"):
            raise errors.SecureConnWantedError  # before any credentials are sent in the clear
        return super()._connect_command()


class Link:
    """An open connection. Make one with `open_link`.

    Attributes:
        lost: set when the connection is over, whoever ended it.
        on_loss: what to call at that moment.
        reason: why it is over.
        refused: operations that the server did not permit.
        inbox: subject prefix that only this client receives from.
    """

    def __init__(
        self, guard: Guard, options: LinkOptions, on_refusal: Callable[[str], None]
    ) -> None:
        self.lost = asyncio.Event()
        self.reason = ""
        self.refused = 0
        self.on_loss: set[Callable[[], None]] = set()
        self._on_refusal = on_refusal
        self.inbox = options.inbox
        self._client = _Client(guard, self._end, tls=options.tls is not None)

    @property
    def payload_bytes_max(self) -> int:
        """What the server takes in one message."""
        return int(self._client.max_payload)

    @property
    def discovered(self) -> list[str]:
        """URLs of other servers of the cluster, as the server told them."""
        return [uri.geturl() for uri in self._client.discovered_servers]

    async def connect(self, server: str, options: LinkOptions) -> None:
        """Connect and authenticate. Raises LinkError."""
        try:
            async with asyncio.timeout(options.connect_s_max):
                await self._client.connect(
                    [server],
                    name=options.name,
                    user=options.user,
                    password=options.password,
                    token=options.token,
                    user_credentials=options.creds,
                    nkeys_seed=options.nkey,
                    tls=options.tls,
                    tls_hostname=options.tls_hostname,
                    tls_handshake_first=options.tls_first,
                    inbox_prefix=options.inbox,
                    no_echo=not options.echo,
                    allow_reconnect=False,
                    max_reconnect_attempts=1,
                    reconnect_time_wait=_CONNECT_WAIT_S,  # type: ignore[arg-type]
                    connect_timeout=options.connect_s_max,  # type: ignore[arg-type]
                    ping_interval=options.ping_s,  # type: ignore[arg-type]
                    max_outstanding_pings=_PINGS_OUTSTANDING_MAX,
                    error_cb=self._on_error,
                )
        except Exception as error:  # whatever a server or a proxy before it may provoke in nats-py
            log.debug("while connecting", exc_info=error)
            what = self.reason if isinstance(error, errors.NoServersError) else _describe(error)
            await self.close()
            raise LinkError(
                f"no connection to {server}: {what}",
                credentials="authorization" in what.lower(),
            ) from error
        except BaseException:
            await self.close()
            raise

    async def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: Headers | None = None
    ) -> None:
        """Send a message; waits while the connection takes no more. Raises BusError."""
        try:
            await self._client.publish(subject, payload, reply, headers)
        except errors.Error as error:
            raise BusError(f"not sent on {subject}: {_describe(error)}") from error

    def write(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """Send messages at once, in one piece; only while `takes` says so."""
        parts = [
            b"PUB %b %d\r\n%b\r\n" % (subject.encode(), len(payload), payload)
            for subject, payload in messages
        ]
        self._client.send_now(b"".join(parts))

    def takes(self, nbytes: int) -> bool:
        """Whether a message of so many bytes can be sent by `write`, behind all sent before it."""
        return nbytes <= self._client.max_payload and self._client.is_clear

    async def subscribe(self, subject: str, handler: RawHandler, queue: str = "") -> Any:
        """Begin to call `handler`; returns what `unsubscribe` wants. Raises BusError."""
        try:
            subscription = await self._client.subscribe(subject, queue=queue)
        except errors.Error as error:
            raise BusError(f"not subscribed to {subject}: {_describe(error)}") from error
        # The server cannot have answered yet: nothing was awaited since the command was queued.
        self._client.handlers[b"%d" % subscription._id] = handler
        return subscription

    async def unsubscribe(self, subscription: Any) -> None:
        """Stop calling the handler; nothing to do on a lost connection."""
        self._client.handlers.pop(b"%d" % subscription._id, None)
        if not self.lost.is_set():
            try:
                await subscription.unsubscribe()
            except errors.Error as error:
                log.debug("unsubscribe on a closing connection: %s", error)

    async def flush(self, timeout_s: float) -> None:
        """Return when the server has had everything sent so far. Raises BusError."""
        try:
            await self._client.flush(timeout_s)  # type: ignore[arg-type]
        except errors.Error as error:
            raise BusError(f"not flushed: {_describe(error)}") from error

    async def close(self) -> None:
        """Drop the connection."""
        try:
            await self._client.close()
        except Exception as error:  # some versions stumble over a connection that never was
            log.debug("while closing", exc_info=error)

    def _end(self) -> None:
        if not self.lost.is_set():
            last = self._client.last_error
            self.reason = _describe(last) if last is not None else self.reason or "closed"
            self.lost.set()
            for callback in tuple(self.on_loss):
                callback()

    async def _on_error(self, error: Exception) -> None:
        text = _describe(error)
        if "permissions violation" in text.lower():
            self.refused += 1
            level = logging.DEBUG if self.refused > _REFUSALS_LOGGED_MAX else logging.WARNING
            log.log(level, "NATS refuses: %s", text)
            self._on_refusal(text)
        else:
            self.reason = text


def _describe(error: BaseException) -> str:
    return str(error).removeprefix("nats: ") or type(error).__name__


async def open_link(
    server: str, options: LinkOptions, guard: Guard, on_refusal: Callable[[str], None]
) -> Link:
    """Connect to a server.

    Args:
        guard: calls the handlers.
        on_refusal: told why, whenever the server does not permit an operation.

    Raises:
        LinkError: it does not answer, or does not let us in.
    """
    link = Link(guard, options, on_refusal)
    await link.connect(server, options)
    return link
