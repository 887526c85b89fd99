"""Messages that wait for their turn: bounded, in order, and never in anybody's way."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from controlplane.bus.mailbox import Mailbox
from tests.bus.worlds import eventually


def box(taken: list[bytes]) -> Mailbox:
    """Return a mailbox that writes down what it takes in."""
    return Mailbox(
        lambda subject, payload: taken.append(payload), Counter(), messages_max=100, slice_s=1.0
    )


async def test_messages_are_taken_in_later_and_in_order() -> None:
    """Whoever puts one in is never held up by what it leads to."""
    taken: list[bytes] = []
    mailbox = box(taken)
    for number in range(5):
        mailbox.put("s", b"%d" % number)
    assert (taken, len(mailbox)) == ([], 5)
    await eventually(lambda: not len(mailbox))
    assert taken == [b"0", b"1", b"2", b"3", b"4"]
    mailbox.put("s", b"5")
    await eventually(lambda: len(taken) == 6)


async def test_beyond_the_bound_the_oldest_goes_and_is_counted() -> None:
    """Exactly at the bound nothing is lost."""
    taken: list[bytes] = []
    counts: Counter[str] = Counter()
    mailbox = Mailbox(lambda _, data: taken.append(data), counts, messages_max=3, slice_s=1.0)
    for number in range(3):
        mailbox.put("s", b"%d" % number)
    assert counts["overflow"] == 0
    for number in range(3, 8):
        mailbox.put("s", b"%d" % number)
        assert len(mailbox) == 3
    assert counts == {"overflow": 5}
    await eventually(lambda: not len(mailbox))
    assert taken == [b"5", b"6", b"7"]


async def test_others_have_their_turn_between_slices() -> None:
    """However many messages wait, the loop is held for one slice, not for all of them."""
    turns: list[int] = []
    taken: list[bytes] = []

    def slow(subject: str, payload: bytes) -> None:
        end_s = time.perf_counter() + 0.001
        while time.perf_counter() < end_s:
            pass
        taken.append(payload)

    mailbox = Mailbox(slow, Counter(), messages_max=100, slice_s=0.005)
    for _ in range(100):
        mailbox.put("s", b"")
    while len(mailbox):
        await asyncio.sleep(0)
        turns.append(len(taken))
    assert len(turns) > 10
    assert turns[0] < 50


async def test_a_message_that_breaks_its_reader_costs_nobody_else() -> None:
    """The error is reported, and the next message is taken in."""
    loop = asyncio.get_running_loop()
    reported: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    taken: list[bytes] = []

    def picky(subject: str, payload: bytes) -> None:
        if payload == b"bad":
            raise LookupError("a bug")
        taken.append(payload)

    mailbox = Mailbox(picky, Counter(), messages_max=100, slice_s=1.0)
    for payload in (b"1", b"bad", b"2", b"bad"):
        mailbox.put("s", payload)
    await eventually(lambda: not len(mailbox))
    mailbox.put("s", b"3")
    await eventually(lambda: taken == [b"1", b"2", b"3"])
    assert [type(error) for error in reported] == [LookupError, LookupError]
