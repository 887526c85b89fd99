"""Several router processes on one port, kept running.

Theory of operation. Each worker is a whole router: they share nothing but the port, and count as
peers of each other on the bus. The supervisor starts them, starts one anew that ends (after a wait
that doubles while it keeps ending soon), replaces them one by one when told to (`renew`: the new
one serves before the old one stops, so no request is lost), and ends them all. If the supervisor
dies, its workers see their standard input end, and stop by themselves.

A worker that cannot serve in the first place ends the supervisor: that is a mistake in the command,
and restarting would hide it. One that only waits for the bus is no such worker, and is waited for.

A worker says that its event loop turns by an empty line now and then (`router.worker`). One that is
silent for `SILENCES_MAX` waits of `SILENCE_S` is stuck: the kernel would go on dealing it its share
of the connections, so it is killed and started anew. Waits are counted rather than time taken,
since after a stall of the whole machine all that was late is due at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Final

import msgspec

from router.config import BEAT, RouterConfig, WorkerOrder, WorkerReady

logger = logging.getLogger(__name__)

SILENCE_S: Final = 10.0
SILENCES_MAX: Final = 3
"""So often may a worker that serves say nothing for `SILENCE_S`."""

STARTING_SILENCES_MAX: Final = 6
"""The same for one that starts: a busy machine takes its time to load a program."""

WAIT_S_MIN: Final = 0.2
WAIT_S_MAX: Final = 10.0
LIVED_LONG_S: Final = 30.0
"""A worker that served so long is started anew with the shortest wait."""

_STOP_MARGIN_S: Final = 10.0
_LINE_BYTES_MAX: Final = 1 << 16


class WorkerError(RuntimeError):
    """A worker ended, or said nothing, instead of serving.

    Attributes:
        status: its exit status; negative if a signal ended it.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Worker:
    """One worker process that serves.

    Attributes:
        ready: what it said of itself.
    """

    def __init__(self, process: asyncio.subprocess.Process, ready: WorkerReady) -> None:
        self.ready = ready
        self._process = process

    @classmethod
    async def start(cls, order: WorkerOrder) -> Worker:
        """Start a process, and return once it serves.

        Raises:
            WorkerError: it does not.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "router.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE_BYTES_MAX,
                pass_fds=(order.stdout,),
                start_new_session=True,  # Ctrl-C is the supervisor's to pass on
            )
        except OSError as error:  # no memory, no descriptors, no more processes
            raise WorkerError(f"no process can be started: {error}", 1) from error
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(order) + b"\n")
            await process.stdin.drain()
            while (line := await _hear(process.stdout, STARTING_SILENCES_MAX)) == BEAT:
                pass
            return cls(process, msgspec.json.decode(line, type=WorkerReady))
        except (TimeoutError, ConnectionError, ValueError, msgspec.DecodeError) as error:
            if process.returncode is None:
                process.kill()
            status = await process.wait()
            raise WorkerError("a worker did not start; its log says why", status) from error
        except BaseException:
            if process.returncode is None:
                process.kill()
            await process.wait()
            raise

    async def lived(self) -> int:
        """Wait for its end, and kill it if it is stuck; returns the exit status."""
        assert self._process.stdout is not None
        try:
            while await _hear(self._process.stdout, SILENCES_MAX):
                pass
        except TimeoutError:
            logger.error("worker %s is stuck, and is killed", self.ready.router_id)
            self._process.kill()
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end; returns the exit status."""
        return await self._process.wait()

    async def stop(self, within_s: float) -> int:
        """Ask it to end, kill it if that takes too long, and return its exit status.

        By the end of its standard input: a signal would be its second, and end it at once, where
        whoever stops the supervisor signals all of its processes, as systemd does.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return await asyncio.wait_for(self.ended(), within_s)
        except TimeoutError:
            logger.error("worker %s does not end, and is killed", self.ready.router_id)
            self._process.kill()
            return await self.ended()


async def _hear(stdout: asyncio.StreamReader, silences_max: int) -> bytes:
    """Return a worker's next line; empty if it has ended.

    Raises:
        TimeoutError: it says nothing for so many waits.
    """
    for _ in range(silences_max):
        try:
            async with asyncio.timeout(SILENCE_S):
                return await stdout.readline()
        except TimeoutError:
            continue
    raise TimeoutError


class Place:
    """A worker's place, which its successors take.

    Attributes:
        number: from 0.
        worker: who is there; None while nobody is.
        restarts: how often a worker had to be started anew.
        changing: held while a successor starts.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: Worker | None = None
        self.restarts = 0
        self.changing = asyncio.Lock()


class Supervisor:
    """Keeps workers running.

    Args:
        config: of every worker; a `router_id` gets the worker's number appended.
        workers: how many.
        log_level: of every worker.

    Attributes:
        places: of the workers.
        started: whether all of them have served.
    """

    def __init__(self, config: RouterConfig, workers: int, log_level: str = "info") -> None:
        self.places = [Place(number) for number in range(workers)]
        self.started = False
        self._config = config
        self._log_level = log_level
        self._stdout = os.dup(sys.stdout.fileno())
        self._keepers: dict[int, asyncio.Task[None]] = {}  # by place
        self._leaving: set[asyncio.Task[int]] = set()
        self._generation = 0

    async def start(self) -> None:
        """Start all workers; returns once they serve.

        Raises:
            WorkerError: one of them does not; the others have been ended.
        """
        filled = await asyncio.gather(*map(self._fill, self.places), return_exceptions=True)
        for failure in filled:
            if failure is not None:
                await self.stop()
                raise failure
        self.started = True
        for place in self.places:
            self._attend(place)

    async def _fill(self, place: Place) -> None:
        """Start a worker at a place."""
        place.worker = await Worker.start(self._order(place))

    async def stop(self) -> None:
        """End all workers, those that have been replaced too."""
        keepers = self._keepers.values()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        for place in self.places:
            if place.worker is not None:
                self._let_go(place.worker)
        await asyncio.gather(*self._leaving)
        os.close(self._stdout)

    def _let_go(self, worker: Worker) -> asyncio.Task[int]:
        """Ask a worker to end; it has time for what it has begun, whoever waits for that."""
        within_s = self._config.stop_grace_s + _STOP_MARGIN_S
        task = asyncio.create_task(worker.stop(within_s))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        return task

    async def renew(self) -> None:
        """Replace every worker by a new one, one after the other, without losing a request."""
        self._generation += 1
        for place in self.places:
            async with place.changing:
                try:
                    successor = await Worker.start(self._order(place))
                except WorkerError as error:
                    logger.error("worker %d stays as it is: %s", place.number, error)
                    continue
                before, place.worker = place.worker, successor
                self._attend(place)
            if before is not None:
                await asyncio.shield(self._let_go(before))
            logger.info("worker %d has been replaced", place.number)

    def _order(self, place: Place) -> WorkerOrder:
        """Return how to run the worker of a place."""
        name = f"{self._config.router_id}-{place.number}" if self._config.router_id else ""
        if name and self._generation:
            name += f".{self._generation}"  # its predecessor still has the other name
        config = msgspec.structs.replace(
            self._config, router_id=name, admin_host="127.0.0.1", admin_port=0, reuse_port=True
        )
        return WorkerOrder(config, self._log_level, self._stdout)

    def _attend(self, place: Place) -> None:
        """Keep the worker that is at a place now running, and no earlier one."""
        keeper = self._keepers.get(place.number)
        if keeper is not None:
            keeper.cancel()
        self._keepers[place.number] = asyncio.create_task(self._keep(place))

    async def _keep(self, place: Place) -> None:
        """Start a worker anew whenever it ends, until cancelled."""
        loop = asyncio.get_running_loop()
        wait_s = WAIT_S_MIN
        while True:
            worker = place.worker
            if worker is not None:
                since_s = loop.time()
                status = await worker.lived()
                if loop.time() - since_s > LIVED_LONG_S:
                    wait_s = WAIT_S_MIN
                logger.error("worker %d ended with status %d", place.number, status)
            async with place.changing:
                place.worker = None
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, WAIT_S_MAX)
                place.restarts += 1
                try:
                    place.worker = await Worker.start(self._order(place))
                except WorkerError as error:
                    logger.error("worker %d: %s", place.number, error)
