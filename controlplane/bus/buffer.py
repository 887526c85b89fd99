"""The bounded buffer between `publish` and the connection."""

from __future__ import annotations

from collections import deque

from controlplane.bus.protocol import PAYLOAD_BYTES_MAX


class OutBuffer:
    """Messages that wait to be sent, oldest first; over a bound the oldest are dropped.

    The newest are worth more: a receiver resyncs at the gap, and then wants what is current.

    Args:
        messages_max: most messages held.
        bytes_max: most payload bytes held.
    """

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        if messages_max < 1 or bytes_max < PAYLOAD_BYTES_MAX:
            raise ValueError(
                f"the out-buffer needs room for one message of {PAYLOAD_BYTES_MAX} bytes: "
                f"got {messages_max} messages, {bytes_max} bytes"
            )
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._queue: deque[tuple[str, bytes]] = deque()
        self.nbytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def first_bytes(self) -> int:
        """Length of the oldest payload. Raises IndexError when there is none."""
        return len(self._queue[0][1])

    def push(self, subject: str, payload: bytes) -> None:
        """Append a message, dropping the oldest ones where it does not fit.

        Raises:
            ValueError: the payload is too large for any bus.
        """
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise ValueError(
                f"a message of {len(payload)} bytes on {subject} is over the limit of "
                f"{PAYLOAD_BYTES_MAX}: split it"
            )
        self._queue.append((subject, payload))
        self.nbytes += len(payload)
        while len(self._queue) > self._messages_max or self.nbytes > self._bytes_max:
            self.pop()
            self.dropped += 1

    def pop(self) -> tuple[str, bytes]:
        """Remove and return the oldest message. Raises IndexError when there is none."""
        message = self._queue.popleft()
        self.nbytes -= len(message[1])
        return message
