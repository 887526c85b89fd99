"""The bus: a server that routes messages and keeps buckets, and each process's connection to it.

What it promises is what `controlplane.bus.protocol` promises, and no more: messages may be lost;
while a client knows that it is cut off, it keeps its newest messages for later; watches of a bucket
are told, late perhaps, every present entry in the order of revisions; a request has answers until
an end mark, which says how many there should have been.

A cut is noticed by the client or not. One that is not, and heals, has lost messages in silence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from tests.sim.network import Link
from tests.sim.world import Process, World

BUFFER_MAX = 200
"""Messages that a client keeps while it is cut off; small, so that runs meet the bound."""

_BUCKET_DELAY_S = 0.02
"""A watch may be this much behind the messages: records overtake and are overtaken."""


class Entry(msgspec.Struct, frozen=True):
    """A key of a bucket, as of a revision; no value where it was deleted."""

    key: str
    value: bytes | None
    revision: int


OnMessage = Callable[[str, bytes], None]
OnEntry = Callable[[Entry], None]
OnAnswer = Callable[[bytes], None]
OnEnd = Callable[[str], None]
Service = Callable[[bytes, Callable[[bytes], None], Callable[[], None]], None]
"""Called with a request, how to answer, and how to end the answers."""


class BusServer:
    """The server.

    Attributes:
        up: whether anybody can be connected.
        connections: of the processes that live, by name.
        entries: the bucket: records and verdicts, told apart by their keys.
        links: every link that a client ever had, by name.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.connections: dict[str, Connection] = {}
        self.entries: dict[str, Entry] = {}
        self.links: dict[str, Link] = {}
        self._revision = 0

    def route(self, sender: Connection, kind: str, payload: bytes) -> None:
        """Pass a message on to everybody who listens."""
        for connection in self.connections.values():
            if kind in connection.kinds:
                connection.link.carry(
                    f"{kind}<{sender.process.name}", connection.deliver, kind, payload
                )

    def put(self, key: str, value: bytes | None) -> int:
        """Write a key, or delete it; returns its revision."""
        self._revision += 1
        self.entries.pop(key, None)
        self.entries[key] = Entry(key, value, self._revision)
        for connection in self.connections.values():
            connection.tell()
        return self._revision

    def forget(self) -> None:
        """Lose the bucket, as a server without a disk does; watches are told nothing."""
        self.entries.clear()

    def fail(self) -> None:
        """Go down: every client is cut off, and knows it."""
        self.up = False
        for connection in self.connections.values():
            connection.link.cut()
            connection.notice(0.01)

    def recover(self) -> None:
        """Come back."""
        self.up = True
        for link in self.links.values():
            link.heal()
        for connection in self.connections.values():
            connection.heal()


class Connection:
    """One process's connection, for as long as the process lives.

    Attributes:
        connected: as the process knows it.
        kinds: which messages it wants.
        buffer: what waits for the connection to return.
        dropped: messages that found no room there.
    """

    def __init__(self, server: BusServer, process: Process, link: Link) -> None:
        self.server = server
        self.process = process
        self.link = link
        self.kinds: frozenset[str] = frozenset()
        self.connected = False
        self.dropped = 0
        self.buffer: deque[tuple[str, bytes]] = deque()
        self.service: Service | None = None
        self.cut_off = not link.up or not server.up
        self._on_message: OnMessage | None = None
        self._on_entry: OnEntry | None = None
        self._on_state: Callable[[bool], None] | None = None
        self._told_revision = self._heard_revision = 0
        self._requests: dict[int, _Request] = {}
        self._watch = f"watch {server.world.events}"
        link.lag_s[self._watch] = _BUCKET_DELAY_S
        server.connections[process.name] = self
        server.links[link.name] = link
        self.notice(0.0) if self.cut_off else self._reconnect()

    # --- the client's side

    def listen(self, kinds: frozenset[str], on_message: OnMessage) -> None:
        """Want some kinds of messages."""
        self.kinds, self._on_message = kinds, on_message

    def watch(self, on_entry: OnEntry) -> None:
        """Want the bucket's entries, all that there are and then all changes."""
        self._on_entry = on_entry
        self.tell()

    def on_state(self, handler: Callable[[bool], None]) -> None:
        """Want to know of losses and returns of the connection."""
        self._on_state = handler

    def publish(self, kind: str, payload: bytes) -> None:
        """Send a message, now or when the connection returns."""
        self.server.world.stamp(payload)
        if self.connected:
            self.link.carry("out", self.server.route, self, kind, payload)
            return
        if len(self.buffer) >= BUFFER_MAX:
            self.buffer.popleft()
            self.dropped += 1
        self.buffer.append((kind, payload))

    def put(self, key: str, value: bytes | None) -> None:
        """Write a key of the bucket, if that is possible."""
        if self.connected and self.link.up:
            self.link.carry("put", self.server.put, key, value)

    def request(
        self, service: str, payload: bytes, on_answer: OnAnswer, on_end: OnEnd, timeout_s: float
    ) -> None:
        """Ask another process; `on_end` comes last and once, with an error or an empty text."""
        request = _Request(self, service, on_answer, on_end, timeout_s)
        self._requests[id(request)] = request
        request.send(payload)

    def forget_request(self, request: _Request) -> None:
        """Note that a request is over."""
        del self._requests[id(request)]

    # --- from the server

    def deliver(self, kind: str, payload: bytes) -> None:
        """Hand over a message."""
        if self.process.alive and self._on_message is not None:
            self._on_message(kind, payload)

    def tell(self) -> None:
        """Send the entries that the watch has not been told of."""
        if self._on_entry is None or not self.link.up or not self.server.up:
            return
        for entry in list(self.server.entries.values()):
            if entry.revision > self._told_revision:
                self._told_revision = entry.revision
                self.link.carry_patiently(self._watch, self.process.do, self._entry, entry)

    def _entry(self, entry: Entry) -> None:
        if self._on_entry is not None and entry.revision > self._heard_revision:
            self._heard_revision = entry.revision
            self._on_entry(entry)

    # --- losses and returns

    def cut(self, notice_s: float | None) -> None:
        """Cut this process off; it notices after `notice_s`, or never."""
        self.link.cut()
        if notice_s is not None:
            self.notice(notice_s)

    def notice(self, after_s: float) -> None:
        """Let the process find out that it is cut off."""
        self.cut_off = True
        self.process.after(after_s, self._lost)

    def _lost(self) -> None:
        if not self.cut_off:
            return
        was, self.connected = self.connected, False
        for request in list(self._requests.values()):
            request.end("the connection was lost")
        if was and self._on_state is not None:
            self._on_state(False)

    def heal(self) -> None:
        """Let the process come back, at once if it has noticed nothing."""
        if not self.server.up:
            return
        self.link.heal()
        self.tell()
        if self.cut_off:
            self.process.after(self.server.world.rng.uniform(0.02, 0.2), self._reconnect)

    def _reconnect(self) -> None:
        if not self.link.up or not self.server.up:
            return
        self.cut_off = False
        was, self.connected = self.connected, True
        if not was and self._on_state is not None:
            self._on_state(True)
        while self.buffer and self.connected:
            self.publish(*self.buffer.popleft())
        self.tell()

    def close(self) -> None:
        """Leave."""
        if self.server.connections.get(self.process.name) is self:
            del self.server.connections[self.process.name]


class _Request:
    """One request and its answers."""

    def __init__(
        self,
        client: Connection,
        service: str,
        on_answer: OnAnswer,
        on_end: OnEnd,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._service = service
        self._on_answer = on_answer
        self._on_end = on_end
        self._timeout_s = timeout_s
        self._way = f"answers<{client.server.world.events}"
        self._count = self._sent = 0
        self._over = False
        self._heard = 0

    def send(self, payload: bytes) -> None:
        """Ask."""
        client = self._client
        if not client.connected:
            client.process.after(0.001, self.end, "not connected")
            return
        self._wait()
        client.link.carry("out", self._routed, payload)

    def _wait(self) -> None:
        self._client.process.after(self._timeout_s, self._timed_out, self._heard)

    def _timed_out(self, heard: int) -> None:
        if heard == self._heard:
            self.end("no further answer came in time")

    def _routed(self, payload: bytes) -> None:
        server = self._client.server.connections.get(self._service)
        if server is None or server.service is None or server.cut_off:
            self._back(self.end, f"nobody answers for {self._service}")
            return
        service = server.service

        def answer(part: bytes) -> None:
            self._sent += 1
            server.link.carry(self._way, self._back, self._answer, part)

        def end() -> None:
            server.link.carry(self._way, self._back, self._ended, self._sent)

        server.link.carry("in", server.process.do, service, payload, answer, end)

    def _back(self, call: Callable[..., None], *args: Any) -> None:
        client = self._client
        client.link.carry(self._way, client.process.do, call, *args)

    def _answer(self, part: bytes) -> None:
        if self._over:
            return
        self._heard += 1
        self._count += 1
        self._wait()
        self._on_answer(part)

    def _ended(self, sent: int) -> None:
        self.end("" if sent == self._count else f"{self._count} of {sent} answers arrived")

    def end(self, error: str) -> None:
        """Be over, with an error or none."""
        if not self._over:
            self._over = True
            self._client.forget_request(self)
            self._on_end(error)
