"""Mock engines for `bench.proxy`: raw, cheap, and the same for every router under test.

    python -m bench.proxy_engine --engines 2        # prints one port a line, then serves

A completion with `"stream": true` is answered by `max_tokens` server-sent events, `seed`
milliseconds apart (fields that every router passes on, put to our own use); any other request by a
small JSON body. Health checks, model lists and metrics get what routers expect of vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from typing import Final

import uvloop

from router.http_head import HeadError, RequestHead, RequestHeads
from router.http_reader import RequestReader
from router.limits import ServerLimits

MODEL: Final = "bench-model"

_JSON_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)
_SSE_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_CHOICE: Final = b'"index":0,"finish_reason":null,"logprobs":null'
_COMPLETION: Final = (
    b'{"id":"cmpl-0123456789abcdef","object":"text_completion","created":1767225600,'
    b'"model":"bench-model","choices":[{"text":" token",%b}],'
    b'"usage":{"prompt_tokens":512,"completion_tokens":1,"total_tokens":513}}' % _CHOICE
)
_EVENT: Final = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1767225600,'
    b'"model":"bench-model","choices":[{"text":" token",%b}]}\n\n' % _CHOICE
)
_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT)
_LAST: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_MODELS: Final = (
    b'{"object":"list","data":[{"id":"bench-model","object":"model","created":1767225600,'
    b'"owned_by":"vllm","root":"bench-model","max_model_len":131072}]}'
)
_INFO: Final = b'{"model_path":"bench-model","tokenizer_path":"bench-model","version":"0.0"}'
_FIXED: Final = {b"/v1/models": _MODELS, b"/get_server_info": _INFO, b"/get_model_info": _INFO}

_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_CHUNKS: Final = re.compile(rb'"max_tokens"\s*:\s*(\d+)')
_GAP_MS: Final = re.compile(rb'"seed"\s*:\s*(\d+)')


class _Connection(asyncio.Protocol):
    """One connection to an engine; answers one request at a time, in order."""

    _transport: asyncio.Transport

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reader = RequestReader(ServerLimits(), RequestHeads())
        self._chunks_left = 0
        self._gap_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        if not self._chunks_left:
            self._next_request()

    def _next_request(self) -> None:
        try:
            request = self._reader.next()
        except HeadError:  # Such as the preface of HTTP/2, which some routers try first.
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n")
            self._transport.close()
            return
        if request is not None:
            self._answer(*request)

    def _answer(self, head: RequestHead, body: bytes) -> None:
        if head.method != b"POST":
            payload = _FIXED.get(head.target.partition(b"?")[0], b"{}")
            self._transport.write(_JSON_HEAD % (len(payload), payload))
        elif _STREAM.search(body):
            self._chunks_left = _number(_CHUNKS, body, 50)
            self._gap_s = _number(_GAP_MS, body, 5) / 1000
            self._transport.write(_SSE_HEAD)
            self._loop.call_later(self._gap_s, self._send_chunk)
        else:
            self._transport.write(_JSON_HEAD % (len(_COMPLETION), _COMPLETION))

    def _send_chunk(self) -> None:
        if self._transport.is_closing():
            return
        self._chunks_left -= 1
        if self._chunks_left:
            self._transport.write(_CHUNK)
            self._loop.call_later(self._gap_s, self._send_chunk)
        else:
            self._transport.write(_CHUNK + _LAST)
            self._next_request()


def _number(pattern: re.Pattern[bytes], body: bytes, default: int) -> int:
    """Return the number that `pattern` finds in a request body."""
    found = pattern.search(body)
    return int(found[1]) if found else default


async def _serve(engines: int) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(engines):
        server = await loop.create_server(lambda: _Connection(loop), "127.0.0.1", 0, backlog=4096)
        print(server.sockets[0].getsockname()[1], flush=True)
    await loop.create_future()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=2)
    uvloop.run(_serve(parser.parse_args().engines))


if __name__ == "__main__":
    main()
