"""Starts vLLM servers in a second instead of half a minute; runs inside vLLM's environment.

Almost all of a server's start is imports, once in the API process and again in the engine's. This
process imports vLLM once and forks: each server is a fork of it, and its engine a fork of that.
What a server then does is `vllm serve ...`, through vLLM's own command line. The one thing changed
is how its further processes start: vLLM's CPU platform asks multiprocessing for `spawn` and here
gets `fork`, vLLM's default elsewhere. A server asked for as `fresh` is executed anew and differs
in nothing.

Protocol, one JSON object a line. Out, once: `{"ready": true}`. In:

    {"run": "forked" | "fresh", "arguments": [...], "environment": {...}, "log": PATH}
    {"run": "probe", "port": N, "log": PATH}      a scheduler_probe, which connects to that port

Out for each: `{"pid": N}`. Each leads a process group of its own. When standard input ends, all
groups are killed: a test run that dies, however it dies, leaves no server behind.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
from typing import Any

import scheduler_probe
import vllm.entrypoints.cli.main as command_line
import vllm.entrypoints.openai.api_server
import vllm.v1.engine.async_llm
import vllm.v1.engine.coordinator
import vllm.v1.engine.core
import vllm.v1.engine.utils

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Serves jobs until standard input ends, then kills what it started."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to standard output
    starters: tuple[Any, ...] = (vllm.v1.engine.utils, vllm.v1.engine.coordinator)
    for module in starters:
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    # Orphaned engine processes become our children, and dead children vanish without a wait: a
    # process group is empty as soon as its processes are gone.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # the forks share these pages as long as nothing writes to them
    print(json.dumps({"ready": True}), file=replies)
    groups: list[int] = []
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            replies.close()
            become(job)
        os.setpgid(pid, pid)  # here too: the group exists when the answer is sent
        groups = [group for group in groups if signal_group(group, 0)] + [pid]
        print(json.dumps({"pid": pid}), file=replies)
    for group in groups:
        signal_group(group, signal.SIGKILL)


def become(job: dict[str, Any]) -> None:
    """Turns this fresh fork into what the job asks for; does not return."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    {"forked": serve_forked, "fresh": serve_fresh, "probe": run_probe}[job["run"]](job)
    sys.exit(0)


def serve_forked(job: dict[str, Any]) -> None:
    """Runs `vllm serve` in this process."""
    os.environ.update(job["environment"])
    sys.argv = ["vllm", "serve", *job["arguments"]]
    serve: Any = command_line.main
    serve()


def serve_fresh(job: dict[str, Any]) -> None:
    """Replaces this process by a new Python that runs `vllm serve`."""
    os.environ.update(job["environment"])
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
    os.execv(sys.executable, [*command, *job["arguments"]])


def run_probe(job: dict[str, Any]) -> None:
    """Runs a scheduler probe whose standard input and output are a connection to the job's port."""
    with socket.create_connection(("127.0.0.1", job["port"])) as connection:
        os.dup2(connection.fileno(), 0)
        os.dup2(connection.fileno(), 1)
    sys.stdin = os.fdopen(0)
    scheduler_probe.main()


def signal_group(group: int, number: int) -> bool:
    """Sends a signal to a process group and returns whether the group has a process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
