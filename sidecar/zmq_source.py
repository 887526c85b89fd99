"""One engine rank's KV events over ZMQ: the live stream, and replays on request.

The receive queue of the SUB socket is the only queue here, bounded by its high-water mark: what
finds it full is dropped by ZMQ, shows as a gap in the sequence numbers, and is replayed.

Source: vllm/distributed/kv_events.py (ZmqEventPublisher): frames `[topic, seq u64 big endian,
payload]`; a replay is asked for with `["", seq]` from a DEALER socket and answered with
`["", topic, seq, payload]` (`["", seq, payload]` before vLLM 0.26) for each message, ending with
seq = -1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

MessageHandler = Callable[[int, bytes], None]
"""Called with (seq, payload)."""

_END = (1 << 64) - 1
_SLICE_S = 0.002
_RECONNECT_MS = 50


class SourceError(Exception):
    """A socket cannot be made, or a replay is not answered."""


class SourceConfig(msgspec.Struct, frozen=True):
    """Where an engine rank publishes, and the bounds.

    Attributes:
        endpoint: `tcp://host:port` of the PUB socket; with `bind`, the address to listen at.
        replay_endpoint: of the ROUTER socket; empty where the engine has none.
        bind: wait for the engine to connect, as it does to endpoints without `*`.
        topic: only messages of exactly this topic are taken; None takes all.
        queue_messages_max: high-water mark of the live stream.
        replay_silence_s_max: longest silence within a replay before it has failed. vLLM looks at
            its replay socket once in 100 ms at the latest.
        replay_s_max: longest replay.
    """

    endpoint: str
    replay_endpoint: str = ""
    bind: bool = False
    topic: str | None = None
    queue_messages_max: int = 100_000
    replay_silence_s_max: float = 2.0
    replay_s_max: float = 60.0


class ZmqSource:
    """Receives from one rank; `close` it.

    Attributes:
        malformed: messages without the frames they should have.
        foreign: messages of another topic.
        received: live messages taken.
    """

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.malformed = self.foreign = self.received = 0
        self._context = zmq.asyncio.Context()
        self._sub: zmq.asyncio.Socket | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, handler: MessageHandler) -> None:
        """Call `handler` for every live message from now on.

        Raises:
            SourceError: the endpoint makes no sense, or cannot be listened at.
        """
        sub = self._context.socket(zmq.SUB)
        sub.linger = 0
        sub.set(zmq.RCVHWM, self.config.queue_messages_max)
        sub.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        sub.set(zmq.IPV6, 1)
        sub.subscribe((self.config.topic or "").encode())
        try:
            if self.config.bind:
                sub.bind(self.config.endpoint)
            else:
                sub.connect(self.config.endpoint)
        except zmq.ZMQError as error:
            sub.close()
            verb = "listen at" if self.config.bind else "connect to"
            raise SourceError(f"cannot {verb} {self.config.endpoint}: {error}") from error
        self._sub = sub
        self._reading = asyncio.create_task(self._read(sub, handler), name="kv-events")

    @property
    def bound_endpoint(self) -> str:
        """Where a source that binds listens."""
        assert self._sub is not None
        return self._sub.get_string(zmq.LAST_ENDPOINT)

    async def _read(self, sub: zmq.asyncio.Socket, handler: MessageHandler) -> None:
        topic = None if self.config.topic is None else self.config.topic.encode()
        turn_s = time.monotonic()
        while True:
            frames: list[bytes] = await sub.recv_multipart()
            parsed = _parse(frames)
            if parsed is None:
                self.malformed += 1
            elif topic is not None and frames[0] != topic:
                self.foreign += 1
            else:
                self.received += 1
                handler(*parsed)
            # With a full queue `recv` never waits: give the rest of the process its turns.
            if time.monotonic() - turn_s > _SLICE_S:
                await asyncio.sleep(0)
                turn_s = time.monotonic()

    async def replay(self, from_seq: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the messages that the engine still has, from a number on, to the end mark.

        Raises:
            SourceError: there is no replay socket, or it does not answer in time.
        """
        if not self.config.replay_endpoint:
            raise SourceError("the engine has no replay socket")
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.linger = 0
            dealer.set(zmq.RCVHWM, 0)  # the engine drops what does not fit, silently
            dealer.set(zmq.IPV6, 1)
            try:
                dealer.connect(self.config.replay_endpoint)
            except zmq.ZMQError as error:
                where = self.config.replay_endpoint
                raise SourceError(f"cannot connect to {where}: {error}") from error
            await dealer.send_multipart([b"", from_seq.to_bytes(8, "big")])
            until_s = time.monotonic() + self.config.replay_s_max
            while time.monotonic() < until_s:
                frames = await self._next_of_replay(dealer)
                parsed = _parse(frames)
                if parsed is None:
                    self.malformed += 1
                elif parsed[0] == _END:
                    return
                else:
                    yield parsed
            raise SourceError(f"a replay took longer than {self.config.replay_s_max} s")
        finally:
            dealer.close()

    async def _next_of_replay(self, dealer: zmq.asyncio.Socket) -> list[bytes]:
        try:
            async with asyncio.timeout(self.config.replay_silence_s_max):
                frames: list[bytes] = await dealer.recv_multipart()
                return frames
        except TimeoutError:
            silence_s, where = self.config.replay_silence_s_max, self.config.replay_endpoint
            raise SourceError(f"no answer from {where} for {silence_s} s") from None

    async def close(self) -> None:
        """Stop and free the sockets; no handler call follows."""
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        if self._sub is not None:
            self._sub.close()
        self._context.destroy(linger=0)


def _parse(frames: list[Any]) -> tuple[int, bytes] | None:
    """Return (seq, payload): the last two frames, whatever is before them."""
    if len(frames) < 3 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
