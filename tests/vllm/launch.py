"""The process that starts vLLM servers and probes, and what starting needs: environment and ports.

`Nursery` is this side of nursery.py, which runs inside vLLM's environment.
"""

import itertools
import json
import os
import random
import re
import socket
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

STOP_S_MAX = 10.0
LOG_TAIL_LINES = 20
LOG_CAUSES_MAX = 5
# Below the kernel's ephemeral range, so that no outgoing connection takes a port meanwhile.
PORTS = range(20_000, 32_000)
PORT_TRIES_MAX = 100

_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_here = Path(__file__).parent

ENVIRONMENT = {
    "PYTHONPATH": str(_here),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache and /collective_rpc
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker runs in the engine's process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


class VllmError(RuntimeError):
    """A server did not start, answer or stop; the message ends with its log's tail."""


class Nursery:
    """The process that starts servers; leaving its context kills all of them."""

    def __init__(self, python: Path, directory: Path) -> None:
        """Starts importing vLLM in the background; the first `launch` waits for it (10 s).

        Args:
            python: The interpreter that tests/vllm_env/build.py prints.
            directory: Where models and logs go.
        """
        self.directory = directory
        self._log = directory / "nursery.log"
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VLLM", "PYTEST"))
        }
        # What vLLM learns about a model class is kept between runs; learning it costs 10 s.
        cache = {"VLLM_CACHE_ROOT": str(python.parents[1].with_suffix(".state"))}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-P", str(_here / "nursery.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                env={**kept, **cache, **ENVIRONMENT},
                text=True,
                start_new_session=True,  # an interrupt at the terminal is for the test run alone
            )
        self._ready = False
        self._names = itertools.count()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Kills every server it started and ends."""
        self.close()

    def close(self) -> None:
        """Kills every server it started and ends; may be called again."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(STOP_S_MAX)

    def new_name(self) -> str:
        """Returns a name for a server's files, unique here."""
        return f"vllm-{next(self._names)}"

    def launch(self, job: dict[str, Any]) -> int:
        """Starts what the job says (see nursery); returns its process id, also its group's.

        Raises:
            VllmError: vLLM cannot be imported.
        """
        if not self._ready:
            self._reply()
            self._ready = True
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._reply()["pid"])

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise VllmError(f"the nursery ended; its log:\n{tail(self._log)}")
        return dict(json.loads(line))


def free_ports(count: int, width: int = 1) -> list[int]:
    """Returns ports that nothing is bound to at the moment, nor to the `width` - 1 after each.

    Raises:
        VllmError: They were not found in a hundred tries a port.
    """
    found: list[int] = []
    chance = random.SystemRandom()
    for _ in range(PORT_TRIES_MAX * count):
        port = chance.choice(PORTS)
        apart = all(abs(port - other) >= width for other in found)
        if apart and all(_is_free(port + i) for i in range(width)):
            found.append(port)
            if len(found) == count:
                return found
    raise VllmError(f"no {count} free ports between {PORTS.start} and {PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True


def tail(log: Path) -> str:
    """Returns what a log says about a failure: its exceptions' last lines, then its own."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines = [line for line in lines if " Route: " not in line]
    causes = [line for line in lines if _EXCEPTION.search(line)][-LOG_CAUSES_MAX:]
    return "\n".join([*causes, "...", *lines[-LOG_TAIL_LINES:]])
