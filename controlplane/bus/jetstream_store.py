"""Buckets and object stores on JetStream, in the formats that every NATS client reads."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from controlplane.bus.jetstream import (
    ALL,
    LAST_PER_SUBJECT,
    Feed,
    JetStream,
    Message,
)
from controlplane.bus.protocol import (
    BusError,
    ChangeHandler,
    Entry,
    EntryHandler,
    Subscription,
    WrongRevision,
)
from controlplane.bus.view import BucketView

if TYPE_CHECKING:
    from controlplane.bus.nats_bus import NatsBus

log = logging.getLogger(__name__)

_OPERATION = "KV-Operation"
_MARKER = "Nats-Marker-Reason"  # on what the server puts in place of an entry that expired
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_CHUNK_BYTES = 128 * 1024
_READ_ATTEMPTS_MAX = 3


def _is_gone(message: Message) -> bool:
    return message.headers.get(_OPERATION) in ("DEL", "PURGE") or _MARKER in message.headers


class NatsBucket:
    """See `protocol.Bucket`."""

    def __init__(self, bus: NatsBus, name: str) -> None:
        self._bus = bus
        self._js = bus.jetstream
        self._name = name
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."

    async def put(self, key: str, value: bytes) -> int:
        """See `Bucket.put`."""
        return await self._js.store(self._prefix + key, value)

    async def create(self, key: str, value: bytes) -> int:
        """See `Bucket.create`."""
        try:
            return await self.update(key, value, 0)
        except WrongRevision:
            last = await self._js.last(self._stream, self._prefix + key)
            if last is None or not _is_gone(last):
                raise
            return await self.update(key, value, last.seq)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        """See `Bucket.update`."""
        return await self._js.store(self._prefix + key, value, {_EXPECTED: str(revision)})

    async def get(self, key: str) -> Entry | None:
        """See `Bucket.get`."""
        last = await self._js.last(self._stream, self._prefix + key)
        return None if last is None or _is_gone(last) else self.entry(last)

    async def delete(self, key: str, revision: int | None = None) -> None:
        """See `Bucket.delete`."""
        expected = {} if revision is None else {_EXPECTED: str(revision)}
        await self._js.store(self._prefix + key, b"", {_OPERATION: "DEL", **expected})

    async def keys(self) -> list[str]:
        """See `Bucket.keys`."""
        messages = await self._js.read(
            self._stream, f"{self._prefix}>", LAST_PER_SUBJECT, headers_only=True
        )
        latest = {message.subject: message for message in messages}
        live = (message for message in latest.values() if not _is_gone(message))
        return sorted(message.subject[len(self._prefix) :] for message in live)

    async def follow(self, handler: ChangeHandler) -> Subscription:
        """See `Bucket.follow`: the server tells everybody what it stores."""

        def told(subject: str, payload: bytes) -> None:
            if payload:
                handler(subject[len(self._prefix) :], payload)

        return await self._bus.subscribe(f"{self._prefix}>", told)

    async def watch(self, handler: EntryHandler, prefix: str = "") -> NatsWatch:
        """See `Bucket.watch`."""
        filter_subject = f"{self._prefix}{prefix}.>" if prefix else f"{self._prefix}>"
        return NatsWatch(self._bus, self, self._stream, filter_subject, handler)

    def entry(self, message: Message, at_wall_s: float | None = None) -> Entry:
        """Return what a message of the bucket's stream says, as of a moment or as it happens."""
        key = message.subject[len(self._prefix) :]
        if _is_gone(message):
            return Entry(key, None, message.seq, expired=_MARKER in message.headers)
        age_s = 0.0 if at_wall_s is None else max(at_wall_s - message.at_wall_s, 0.0)
        return Entry(key, message.payload, message.seq, age_s=age_s)


class NatsWatch:
    """A running watch; see `protocol.Watch`. It reads a feed, and opens another when that ends."""

    def __init__(
        self,
        bus: NatsBus,
        bucket: NatsBucket,
        stream: str,
        filter_subject: str,
        handler: EntryHandler,
    ) -> None:
        self._bus = bus
        self._bucket = bucket
        self._stream = stream
        self._filter = filter_subject
        self._view = BucketView(lambda entry: bus.guard.call(handler, entry))
        self._synced = asyncio.Event()
        self._task = bus.spawn(self._run())

    async def synced(self, timeout_s: float) -> None:
        """See `Watch.synced`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._synced.wait()
        except TimeoutError:
            raise BusError(f"{self._stream} was not read within {timeout_s} s") from None

    async def stop(self) -> None:
        """See `Subscription.stop`."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        attempt = 0
        while True:
            link = await self._bus.next_link()
            feed = Feed(self._bus.jetstream, link, self._stream, self._filter, LAST_PER_SUBJECT)
            try:
                pending = await feed.open()
                attempt = 0
                await self._follow(feed, pending)
            except BusError as error:
                # A lost connection is told elsewhere; anything else is worth a line, once.
                level = logging.DEBUG if attempt or link.lost.is_set() else logging.WARNING
                log.log(level, "watching %s anew: %s", self._stream, error)
            finally:
                await feed.close()
            await asyncio.sleep(self._bus.pause_s(attempt))
            attempt += 1

    async def _follow(self, feed: Feed, pending: int) -> None:
        self._view.restart()
        whole = False
        while True:
            if not pending and not whole:
                whole = True
                self._view.complete()
                self._synced.set()
            message = await feed.next()
            self._view.feed(self._bucket.entry(message, None if whole else feed.opened_wall_s))
            pending = message.pending


class _Info(msgspec.Struct, frozen=True):
    """What is stored of an object beside its chunks (ADR-20)."""

    name: str
    bucket: str
    nuid: str
    size: int = 0
    chunks: int = 0
    digest: str = ""
    deleted: bool = False
    options: dict[str, Any] = {}


def _decode_info(message: Message) -> _Info:
    try:
        return msgspec.json.decode(message.payload, type=_Info)
    except msgspec.DecodeError as error:
        raise BusError(f"{message.subject} does not describe an object: {error}") from error


class NatsObjects:
    """See `protocol.Objects`."""

    def __init__(self, js: JetStream, name: str) -> None:
        self._js = js
        self._name = name
        self._stream = f"OBJ_{name}"

    async def put(self, name: str, data: bytes) -> None:
        """See `Objects.put`; what is there already is left as it is."""
        digest = await _digest(data)
        before = await self._info(name)
        if before is not None and before.digest == digest and before.size == len(data):
            return
        nuid = secrets.token_hex(11)
        chunks = range(0, len(data), _CHUNK_BYTES)
        try:
            for start in chunks:
                await self._js.store(self._chunks(nuid), data[start : start + _CHUNK_BYTES])
            options = {"max_chunk_size": _CHUNK_BYTES}
            info = _Info(name, self._name, nuid, len(data), len(chunks), digest, options=options)
            await self._write_info(info)
        except BusError:
            await self._purge_quietly(nuid)
            raise
        if before is not None:
            await self._purge_quietly(before.nuid)

    async def get(self, name: str) -> bytes | None:
        """See `Objects.get`."""
        for _ in range(_READ_ATTEMPTS_MAX):
            info = await self._info(name)
            if info is None:
                return None
            if not info.size:
                return b""
            chunks = await self._js.read(self._stream, self._chunks(info.nuid), ALL)
            data = b"".join(chunk.payload for chunk in chunks)
            if await _digest(data) == info.digest:
                return data
            # It was replaced while we read it; the next attempt reads the new one.
        raise BusError(f"object {name} in {self._name} is damaged: its digest does not match")

    async def delete(self, name: str) -> None:
        """See `Objects.delete`."""
        info = await self._info(name)
        if info is not None:
            await self._write_info(msgspec.structs.replace(info, deleted=True, size=0, chunks=0))
            await self._purge_quietly(info.nuid)

    async def names(self) -> list[str]:
        """See `Objects.names`."""
        messages = await self._js.read(self._stream, f"$O.{self._name}.M.>", LAST_PER_SUBJECT)
        infos = [_decode_info(message) for message in messages]
        return sorted({info.name for info in infos if not info.deleted})

    async def _info(self, name: str) -> _Info | None:
        last = await self._js.last(self._stream, self._meta(name))
        info = None if last is None else _decode_info(last)
        return None if info is None or info.deleted else info

    async def _write_info(self, info: _Info) -> None:
        payload = msgspec.json.encode(info)
        await self._js.store(self._meta(info.name), payload, {"Nats-Rollup": "sub"})

    async def _purge_quietly(self, nuid: str) -> None:
        """Remove chunks that nothing refers to: a failure leaves garbage, within the bound."""
        try:
            await self._js.api(f"STREAM.PURGE.{self._stream}", {"filter": self._chunks(nuid)})
        except BusError as error:
            log.warning("old chunks stay in %s: %s", self._stream, error)

    def _meta(self, name: str) -> str:
        return f"$O.{self._name}.M.{base64.urlsafe_b64encode(name.encode()).decode()}"

    def _chunks(self, nuid: str) -> str:
        return f"$O.{self._name}.C.{nuid}"


async def _digest(data: bytes) -> str:
    """Hash without holding up the loop: a tokenizer has megabytes."""
    digest = await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
    return "SHA-256=" + base64.urlsafe_b64encode(digest).decode()
