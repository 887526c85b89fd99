"""The sidecar as a whole, beside an emulated engine, on both buses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from controlplane.bus import NatsBus
from controlplane.bus.embedded import EmbeddedNats
from controlplane.http_client import HttpClient
from lab.engine_types import block_hash_of
from lab.server import EmulatedServer
from lab.server_options import ServerOptions
from lab.tiny_model import tiny_model_dir
from schemas import subjects
from schemas.bus import decode_card
from sidecar.relay import RelayConfig
from tests.bus.worlds import MemoryWorld, NatsWorld, World, fast
from tests.lab.server_helpers import Client, serving
from tests.models.naive_relay import snapshot_sets
from tests.sidecar.service_helpers import Router, eventually, sidecar_of, snapshot_of

pytestmark = pytest.mark.slow


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.live)])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """A bus of the test's own, which it may cut and heal."""
    if request.param == "memory":
        world: World = MemoryWorld()
    else:
        world = NatsWorld(await EmbeddedNats().start(), shared=False)
    yield world
    await world.close()


async def complete(client: Client, prompt: list[int], tokens: int = 20) -> None:
    """Have the engine compute something."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    await client.ok("/v1/completions", body)


async def complete_at(url: str, prompt: list[int]) -> None:
    """Have the engine at a URL compute something."""
    async with HttpClient() as http:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 20, "ignore_eos": True}
        await http.post(f"{url}/v1/completions", body)


def truth(server: EmulatedServer) -> set[int]:
    """The blocks that the engine holds, in our names."""
    return {block_hash_of(name) for name in server.engine.pool.cached}


@pytest.mark.live
async def test_an_empty_server_is_filled() -> None:
    """A sidecar on a server that holds nothing yet creates what the plane needs, and registers."""
    async with EmbeddedNats() as server:
        bus = await NatsBus.connect(server.url, options=fast())
        other = await NatsBus.connect(server.url, options=fast())
        router = Router(other)
        await router.start()
        async with serving(names=["tiny"]) as client, sidecar_of(client.url, bus):
            await eventually(lambda: router.state("i-1") == "ready" and router.records["i-1"].card)
        await bus.close()
        await other.close()


async def test_an_engine_is_registered_and_its_blocks_are_followed(world: World) -> None:
    """Record, card, block stream, snapshot and load agree with the engine, also under eviction."""
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    engine = serving(num_blocks=129, max_model_len=2000, names=["tiny", "alias"], loras=["adapter"])
    async with engine as client, sidecar_of(client.url, bus) as service:
        await eventually(lambda: router.state("i-1") == "ready" and router.records["i-1"].card)
        record = router.records["i-1"]
        assert (record.model, record.aliases, record.loras) == ("tiny", ["alias"], ["adapter"])
        assert (record.url, record.dp_rank, record.kv_events) == (client.url, None, True)
        assert (record.block_size, record.num_blocks, record.max_model_len) == (16, 129, 2000)
        stored = await (await other.objects(subjects.MODELS)).get(record.card)
        assert stored is not None
        card = decode_card(stored)
        assert (card.model, card.block_size, card.max_model_len) == ("tiny", 16, 2000)
        assert card.chat_template
        assert [bool(probe.messages) for probe in card.probes] == [False, True]
        assert all(probe.token_ids for probe in card.probes)

        for start in range(0, 2000, 100):  # over and over what the cache holds
            await complete(client, list(range(start, start + 300)))
        held = truth(client.server)
        assert len(held) > 50
        await eventually(lambda: router.blocks("i-1") == held)
        chunks = await snapshot_of(other, "tiny", "i-1")
        assert snapshot_sets(chunks) == {0: held}
        assert chunks[0].epoch == record.epoch
        feed = service.instances[0].feed
        assert feed is not None
        assert feed.mirror.complete
        feed.mirror.validate()
        feed.relay.validate()

        await eventually(lambda: router.loads["i-1"] and router.loads["i-1"][-1].kv_usage == 0.0)
    assert router.history[0] == ("i-1", "ready")
    await eventually(lambda: router.history[-1] == ("i-1", "deleted"))
    assert [state for _, state in router.history[-3:]] == ["draining", "stopped", "deleted"]


async def test_load_is_reported_while_requests_run(world: World) -> None:
    """Running requests show at once, with rates, and are gone when they end."""
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving(speed=2.0) as client, sidecar_of(client.url, bus):
        await eventually(lambda: router.state("i-1") == "ready")
        running = [asyncio.create_task(complete(client, [n] * 40, tokens=100)) for n in (1, 2, 3)]
        await eventually(lambda: any(load.server_load == 3 for load in router.loads["i-1"]))
        await eventually(lambda: any(load.running == 3 for load in router.loads["i-1"]))
        await asyncio.gather(*running)
        await eventually(lambda: router.loads["i-1"][-1].server_load == 0)
        await eventually(lambda: router.loads["i-1"][-1].running == 0)
        assert any((load.decode_tokens_per_s or 0.0) > 10 for load in router.loads["i-1"])
        seqs = [load.seq for load in router.loads["i-1"]]
        assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))


async def test_lost_events_are_replayed(world: World) -> None:
    """Events that the network lost come from the engine's buffer, also if nothing follows them."""
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving() as client, sidecar_of(client.url, bus, probe_s=0.1) as service:
        await eventually(lambda: router.state("i-1") == "ready")
        publisher = client.server.publisher
        assert publisher is not None
        publisher.drop_next(3)
        for start in range(5):
            await complete(client, list(range(start * 50, start * 50 + 200)))
        await eventually(lambda: router.blocks("i-1") == truth(client.server))
        feed = service.instances[0].feed
        assert feed is not None
        publisher.drop_next(1000)
        await complete(client, list(range(3000, 3200)), tokens=1)
        await eventually(lambda: router.blocks("i-1") == truth(client.server))
        assert feed.counts["missed_live"] > 0
        assert (feed.stream.losses, feed.stream.restarts) == (0, 0)


async def test_a_sidecar_that_starts_late_replays_what_was_before(world: World) -> None:
    """Blocks stored before the sidecar's start are known, if the engine still remembers."""
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving() as client:
        for start in range(5):
            await complete(client, list(range(start * 50, start * 50 + 200)))
        async with sidecar_of(client.url, bus) as service:
            await eventually(lambda: router.state("i-1") == "ready")
            await eventually(lambda: router.blocks("i-1") == truth(client.server))
            assert service.instances[0].feed.mirror.complete  # type: ignore[union-attr]


async def test_a_sidecar_that_starts_too_late_says_so(world: World) -> None:
    """With the engine's buffer wrapped the set is a part of the truth until the cache is reset."""
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving(kv_buffer_steps=2) as client:
        for start in range(5):
            await complete(client, list(range(start * 50, start * 50 + 200)))
        async with sidecar_of(client.url, bus) as service:
            await eventually(lambda: router.state("i-1") == "ready")
            feed = service.instances[0].feed
            assert feed is not None
            assert not feed.mirror.complete
            assert not router.records["i-1"].mirror_complete
            assert router.blocks("i-1") < truth(client.server)
            assert client.server.engine.reset_prefix_cache()
            await complete(client, list(range(200)))
            await eventually(lambda: router.blocks("i-1") == truth(client.server))
            assert feed.mirror.complete
            await eventually(lambda: router.records["i-1"].mirror_complete)


@pytest.mark.live
async def test_why_nothing_can_be_registered_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The bus lacks everything, and the server has no room for it: each reason is logged once."""
    config = tmp_path / "nats.conf"
    config.write_text('jetstream { store_dir: "js", max_file_store: 1M, max_memory_store: 1M }\n')
    async with EmbeddedNats(config=config) as server:
        bus = await NatsBus.connect(server.url, options=fast())
        async with serving(names=["tiny"]) as client, sidecar_of(client.url, bus) as sidecar:
            await eventually(lambda: sidecar.counts["bus_errors"] > 2, within_s=10.0)
        await bus.close()
    said = [record.message for record in caplog.records if "cannot register" in record.message]
    assert len(said) == len(set(said))
    assert all("; nor create what the bus lacks: " in line for line in said)
    assert all("`multiplane bus init` tells what `--size` fits" in line for line in said)


async def test_the_bus_may_be_away(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """While the bus is lost the mirror goes on; afterwards record and snapshot are right again."""
    caplog.set_level(logging.CRITICAL)
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving() as client, sidecar_of(client.url, bus):
        await eventually(lambda: router.state("i-1") == "ready")
        await complete(client, list(range(200)))
        before = router.records["i-1"].seq
        await world.cut()
        await complete(client, list(range(500, 900)))
        await world.heal()
        await eventually(lambda: router.records["i-1"].seq > before, within_s=10.0)
        assert snapshot_sets(await snapshot_of(other, "tiny", "i-1")) == {0: truth(client.server)}


def options(**more: object) -> ServerOptions:
    """Options of an engine that can come back to the same addresses."""
    fields = {"num_blocks": 257, "max_model_len": 4096, "speed": 100.0, **more}
    return ServerOptions(tiny_model_dir(), ["tiny"], **fields)  # type: ignore[arg-type]


async def test_an_engine_that_restarts_begins_a_new_epoch(world: World) -> None:
    """A lost engine's record is stopped; the next process of it begins with nothing cached."""
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    first = EmulatedServer(options())
    ready = await first.start()
    assert ready.kv_endpoint is not None
    assert ready.kv_replay_endpoint is not None
    again = options(
        port=ready.port,
        kv_port=int(ready.kv_endpoint.rpartition(":")[2]),
        kv_replay_port=int(ready.kv_replay_endpoint.rpartition(":")[2]),
    )
    async with sidecar_of(ready.url, bus, http_timeout_s=0.3) as service:
        await eventually(lambda: router.state("i-1") == "ready")
        feed = service.instances[0].feed
        assert feed is not None
        await complete_at(ready.url, list(range(300)))
        await eventually(lambda: router.blocks("i-1") == truth(first) != set())
        epoch = feed.epoch
        await first.stop()
        await eventually(lambda: router.state("i-1") == "stopped")

        second = EmulatedServer(again)
        await second.start()
        await eventually(lambda: router.state("i-1") == "ready")
        await eventually(lambda: router.records["i-1"].epoch > epoch)
        await eventually(lambda: router.blocks("i-1") == set())
        await complete_at(ready.url, list(range(200)))
        await eventually(lambda: router.blocks("i-1") == truth(second) != set())
        assert service.counts["engine_losses"] == 1
        await second.stop()


async def test_an_engine_without_events_is_registered_all_the_same(world: World) -> None:
    """Routers get an instance whose cache is invisible, and its load."""
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving(kv_port=None) as client, sidecar_of(client.url, bus):
        await eventually(lambda: router.state("i-1") == "ready")
        assert not router.records["i-1"].kv_events
        assert router.records["i-1"].block_size == 0
        await eventually(lambda: router.loads["i-1"])
    assert router.batches == {}


async def test_draining_waits_for_running_requests() -> None:
    """A sidecar that is stopped takes its instance out first, and goes when nothing runs."""
    world = MemoryWorld()
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving(speed=1.0) as client:
        async with sidecar_of(client.url, bus):
            await eventually(lambda: router.state("i-1") == "ready")
            running = asyncio.create_task(complete(client, [1] * 40, tokens=60))
            await eventually(lambda: any(load.running for load in router.loads["i-1"]))
        assert running.done()
        assert ("i-1", "draining") in router.history
        await running
    await world.close()


async def test_draining_is_bounded() -> None:
    """After the limit the sidecar goes, whatever still runs."""
    world = MemoryWorld()
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving(speed=0.05) as client:
        async with sidecar_of(client.url, bus, drain_s_max=0.1):
            await eventually(lambda: router.state("i-1") == "ready")
            running = asyncio.create_task(complete(client, [1] * 40, tokens=2000))
            await eventually(lambda: any(load.server_load for load in router.loads["i-1"]))
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await world.close()


async def test_an_engine_that_hangs_is_an_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """It answers health checks and lists its requests, but computes nothing: that is said once."""
    world = MemoryWorld()
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with (
        serving(speed=1.0) as client,
        sidecar_of(client.url, bus, still_s_max=0.3) as service,
    ):
        await eventually(lambda: router.state("i-1") == "ready")
        running = asyncio.create_task(complete(client, [1] * 40, tokens=60))
        await eventually(lambda: any(load.running for load in router.loads["i-1"]))
        await client.ok("/debug/fault", {"kind": "stall", "seconds": 1.5})
        await eventually(lambda: service.counts["engine_stills"] == 1)
        assert "the engine hangs" in caplog.text
        assert router.state("i-1") == "ready", "routers see its batch grow; an operator decides"
        await running
        await eventually(lambda: "the engine computes again" in caplog.text)
        assert service.counts["engine_stills"] == 1
    await world.close()


async def test_an_idle_instance_sends_heartbeats() -> None:
    """Batches without operations and unchanged records show that the sidecar lives."""
    world = MemoryWorld()
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    quick = RelayConfig(heartbeat_s=0.02)
    async with serving() as client, sidecar_of(client.url, bus, relay=quick, heartbeat_s=0.02):
        await eventually(lambda: len(router.batches["i-1"]) > 5)
        await eventually(lambda: router.records["i-1"].seq > 5)
        assert router.blocks("i-1") == set()
    await world.close()


async def test_adapters_loaded_later_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record follows what the engine lists, without a new epoch."""
    monkeypatch.setattr("sidecar.service._NAMES_S", 0.05)
    world = MemoryWorld()
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving(loras=["first"]) as client, sidecar_of(client.url, bus):
        await eventually(lambda: router.state("i-1") == "ready")
        epoch = router.records["i-1"].epoch
        client.server.api.loras.append("second")
        await eventually(lambda: router.records["i-1"].loras == ["first", "second"])
        assert router.records["i-1"].epoch == epoch
    await world.close()


async def test_a_card_that_the_bus_lost_is_uploaded_again() -> None:
    """A server that comes back without its objects gets them again."""
    world = MemoryWorld()
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving() as client, sidecar_of(client.url, bus):
        await eventually(lambda: router.state("i-1") == "ready" and router.records["i-1"].card)
        cards = world.broker.stores[subjects.MODELS]
        await world.cut()
        cards.clear()
        await world.heal()
        await eventually(lambda: cards)
    await world.close()


async def test_two_sidecars_with_one_id_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each names the other one's engine, once; one that comes back by itself is no rival."""
    monkeypatch.setattr("sidecar.service.LOOK_S", 0.05)
    world = MemoryWorld()
    bus, other = await world.bus(), await world.bus()
    async with serving() as client, serving() as second:
        async with sidecar_of(client.url, bus) as service:
            await eventually(lambda: service.counts["records"] > 3)
            assert service.counts["rivals"] == 0
            async with sidecar_of(second.url, other) as rival:
                await eventually(lambda: service.counts["rivals"] and rival.counts["rivals"])
                assert service.contested == rival.contested == {"i-1"}
        said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert any(f"at {second.url}, speaks for i-1 too" in line for line in said)
        assert any("--instance-id" in line for line in said)
        async with sidecar_of(client.url, bus) as service:
            await eventually(lambda: service.counts["records"] > 3)
            assert service.counts["rivals"] == 0
    await world.close()


@pytest.mark.parametrize("server", ["multiplane", "uvicorn"])
async def test_what_is_no_engine_is_not_registered(
    server: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A router, which would get its own requests, and any other OpenAI server: said once."""
    models = {"object": "list", "data": [{"id": "m", "owned_by": "somebody"}]}

    async def answer(asked: web.Request) -> web.Response:
        return web.json_response(models, headers={"Server": server})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    world = MemoryWorld()
    bus = await world.bus()
    async with sidecar_of(f"http://{host}:{port}", bus) as service:
        await eventually(lambda: service.counts["not_an_engine"] > 2)
        assert (service.state, service.instances) == ("starting", [])
        said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(said) == 1
        assert "not registering" in said[0]
        assert "--engine" in said[0]
    assert await (await bus.bucket(subjects.INSTANCES)).keys() == []
    await runner.cleanup()
    await world.close()


async def test_a_router_in_an_engines_place_is_taken_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The port may change hands while the sidecar runs: requests must not run in circles."""
    world = MemoryWorld()
    bus, other = await world.bus(), await world.bus()
    router = Router(other)
    await router.start()
    async with serving() as client, sidecar_of(client.url, bus, health_failures_max=10**6):
        await eventually(lambda: router.state("i-1") == "ready")
        monkeypatch.setattr("sidecar.engine_http._ROUTER", "")  # any server seems to be one
        await eventually(lambda: router.state("i-1") == "stopped")
        monkeypatch.setattr("sidecar.engine_http._ROUTER", "multiplane")
        await eventually(lambda: router.state("i-1") == "ready")
    await world.close()


async def test_an_engine_that_is_not_there_yet_is_waited_for() -> None:
    """Nothing is registered before the engine answers, and a stop does not wait for it."""
    world = MemoryWorld()
    bus = await world.bus()
    async with sidecar_of("http://127.0.0.1:9", bus) as service:
        await eventually(lambda: service.counts["engine_errors"] > 2)
        assert service.state == "starting"
    assert await (await bus.bucket(subjects.INSTANCES)).keys() == []
    await world.close()


async def test_events_that_cannot_be_followed_are_told_now_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The sidecar tries again and again, and says so ever less often; anew when it comes back."""
    caplog.set_level(logging.INFO)
    world = MemoryWorld()
    bus = await world.bus()
    async with serving() as client, sidecar_of(client.url, bus, kv_endpoint="nonsense") as service:
        await eventually(lambda: service.counts["engine_errors"] > 3)
        assert service.state == "starting"
        assert caplog.text.count("engine http") == 1
        assert caplog.text.count("cannot be followed") == 1
        assert caplog.text.count("no replay socket") == 1
        broken = service.config
        service.config = msgspec.structs.replace(broken, kv_endpoint="")
        await eventually(lambda: service.state == "ready")
        service.config = broken
        before = service.counts["engine_errors"]
        service.lose("it starts anew")
        await eventually(lambda: service.counts["engine_errors"] > before)
        assert caplog.text.count("cannot be followed") == 2
    await world.close()
