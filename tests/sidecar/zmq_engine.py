"""A publisher that speaks as vLLM does, and can be made to misbehave."""

from __future__ import annotations

import threading

import zmq

END = (1 << 64) - 1


class ZmqEngine:
    """A PUB and a ROUTER socket with a replay buffer, from `lab`'s publisher kept apart on purpose.

    Attributes:
        sent: messages of this process, by number.
        silent: do not answer.
        two_frames: answer in the form of vLLM before 0.26.
        first_kept: the replay buffer begins here.
    """

    def __init__(
        self, *, topic: str = "kv", connect: str = "", port: int = 0, replay_port: int = 0
    ) -> None:
        self.topic = topic.encode()
        self.sent: list[bytes] = []
        self.silent = self.two_frames = False
        self.first_kept = 0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.linger = 0
        if connect:
            self._pub.connect(connect)
            self.endpoint = connect
        else:
            self._pub.bind(f"tcp://127.0.0.1:{port or '*'}")
            self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.sndhwm = 0  # with a bound it would drop answers when the machine is busy
        self._router.bind(f"tcp://127.0.0.1:{replay_port or '*'}")
        self.replay_endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def publish(self, payload: bytes, *, lost: bool = False) -> None:
        """Send a message, or lose it on the way."""
        seq = len(self.sent)
        self.sent.append(payload)
        if not lost:
            self.raw(self.topic, seq.to_bytes(8, "big"), payload)

    def raw(self, *frames: bytes) -> None:
        """Send any frames."""
        self._pub.send_multipart(frames)

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._router.poll(10):
                continue
            peer, _, first = self._router.recv_multipart()
            if self.silent:
                continue
            start = max(int.from_bytes(first, "big"), self.first_kept)
            for seq, payload in list(enumerate(self.sent))[start:]:
                self._answer(peer, self.topic, seq, payload)
            self._answer(peer, b"", END, b"")

    def _answer(self, peer: bytes, topic: bytes, seq: int, payload: bytes) -> None:
        head = (peer, b"") if self.two_frames else (peer, b"", topic)
        self._router.send_multipart((*head, seq.to_bytes(8, "big"), payload))

    def close(self) -> None:
        """Free the sockets."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)
