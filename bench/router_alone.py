r"""A whole router in front of given engines: what `bench.proxy` measures as ours.

    python -m bench.router_alone --bus nats://127.0.0.1:4222 --port 8000 \
        --engines 127.0.0.1:8001,127.0.0.1:8002

Nothing of the request path is left out: prompts are tokenized and hashed, the index holds blocks of
every instance, the policy is `multiplicative`, decisions are told over NATS with all their
candidates, metrics are counted. Only the sidecars are imitated, within this process, which costs it
a heartbeat a second for each instance. The bus is prepared first, so it may be a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
from itertools import islice
from typing import Final

from bench.proxy_engine import MODEL
from controlplane import runtime
from controlplane.bus import connect, setup
from controlplane.bus.layout import layout
from controlplane.bus.protocol import Bus
from controlplane.core.hashing import chain, pack_hashes, pack_tokens
from lab.tiny_model import tiny_model_dir
from router.config import RouterConfig
from router.main import RouterProcess, connect_bus
from schemas import subjects
from schemas.bus import InstanceRecord, KvBatch, KvStored, ModelCard
from schemas.codec import encode

BLOCK_SIZE: Final = 16
CONTEXT_TOKENS: Final = 131_072
BLOCKS: Final = 8192
"""Of each instance: 131,072 cached tokens."""

_PREFIX_BLOCKS: Final = 64
_BEAT_S: Final = 1.0


class Sidecar:
    """Publishes one instance's blocks, and that it lives."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.name = name
        self._bus = bus
        self._seq = -1
        self._count = 0
        self._digest = 0

    def store(self, hashes: list[int]) -> None:
        """Publish new blocks, parents first; none of them is a heartbeat."""
        self._seq += 1
        self._count += len(hashes)
        for block in hashes:
            self._digest ^= block
        ops = [KvStored(pack_hashes(hashes))] if hashes else []
        batch = KvBatch(self.name, 1, self._seq, 0.0, list(ops), self._count, self._digest)
        self._bus.publish(subjects.kv(MODEL, self.name), encode(batch))


def card() -> ModelCard:
    """Return the packaged tiny model's card, under the name that the load asks for."""
    folder = tiny_model_dir()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    return ModelCard(
        MODEL,
        (folder / "tokenizer.json").read_bytes(),
        (folder / "chat_template.jinja").read_text(),
        {key: config[key] for key in ("eos_token", "pad_token") if key in config},
        block_size=BLOCK_SIZE,
        max_model_len=CONTEXT_TOKENS,
        tokenizer_config=config,
    )


async def fill(bus: Bus, process: RouterProcess, engines: list[str]) -> list[Sidecar]:
    """Register the engines, and fill the index with blocks of each."""
    data = encode(card())
    digest = hashlib.sha256(data).hexdigest()
    await (await bus.objects(subjects.MODELS)).put(digest, data)
    bucket = await bus.bucket(subjects.INSTANCES)
    sidecars = []
    for number, engine in enumerate(engines):
        name = f"engine-{number}"
        record = InstanceRecord(
            *(name, MODEL, f"http://{engine}", 1),
            block_size=BLOCK_SIZE,
            max_model_len=CONTEXT_TOKENS,
            card=digest,
        )
        await bucket.put(subjects.key(MODEL, name), encode(record))
        sidecars.append(Sidecar(bus, name))
    chance = random.Random(1)
    for sidecar in sidecars:
        sidecar.store([])
        for _ in range(BLOCKS // _PREFIX_BLOCKS):
            tokens = islice(iter(lambda: chance.randrange(5000), -1), BLOCK_SIZE * _PREFIX_BLOCKS)
            sidecar.store(chain(pack_tokens(list(tokens)), BLOCK_SIZE))
            await asyncio.sleep(0)
    while not await process.events.caught_up(1.0):
        pass
    return sidecars


async def serve(url: str, port: int, engines: list[str], stop: asyncio.Event) -> int:
    """Run until stopped."""
    bus = await connect(url, name="bench-sidecars")
    await setup.ensure(bus, layout(storage="memory"))
    config = RouterConfig(bus_url=url, port=port, admin_port=0)
    process = RouterProcess(config, await connect_bus(config))
    await process.start()
    sidecars = await fill(bus, process, engines)
    runtime.settle_gc()
    while not stop.is_set():
        for sidecar in sidecars:
            sidecar.store([])
        await asyncio.sleep(_BEAT_S)
    await process.stop()
    await bus.close()
    return 0


def main() -> None:
    """Serve until signalled."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bus", required=True, help="URL of the NATS server")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engines", required=True, help="host:port, separated by commas")
    options = parser.parse_args()
    runtime.log_to_stderr("error")
    engines = options.engines.split(",")
    raise SystemExit(runtime.run(lambda stop: serve(options.bus, options.port, engines, stop)))


if __name__ == "__main__":
    main()
