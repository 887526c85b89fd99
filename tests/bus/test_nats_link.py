"""Cutting what NATS sends into messages, however it arrives."""

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats import errors

from controlplane.bus.guard import Guard
from controlplane.bus.nats_link import SLICE_S, _Client, parse_headers

Received = tuple[str, str, bytes, dict[str, str] | None]


class Reader:
    """A client without a connection, whose parser is fed by hand."""

    def __init__(self) -> None:
        self.got: list[Received] = []
        self.client = _Client(Guard(), lambda: None, tls=False)
        self.client.handlers[b"7"] = lambda *message: self.got.append(message)

    async def feed(self, data: bytes, cuts: list[int]) -> None:
        """Feed data in pieces that end at the cuts."""
        edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
        for start, end in pairwise(edges):
            await self.client._ps.parse(data[start:end])


def frame(message: Received, sid: bytes = b"7") -> bytes:
    """Return a message as the server sends it."""
    subject, reply, payload, headers = message
    words = [subject.encode(), sid, *([reply.encode()] if reply else [])]
    if headers is None:
        return b"MSG %s %d\r\n%s\r\n" % (b" ".join(words), len(payload), payload)
    block = b"NATS/1.0\r\n" + b"".join(
        b"%s: %s\r\n" % (name.encode(), value.encode()) for name, value in headers.items()
    )
    block += b"\r\n"
    sizes = b"%d %d" % (len(block), len(block) + len(payload))
    return b"HMSG %s %s\r\n%s%s\r\n" % (b" ".join(words), sizes, block, payload)


TOKEN = st.text("abcXYZ019=_-", min_size=1, max_size=5)
SUBJECT = st.lists(TOKEN, min_size=1, max_size=4).map(".".join)
HEADERS = st.none() | st.dictionaries(TOKEN.map(lambda t: f"H{t}"), TOKEN, min_size=1, max_size=3)
PAYLOAD = st.binary(max_size=300) | st.sampled_from(
    [b"\r\n", b"MSG a 7 3\r\nabc\r\n", b"x" * 70_000]
)
MESSAGES = st.lists(st.tuples(SUBJECT, st.just("") | SUBJECT, PAYLOAD, HEADERS), max_size=6)
CUTS = st.lists(st.integers(0, 200_000), max_size=8)


@pytest.mark.slow
@given(messages=MESSAGES, cuts=CUTS)
def test_messages_survive_any_cut(messages: list[Received], cuts: list[int]) -> None:
    """However the bytes are split, every message arrives once, unchanged, in order."""
    reader = Reader()
    stream = b"".join(frame(m) + b"+OK\r\n" + frame(m, sid=b"8") for m in messages)
    asyncio.run(reader.feed(stream, cuts))
    assert reader.got == messages


PIECES = [
    b"MSG ",
    b"HMSG ",
    b"INFO ",
    b"{}",
    b"-ERR ",
    b"+OK",
    b"PONG",
    b"'x'",
    b"a ",
    b"7 ",
    b"\r\n",
]
LINES = st.lists(st.sampled_from(PIECES) | st.binary(max_size=4), max_size=20).map(b"".join)


@pytest.mark.slow
@given(data=LINES, cuts=CUTS)
def test_nonsense_is_a_protocol_error_or_waits_for_more(data: bytes, cuts: list[int]) -> None:
    """Any bytes are understood, waited on, or refused: nothing else is raised."""
    try:
        asyncio.run(Reader().feed(data, cuts))
    except errors.ProtocolError:
        return


@pytest.mark.parametrize(
    "line",
    [
        *(b"MSG a 7\r\n", b"MSG a 7 -3\r\n", b"HMSG a 7 r 1 2 3 4\r\n", b"MSG a 7 x\r\n", b"\r\n"),
        *(b"HMSG a 7 x 3\r\n", b"MSG a 7 " + b"9" * 5000 + b"\r\n"),
    ],
)
async def test_malformed_lines_are_refused(line: bytes) -> None:
    """A first line that cannot be understood ends the connection."""
    with pytest.raises(errors.ProtocolError):
        await Reader().client._ps.parse(line)


@pytest.mark.parametrize("subject", [b"a.\xff.b", b"a\x0bb", b"a\x0b\x0cb\x0bc\x0bd\x0be\x0bf"])
async def test_subjects_of_any_bytes_cost_nobody_the_connection(subject: bytes) -> None:
    """Whoever may publish can send on such subjects; what follows is heard all the same."""
    reader = Reader()
    odd = b"MSG %b 7 %b 1\r\nx\r\n" % (subject, subject)
    await reader.feed(odd + frame(("a.b", "", b"y", None)), [])
    name = subject.decode("utf-8", "replace")
    assert reader.got == [(name, name, b"x", None), ("a.b", "", b"y", None)]


async def test_an_endless_line_is_refused() -> None:
    """A first line has a longest length: a peer cannot fill our memory with it."""
    with pytest.raises(errors.ProtocolError):
        await Reader().feed(b"A" * 100_000, list(range(0, 100_000, 1000)))


async def test_bursts_let_the_loop_turn() -> None:
    """However many messages arrive at once, others get their turn meanwhile."""
    reader = Reader()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    begun = asyncio.get_running_loop().time()
    await reader.client._ps.parse(frame(("a.b", "", b"x", None)) * 20_000)
    took_s = asyncio.get_running_loop().time() - begun
    counter.cancel()
    assert len(reader.got) == 20_000
    assert turns >= min(took_s / SLICE_S / 4, 3)


@pytest.mark.parametrize(
    ("raw", "headers"),
    [
        (b"NATS/1.0\r\nA: 1\r\nB:2\r\n\r\n", {"A": "1", "B": "2"}),
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (b"NATS/1.0 100 Idle Heartbeat\r\nX: y\r\n\r\n", {"Status": "100", "X": "y"}),
        (b"NATS/1.0\r\nA: \xff\r\n\r\n", {"A": "\N{REPLACEMENT CHARACTER}"}),
        (b"", {}),
    ],
)
def test_headers(raw: bytes, headers: dict[str, str]) -> None:
    """Headers and the server's status are read; bad UTF-8 does no harm."""
    assert parse_headers(raw) == headers
