"""Reads what a vLLM server has published, from its replay socket.

That has no race: what was published can be asked for, whether anyone listened or not. A batch is
there once vLLM's publisher thread has sent it, so `wait_for_events` asks until a test is satisfied.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from tests.vllm.harness import VllmServer
from tests.vllm.launch import VllmError

REPLAY_S_MAX = 5.0
WAIT_S_MAX = 10.0
POLL_S = 0.05
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

Event = dict[str, Any]


def replay(server: VllmServer, start: int = 0, rank: int = 0) -> list[tuple[int, list[Event]]]:
    """Returns (sequence number, events) of each batch that a rank published from `start` on.

    Raises:
        VllmError: The server did not answer.
    """
    batches: list[tuple[int, list[Event]]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(REPLAY_S_MAX * 1000)
        dealer.connect(server.replay_endpoints[rank])
        dealer.send_multipart([b"", start.to_bytes(8, "big")])
        while True:
            try:
                _, _topic, sequence, payload = dealer.recv_multipart()
            except zmq.Again as error:
                raise VllmError(f"no replay from {server.replay_endpoints[rank]}") from error
            if sequence == END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(sequence, "big"), decode(payload)))


def decode(payload: bytes) -> list[Event]:
    """Returns the events of one batch."""
    _timestamp, events, *_rank = msgspec.msgpack.decode(payload)
    return list(events)


def events_of(server: VllmServer, rank: int = 0) -> list[Event]:
    """Returns all events that a rank published since the server started, in order."""
    return [event for _, events in replay(server, rank=rank) for event in events]


def wait_for_events(
    server: VllmServer,
    satisfied: Callable[[list[Event]], bool],
    *,
    rank: int = 0,
    timeout_s: float = WAIT_S_MAX,
) -> list[Event]:
    """Returns all events a rank published since the server started, once they satisfy a condition.

    Raises:
        VllmError: They did not in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not satisfied(events := events_of(server, rank)):
        if time.monotonic() > deadline_s:
            raise VllmError(f"after {timeout_s} s {server.url} had published only {events}")
        time.sleep(POLL_S)
    return events


def copies(events: list[Event]) -> dict[int, int]:
    """Returns what a prefix cache holds after these events: each hash, and its physical copies.

    Exact as long as no request asks vLLM to announce its hits again (kv_cache_report_mode).
    """
    held: dict[int, int] = {}
    for event in events:
        if event["type"] == "AllBlocksCleared":
            held.clear()
        for engine_hash in event.get("block_hashes", ()):
            held[engine_hash] = held.get(engine_hash, 0) + (
                1 if event["type"] == "BlockStored" else -1
            )
            if not held[engine_hash]:
                del held[engine_hash]
    return held
