"""A whole router on a bus in memory, in front of fake engines, for tests of the service."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import msgspec

from controlplane.bus import MemoryBroker
from controlplane.bus.memory_bus import MemoryBus
from controlplane.core.plane import PlaneConfig
from controlplane.http_client import HttpClient, HttpError
from lab.tiny_model import tiny_model_dir
from router.config import RouterConfig
from router.limits import ServerLimits, UpstreamLimits
from router.main import RouterProcess
from schemas import subjects
from schemas.bus import InstanceRecord, KvBatch, ModelCard, RouteBatch, RouteEvent, decode_route
from schemas.codec import encode
from tests.core.plane_helpers import BLOCK, Publisher
from tests.router.fake_engine import Behaviour, FakeEngine

DEADLINE_S = 10.0
MODEL = "tiny"


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds; fail when it does not in time."""
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"still waiting for {condition}"
        await asyncio.sleep(0.005)


def tiny_card() -> ModelCard:
    """Return the packaged tiny model's card."""
    folder = tiny_model_dir()
    config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes())
    special = {key: config[key] for key in ("eos_token", "pad_token") if key in config}
    return ModelCard(
        MODEL,
        (folder / "tokenizer.json").read_bytes(),
        (folder / "chat_template.jinja").read_text(),
        special,
        block_size=BLOCK,
        max_model_len=4096,
        tokenizer_config=config,
    )


class ServiceRig:
    """Use as an async context manager; `instance` adds engines to it.

    Args:
        settings: of the router process, beyond the rig's own.
        broker: of another rig, to be another router of the same plane.
        plane: how it decides.

    Attributes:
        events: what the router told on the route subject, in order.
        publishers: a block stream for each instance.
    """

    def __init__(
        self,
        settings: dict[str, Any] | None = None,
        *,
        broker: MemoryBroker | None = None,
        **plane: Any,
    ) -> None:
        self.settings = settings or {}
        self.broker = broker or MemoryBroker()
        self.bus: MemoryBus = self.broker.bus()
        self.plane = PlaneConfig(**plane)
        self.events: list[RouteEvent] = []
        self.engines: dict[str, FakeEngine] = {}
        self.publishers: dict[str, Publisher] = {}
        self.http = HttpClient(timeout_s=20.0)
        self._card = ""

    async def __aenter__(self) -> Self:
        config = RouterConfig(
            bus_url="memory://",
            port=0,
            admin_port=0,
            plane=self.plane,
            server=ServerLimits(tick_s=0.05),
            upstream=UpstreamLimits(tick_s=0.05),
            stop_grace_s=1.0,
            tick_s=0.02,
            **self.settings,
        )
        self.process = RouterProcess(config, self.broker.bus())
        await self.process.start()
        await self.bus.subscribe(subjects.all_of("route"), self._told)
        await self.http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.http.__aexit__(kind, error, trace)
        await self.process.stop()
        for engine in self.engines.values():
            await engine.stop()

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return "http://{}:{}".format(*self.process.address)

    @property
    def admin(self) -> str:
        """Base URL for operators."""
        return "http://{}:{}".format(*self.process.admin_address)

    def _told(self, subject: str, payload: bytes) -> None:
        batch: RouteBatch = decode_route(payload)
        self.events += batch.events

    def of_kind(self, kind: type[RouteEvent]) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    async def card(self) -> str:
        """Upload the tiny model's card once; returns its name."""
        if not self._card:
            objects = await self.bus.objects(subjects.MODELS)
            data = encode(tiny_card())
            self._card = hashlib.sha256(data).hexdigest()
            await objects.put(self._card, data)
        return self._card

    async def swap_card(self, **fields: Any) -> None:
        """Give every instance another card, and wait until it is in use."""
        objects = await self.bus.objects(subjects.MODELS)
        data = encode(msgspec.structs.replace(tiny_card(), **fields))
        digest = hashlib.sha256(data).hexdigest()
        await objects.put(digest, data)
        for instance in list(self.served.plane.fleet):
            await self.put(msgspec.structs.replace(instance.record, card=digest))
        await until(lambda: self.served.card == digest)

    async def instance(
        self, name: str, behaviour: Behaviour | None = None, *, seen: bool = True, **fields: Any
    ) -> FakeEngine:
        """Start a fake engine, register it, publish its empty block set, and wait until seen."""
        engine = FakeEngine(behaviour or Behaviour())
        port = await engine.start()
        self.engines[name] = engine
        defaults = {"epoch": 1, "block_size": BLOCK, "max_model_len": 4096}
        record = InstanceRecord(
            name,
            MODEL,
            f"http://127.0.0.1:{port}",
            **(defaults | {"card": await self.card()} | fields),
        )
        await self.put(record)
        if seen:
            self.publishers[name] = Publisher(name)
            await until(lambda: self.known(name))
            await self.publish(self.publishers[name].batch())
        return engine

    async def put(self, record: InstanceRecord) -> None:
        """Write an instance's record."""
        bucket = await self.bus.bucket(subjects.INSTANCES)
        await bucket.put(subjects.key(record.model, record.instance_id), encode(record))

    async def publish(self, batch: KvBatch) -> None:
        """Publish a batch and wait until the router applied it."""
        self.bus.publish(subjects.kv(MODEL, batch.instance_id), encode(batch))
        instance = self.known(batch.instance_id)
        assert instance is not None
        await until(lambda: instance.follower.position == (batch.epoch, batch.seq))

    def known(self, name: str) -> Any:
        """Return what the router knows of an instance; None if nothing yet."""
        served = self.served
        return None if served is None or not served.card else served.plane.fleet.get(name)

    @property
    def served(self) -> Any:
        """The model as the router holds it; None before an instance has registered."""
        return self.process.router.directory.get(MODEL)

    async def chat(self, text: str, **fields: Any) -> Any:
        """Send a chat through the router; returns the answer."""
        return await self.http.post(f"{self.url}/v1/chat/completions", chat(text, **fields))

    async def refusal(self, path: str, body: Any) -> HttpError:
        """Send what must fail; returns the error."""
        try:
            await self.http.post(self.url + path, body)
        except HttpError as error:
            return error
        raise AssertionError("the request was answered")

    async def explain(self, body: Any) -> Any:
        """Ask how a request would be routed."""
        return await self.http.post(f"{self.admin}/debug/explain", body)

    async def keys(self, text: str) -> list[int]:
        """Return the block hashes that the router computes for a chat."""
        explained = await self.explain(chat(text))
        return [int(key, 16) for key in explained["block_hashes"]]

    def snapshots(self, name: str) -> Callable[[bytes], AsyncIterator[bytes]]:
        """Return a snapshot service over an instance's publisher."""

        async def serve(_: bytes) -> AsyncIterator[bytes]:
            for chunk in self.publishers[name].snapshot(chunks=3):
                yield encode(chunk)

        return serve


def chat(text: str, **fields: Any) -> dict[str, Any]:
    """Return a chat request's body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
