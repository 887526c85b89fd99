"""Answers on their way back: one subscription takes them all and sorts them by request.

One wildcard subscription, made once a connection, is known to every server of a cluster by the
time a request leaves; a subscription made for each request might not be.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

import msgspec

from controlplane.bus.protocol import BusError

Headers = dict[str, str]


class Answer(msgspec.Struct, frozen=True):
    """One message that came back."""

    payload: bytes
    headers: Headers

    @property
    def status(self) -> str:
        """The server's status number, empty for a message of a peer."""
        return self.headers.get("Status", "")


class NoAnswerError(BusError):
    """Nobody has answered in time, though the connection stands."""


class Box:
    """The answers to one request, until it is closed; a context manager.

    Args:
        subject: where they arrive.
        asked: the subject of the request.
        limit: most unread answers; one more fails the request.
    """

    def __init__(self, inbox: Inbox, subject: str, asked: str, limit: int) -> None:
        self.subject = subject
        self.asked = asked
        self._inbox = inbox
        self._limit = limit
        self._answers: deque[Answer] = deque()
        self._arrived = asyncio.Event()
        self._failure: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inbox.close(self)

    def put(self, answer: Answer) -> None:
        """Take an answer in."""
        if len(self._answers) >= self._limit:
            self.fail(f"more than {self._limit} answers were waiting to be read")
        else:
            self._answers.append(answer)
            self._arrived.set()

    def fail(self, reason: str) -> None:
        """Let `get` raise once what has arrived is read."""
        self._failure = self._failure or reason
        self._arrived.set()

    async def get(self, timeout_s: float) -> Answer:
        """Return the next answer.

        Raises:
            NoAnswerError: there is none in time.
            BusError: there never will be.
        """
        if not self._answers and self._failure is None:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                raise NoAnswerError(f"no answer within {timeout_s} s") from None
        if not self._answers:
            raise BusError(f"no answer: {self._failure}")
        return self._answers.popleft()


class Inbox:
    """All open boxes of a bus.

    Args:
        prefix: subject prefix that no other client receives from.
    """

    def __init__(self, prefix: str) -> None:
        self.pattern = f"{prefix}.*"
        self._prefix = prefix
        self._count = 0
        self._boxes: dict[str, Box] = {}

    def open(self, asked: str, limit: int) -> Box:
        """Return a new box; use it as a context manager."""
        self._count += 1
        box = Box(self, f"{self._prefix}.{self._count}", asked, limit)
        self._boxes[box.subject] = box
        return box

    def close(self, box: Box) -> None:
        """Forget a box; what still comes for it is ignored."""
        self._boxes.pop(box.subject, None)

    def receive(self, subject: str, reply: str, payload: bytes, headers: Headers | None) -> None:
        """Sort one message in: the handler of `pattern`."""
        box = self._boxes.get(subject)
        if box is not None:
            box.put(Answer(payload, headers or {}))

    def fail(self, reason: str) -> None:
        """No answer will come to any of the open boxes."""
        for box in self._boxes.values():
            box.fail(reason)

    def refuse(self, reason: str) -> None:
        """The server forbade something: fail the requests that its reason names."""
        for box in self._boxes.values():
            if f'"{box.asked}"'.lower() in reason.lower():
                box.fail(f"the server refuses: {reason}")
