"""What the chaos tests share: steady traffic, its account, and the comparison with the truth.

A client here retries a request only if no connection could be made, or if a connection that it had
used before turns out to be closed. Whatever else happens to a request is in its `Reply`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from controlplane.http_client import HttpClient, HttpError
from lab.stack import LocalStack

CONVERGED_S_MAX = 3.0
ANSWER_S_MAX = 60.0
_PROBE_CPU_S = 0.02
BROKE = "the connection broke"
CONNECT_S_MAX = 20.0
GROUPS = 10
SHARED_TOKENS = 20 * 16
_POLL_S = 0.05
_numbers = itertools.count()


class Reply(NamedTuple):
    """What became of one request.

    Attributes:
        status: HTTP status; 0 if none came.
        error: what was wrong with the answer; empty if it was whole and the request's own.
        stream: whether the answer was streamed.
        began_s: monotonic, when it was first tried.
        retries: connections that could not be made, or that had been closed while idle.
    """

    number: int
    status: int
    error: str
    stream: bool
    began_s: float
    ended_s: float
    retries: int

    @property
    def ok(self) -> bool:
        """Whether it was answered whole, once, and with its own answer."""
        return self.status == 200 and not self.error

    @property
    def broke(self) -> bool:
        """Whether its connection broke."""
        return self.error.startswith(BROKE)


class _Request(NamedTuple):
    """One completion of token ids."""

    number: int
    prompt: list[int]
    max_tokens: int
    stream: bool

    @property
    def name(self) -> str:
        return f"chaos-{self.number}"

    def encoded(self, *, keep_alive: bool) -> bytes:
        body = msgspec.json.encode(
            {
                "model": "tiny",
                "prompt": self.prompt,
                "max_tokens": self.max_tokens,
                "ignore_eos": True,
                "stream": self.stream,
                **({"stream_options": {"include_usage": True}} if self.stream else {}),
            }
        )
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"
            f"connection: {'keep-alive' if keep_alive else 'close'}\r\n"
            f"x-request-id: {self.name}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def problem(self, body: bytes) -> str:
        """Return what is wrong with an answer to this request; empty if nothing is."""
        try:
            events = _events(body) if self.stream else [msgspec.json.decode(body)]
        except (msgspec.DecodeError, ValueError) as error:
            return f"unreadable answer: {error}"
        if {event["id"] for event in events} != {f"cmpl-{self.name}"}:
            return "somebody else's answer"
        ends = [c["finish_reason"] for event in events for c in event["choices"]]
        if len([end for end in ends if end]) != 1:
            return f"it ended {len([end for end in ends if end])} times"
        usage = events[-1]["usage"]
        counted = (usage["prompt_tokens"], usage["completion_tokens"])
        if counted != (len(self.prompt), self.max_tokens):
            return f"(prompt, answer) has {counted} tokens"
        return ""


def _events(body: bytes) -> list[Any]:
    """Return a stream's events. Raises ValueError unless it ends as it should, once."""
    lines = [line for line in body.split(b"\n\n") if line]
    if lines[-1:] != [b"data: [DONE]"] or b"[DONE]" in b"".join(lines[:-1]):
        raise ValueError(f"no single [DONE] at the end: {body[-80:]!r}")
    return [msgspec.json.decode(line.removeprefix(b"data: ")) for line in lines[:-1]]


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Traffic:
    """Sends requests at a steady rate, over kept and over fresh connections.

    Attributes:
        replies: of the requests that have ended.
    """

    def __init__(self, host: str, port: int, requests_per_s: float, answer_tokens: int) -> None:
        self.replies: list[Reply] = []
        self._address = (host, port)
        self._every_s = 1.0 / requests_per_s
        self._answer_tokens = answer_tokens
        self._rng = random.Random(requests_per_s)
        self._idle: list[Connection] = []
        self._under_way: set[asyncio.Task[None]] = set()
        self._sending = asyncio.create_task(self._send())

    async def stop(self) -> None:
        """Send no more, and wait for every answer."""
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        await asyncio.gather(*self._under_way)
        for _, writer in self._idle:
            writer.close()

    async def answered(self, more: int, within_s: float = 30.0) -> None:
        """Return once so many more requests have been answered well."""
        wanted = sum(reply.ok for reply in self.replies) + more
        await until(lambda: sum(reply.ok for reply in self.replies) >= wanted, within_s, "traffic")

    async def _send(self) -> None:
        due_s = time.monotonic()
        while True:
            task = asyncio.create_task(self._ask(self._request()))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            due_s += self._every_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    def _request(self) -> _Request:
        rng = self._rng
        shared = random.Random(rng.randrange(GROUPS))
        prompt = [shared.randrange(1000, 4000) for _ in range(SHARED_TOKENS)]
        prompt += [rng.randrange(1000, 4000) for _ in range(rng.randrange(20, 80))]
        return _Request(next(_numbers), prompt, self._answer_tokens, rng.random() < 0.5)

    async def _ask(self, request: _Request) -> None:
        """See one request through, and note what became of it."""
        began_s = time.monotonic()
        status, error, retries = 0, "", 0
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                while True:
                    keep_alive = request.number % 2 == 0
                    reused = bool(keep_alive and self._idle)
                    try:
                        connection = self._idle.pop() if reused else await self._connect()
                    except ConnectionError as refused:
                        retries += 1
                        if time.monotonic() - began_s > CONNECT_S_MAX:
                            error = f"no connection: {refused}"
                            break
                        await asyncio.sleep(_POLL_S)
                        continue
                    status, error = await self._exchange(connection, request, keep_alive=keep_alive)
                    if reused and not status:
                        retries += 1
                        continue
                    break
        except TimeoutError:
            error = f"no answer in {ANSWER_S_MAX} s"
        self.replies.append(
            Reply(request.number, status, error, request.stream, began_s, time.monotonic(), retries)
        )

    async def _connect(self) -> Connection:
        return await asyncio.open_connection(*self._address)

    async def _exchange(
        self, connection: Connection, request: _Request, *, keep_alive: bool
    ) -> tuple[int, str]:
        """Send a request and read its answer; returns (status or 0, what is wrong)."""
        reader, writer = connection
        status = 0
        try:
            writer.write(request.encoded(keep_alive=keep_alive))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            body = await _body(reader, head.lower())
        except (asyncio.IncompleteReadError, OSError) as error:
            writer.transport.abort()
            return status, f"{BROKE}: {error!r}"
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        if keep_alive and b"connection: close" not in head.lower() and not reader.at_eof():
            self._idle.append(connection)
        else:
            writer.close()
        return status, request.problem(body) if status == 200 else body[:200].decode()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    """Read a body; raises IncompleteReadError if it breaks off."""
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        return await reader.readexactly(int(length[1]))
    parts = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readexactly(2)
    return b"".join(parts)


def contention() -> float:
    """Return how many times longer than alone everything takes on this machine now; at least 1.

    Deadlines are promises of a machine that has the time to keep them.
    """
    began_s, cpu_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_s < _PROBE_CPU_S:
        pass
    return max((time.perf_counter() - began_s) / _PROBE_CPU_S, 1.0)


class Deadline:
    """A time limit that is longer where the machine is busy, as far as that shows meanwhile."""

    def __init__(self, within_s: float) -> None:
        self._began_s = time.monotonic()
        self._within_s = within_s
        self._worst = 1.0

    @property
    def elapsed_s(self) -> float:
        """How long it has run."""
        return time.monotonic() - self._began_s

    def passed(self) -> bool:
        """Whether it has passed."""
        if self.elapsed_s <= self._within_s:
            return False
        self._worst = max(self._worst, contention())
        return self.elapsed_s > self._within_s * self._worst


async def until(holds: Callable[[], object], within_s: float, what: str) -> None:
    """Wait for a condition; fail if it does not come to hold."""
    deadline = Deadline(within_s)
    while not holds():
        assert not deadline.passed(), f"still waiting for {what}"
        await asyncio.sleep(_POLL_S)


async def eventually(
    look: Callable[[], Awaitable[object]], wanted: object, what: str, within_s: float = 15.0
) -> None:
    """Wait until looking finds what is wanted; fail if that does not come."""
    deadline = Deadline(within_s)
    while (found := await look()) != wanted:
        assert not deadline.passed(), f"{what}: still {found}"
        await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def steady(
    stack: LocalStack,
    *,
    requests_per_s: float = 80.0,
    answer_tokens: int = 8,
    before: int = 50,
    after: int = 100,
    may_fail: Callable[[Reply], bool] = lambda reply: False,
) -> AsyncIterator[Traffic]:
    """Steady traffic around a fault: inject and heal it inside.

    Afterwards every request has been answered, but for those that may fail, and within
    `CONVERGED_S_MAX` of quiet every router knows the truth.

    Args:
        before: good answers before the fault.
        after: good answers after it.
    """
    flow = Traffic(stack.options.host, stack.port, requests_per_s, answer_tokens)
    try:
        await flow.answered(before)
        yield flow
        await flow.answered(after)
    finally:
        await flow.stop()
    wrong = [reply for reply in flow.replies if not (reply.ok or may_fail(reply))]
    assert not wrong, f"{len(wrong)} of {len(flow.replies)}, such as {wrong[:3]}\n{logs(stack)}"
    await agree(stack)


def logs(stack: LocalStack) -> str:
    """Return what routers and sidecars said last."""
    return "\n".join(f"--- {c.name}\n{c.log()}" for c in (*stack.routers, *stack.sidecars))


async def differences(stack: LocalStack, http: HttpClient) -> list[str]:
    """Return in what the routers' indices and ledgers differ from the truth after quiet."""
    found: list[str] = []
    alive = [instance for instance in stack.fleet.instances if instance.running]
    truths = {i.name: set((await http.get(f"{i.url}/debug/blocks"))["block_hashes"]) for i in alive}
    for router in stack.routers:
        if not router.running:
            continue
        admin = f"http://{router.ready['admin']}"
        models = (await http.get(f"{admin}/debug/state"))["models"]
        if list(models) != ["tiny"]:
            found.append(f"{router.name}: knows the models {list(models)}")
            continue
        (state,) = models.values()
        found += [f"{router.name}: {state['tickets']} tickets"] if state["tickets"] else []
        seen = {each["instance"]: each for each in state["instances"]}
        if seen.keys() != truths.keys():
            found.append(f"{router.name}: sees {sorted(seen)}, not {sorted(truths)}")
        for name in seen.keys() & truths.keys():
            row = seen[name]
            where = f"{router.name} of {name}"
            if row["batch_size"] or row["queued_tokens"]:
                found.append(f"{where}: load {row['load']}")
            if row["trust"] != "exact" or row["breaker_open"] or row["state"] != "ready":
                found.append(f"{where}: {row['trust']}, {row['state']}, {row['breaker_open']=}")
            blocks = set((await http.get(f"{admin}/debug/blocks?instance={name}"))["blocks"])
            if blocks != truths[name]:
                more, less = len(blocks - truths[name]), len(truths[name] - blocks)
                found.append(f"{where}: {more} blocks too many, {less} missing")
    return found


async def agree(stack: LocalStack, within_s: float = CONVERGED_S_MAX) -> float:
    """Wait until every router's view equals the truth; returns how long that took.

    Raises:
        AssertionError: that did not happen in time; says what differs, and what was logged.
    """
    deadline = Deadline(within_s)
    async with HttpClient(timeout_s=5.0) as http:
        while True:
            try:
                found = await differences(stack, http)
            except HttpError as error:
                found = [str(error)]
            if not found:
                return deadline.elapsed_s
            if deadline.passed():
                raise AssertionError("\n".join([*found, logs(stack)]))
            await asyncio.sleep(_POLL_S)
