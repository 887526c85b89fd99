"""The engine's HTTP side, as far as a sidecar needs it: every failure one error, all bounded."""

from __future__ import annotations

from types import TracebackType
from typing import Annotated, TypeVar

import aiohttp
import msgspec

from schemas.message import Count
from sidecar.metrics_text import RANKS_MAX, MetricsPage, parse_metrics

T = TypeVar("T")

TOKENIZE = "/tokenize"
ANSWER_BYTES_MAX = 32 * 1024 * 1024
# Names become subjects of the bus, which are neither empty nor of any length.
_NAME_MAX = 1024
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=_NAME_MAX)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
# uvicorn closes idle connections after 5 s; one that is reused just then fails.
_KEEPALIVE_S = 3.0
# How a router of ours begins its `Server` header.
_ROUTER = "multiplane"


class EngineError(Exception):
    """The engine did not answer as it should.

    Attributes:
        status: of its answer; 0 if none came.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotAnEngine(EngineError):
    """Something answers at the engine's URL, and it is no vLLM; says what to do."""


class Served(msgspec.Struct, frozen=True):
    """One entry of `/v1/models`.

    Attributes:
        root: what the engine was started with: a folder, or a name on the hub.
        parent: of an adapter: the model that it adapts.
        owned_by: what serves it: `vllm`.
    """

    id: _Name
    root: str | None = None
    parent: str | None = None
    max_model_len: Count | None = None
    owned_by: str = ""


class KvSource(msgspec.Struct, frozen=True):
    """One rank's entry of `/kv_event_sources`."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    publisher: str | None = "zmq"
    enable_kv_cache_events: bool = True


class _Models(msgspec.Struct):
    data: list[Served]


class _Load(msgspec.Struct):
    server_load: Annotated[int, msgspec.Meta(le=1 << 53)]


class _Version(msgspec.Struct):
    version: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class EngineHttp:
    """A client of one engine; use as an async context manager.

    Args:
        url: base URL.
        api_key: sent as bearer token; never logged.
        timeout_s: for one request, from connecting to the last byte.
    """

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 2.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> EngineHttp:
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=8, keepalive_timeout=_KEEPALIVE_S),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def check_health(self) -> None:
        """Return if `/health` answers 200. Raises EngineError."""
        await self._ask("GET", "/health")

    async def server_load(self) -> int:
        """Return the requests in the API process (`/load`). Raises EngineError."""
        return max(self._read(await self._ask("GET", "/load"), _Load).server_load, 0)

    async def metrics(self) -> MetricsPage:
        """Return what matters of `/metrics`. Raises EngineError."""
        return parse_metrics((await self._ask_vllm("/metrics")).decode(errors="replace"))

    async def models(self) -> list[Served]:
        """Return what `/v1/models` lists, at least one entry. Raises EngineError."""
        served = self._read(await self._ask_vllm("/v1/models"), _Models).data
        if not served:
            raise EngineError(f"{self.url}/v1/models lists no model")
        return served

    async def version(self) -> str:
        """Return the engine's version; empty where it does not say. Raises EngineError."""
        body = await self._ask_if_there("/version")
        return self._read(body, _Version).version if body is not None else ""

    async def kv_sources(self) -> dict[int, KvSource] | None:
        """Return each rank's event sockets; None where the engine has no such route.

        Raises:
            EngineError: it answers something else.
        """
        body = await self._ask_if_there("/kv_event_sources")
        if body is None:
            return None
        return self._read(body, dict[_Rank, KvSource])

    async def tokenize(self, prompt: str, model: str) -> list[int]:
        """Return the engine's token ids of a plain prompt. Raises EngineError."""
        asked = msgspec.json.encode({"model": model, "prompt": prompt})
        return self._read(await self._ask("POST", TOKENIZE, asked), _Tokens).tokens

    async def tokenize_chat(self, messages: list[dict[str, str]], model: str) -> list[int]:
        """Return the engine's token ids of a chat, as it would be answered. Raises EngineError."""
        asked = msgspec.json.encode({"model": model, "messages": messages})
        return self._read(await self._ask("POST", TOKENIZE, asked), _Tokens).tokens

    async def _ask_vllm(self, path: str) -> bytes:
        """Return the body of a GET that every vLLM server answers."""
        body = await self._ask_if_there(path)
        if body is None:
            raise NotAnEngine(
                f"{self.url} is no vLLM server: it has no {path}; give the URL of one with --engine"
            )
        return body

    async def _ask_if_there(self, path: str) -> bytes | None:
        """Return the body of a GET, None for 404."""
        try:
            return await self._ask("GET", path)
        except EngineError as error:
            if error.status == 404:
                return None
            raise

    async def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        assert self._session is not None
        url = f"{self.url}{path}"
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, url, data=data, headers=headers) as answer:
                self._refuse_router(answer)
                body = await self._body(answer)
        except TimeoutError:
            raise EngineError(f"{url} did not answer within {self._timeout.total} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineError(f"{url}: {error}") from error
        if answer.status != 200:
            hint = " (give the engine's key)" if answer.status == 401 else ""
            raise EngineError(f"{url} answered {answer.status}{hint}", answer.status)
        return body

    def _refuse_router(self, answer: aiohttp.ClientResponse) -> None:
        if answer.headers.get("Server", "").lower().startswith(_ROUTER):
            raise NotAnEngine(
                f"{self.url} is a Multiplane router, not an engine: its requests would come back "
                "to it; give the URL of one vLLM server with --engine"
            )

    async def _body(self, answer: aiohttp.ClientResponse) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in answer.content.iter_any():
            size += len(part)
            if size > ANSWER_BYTES_MAX:
                raise EngineError(f"{answer.url} answered more than {ANSWER_BYTES_MAX} bytes")
            parts.append(part)
        return b"".join(parts)

    def _read(self, body: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(body, type=kind, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(f"{self.url} answered nonsense: {error}") from error
