from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from lab.publisher import END, Publisher

DEADLINE_MS = 5000


class Sockets:
    """Opens the test's own sockets, and closes them all."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.opened: list[zmq.Socket[bytes]] = []

    def connect(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """A connected socket."""
        socket = self.context.socket(kind)
        self.opened.append(socket)
        socket.connect(endpoint)
        return socket


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """The test's own sockets."""
    made = Sockets()
    yield made
    made.context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    """A publisher on free ports that remembers four batches."""
    made = Publisher(topic="kv", buffer_steps=4)
    yield made
    made.close()


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    """One message, or a failure."""
    assert socket.poll(DEADLINE_MS), "nothing came"
    return socket.recv_multipart()


def subscribe(sockets: Sockets, publisher: Publisher) -> zmq.Socket[bytes]:
    """A SUB socket to which the publisher's messages already come."""
    socket = sockets.connect(zmq.SUB, publisher.endpoint)
    socket.subscribe(b"")
    while not socket.poll(20):
        publisher.publish(b"probe")
    while socket.poll(50):
        socket.recv_multipart()
    return socket


def replay(sockets: Sockets, publisher: Publisher, first: int) -> list[list[bytes]]:
    """All frames of a replay, the end marker excluded."""
    socket = sockets.connect(zmq.DEALER, publisher.replay_endpoint)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    answers = []
    while (frames := receive(socket))[2] != END:
        answers.append(frames)
    assert frames == [b"", b"", END, b""]
    return answers


def test_batches_are_numbered_in_three_frames(sockets: Sockets, publisher: Publisher) -> None:
    """A subscriber gets topic, number and payload, in order and without gaps."""
    socket = subscribe(sockets, publisher)
    first = publisher.next_seq
    for payload in (b"one", b"two"):
        publisher.publish(payload)
    assert receive(socket) == [b"kv", first.to_bytes(8, "big"), b"one"]
    assert receive(socket) == [b"kv", (first + 1).to_bytes(8, "big"), b"two"]


def test_replay_starts_where_asked(sockets: Sockets, publisher: Publisher) -> None:
    """A replay gives each batch from the asked number on, then the end marker."""
    for payload in (b"a", b"b", b"c"):
        publisher.publish(payload)
    expected = [[b"", b"kv", seq.to_bytes(8, "big"), b"abc"[seq : seq + 1]] for seq in (1, 2)]
    assert replay(sockets, publisher, 1) == expected


def test_replay_beyond_the_end_is_empty(sockets: Sockets, publisher: Publisher) -> None:
    """Asking for what is yet to come gives the end marker alone."""
    publisher.publish(b"a")
    assert replay(sockets, publisher, 7) == []


def test_replay_holds_the_last_batches_only(sockets: Sockets, publisher: Publisher) -> None:
    """At the bound the oldest batch is forgotten."""
    for number in range(6):
        publisher.publish(bytes([number]))
    assert [frames[3] for frames in replay(sockets, publisher, 0)] == [b"\2", b"\3", b"\4", b"\5"]


def test_dropped_batches_leave_a_gap_that_replay_fills(
    sockets: Sockets, publisher: Publisher
) -> None:
    """A batch lost on the way keeps its number, and replay still has it."""
    socket = subscribe(sockets, publisher)
    lost = publisher.next_seq
    publisher.drop_next(1)
    publisher.publish(b"lost")
    publisher.publish(b"seen")
    assert receive(socket) == [b"kv", (lost + 1).to_bytes(8, "big"), b"seen"]
    assert publisher.dropped == 1
    assert replay(sockets, publisher, lost)[0][3] == b"lost"


def test_nonsense_asked_for_is_ignored(sockets: Sockets, publisher: Publisher) -> None:
    """A request of another form gets no answer and harms nobody."""
    socket = sockets.connect(zmq.DEALER, publisher.replay_endpoint)
    socket.send_multipart([b"what", b"is", b"this"])
    socket.send_multipart([b"", b"short"])
    publisher.publish(b"a")
    assert len(replay(sockets, publisher, 0)) == 1
    assert not socket.poll(0)


def test_taken_port_is_refused(publisher: Publisher) -> None:
    """Binding an address in use fails, and says which."""
    taken = int(publisher.endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match=f"cannot bind 127.0.0.1:{taken}"):
        Publisher(port=taken)
