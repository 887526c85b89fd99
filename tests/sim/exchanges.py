"""One client's request as seen from outside, and one attempt of a router at an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from lab.engine_types import Output
from router.http_proxy import Outcome
from tests.sim.engines import EngineProcess, Job
from tests.sim.network import Link

if TYPE_CHECKING:
    from tests.sim.routers import RouterProcess
    from tests.sim.sites import Site

CONNECT_S = 1.0
FIRST_BYTE_S = 4.0
STALL_S = 3.0


class Exchange:
    """A request and how it ended.

    Attributes:
        hashes: block hashes of the prompt; empty where the router cannot know them.
        streamed: whether the answer comes token by token.
        ends: how it ended; a good world lets it end once.
        cancel: tells the router that the client has left; None before it knows of the request.
    """

    def __init__(
        self,
        job: Job,
        hashes: list[int],
        *,
        streamed: bool,
        on_end: Callable[[Exchange], None],
    ) -> None:
        self.job = job
        self.hashes = hashes
        self.streamed = streamed
        self.ends: list[str] = []
        self.cancel: Callable[[], None] | None = None
        self.attempts = 0
        self.answered = 0
        self._on_end = on_end

    def end(self, how: str) -> None:
        """Note an end."""
        self.ends.append(how)
        if len(self.ends) == 1:
            self._on_end(self)


class Sink(msgspec.Struct, frozen=True):
    """Who wants to hear of an attempt.

    Attributes:
        first_byte: the answer begins.
        ended: it is whole; called with its tokens and the prompt tokens that were cached.
        failed: there will be no (more) answer. Of the last two one comes, once and last.
    """

    first_byte: Callable[[], None]
    ended: Callable[[int, int], None]
    failed: Callable[[Outcome, int], None]


class Attempt:
    """One attempt at one engine: a connection, a request on it, and the bytes of the answer."""

    def __init__(
        self,
        router: RouterProcess,
        site: Site | None,
        link: Link,
        job: Job,
        sink: Sink,
        *,
        streamed: bool,
    ) -> None:
        self._router = router
        self._site = site
        self._link = link
        self._job = job
        self._sink = sink
        self._streamed = streamed
        self._engine: EngineProcess | None = None
        self._over = False
        self._connected = False
        self._begun = False
        self._tokens = self._cached = 0
        self._heard = 0

    # --- the router's side

    def send(self) -> None:
        """Connect and send the request."""
        self._router.after(CONNECT_S, self._check_connected)
        self._link.carry_patiently("requests", self._arrive)

    def cancel(self) -> None:
        """Close the connection: nothing more is heard of it."""
        if not self._over:
            self._over = True
            self._link.carry_patiently("requests", self._hung_up)

    def _check_connected(self) -> None:
        if not self._over and not self._connected:
            self._fail(Outcome.CONNECT_FAILED, 0)

    def _check_heard(self, heard: int) -> None:
        if not self._over and heard == self._heard:
            self._fail(Outcome.STALLED if self._begun else Outcome.FIRST_BYTE_TIMEOUT, 0)

    def _wait(self) -> None:
        self._router.after(STALL_S if self._begun else FIRST_BYTE_S, self._check_heard, self._heard)

    def _on_connected(self) -> None:
        if not self._over:
            self._connected = True
            self._wait()

    def _on_output(self, output: Output) -> None:
        if self._over:
            return
        self._heard += 1
        if not self._begun:
            self._begun = True
            self._sink.first_byte()
        if output.finish_reason is None:
            self._wait()
        else:
            self._over = True
            self._sink.ended(self._tokens, self._cached)

    def _on_reset(self) -> None:
        if not self._over:
            begun = self._begun
            self._fail(Outcome.RESET_MID_STREAM if begun else Outcome.RESET_BEFORE_FIRST_BYTE, 0)

    def _on_refused(self, outcome: Outcome, status: int) -> None:
        if not self._over:
            self._fail(outcome, status)

    def _fail(self, outcome: Outcome, status: int) -> None:
        self.cancel()
        self._sink.failed(outcome, status)

    # --- the engine's side

    def _back(self, call: Callable[..., None], *args: object) -> None:
        self._link.carry_patiently("answers", self._router.do, call, *args)

    def _arrive(self) -> None:
        engine = None if self._site is None else self._site.engine
        if engine is None:
            self._back(self._on_refused, Outcome.CONNECT_FAILED, 0)
            return
        self._engine = engine
        engine.accept(self._job.job_id, self._broken)
        self._back(self._on_connected)
        engine.do(self._begin, engine)

    def _begin(self, engine: EngineProcess) -> None:
        if engine.world.chance(engine.refusing):
            self._back(self._on_refused, Outcome.STATUS_5XX, 500)
            return
        engine.submit(self._job, self._output)

    def _output(self, output: Output) -> None:
        self._tokens += output.new_tokens
        self._cached += output.cached_tokens or 0
        if self._streamed or output.finish_reason is not None:
            self._back(self._on_output, output)

    def _broken(self) -> None:
        self._back(self._on_reset)

    def _hung_up(self) -> None:
        if self._engine is not None:
            self._engine.do(self._engine.abort, self._job.job_id)
