"""Client and engine joined: bytes through, retries before the first byte, one end to everything."""

from __future__ import annotations

import asyncio

import pytest

from router.http_proxy import Outcome
from router.limits import ServerLimits, UpstreamLimits
from router.upstream_connection import TAIL_BYTES_MAX
from tests.router.fake_engine import DONE, EVENT, USAGE, Behaviour, Mode
from tests.router.http_rig import (
    PROBE,
    SERVER_LIMITS,
    Answer,
    Books,
    CutShort,
    Rig,
    on_uvloop,
    parse_answers,
    request,
    until,
)

STREAM_BODY = b"".join(EVENT % index for index in range(4)) + USAGE % 4 + DONE
QUICK_TIMEOUTS = UpstreamLimits(tick_s=0.01, first_byte_s=0.1, stall_s=0.1, connect_s=0.2)


async def ask(rig: Rig, raw: bytes = b"") -> tuple[Answer, Books]:
    """Forward one request; return the answer and what the observer was told."""
    answers = parse_answers(await rig.talk(raw or request("/v1", b"{}", "Connection: close")))
    assert len(answers) == 1
    await until(lambda: rig.books and rig.books[-1].outcome)
    return answers[0], rig.books[-1]


@on_uvloop
async def test_plain_answer_goes_through() -> None:
    """Status, headers and body are the engine's; the observer hears first byte, attempt, end."""
    async with Rig() as rig:
        answer, books = await ask(rig)
        assert (answer.status, answer.body) == (200, rig.engines[0].behaviour.body)
        assert answer.headers[b"server"] == b"fake"
        assert books.events == ["first_byte", ("attempt", "e0", Outcome.COMPLETED, 200), "end"]
        assert (books.outcome, books.status) == (Outcome.COMPLETED, 200)
        assert books.body_bytes == len(answer.body)
        assert books.tail == answer.body


@on_uvloop
async def test_stream_goes_through_untouched() -> None:
    """Events reach the client as the engine wrote them, unbuffered by anyone on the way."""
    async with Rig(Behaviour(mode=Mode.STREAM)) as rig:
        answer, books = await ask(rig)
        assert answer.body == STREAM_BODY
        assert answer.headers[b"x-accel-buffering"] == b"no"
        assert answer.headers[b"content-type"].startswith(b"text/event-stream")
        assert books.tail.rstrip(b"\r\n") == STREAM_BODY.rstrip(b"\n")


@on_uvloop
async def test_each_event_is_passed_on_at_once() -> None:
    """The client has an event before the engine writes the next one, and the first byte is told."""
    async with Rig(Behaviour(mode=Mode.STREAM, gap_s=0.2)) as rig:
        client = await rig.connect()
        client.send(request("/v1"))
        await client.read_until(EVENT % 0)
        assert rig.books[0].events == ["first_byte"]
        assert rig.engines[0].open
        client.abort()


@on_uvloop
async def test_request_body_is_let_go_with_the_first_byte() -> None:
    """A long answer does not hold a long prompt in memory: it cannot be sent again anyway."""
    async with Rig(Behaviour(mode=Mode.STALL)) as rig:
        client = await rig.connect()
        client.send(request("/v1?mode=stall&delay_s=0.05", b"x" * 100_000))
        await until(lambda: rig.server.buffered_bytes)
        await client.read_until(EVENT % 1)
        assert rig.server.buffered_bytes == 0
        (call,) = rig.pool._calls
        assert call.body == b""
        client.abort()


@on_uvloop
async def test_http10_client_gets_plain_content() -> None:
    """A client that knows no chunks gets their content and the connection's end."""
    async with Rig(Behaviour(mode=Mode.STREAM)) as rig:
        answer, books = await ask(rig, b"GET /v1 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert answer.body == STREAM_BODY
        assert b"transfer-encoding" not in answer.headers
        assert books.tail.rstrip() == STREAM_BODY.rstrip()


@on_uvloop
async def test_body_that_only_the_end_ends() -> None:
    """A close-delimited answer is passed on as one, even where the client would keep alive."""
    async with Rig(Behaviour(mode=Mode.CLOSE_DELIMITED)) as rig:
        answer, books = await ask(rig, request("/v1", b"{}"))
        assert answer.body == rig.engines[0].behaviour.body
        assert answer.headers[b"connection"] == b"close"
        assert books.outcome == Outcome.COMPLETED


@pytest.mark.parametrize(
    ("raw", "length"),
    [
        (b"HTTP/1.1 204 No\r\n\r\n", None),
        (b"HTTP/1.1 304 No\r\nContent-Length: 7\r\n\r\n", b"7"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"0"),
    ],
)
@on_uvloop
async def test_answers_without_a_body(raw: bytes, length: bytes | None) -> None:
    """An answer without a body is complete with its head, and has no first byte."""
    async with Rig(Behaviour(mode=Mode.RAW, raw=raw)) as rig:
        answers = parse_answers(await rig.talk(request("/v1") + PROBE))
        assert [answer.status for answer in answers] == [int(raw[9:12]), 200]
        assert answers[0].headers.get(b"content-length") == length
        assert "first_byte" not in rig.books[0].events


@on_uvloop
async def test_what_the_engine_is_sent() -> None:
    """Hop-by-hop headers end here, end-to-end ones go on, a chunked body gets a length."""
    async with Rig(Behaviour(mode=Mode.ECHO)) as rig:
        raw = (
            b"POST /v1?mode=echo&x=%20 HTTP/1.1\r\nHost: public.example\r\n"
            b"Authorization: Bearer secret\r\ntraceparent: 00-ab-cd-01\r\nX-Custom: 1\r\n"
            b"X-Custom: 2\r\nConnection: close, X-Private\r\nX-Private: 1\r\nKeep-Alive: 5\r\n"
            b"TE: trailers\r\nTrailer: X\r\nProxy-Authorization: x\r\nProxy-Connection: close\r\n"
            b"Upgrade: h2c\r\nHTTP2-Settings: x\r\nExpect: 100-continue\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX: y\r\n\r\n"
        )
        answer, _ = await ask(rig, raw)
        head, _, body = answer.body.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0] == b"POST /v1?mode=echo&x=%20 HTTP/1.1"
        assert body == b"ab"
        assert sorted(line for line in lines[1:] if not line.startswith(b"x-request-id")) == [
            b"Authorization: Bearer secret",
            b"X-Custom: 1",
            b"X-Custom: 2",
            b"content-length: 2",
            b"host: 127.0.0.1:%d" % rig.engines[0].port,
            b"traceparent: 00-ab-cd-01",
        ]


@on_uvloop
async def test_what_the_client_is_sent() -> None:
    """The engine's hop-by-hop headers end here; everything else is passed on, repeats too."""
    raw = (
        b"HTTP/1.1 200 Fine\r\nSet-Cookie: a\r\nX-Request-Id: engine\r\nKeep-Alive: 5\r\n"
        b"Connection: keep-alive, X-Private\r\nX-Private: 1\r\nContent-Length: 2\r\n\r\nok"
    )
    async with Rig(Behaviour(mode=Mode.RAW, raw=raw)) as rig:
        rig.forward_options = {"response_lines": b"x-instance: e0\r\n"}
        sent = await rig.talk(request("/v1", b"", "Connection: close"))
        assert sent.startswith(b"HTTP/1.1 200 Fine\r\n")
        assert parse_answers(sent)[0].headers == {
            b"set-cookie": b"a",
            b"x-request-id": b"engine",
            b"x-instance": b"e0",
            b"content-length": b"2",
            b"connection": b"close",
        }


@on_uvloop
async def test_request_can_be_changed_on_the_way() -> None:
    """The service may send another body and add or drop header lines."""
    async with Rig(Behaviour(mode=Mode.ECHO), dropped_headers=frozenset({b"x-rank"})) as rig:
        rig.forward_options = {"body": b"other", "request_lines": b"x-added: 1\r\n"}
        answer, _ = await ask(rig, request("/v1", b"body", "X-Rank: 9", "Connection: close"))
        assert answer.body.endswith(b"\r\n\r\nother")
        assert b"content-length: 5\r\n" in answer.body
        assert b"x-added: 1\r\n" in answer.body
        assert b"x-rank" not in answer.body


@on_uvloop
async def test_large_answers_keep_only_their_tail() -> None:
    """Of a large body the observer gets the last bytes, whatever the reads were."""
    body = b"".join(b"%07d " % index for index in range(200_000))
    async with Rig(Behaviour(body=body)) as rig:
        answer, books = await ask(rig)
        assert answer.body == body
        assert (books.body_bytes, books.tail) == (len(body), body[-TAIL_BYTES_MAX:])


@on_uvloop
async def test_long_streams_keep_their_usage_event() -> None:
    """After thousands of events the tail still holds the last ones, chunk framing removed."""
    async with Rig(Behaviour(mode=Mode.STREAM, chunks=3000)) as rig:
        _, books = await ask(rig)
        assert len(books.tail) <= TAIL_BYTES_MAX
        assert books.tail.rstrip(b"\r\n").endswith((USAGE % 3000 + DONE).rstrip(b"\n"))
        assert books.tail.count(EVENT % 2990) == 1


# What the first engine does, and what the observer is told of that attempt.
RETRIED = {
    "dies before the head": (Behaviour(mode=Mode.DIE_BEFORE_HEAD), "reset_before_first_byte", 0),
    "dies after the head": (Behaviour(mode=Mode.DIE_AFTER_HEAD), "reset_before_first_byte", 200),
    "never answers": (Behaviour(mode=Mode.NEVER), "first_byte_timeout", 0),
    "sends a head only": (Behaviour(mode=Mode.HEAD_ONLY), "first_byte_timeout", 200),
    "500": (Behaviour(status=500), "status_5xx", 500),
    "503": (Behaviour(status=503), "status_5xx", 503),
}


@pytest.mark.parametrize(("first", "outcome", "status"), RETRIED.values(), ids=RETRIED.keys())
@on_uvloop
async def test_failures_before_the_first_byte_are_made_good(
    first: Behaviour, outcome: str, status: int
) -> None:
    """Another instance answers, and the client never learns of the first."""
    async with Rig(first, Behaviour(), upstream=QUICK_TIMEOUTS) as rig:
        answer, books = await ask(rig)
        assert (answer.status, answer.body) == (200, rig.engines[1].behaviour.body)
        assert books.asked == [(1, outcome)]
        assert books.events == [
            ("attempt", "e0", outcome, status),
            "first_byte",
            ("attempt", "e1", Outcome.COMPLETED, 200),
            "end",
        ]
        assert rig.engines[1].received[0].body == b"{}"


@on_uvloop
async def test_unreachable_instance_is_made_good() -> None:
    """A refused connection goes on to another instance."""
    async with Rig(Behaviour(), Behaviour()) as rig:
        await rig.engines[0].stop()
        answer, books = await ask(rig)
        assert answer.status == 200
        assert books.asked == [(0, Outcome.CONNECT_FAILED)]


@on_uvloop
async def test_full_instance_is_made_good() -> None:
    """An instance with no connection to spare is no failure of the request."""
    upstream = UpstreamLimits(tick_s=0.01, connections_max=1)
    async with Rig(Behaviour(mode=Mode.NEVER), Behaviour(), upstream=upstream) as rig:
        blocked = await rig.connect()
        blocked.send(request("/v1"))
        await until(lambda: rig.engines[0].requests)
        answer, books = await ask(rig)
        assert answer.status == 200
        assert books.asked == [(0, Outcome.POOL_FULL)]


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
@on_uvloop
async def test_client_errors_pass_through(status: int) -> None:
    """A 4xx is the engine's answer to the client's mistake: passed on, never tried elsewhere."""
    async with Rig(Behaviour(status=status, body=b"no"), Behaviour()) as rig:
        answer, books = await ask(rig)
        assert (answer.status, answer.body) == (status, b"no")
        assert (books.asked, rig.engines[1].requests) == ([], 0)
        assert (books.outcome, books.status) == (Outcome.COMPLETED, status)


@on_uvloop
async def test_two_retries_then_the_fallback_then_no_more() -> None:
    """Four instances are tried at most; the last one's 5xx is what the client gets."""
    async with Rig(*[Behaviour(status=500 + n, body=b"%d" % n) for n in range(6)]) as rig:
        answer, books = await ask(rig)
        assert [attempt for attempt, _ in books.asked] == [1, 2, 3]
        assert [engine.requests for engine in rig.engines] == [1, 1, 1, 1, 0, 0]
        assert (answer.status, answer.body) == (503, b"3")
        assert books.status == 503


@on_uvloop
async def test_instances_that_cannot_be_reached_do_not_count_as_retries() -> None:
    """Nothing was sent to them, so the whole fleet is tried before the client hears of it."""
    behaviours = [Behaviour(status=500), *[Behaviour()] * 7, Behaviour(body=b"here")]
    async with Rig(*behaviours) as rig:
        for engine in rig.engines[1:-1]:
            await engine.stop()
        answer, books = await ask(rig)
        assert (answer.status, answer.body) == (200, b"here")
        assert [attempt for attempt, _ in books.asked] == [1] * 8


@on_uvloop
async def test_looking_for_an_instance_takes_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It counts from the first that refused; after it the client is told, whoever else there is."""
    monkeypatch.setattr("router.http_proxy.CONNECTING_S_MAX", -1.0)
    async with Rig(Behaviour(), Behaviour(), Behaviour()) as rig:
        await rig.engines[0].stop()
        answer, books = await ask(rig)
        assert (answer.status, len(books.asked)) == (200, 1)
        await rig.engines[1].stop()
        answer, books = await ask(rig)
        assert (answer.status, len(books.asked)) == (502, 1)


FINAL = {
    "nobody there": (None, 502, "connect_failed"),
    "dies": (Behaviour(mode=Mode.DIE_BEFORE_HEAD), 502, "reset_before_first_byte"),
    "never answers": (Behaviour(mode=Mode.NEVER), 502, "first_byte_timeout"),
    "garbage": (Behaviour(mode=Mode.RAW, raw=b"SSH-2.0\r\n\r\n"), 502, "bad_response"),
}


@pytest.mark.parametrize(("only", "status", "code"), FINAL.values(), ids=FINAL.keys())
@on_uvloop
async def test_when_nobody_is_left_the_client_is_told(
    only: Behaviour | None, status: int, code: str
) -> None:
    """With nothing more to try: an OpenAI error that says what happened and when to come back."""
    async with Rig(only or Behaviour(), upstream=QUICK_TIMEOUTS) as rig:
        if only is None:
            await rig.engines[0].stop()
        answer, books = await ask(rig)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.error["type"] == "server_error"
        assert answer.headers[b"retry-after"] == b"1"
        assert (books.outcome, books.status, books.body_bytes) == (code, status, 0)


@on_uvloop
async def test_full_everywhere_is_503() -> None:
    """A pool without room is the router's own limit: 503, not the engine's failure."""
    upstream = UpstreamLimits(tick_s=0.01, connections_max=1)
    async with Rig(Behaviour(mode=Mode.NEVER), upstream=upstream) as rig:
        blocked = await rig.connect()
        blocked.send(request("/v1"))
        await until(lambda: rig.engines[0].requests)
        answer, _ = await ask(rig)
        assert (answer.status, answer.error["code"]) == (503, "pool_full")


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [
        (Behaviour(mode=Mode.DIE_MID_STREAM), Outcome.RESET_MID_STREAM),
        (Behaviour(mode=Mode.STALL), Outcome.STALLED),
        (
            Behaviour(
                mode=Mode.RAW,
                raw=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n",
                raw_later=b"zz\r\n",
            ),
            Outcome.BAD_RESPONSE,
        ),
        (
            Behaviour(
                mode=Mode.RAW, raw=b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na", close=True
            ),
            Outcome.RESET_MID_STREAM,
        ),
    ],
    ids=["dies", "stalls", "garbage", "too short"],
)
@on_uvloop
async def test_broken_stream_breaks_visibly(behaviour: Behaviour, outcome: Outcome) -> None:
    """After the first byte nothing is retried, and the client cannot take the rest for an end."""
    async with Rig(behaviour, Behaviour(), upstream=QUICK_TIMEOUTS) as rig:
        raw = await rig.talk(request("/v1"))
        assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
        with pytest.raises(CutShort):
            parse_answers(raw)
        await until(lambda: rig.books[0].outcome)
        assert (rig.books[0].outcome, rig.books[0].asked) == (outcome, [])
        assert rig.books[0].status == 200
        assert rig.engines[1].requests == 0


@on_uvloop
async def test_broken_answer_without_framing_is_reset() -> None:
    """Where only the connection's end ends a body, a cut is a reset and not an end."""
    async with Rig(Behaviour(mode=Mode.STALL), upstream=QUICK_TIMEOUTS) as rig:
        client = await rig.connect()
        client.send(b"GET /v1 HTTP/1.0\r\n\r\n")
        await client.read_until(EVENT % 1)
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(client.reader.read(1000), 5)


@pytest.mark.parametrize("mode", [Mode.NEVER, Mode.HEAD_ONLY, Mode.STALL])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@on_uvloop
async def test_client_that_leaves_stops_the_engine(mode: Mode, version: bytes) -> None:
    """Streamed or not, when the client goes the engine's connection closes at once."""
    limits = ServerLimits(half_close_s=1e-9, tick_s=0.02)
    async with Rig(Behaviour(mode=mode), Behaviour(), server=limits) as rig:
        client = await rig.connect()
        client.send(b"GET /v1 HTTP/%b\r\nHost: t\r\n\r\n" % version)
        await until(lambda: rig.engines[0].requests)
        if mode == Mode.STALL:
            await client.read_until(EVENT % 1)
        client.close()
        await until(lambda: rig.engines[0].aborted == 1)
        books = rig.books[0]
        assert (books.outcome, books.asked) == (Outcome.CLIENT_GONE, [])
        assert books.status == (200 if mode == Mode.STALL else 0)
        assert books.events[-2][:3] == ("attempt", "e0", Outcome.CLIENT_GONE)


@on_uvloop
async def test_client_gone_before_the_decision_costs_no_engine() -> None:
    """A request whose client left while it was queued is ended without being sent."""
    async with Rig() as rig:
        client = await rig.connect()
        client.send(request("/hold"))
        await until(lambda: rig.held)
        client.close()
        await until(lambda: rig.held[0].closed)
        rig.forward(rig.held[0])
        assert rig.books[0].outcome == Outcome.CLIENT_GONE
        assert rig.engines[0].connections == 0


@pytest.mark.slow
@on_uvloop
async def test_client_that_does_not_read_stops_its_engine_only() -> None:
    """Back-pressure reaches the engine, memory stays bounded, and others are not held up."""
    behaviour = Behaviour(mode=Mode.STREAM, chunks=2000, chunk_bytes=50_000)
    limits = ServerLimits(write_stall_s=0.5, tick_s=0.02)
    async with Rig(behaviour, server=limits) as rig:
        lazy = await rig.connect(limit=1024)
        lazy.send(request("/v1"))
        lazy.writer.transport.pause_reading()
        await until(lambda: rig.server._connections)
        connection = next(iter(rig.server._connections))
        await until(lambda: connection._behind)
        assert connection._transport.get_write_buffer_size() < 400_000
        assert next(iter(rig.pool._calls)).paused
        assert (await ask(rig, request("/v1?mode=json", b"", "Connection: close")))[0].status == 200
        await until(lambda: rig.server.stats.write_stalls == 1)
        await until(lambda: rig.engines[0].aborted == 1)
        assert rig.books[0].outcome == Outcome.CLIENT_GONE
        assert rig.books[0].body_bytes < 20_000_000


@pytest.mark.slow
@on_uvloop
async def test_slow_reader_gets_everything() -> None:
    """Pausing and resuming many times loses and repeats nothing."""
    behaviour = Behaviour(mode=Mode.STREAM, chunks=300, chunk_bytes=20_000)
    limits = ServerLimits(write_buffer_bytes=5000, tick_s=0.02)
    async with Rig(behaviour, server=limits) as rig:
        client = await rig.connect(limit=1024)
        client.send(request("/v1", b"", "Connection: close"))
        parts = []
        while part := await client.reader.read(50_000):
            parts.append(part)
            await asyncio.sleep(0)
        (answer,) = parse_answers(b"".join(parts))
        padding = b"x" * 20_000
        events = b"".join(EVENT % index + padding for index in range(300))
        assert answer.body == events + USAGE % 300 + DONE


@on_uvloop
async def test_faults_of_the_service_do_not_cost_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An observer or a chooser that raises is logged; the client is answered all the same."""

    class Faulty(Books):
        def next_upstream(self, attempt: int, reason: Outcome) -> str:
            raise LookupError("no choice")

        def on_first_byte(self, now_s: float) -> None:
            raise LookupError("no first byte")

        def on_attempt_end(self, *_: object) -> None:
            raise LookupError("no attempt")

    async with Rig(Behaviour(status=500, body=b"broken"), server=SERVER_LIMITS) as rig:
        client = await rig.connect()
        client.send(request("/hold", b"", "Connection: close"))
        await until(lambda: rig.held)
        books = Faulty([])
        rig.forwarder.forward(rig.held[0], "e0", books.next_upstream, books)
        (answer,) = parse_answers(await client.read_all())
        assert (answer.status, answer.body) == (500, b"broken")
        assert books.events == ["end"]
        for fault in ("no choice", "no first byte", "no attempt"):
            assert fault in caplog.text
