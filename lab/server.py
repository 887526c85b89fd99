"""An emulated vLLM server: OpenAI HTTP in front of the emulated engine, KV events beside it.

`python -m lab.server` starts one and prints one JSON line, `Ready`, once it serves. What vLLM's API
process does is here (HTTP, admission limits, errors, disconnects); the engine is in
`lab.server_engine`, the meaning of bodies in `lab.server_api`, the bytes of answers in
`lab.server_reply`.

Beside vLLM's routes: `GET /debug/blocks`, the truth about the prefix cache, and
`POST /debug/fault`, what goes wrong next (`lab.server_faults`).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
import uvloop
from aiohttp import web

from lab import server_pooling
from lab.engine import Engine
from lab.engine_types import block_hash_of
from lab.publisher import Publisher
from lab.server_api import Api, ApiError, Plan, decode
from lab.server_dialects import Dialects
from lab.server_dialogues import MessagesReply, ResponsesReply, messages_error
from lab.server_engine import Generation, Job, LiveEngine
from lab.server_faults import Fault, Faults
from lab.server_metrics import CONTENT_TYPE, ServerMetrics
from lab.server_model import ModelError, ServedModel
from lab.server_options import ServerOptions, parse
from lab.server_reply import Reply, error_body
from schemas.vllm_events import Event, encode_batch

VERSION = "0.32.0+emulated"
BODY_BYTES_MAX = 64 << 20
KEEPALIVE_S = 5.0  # vLLM's default: idle client connections are closed after it

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
AnyReply = Reply | MessagesReply | ResponsesReply


class Ready(msgspec.Struct, frozen=True):
    """What the server says on stdout when it serves; endpoints are None without KV events."""

    url: str
    port: int
    pid: int
    model: str
    block_size: int
    num_blocks: int
    kv_endpoint: str | None
    kv_replay_endpoint: str | None


class EmulatedServer:
    """One emulated engine behind HTTP: `start`, then `stop`."""

    def __init__(self, options: ServerOptions) -> None:
        """Build everything that can fail before a port is taken.

        Raises:
            ValueError: the options contradict each other or the model folder is unusable.
            OSError: a KV port is taken.
        """
        self.options = options
        model = ServedModel(options.model_dir, options.answer_tokens)
        config = options.engine_config(model)
        self.api = Api(model, options.names, options.loras, config.max_model_len)
        self.dialects = Dialects(self.api)
        self.engine = Engine(config)
        self.metrics = ServerMetrics(options.names[0], config)
        self.publisher = _publisher(options)
        self.live = LiveEngine(
            self.engine, self._publish, self.metrics.observe_step, options.stream_interval
        )
        self.faults = Faults()
        self.load = 0
        self._started = int(time.time())
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> Ready:
        """Serve. Raises OSError if the port is taken."""
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=0.5,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.options.host, self.options.port, backlog=1024)
        await site.start()
        self._loop_task = asyncio.create_task(self.live.run())
        host, port = self._runner.addresses[0][:2]
        publisher = self.publisher
        return Ready(
            url=f"http://{host}:{port}",
            port=port,
            pid=os.getpid(),
            model=self.options.names[0],
            block_size=self.engine.config.block_size,
            num_blocks=self.engine.config.num_blocks,
            kv_endpoint=publisher.endpoint if publisher else None,
            kv_replay_endpoint=publisher.replay_endpoint if publisher else None,
        )

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Wait until told to stop; what ends the engine's loop before that is raised."""
        assert self._loop_task is not None
        told = asyncio.create_task(stopping.wait())
        await asyncio.wait({told, self._loop_task}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if self._loop_task.done():
            self._loop_task.result()

    async def stop(self) -> None:
        """Close every socket; requests under way are cut off."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        if self.publisher is not None:
            self.publisher.close()

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._guard])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/v1/messages", self._messages),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.post("/v1/responses", self._responses),
                web.post("/v1/embeddings", self._pooling(server_pooling.embeddings)),
                web.post("/v1/rerank", self._pooling(server_pooling.rerank)),
                web.post("/rerank", self._pooling(server_pooling.rerank)),
                web.post("/v1/score", self._pooling(server_pooling.score)),
                web.post("/score", self._pooling(server_pooling.score)),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/v1/models", self._models),
                web.get("/health", _empty),
                web.route("*", "/ping", _empty),
                web.get("/version", self._version),
                web.get("/load", self._load),
                web.get("/metrics", self._metrics),
                web.get("/kv_event_sources", self._event_sources),
                web.post("/reset_prefix_cache", self._reset),
                web.get("/debug/blocks", self._blocks),
                web.post("/debug/fault", self._fault),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and turn refusals into vLLM's error bodies."""
        if not self._authorized(request):
            return _json({"error": "Unauthorized"}, status=401)
        try:
            return await handler(request)
        except ApiError as error:
            in_form = messages_error if request.path.startswith("/v1/messages") else error_body
            return _bytes(in_form(error), status=error.status)
        except web.HTTPException as error:
            return _json({"detail": error.reason}, status=error.status)

    def _authorized(self, request: web.Request) -> bool:
        key = self.options.api_key
        if key is None or not request.path.startswith(("/v1", "/v2")):
            return True
        return request.headers.get("Authorization") == f"Bearer {key}"

    # --- generation -----------------------------------------------------------------------------

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self.api.plan_chat, "chatcmpl-", Reply)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, self.api.plan_completion, "cmpl-", Reply)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        plan_of = self.dialects.plan_messages
        return await self._generate(request, plan_of, "chatcmpl-", MessagesReply)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        plan_of = self.dialects.plan_responses
        return await self._generate(request, plan_of, "resp_", ResponsesReply)

    async def _generate(
        self,
        request: web.Request,
        plan_of: Callable[[bytes, str | None], Plan],
        prefix: str,
        reply_in: Callable[[Plan, str, int], AnyReply],
    ) -> web.StreamResponse:
        body = await request.read()
        self.load += 1
        job: Job | None = None
        try:
            fault = self.faults.strike()
            await _befall(fault, request)
            plan = plan_of(body, request.headers.get("X-Session-ID"))
            name = f"{prefix}{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"
            job = self._job(plan, name)
            generation = self._submit(job)
            reply = reply_in(plan, name, int(time.time()))
            if plan.stream:
                return await self._stream(request, reply, generation, fault)
            delta = await generation.all()
            return _bytes(reply.whole(delta.cached_tokens))
        finally:
            self.load -= 1
            if job is not None:
                self.live.abort(job.request_id)

    def _job(self, plan: Plan, name: str) -> Job:
        """Return the engine's job for a plan; callers may repeat a request id, the engine not."""
        return Job(
            request_id=f"{name}-{next(self._numbers)}",
            prompt_ids=plan.prompt_ids,
            answer=plan.answer,
            extras=plan.extras,
            lora_id=plan.lora_id,
            session_id=plan.session_id,
            report_hits=plan.report_hits,
        )

    def _submit(self, job: Job) -> Generation:
        limit = self.options.max_num_queued_reqs
        if limit and self.live.unfinished_count >= limit:
            self.metrics.observe_rejection()
            message = f"The engine has {limit} requests and takes no more; try another instance."
            raise ApiError(503, message, "Service Unavailable")
        return self.live.submit(job)

    async def _stream(
        self, request: web.Request, reply: AnyReply, generation: Generation, fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        chunks_left = fault.chunks if fault is not None and fault.kind == "close" else None
        greeting = reply.greeting
        if greeting:
            await response.prepare(request)
            await response.write(greeting)
        delta = await generation.next()
        if not greeting:
            await response.prepare(request)
        opening = reply.opening()
        while True:
            if chunks_left is not None:
                if chunks_left == 0:
                    await _cut(request)
                chunks_left -= 1
            chunk = opening + reply.tokens(delta.new_tokens, delta.finish_reason)
            opening = b""
            if delta.finish_reason is not None:
                await response.write(chunk + reply.closing(delta.cached_tokens))
                await response.write_eof()
                return response
            await response.write(chunk)
            delta = await generation.next()

    # --- the rest -------------------------------------------------------------------------------

    def _pooling(self, answer: Callable[[Api, bytes], dict[str, Any]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            self.load += 1
            try:
                await _befall(self.faults.strike(), request)
                return _json(answer(self.api, body))
            finally:
                self.load -= 1

        return handle

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        return _json(self.dialects.count_tokens(await request.read()))

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        return _json(self.api.tokenize(await request.read()))

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        return _json(self.api.detokenize(await request.read()))

    async def _models(self, _: web.Request) -> web.StreamResponse:
        return _json(self.api.models(self._started))

    async def _version(self, _: web.Request) -> web.StreamResponse:
        return _json({"version": VERSION})

    async def _load(self, _: web.Request) -> web.StreamResponse:
        return _json({"server_load": self.load})

    async def _metrics(self, _: web.Request) -> web.StreamResponse:
        return _bytes(self.metrics.exposition(), content_type=CONTENT_TYPE)

    async def _event_sources(self, _: web.Request) -> web.StreamResponse:
        publisher = self.publisher
        if publisher is None:
            return _json({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": publisher.buffer_steps,
            "topic": publisher.topic,
        }
        return _json({"0": source})

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        forced = request.query.get("reset_running_requests", "").lower() in ("1", "true")
        return _json({"success": self.engine.reset_prefix_cache(preempt_running=forced)})

    async def _blocks(self, _: web.Request) -> web.StreamResponse:
        engine, publisher = self.engine, self.publisher
        names = sorted(engine.pool.cached)
        return _json(
            {
                "engine_hashes": names,
                "block_hashes": sorted(map(block_hash_of, names)),
                "running": engine.running_count,
                "waiting": engine.waiting_count,
                "next_seq": publisher.next_seq if publisher else 0,
            }
        )

    async def _fault(self, request: web.Request) -> web.StreamResponse:
        fault = decode(await request.read(), Fault)
        if fault.kind == "stall":
            self.live.stalled_until_s = time.monotonic() + fault.seconds
        elif fault.kind == "drop_events":
            if self.publisher is not None:
                self.publisher.drop_next(fault.count)
        else:
            self.faults.add(fault)
        return _json({"success": True})

    def _publish(self, events: list[Event]) -> None:
        if self.publisher is not None:
            encoding: Literal["map", "array"] = (
                "array" if self.options.kv_encoding == "array" else "map"
            )
            self.publisher.publish(encode_batch(time.time(), events, 0, encoding))


def _publisher(options: ServerOptions) -> Publisher | None:
    if options.kv_port is None:
        return None
    return Publisher(
        host=options.host,
        port=options.kv_port,
        replay_port=options.kv_replay_port,
        topic=options.kv_topic,
        buffer_steps=options.kv_buffer_steps,
    )


async def _befall(fault: Fault | None, request: web.Request) -> None:
    """Let a fault strike a request before it is read."""
    if fault is None:
        return
    if fault.kind == "error":
        raise ApiError(fault.status, "a fault was asked for", "InternalServerError")
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "close" and fault.chunks == 0:
        await _cut(request)


async def _cut(request: web.Request) -> None:
    """Drop the connection without a goodbye; the handler is cancelled as for a client's hang-up."""
    if request.transport is not None:
        request.transport.abort()
    await asyncio.Event().wait()


async def _empty(_: web.Request) -> web.StreamResponse:
    return web.Response()


def _json(value: Any, status: int = 200) -> web.Response:
    return _bytes(msgspec.json.encode(value), status)


def _bytes(body: bytes, status: int = 200, content_type: str = "application/json") -> web.Response:
    return web.Response(body=body, status=status, headers={"Content-Type": content_type})


async def serve(options: ServerOptions) -> None:
    """Serve until SIGTERM or SIGINT, having printed `Ready` as one JSON line."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    server = EmulatedServer(options)
    ready = await server.start()
    gc.collect()
    gc.freeze()  # what start-up built lives as long as the process
    sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
    sys.stdout.flush()
    try:
        await server.run_until(stopping)
    finally:
        await server.stop()


def main(arguments: list[str]) -> int:
    """Run from the command line, and return the exit status."""
    options = parse(arguments)
    try:
        uvloop.run(serve(options))
    except ModelError as error:
        sys.stderr.write(f"lab.server: --model-dir {error}\n")
        return 2
    except (ValueError, OSError) as error:
        sys.stderr.write(f"lab.server: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
