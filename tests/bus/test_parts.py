"""The pure parts of the buses: buffer, view, wildcards, layout, inbox and options."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.bus import BusError, NatsOptions
from controlplane.bus.buffer import OutBuffer
from controlplane.bus.inbox import Answer, Inbox
from controlplane.bus.layout import MIB, layout
from controlplane.bus.nats_options import link_options
from controlplane.bus.protocol import PAYLOAD_BYTES_MAX, Entry
from controlplane.bus.view import BucketView
from controlplane.bus.wildcard import matches


@pytest.mark.slow
@given(sizes=st.lists(st.integers(0, 400_000), max_size=40), messages_max=st.integers(1, 10))
def test_the_buffer_keeps_the_newest_within_its_bounds(sizes: list[int], messages_max: int) -> None:
    """Neither bound is ever exceeded; what is left is the newest; all others are counted."""
    buffer = OutBuffer(messages_max, bytes_max=PAYLOAD_BYTES_MAX)
    for number, size in enumerate(sizes):
        buffer.push(str(number), bytes(size))
        assert len(buffer) <= messages_max
        assert buffer.nbytes <= PAYLOAD_BYTES_MAX
    left = [buffer.pop() for _ in range(len(buffer))]
    newest = range(len(sizes) - len(left), len(sizes))
    assert [int(subject) for subject, _ in left] == list(newest)
    assert buffer.dropped + len(left) == len(sizes)
    assert buffer.nbytes == 0


@pytest.mark.parametrize(("messages_max", "bytes_max"), [(0, 10**7), (10, 1000)])
def test_a_buffer_without_room_is_refused(messages_max: int, bytes_max: int) -> None:
    """A buffer that cannot hold one message is a mistake."""
    with pytest.raises(ValueError, match="room"):
        OutBuffer(messages_max, bytes_max)


KEYS = st.sampled_from("abcd")
BUCKET = st.dictionaries(KEYS, st.binary(max_size=1))
CHANGES = st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=1)), max_size=6)


@pytest.mark.slow
@given(snapshots=st.lists(st.tuples(BUCKET, CHANGES), max_size=5))
def test_a_view_tells_exactly_the_differences(snapshots: list) -> None:
    """After any snapshots and changes, who applied what the handler heard has the bucket."""
    heard: list[Entry] = []
    view = BucketView(heard.append)
    applied: dict[str, bytes] = {}
    revision = 0
    for snapshot, changes in snapshots:
        current = dict(snapshot)
        view.restart()
        for key, value in snapshot.items():
            view.feed(Entry(key, value, len(key) + sum(value)))
        view.complete()
        for key, value in changes:
            revision += 1
            view.feed(Entry(key, value, 1000 + revision))
            current.pop(key, None)
            if value is not None:
                current[key] = value
        for entry in heard:
            before = applied.pop(entry.key, None)
            assert entry.value is not None or before is not None, "told of a loss of nothing"
            if entry.value is not None:
                applied[entry.key] = entry.value
        heard.clear()
        assert applied == current


def test_a_view_repeats_nothing_and_marks_what_vanished() -> None:
    """The same snapshot again is silent; a key that is missing from it has expired."""
    heard: list[Entry] = []
    view = BucketView(heard.append)
    entries = [Entry("a", b"1", 1), Entry("b", b"1", 2)]
    for snapshot in (entries, entries, entries[:1]):
        view.restart()
        for entry in snapshot:
            view.feed(entry)
        view.complete()
    assert heard == [*entries, Entry("b", None, 2, expired=True)]


@pytest.mark.parametrize(
    ("pattern", "subject", "match"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("*.b", "a.b", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        (">", "a", True),
        ("a.*.>", "a.b", False),
        ("a.*.>", "a.b.c", True),
        ("ab", "a", False),
    ],
)
def test_wildcards(pattern: str, subject: str, match: bool) -> None:
    """`*` is one token, `>` is one or more at the end."""
    assert matches(pattern, subject) is match


@pytest.mark.parametrize("pattern", ["", "a..b", ".a", "a.>.b"])
def test_nonsense_patterns_are_refused(pattern: str) -> None:
    """What NATS would not accept as a subject is a mistake here too."""
    with pytest.raises(ValueError, match="not a subject"):
        matches(pattern, "a")


def test_layout_bounds_everything() -> None:
    """Nothing grows without end, and heartbeat buckets forget the dead, but not in seconds.

    An instance's record outlives its sidecar by an hour or two: its engine serves on.
    """
    plan = layout()
    assert all(spec.bytes_max > 0 and spec.age_s_max > 0 for spec in plan.streams)
    assert all(spec.bytes_max > 0 for spec in (*plan.buckets, *plan.stores))
    lives = {spec.name: spec.ttl_s for spec in plan.buckets}
    assert 3600 <= lives["mp_instances"] <= 3 * 3600
    assert 60 <= lives["mp_routers"] <= 900
    small = layout(size=1e-9)
    assert all(s.bytes_max == MIB for s in (*small.streams, *small.buckets, *small.stores))


@pytest.mark.parametrize("bad", [{"replicas": 2}, {"replicas": 0}, {"size": 0}, {"size": -1}])
def test_a_layout_that_cannot_be_is_refused(bad: dict) -> None:
    """Mistakes are found before the server is asked."""
    with pytest.raises(ValueError, match="must be"):
        layout(**bad)


async def test_a_box_is_bounded() -> None:
    """A requester that does not read fails; what it had is still there."""
    inbox = Inbox("_INBOX.x")
    with inbox.open("asked", limit=2) as box:
        for payload in (b"1", b"2", b"3"):
            inbox.receive(box.subject, "", payload, None)
        assert [(await box.get(1)).payload for _ in range(2)] == [b"1", b"2"]
        with pytest.raises(BusError, match="more than 2"):
            await box.get(1)
    inbox.receive(box.subject, "", b"late", None)
    assert box._answers == box._answers.__class__()


async def test_a_lost_connection_fails_open_boxes_only() -> None:
    """Whoever waits learns it at once; later requests are not touched."""
    inbox = Inbox("_INBOX.x")
    with inbox.open("asked", limit=2) as box:
        waiting = asyncio.create_task(box.get(60))
        await asyncio.sleep(0)
        inbox.fail("gone")
        with pytest.raises(BusError, match="gone"):
            await waiting
    with inbox.open("asked", limit=2) as box:
        inbox.receive(box.subject, "", b"1", {"A": "b"})
        assert await box.get(1) == Answer(b"1", {"A": "b"})


async def test_a_refusal_fails_the_request_it_names() -> None:
    """The server's errors come on their own, in lower case; they name the subject."""
    inbox = Inbox("_INBOX.x")
    with inbox.open("$JS.API.A", limit=2) as one, inbox.open("$JS.API.AB", limit=2) as other:
        inbox.refuse('permissions violation for publish to "$js.api.a"')
        inbox.receive(other.subject, "", b"1", None)
        with pytest.raises(BusError, match="refuses"):
            await one.get(1)
        assert (await other.get(1)).payload == b"1"


@pytest.mark.parametrize(
    ("url", "server", "user", "password", "token"),
    [
        ("nats://h:1", "nats://h:1", None, None, None),
        ("h:1", "nats://h:1", None, None, None),
        (" nats://u:p@h:1", "nats://h:1", "u", "p", None),
        ("tls://u%40x:p%3Aq@h", "tls://h", "u@x", "p:q", None),
        ("nats://secret@h:1", "nats://h:1", None, None, "secret"),
    ],
)
def test_urls(
    url: str, server: str, user: str | None, password: str | None, token: str | None
) -> None:
    """Credentials are taken out of URLs, so that they are not logged and serve all servers."""
    servers, options = link_options([url, "nats://other"], "me", NatsOptions())
    assert servers == [server, "nats://other"]
    assert (options.user, options.password, options.token) == (user, password, token)
    assert (options.tls is not None) == url.startswith("tls")


def test_the_inbox_is_the_users_own() -> None:
    """A user's answers arrive under its name, so that the server can keep others out."""
    _, options = link_options(["nats://sidecar.a:p@h"], "me", NatsOptions())
    assert options.inbox == "_INBOX.sidecar=2Ea"
    assert link_options(["h"], "me", NatsOptions(inbox="_I.x"))[1].inbox == "_I.x"
    anonymous = [link_options(["h"], "me", NatsOptions())[1].inbox for _ in range(2)]
    assert anonymous[0] != anonymous[1]


@pytest.mark.parametrize(
    ("servers", "options", "reason"),
    [
        ([], NatsOptions(), "no NATS server"),
        (["http://h"], NatsOptions(), "not a NATS URL"),
        (["nats://h:99999"], NatsOptions(), "h:99999: Port out of range"),
        (["nats://h:0"], NatsOptions(), "port 0"),
        (["nats://a:b:c"], NatsOptions(), "not a NATS URL"),
        (["nats://[::1"], NatsOptions(), "not a NATS URL"),
        (["nats://u:p@"], NatsOptions(), "must name a host"),
        (["nats://h"], NatsOptions(tls_ca="/nowhere/ca.pem"), "/nowhere/ca.pem"),
        (["nats://h"], NatsOptions(creds="/nowhere/user.creds"), "nkeys|/nowhere/user.creds"),
    ],
)
def test_useless_options_say_so(servers: list[str], options: NatsOptions, reason: str) -> None:
    """Mistakes in the options are found before anything is tried."""
    with pytest.raises(BusError, match=reason):
        link_options(servers, "me", options)
