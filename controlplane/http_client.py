"""A small HTTP client for tools: JSON in, JSON out, every failure one error with the URL in it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import aiohttp
import msgspec


class HttpError(Exception):
    """A request did not succeed.

    Attributes:
        status: of the answer; 0 if none came.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class HttpClient:
    """Requests to any URL; use as an async context manager.

    Args:
        timeout_s: for one request, from connecting to the last byte.
        bearer: API key to send; never logged.
    """

    def __init__(self, timeout_s: float = 30.0, bearer: str | None = None) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpClient:
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=self._headers)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, url: str) -> Any:
        """Return the JSON of a GET. Raises HttpError."""
        return await self._ask("GET", url, None)

    async def post(self, url: str, body: Any = None) -> Any:
        """Return the JSON answer to a POST of `body` as JSON. Raises HttpError."""
        return await self._ask("POST", url, {} if body is None else body)

    async def _ask(self, method: str, url: str, body: Any) -> Any:
        assert self._session is not None
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, url, data=data, headers=headers) as answer:
                payload = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise HttpError(f"{method} {url}: {reason}") from error
        if answer.status >= 400:
            raise HttpError(f"{method} {url}: {answer.status} {_reason(payload)}", answer.status)
        if not payload:
            return None
        try:
            return msgspec.json.decode(payload)
        except msgspec.DecodeError as error:
            raise HttpError(f"{method} {url}: the answer is no JSON: {error}") from error


def _reason(payload: bytes) -> str:
    """Return the message of an error answer, in OpenAI's form or any other."""
    try:
        answer = msgspec.json.decode(payload)
        error = answer.get("error", answer)
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (msgspec.DecodeError, AttributeError):
        return payload[:200].decode("utf-8", "replace")
