"""A plane whose bus is taped, for tests of whoever reads the record."""

from __future__ import annotations

import msgspec

from controlplane.audit.heard import Heard, Unreadable, understand
from controlplane.bus.protocol import Record
from controlplane.core.decision import RouteRequest
from controlplane.core.dispatch import Ticket
from schemas import bus as messages
from schemas import subjects
from schemas.codec import encode
from tests.core.plane_helpers import Publisher, plane, prompt, record, request

WALL_S = 1_700_000_000.0


def named(name: str, hashes: list[int], **fields: object) -> RouteRequest:
    """Return a request with a name of its own."""
    return msgspec.structs.replace(request(hashes, **fields), request_id=name)


class Tape:
    """Two instances, their publishers, and a request now and then.

    Attributes:
        records: what was said, in order.
    """

    def __init__(self, **config: object) -> None:
        self.records: list[Record] = []
        self.plane = plane(**config)  # type: ignore[arg-type]
        self.publishers = {name: Publisher(name) for name in "ab"}
        self.now_s = 1.0
        for name, publisher in self.publishers.items():
            self.plane.handle(record(name), self.now_s)
            self.publish(publisher.batch())

    @property
    def wall_s(self) -> float:
        """The time, Unix seconds."""
        return WALL_S + self.now_s

    def heard(self) -> list[Heard | Unreadable]:
        """Return what was said, as it is understood."""
        return [understand(each) for each in self.records]

    def publish(self, batch: messages.KvBatch, *, reaches: bool = True) -> None:
        """Let a sidecar say something, which reaches the router or not."""
        self.write(subjects.kv("m", batch.instance_id), batch)
        if reaches:
            self.plane.handle(batch, self.now_s)

    def begin(self, *numbers: int, name: str = "", **fields: object) -> Ticket:
        """Send a request, and tell."""
        asked = named(name or f"q{len(self.records)}", prompt(*numbers), **fields)
        decision = self.plane.requests.decide(asked, self.now_s)
        assert decision is not None
        ticket = self.plane.requests.book(decision, self.now_s, self.wall_s)
        self.tell()
        return ticket

    def finish(
        self, ticket: Ticket, outcome: str = "ok", cached: int | None = None, output: int = 10
    ) -> None:
        """Let a request end, and tell."""
        ok = outcome == "ok"
        if ok:
            self.plane.requests.first_byte(ticket, 0.05)
        self.plane.requests.finish(
            ticket,
            outcome,
            200 if ok else 0,
            self.now_s,
            self.wall_s,
            cached_tokens=(ticket.decision.hit if cached is None else cached) if ok else None,
            output_tokens=output if ok else None,
        )
        self.tell()

    def ask(self, *numbers: int, cached: int | None = None, **fields: object) -> str:
        """Send a request and let it end; returns who got it."""
        ticket = self.begin(*numbers, **fields)
        self.finish(ticket, cached=cached)
        return ticket.decision.instance.record.instance_id

    def tell(self) -> None:
        """Publish what the router has to say."""
        while (batch := self.plane.outbox.take(self.wall_s)) is not None:
            self.write(subjects.route("m", batch.router_id), batch)

    def say(self, subject: str, message: msgspec.Struct) -> None:
        """Let a detector or an operator say something, and the router hear it."""
        self.write(subject, message)
        self.plane.handle(message, self.now_s)  # type: ignore[arg-type]

    def write(self, subject: str, message: msgspec.Struct) -> None:
        """Record a message."""
        self.now_s += 0.01
        self.records.append(Record(subject, encode(message), len(self.records) + 1, self.wall_s))
