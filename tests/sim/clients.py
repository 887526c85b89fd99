"""Client traffic: chats of several turns that share beginnings, and requests past the routers.

A chat asks a router, waits for the answer, thinks, and asks on with the whole conversation so far.
It may leave early. When its request fails it tries again with another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from controlplane.core.hashing import chain, pack_tokens
from lab.engine_types import Output
from tests.sim.engines import BLOCK, Job
from tests.sim.exchanges import Exchange
from tests.sim.settings import Settings
from tests.sim.world import World

if TYPE_CHECKING:
    from tests.sim.routers import RouterProcess
    from tests.sim.sites import Site

_VOCABULARY = 50_000


class Clients:
    """All the clients.

    Attributes:
        exchanges: every request so far that went to a router.
        ends: how requests ended, counted.
        asking: whether new requests are made.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        routers: Callable[[], list[RouterProcess]],
        sites: Callable[[], list[Site]],
    ) -> None:
        self.world = world
        self.settings = settings
        self.exchanges: list[Exchange] = []
        self.ends: Counter[str] = Counter()
        self.asking = True
        self.foreign: Counter[str] = Counter()
        self._routers = routers
        self._sites = sites
        rng = world.rng
        self.beginnings = [
            self._words(BLOCK * rng.randrange(1, 16) + rng.randrange(BLOCK)) for _ in range(3)
        ]

    def start(self) -> None:
        """Begin to talk."""
        for _ in range(self.settings.chats):
            self.world.after(self.world.rng.uniform(0.0, 0.5), _Chat(self).ask)
        for _ in range(self.settings.foreign):
            self.world.after(self.world.rng.uniform(0.0, 2.0), self._ask_directly)

    def stop(self) -> None:
        """Ask nothing more; what runs may end."""
        self.asking = False

    @property
    def open(self) -> list[Exchange]:
        """Requests that have not ended."""
        return [exchange for exchange in self.exchanges if not exchange.ends]

    def _words(self, count: int) -> list[int]:
        return [self.world.rng.randrange(_VOCABULARY) for _ in range(count)]

    def make_job(self, prompt: list[int]) -> Job:
        """Return a request with an answer of some length."""
        rng = self.world.rng
        number = len(self.exchanges) + self.foreign["made"]
        tokens = 1 if rng.random() < 0.1 else rng.randrange(2, 24)
        if rng.random() < 0.03:
            tokens = 60
        return Job(
            f"r{number}",
            prompt,
            self._words(tokens),
            report_hits=rng.random() < self.settings.reports,
        )

    def ask_at_length(self, count: int) -> None:
        """Ask some new things with long prompts, of long answers: they still run a while later."""
        for _ in range(count):
            room = self.settings.context_tokens
            prompt = self._words(self.world.rng.randrange(1, room // 2))
            self.send(prompt, self._noted, answer_tokens=room // 2)

    def _noted(self, exchange: Exchange) -> None:
        self.ends[exchange.ends[0]] += 1

    def send(
        self,
        prompt: list[int],
        on_end: Callable[[Exchange], None],
        *,
        answer_tokens: int | None = None,
    ) -> bool:
        """Send a request to some router that says it is ready; False if there is none."""
        routers = [router for router in self._routers() if router.ready]
        if not routers:
            return False
        rng = self.world.rng
        job = self.make_job(prompt)
        if answer_tokens is not None:
            job = msgspec.structs.replace(job, answer=self._words(answer_tokens))
        inexact = rng.random() < 0.03
        hashes = [] if inexact else chain(pack_tokens(prompt), BLOCK)
        streamed = rng.random() < self.settings.streamed
        exchange = Exchange(job, hashes, streamed=streamed, on_end=on_end)
        self.exchanges.append(exchange)
        router = rng.choice(routers)
        self.world.after(rng.uniform(0.0001, 0.001), self._deliver, router, exchange)
        if rng.random() < self.settings.cancels:
            self.world.after(rng.expovariate(5.0), self._leave, exchange)
        return True

    def _deliver(self, router: RouterProcess, exchange: Exchange) -> None:
        if router.alive:
            router.serve(exchange)
        else:
            exchange.end("router_died")

    def _leave(self, exchange: Exchange) -> None:
        if self.asking and not exchange.ends and exchange.cancel is not None:
            exchange.cancel()

    # --- requests that no router knows of

    def _ask_directly(self) -> None:
        if not self.asking:
            return
        rng = self.world.rng
        sites = [site for site in self._sites() if site.engine is not None]
        self.world.after(rng.expovariate(0.5), self._ask_directly)
        if not sites:
            return
        engine = rng.choice(sites).engine
        assert engine is not None
        job = self.make_job(self._words(rng.randrange(4, 80)))
        self.foreign["made"] += 1
        job = msgspec.structs.replace(job, job_id=f"foreign-{job.job_id}", foreign=True)
        engine.do(engine.submit, job, _ignore)


class _Chat:
    """One client."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._tokens: list[int] = []
        self._begin()

    def _begin(self) -> None:
        rng = self._clients.world.rng
        beginnings = self._clients.beginnings
        if rng.random() < 0.2:  # a new one that others will share from now on
            beginnings[rng.randrange(3)] = self._clients._words(BLOCK * rng.randrange(1, 16))
        self._tokens = list(rng.choice(beginnings))

    def ask(self) -> None:
        """Say something more."""
        clients = self._clients
        if not clients.asking:
            return
        rng = clients.world.rng
        self._tokens += clients._words(rng.randrange(1, 30))
        if len(self._tokens) + 64 > clients.settings.context_tokens:
            self._begin()
        if not clients.send(list(self._tokens), self._ended):
            clients.world.after(0.1, self.ask)

    def _ended(self, exchange: Exchange) -> None:
        clients = self._clients
        how = exchange.ends[0]
        clients._noted(exchange)
        clients.world.note(f"request {exchange.job.job_id}: {how}")
        if how == "ok":
            self._tokens += exchange.job.answer
        rng = clients.world.rng
        if rng.random() < 0.15:
            self._begin()
        clients.world.after(rng.expovariate(1.0 / clients.settings.think_s), self.ask)


def _ignore(output: Output) -> None:
    """A foreign client's answer is nobody's business here."""
