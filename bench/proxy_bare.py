"""The data plane alone, in turns over the engines: what the router costs before it decides.

python -m bench.proxy_bare --port 8000 --engines 127.0.0.1:8001,127.0.0.1:8002
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from itertools import cycle
from typing import TYPE_CHECKING

import uvloop

from router.http_proxy import Forwarder, Outcome
from router.http_server import HttpServer
from router.upstream import UpstreamPool

if TYPE_CHECKING:
    from collections.abc import Hashable

    from router.http_exchange import Exchange


class _RoundRobin:
    """Sends each request to the next engine; keeps no books."""

    def __init__(self, forwarder: Forwarder, keys: list[str]) -> None:
        self._forwarder = forwarder
        self._turns = cycle(keys)

    def handle(self, exchange: Exchange) -> None:
        self._forwarder.forward(exchange, next(self._turns), self.next_upstream, self)

    def next_upstream(self, attempt: int, reason: Outcome) -> Hashable:
        return next(self._turns)

    def on_first_byte(self, now_s: float) -> None:
        pass

    def on_attempt_end(self, key: Hashable, outcome: Outcome, status: int, now_s: float) -> None:
        pass

    def on_end(
        self, outcome: Outcome, status: int, body_bytes: int, now_s: float, usage_tail: bytes
    ) -> None:
        pass


async def _serve(port: int, engines: list[str]) -> None:
    pool = UpstreamPool()
    for engine in engines:
        host, _, engine_port = engine.rpartition(":")
        pool.put(engine, host, int(engine_port))
    server = HttpServer(_RoundRobin(Forwarder(pool), engines))
    await server.start("127.0.0.1", port, reuse_port=True)
    gc.freeze()
    await asyncio.get_running_loop().create_future()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engines", required=True, help="host:port, separated by commas")
    options = parser.parse_args()
    uvloop.run(_serve(options.port, options.engines.split(",")))


if __name__ == "__main__":
    main()
