"""Whatever one client sends, the others are served: the event loop is never held for long."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from router.limits import KIB, MIB
from schemas.bus import InstanceRecord
from tests.router import fake_engine
from tests.router.http_rig import on_uvloop
from tests.router.service_rig import MODEL, ServiceRig, until

pytestmark = pytest.mark.slow  # each starts a router with a real tokenizer

LAG_S_MAX = 0.1
"""Far below what these bodies took (0.3 to 40 s), and above what a busy machine adds to 20 ms."""
_WATCH_S = 0.001


class LagWatch:
    """Use as an async context manager; `worst_s` is how long the loop was busy with one thing.

    Args:
        used: what is counted of that: this process's time, so that what other processes took of the
            machine is not ours, or only this thread's.
    """

    def __init__(self, used: Callable[[], float] = time.process_time) -> None:
        self.worst_s = 0.0
        self._used = used

    async def __aenter__(self) -> LagWatch:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            due_s, used_s = time.perf_counter() + _WATCH_S, self._used()
            await asyncio.sleep(_WATCH_S)
            late_s = time.perf_counter() - due_s
            self.worst_s = max(self.worst_s, min(late_s, self._used() - used_s))


def _send(address: tuple[str, int], path: str, body: bytes) -> int:
    """Send a request from a thread, which does not hold up the loop; returns the status."""
    with socket.create_connection(address, timeout=30.0) as sock:
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode())
        sock.sendall(body)
        return int(sock.recv(4096).split(b" ")[1])


def _completion(prompt: bytes) -> bytes:
    return b'{"model":"%b","prompt":%b}' % (MODEL.encode(), prompt)


def _chat(messages: bytes) -> bytes:
    return b'{"model":"%b","messages":[%b]}' % (MODEL.encode(), messages)


def _repeated(part: bytes, size_bytes: int) -> bytes:
    return part * (size_bytes // len(part))


BODIES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "letters": ("completions", lambda: _completion(b'"%b"' % (b"a" * 4 * MIB)), 400),
    "words": ("completions", lambda: _completion(b'"%b"' % _repeated(b"ab cd ", 400_000)), 400),
    "one word": ("completions", lambda: _completion(b'"%b"' % (b"xyzw" * 100_000)), 400),
    "breaks": ("completions", lambda: _completion(b'"%b"' % (b"\\n" * MIB)), 400),
    "tokens": ("completions", lambda: _completion(b"[%b1]" % _repeated(b"1,", 30 * MIB)), 400),
    "lists": ("completions", lambda: _completion(b"[%b[]]" % _repeated(b"[],", 8 * MIB)), 200),
    "messages": (
        "chat/completions",
        lambda: _chat(_repeated(b'{"role":"user","content":"a"},', 30 * MIB) + b"{}"),
        400,
    ),
    "some messages": (
        "chat/completions",
        lambda: _chat(_repeated(b'{"role":"user","content":"a"},', 100_000) + b"{}"),
        200,
    ),
    "parts": (
        "chat/completions",
        lambda: _chat(
            b'{"role":"user","content":[%b{}]}' % _repeated(b'{"type":"text"},', MIB),
        ),
        200,
    ),
    "unknown": (
        "completions",
        lambda: b'{"model":"tiny","x":[%b1]}' % _repeated(b"[],", 30 * MIB),
        400,
    ),
    "too large": ("completions", lambda: b" " * 33 * MIB, 413),
    "media": (
        "chat/completions",
        lambda: _chat(
            b'{"role":"user","content":[{"type":"image_url","image_url":{"url":'
            b'"data:image/png;base64,%b"}}]}' % (b"iVBO" * 5 * MIB)
        ),
        200,
    ),
}


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_up_the_others(name: str) -> None:
    """It is answered, and meanwhile the loop goes round."""
    path, make, status = BODIES[name]
    body = make()
    async with ServiceRig() as rig:
        await rig.instance("a")
        await rig.chat("warm")
        async with LagWatch() as watch:
            address = rig.process.address
            assert await asyncio.to_thread(_send, address, f"/v1/{path}", body) == status
        assert watch.worst_s < LAG_S_MAX
        await rig.chat("others are served")


async def test_chunks_of_one_byte_hold_up_nobody() -> None:
    """However small the pieces of a body, they are read a bounded number at a time."""
    body = _chat(b'{"role":"user","content":"%b"}' % (b"a " * 1000)) + b" " * 300_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"

    def send(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=30.0) as sock:
            sock.sendall(head + chunks)
            return sock.recv(4096)

    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        await rig.chat("warm")
        async with LagWatch() as watch:
            answer = await asyncio.to_thread(send, rig.process.address)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert engine.received[-1].body == body
        assert watch.worst_s < LAG_S_MAX


MORE_S_MAX = 0.03
"""What 30 MiB may hold the loop for, beyond what 6 KiB do: putting a body's pieces together moves
it in memory, at worst. Decoding and rendering such a chat took 60 ms."""


@pytest.fixture
def engine_url() -> Iterator[str]:
    """A fake engine in a process of its own: what it does with a body is not the router's."""
    command = [sys.executable, fake_engine.__file__, "--port", "0", "--mode", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.terminate()


@pytest.mark.parametrize(("longest", "status"), [(4096, 400), (None, 200)])
@on_uvloop
async def test_a_chat_of_30_mib_holds_up_others_hardly_longer_than_one_of_6_kib(
    engine_url: str, longest: int | None, status: int
) -> None:
    """Whether or not the model's context says that it is too long."""
    worst_s: list[float] = []
    async with ServiceRig() as rig:
        record = InstanceRecord("a", MODEL, engine_url, epoch=1, kv_events=False)
        record = msgspec.structs.replace(record, card=await rig.card(), max_model_len=longest)
        await rig.put(record)
        await until(lambda: rig.served is not None and rig.served.reader is not None)
        address, path = rig.process.address, "/v1/chat/completions"
        for size_bytes, expected in ((6 * KIB, 200), (30 * MIB, status)):
            text = _repeated(b"ab cd ", size_bytes)
            body = _chat(b'{"role":"user","content":"%b"}' % text)
            times_s = []
            for _ in range(3):
                async with LagWatch(time.thread_time) as watch:  # The client is a thread here.
                    assert await asyncio.to_thread(_send, address, path, body) == expected
                times_s.append(watch.worst_s)
            worst_s.append(min(times_s))
    small_s, large_s = worst_s
    assert large_s < small_s + MORE_S_MAX
