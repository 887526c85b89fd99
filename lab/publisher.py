"""KV events over ZMQ as vLLM sends them: a PUB socket, and a ROUTER socket that replays.

Theory of operation. Each batch is three frames: topic, sequence number (u64, big endian, from 0 for
each process), payload. The last `buffer_steps` batches can be asked for again: a DEALER sends
`["", first sequence number]` and gets `["", topic, number, payload]` for each that is still there,
then `["", "", -1, ""]`. Slow subscribers lose batches beyond the high-water mark, and a long replay
beyond ZMQ's default one is cut short, both silently: the receiver must look at the numbers.

`publish` runs in the caller's thread and never blocks; replays are served by a thread of their own,
which looks at its socket at least every 25 ms.

Source: vllm/distributed/kv_events.py of vLLM 0.32 (wire behaviour; the code is our own).
"""

from __future__ import annotations

import threading
from collections import deque

import zmq

END = (-1).to_bytes(8, "big", signed=True)
HIGH_WATER_MARK = 100_000
BUFFER_STEPS = 10_000
POLL_MS = 25


class Publisher:
    """Publishes one engine's batches; `close` it.

    Attributes:
        endpoint: where a SUB socket connects.
        replay_endpoint: where a DEALER socket asks for old batches.
        next_seq: the number that the next batch will have.
        dropped: batches that `drop_next` kept from the wire.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        replay_port: int = 0,
        topic: str = "",
        buffer_steps: int = BUFFER_STEPS,
    ) -> None:
        """Bind both sockets; port 0 picks a free one.

        Raises:
            OSError: an address is taken or not ours.
        """
        self.topic = topic
        self.buffer_steps = buffer_steps
        self.next_seq = 0
        self.dropped = 0
        self._to_drop = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(HIGH_WATER_MARK)
        self._pub.linger = 0
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        try:
            self.endpoint = _bind(self._pub, host, port)
            self.replay_endpoint = _bind(self._router, host, replay_port)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise OSError(
                error.errno, f"cannot bind {host}:{port or replay_port}: {error}"
            ) from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._replay, name="kv-replay", daemon=True)
        self._thread.start()

    def publish(self, payload: bytes) -> None:
        """Give a batch the next number, remember it for replay and send it to whoever listens."""
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        with self._lock:
            self._buffer.append((seq, payload))
        if self._to_drop:
            self._to_drop -= 1
            self.dropped += 1
            return
        self._pub.send_multipart((self.topic.encode(), seq.to_bytes(8, "big"), payload))

    def drop_next(self, count: int) -> None:
        """Lose the next `count` batches on the way, as a network would; replay still has them."""
        self._to_drop = count

    def close(self) -> None:
        """Stop the replay thread and close the sockets."""
        self._closing.set()
        self._thread.join()
        self._context.destroy()

    def _replay(self) -> None:
        while not self._closing.is_set():
            if not self._router.poll(POLL_MS):
                continue
            frames = self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # vLLM logs it and goes on; who asks wrongly gets no answer
            peer, first = frames[0], int.from_bytes(frames[2], "big")
            with self._lock:
                batches = [each for each in self._buffer if each[0] >= first]
            topic = self.topic.encode()
            for seq, payload in batches:
                self._router.send_multipart((peer, b"", topic, seq.to_bytes(8, "big"), payload))
            self._router.send_multipart((peer, b"", b"", END, b""))


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> str:
    """Bind, and return the address that a peer connects to."""
    socket.bind(f"tcp://{host}:{port}" if port else f"tcp://{host}:*")
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    number = bound.rpartition(":")[2]
    return f"tcp://*:{number}" if host in ("*", "0.0.0.0") else f"tcp://{host}:{number}"  # noqa: S104
