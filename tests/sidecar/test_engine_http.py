"""The HTTP client against an emulated engine, and against one that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from lab.tiny_model import tiny_model_dir
from sidecar.engine_http import EngineError, EngineHttp, NotAnEngine, Served
from tests.lab.server_helpers import serving
from tests.router.service_rig import ServiceRig


async def test_an_engine_answers_what_a_sidecar_asks() -> None:
    """Health, names, version, sockets, load, metrics and tokens."""
    async with (
        serving(names=["tiny", "alias"], loras=["lo"], api_key="key") as client,
        EngineHttp(client.url + "/", api_key="key") as http,
    ):
        await http.check_health()
        base, alias, lora = await http.models()
        assert base == Served("tiny", str(tiny_model_dir()), None, 4096, "vllm")
        assert (alias.id, lora.id, lora.parent) == ("alias", "lo", "tiny")
        assert "emulated" in await http.version()
        sources = await http.kv_sources()
        assert sources is not None
        assert sources[0].endpoint.startswith("tcp://127.0.0.1:")
        assert await http.server_load() == 0
        page = await http.metrics()
        assert page.caches[0].block_size == 16
        assert page.engines[0].running == 0
        assert await http.tokenize("hello", "tiny")


async def test_a_missing_key_is_said_without_the_key() -> None:
    """The status is in the error, with a hint."""
    async with serving(api_key="key") as client, EngineHttp(client.url) as http:
        with pytest.raises(EngineError, match=r"answered 401 .*key") as caught:
            await http.models()
        assert caught.value.status == 401


async def test_an_engine_that_is_not_there_is_an_error() -> None:
    """The URL is in the message."""
    async with EngineHttp("http://127.0.0.1:9") as http:
        with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/health"):
            await http.check_health()


@pytest.fixture
async def odd() -> AsyncIterator[Callable[[Callable[[], Awaitable[web.Response]]], Awaitable[str]]]:
    """Starts a server that answers everything alike; gives its URL."""
    runners: list[web.AppRunner] = []

    async def start(answer: Callable[[], Awaitable[web.Response]]) -> str:
        async def handle(_: web.Request) -> web.Response:
            return await answer()

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handle)
        runners.append(web.AppRunner(app, access_log=None, handler_cancellation=True))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        host, port = runners[-1].addresses[0][:2]
        return f"http://{host}:{port}"

    yield start
    for runner in runners:
        await runner.cleanup()


async def test_nonsense_is_an_error(
    odd: Callable[[Callable[[], Awaitable[web.Response]]], Awaitable[str]],
) -> None:
    """Whatever a server says, only EngineError comes out."""

    async def empty() -> web.Response:
        return web.Response(body=b'{"data": []}')

    async def garbage() -> web.Response:
        return web.Response(body=b"\xff\xfe")

    async with EngineHttp(await odd(empty)) as http:
        with pytest.raises(EngineError, match="lists no model"):
            await http.models()
        with pytest.raises(EngineError, match="nonsense"):
            await http.server_load()
    async with EngineHttp(await odd(garbage)) as http:
        with pytest.raises(EngineError, match="nonsense"):
            await http.kv_sources()
        assert (await http.metrics()).engines == {}


async def test_a_router_is_no_engine(
    odd: Callable[[Callable[[], Awaitable[web.Response]]], Awaitable[str]],
) -> None:
    """Its header gives it away with the first answer, whatever that is."""

    async def router() -> web.Response:
        return web.Response(status=503, headers={"Server": "multiplane/1.0"})

    async with EngineHttp(await odd(router)) as http:
        with pytest.raises(NotAnEngine, match="is a Multiplane router, not an engine"):
            await http.check_health()


@pytest.mark.slow
async def test_our_own_router_is_known_for_one() -> None:
    """On the port of its clients and on its operators', ready or not."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        for url in (rig.url, rig.admin):
            async with EngineHttp(url) as http:
                for ask in (http.check_health, http.models):
                    with pytest.raises(NotAnEngine, match="is a Multiplane router"):
                        await ask()


async def test_routes_that_older_engines_lack_are_not_errors(
    odd: Callable[[Callable[[], Awaitable[web.Response]]], Awaitable[str]],
) -> None:
    """A missing route says nothing; any other failure is one."""

    async def missing() -> web.Response:
        return web.Response(status=404)

    async def broken() -> web.Response:
        return web.Response(status=500)

    async with EngineHttp(await odd(missing)) as http:
        assert await http.kv_sources() is None
        assert await http.version() == ""
        for ask in (http.models, http.metrics):  # every vLLM has these
            with pytest.raises(NotAnEngine, match="is no vLLM server"):
                await ask()
        with pytest.raises(EngineError, match="answered 404"):
            await http.server_load()
    async with EngineHttp(await odd(broken)) as http:
        with pytest.raises(EngineError, match="answered 500"):
            await http.kv_sources()


async def test_answers_are_bounded_in_time_and_size(
    odd: Callable[[Callable[[], Awaitable[web.Response]]], Awaitable[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent server and an endless page end in an error."""

    async def silent() -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    async def large() -> web.Response:
        return web.Response(body=bytes(5000))

    async with EngineHttp(await odd(silent), timeout_s=0.05) as http:
        with pytest.raises(EngineError, match=r"did not answer within 0.05 s"):
            await http.check_health()
    monkeypatch.setattr("sidecar.engine_http.ANSWER_BYTES_MAX", 4096)
    async with EngineHttp(await odd(large)) as http:
        with pytest.raises(EngineError, match="more than 4096 bytes"):
            await http.check_health()


@pytest.mark.parametrize(
    "body",
    [
        '{"data": [{"id": ""}]}',
        '{"data": [{"id": "%s"}]}' % ("m" * 2000),
        '{"data": [{"id": "m", "max_model_len": 1%s}]}' % ("0" * 30),
        '{"server_load": 1%s}' % ("0" * 30),
        '{"-1": {"endpoint": "tcp://*:5557"}}',
        '{"99999": {"endpoint": "tcp://*:5557"}}',
    ],
)
async def test_what_no_message_could_say_is_nonsense(
    odd: Callable[[Callable[[], Awaitable[web.Response]]], Awaitable[str]], body: str
) -> None:
    """Empty names, numbers without end and ranks that are none cost an error, not the sidecar."""

    async def answer() -> web.Response:
        return web.Response(text=body, content_type="application/json")

    async with EngineHttp(await odd(answer)) as http:
        for ask in (http.models, http.server_load, http.kv_sources):
            with pytest.raises(EngineError, match="nonsense"):
                await ask()
