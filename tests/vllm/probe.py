"""Drives vLLM's own scheduler and block pool step by step; scheduler_probe is the other end.

For example:

    with SchedulerProbe(nursery) as probe:
        probe.open(num_blocks=64, block_size=16, max_model_len=512)
        probe.add("a", list(range(40)), max_tokens=4)
        steps = probe.run()
        probe.blocks()
"""

import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from tests.vllm.launch import Nursery

CONNECT_S_MAX = 60.0
ANSWER_S_MAX = 60.0
STEPS_MAX = 10_000


class ProbeError(RuntimeError):
    """The probe refused an operation, or ended."""


class Step(msgspec.Struct, frozen=True):
    """What one step of vLLM's scheduler did.

    Attributes:
        step: Counted from 0 since the engine was opened.
        scheduled: (request id, tokens computed) in the order of the batch.
        preempted: Request ids, sorted.
        sampled: The token of each request that got one.
        cached_tokens: The prefix hit of each request that got its first token.
        finished: The reason of each request that ended.
        events: vLLM's KV events as maps, in order; hashes are the low 64 bits.
        running: Request ids after the step, in order.
        waiting: Request ids after the step, in order.
        free_blocks: Blocks that no request holds, cached ones included.
    """

    step: int
    scheduled: list[tuple[str, int]]
    preempted: list[str]
    sampled: dict[str, int]
    cached_tokens: dict[str, int]
    finished: dict[str, str]
    events: list[dict[str, Any]]
    running: list[str]
    waiting: list[str]
    free_blocks: int


class SchedulerProbe:
    """One process with one engine at a time; `open` replaces it in a few milliseconds."""

    def __init__(self, nursery: Nursery) -> None:
        """Forks the process (the nursery's first start takes 10 s).

        Raises:
            ProbeError: It did not connect.
        """
        log = nursery.directory / f"{nursery.new_name()}-probe.log"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(CONNECT_S_MAX)
            nursery.launch({"run": "probe", "port": listener.getsockname()[1], "log": str(log)})
            try:
                self._socket, _ = listener.accept()
            except TimeoutError as error:
                raise ProbeError(f"the scheduler probe did not start; see {log}") from error
        self._socket.settimeout(ANSWER_S_MAX)
        self._lines = self._socket.makefile("rb")
        self._log = log

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the process."""
        self.close()

    def close(self) -> None:
        """Ends the process: its input ends."""
        self._lines.close()
        self._socket.close()

    def open(self, **limits: int | float | str) -> dict[str, Any]:
        """Makes a new engine and returns its limits (see scheduler_probe for their names)."""
        return self._ask({"op": "open", **limits})

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        seed: str | None = None,
        cache_salt: str | None = None,
        arrival_step: int | None = None,
        report_hits: bool = False,
    ) -> None:
        """Adds a request; its tokens follow token_rule with `seed`, by default the request's id."""
        optional = {
            "seed": seed,
            "cache_salt": cache_salt,
            "arrival_step": arrival_step,
            "report_hits": report_hits,
        }
        request = {"id": request_id, "tokens": list(token_ids), "max_tokens": max_tokens}
        given = {name: value for name, value in optional.items() if value is not None}
        self._ask({"op": "add", **request, **given})

    def step(self) -> Step:
        """Runs one engine step."""
        return msgspec.convert(self._ask({"op": "step"}), Step)

    def run(self, steps_max: int = STEPS_MAX) -> list[Step]:
        """Runs steps until nothing is left to do.

        Raises:
            ProbeError: Work was left after `steps_max` steps.
        """
        answer = self._ask({"op": "run", "steps_max": steps_max})
        steps = []
        while "idle" not in answer:
            steps.append(msgspec.convert(answer, Step))
            answer = self._answer()
        if not answer["idle"]:
            raise ProbeError(f"the engine was still busy after {steps_max} steps")
        return steps

    def abort(self, *request_ids: str) -> None:
        """Aborts requests between two steps."""
        self._ask({"op": "abort", "ids": list(request_ids)})

    def reset_prefix_cache(self, *, running_too: bool = False) -> bool:
        """Resets the prefix cache and returns whether vLLM did it."""
        return bool(self._ask({"op": "reset", "running_too": running_too})["success"])

    def blocks(self) -> dict[int, int]:
        """Returns the true prefix cache: the hash of each full block, and its copies."""
        return dict(self._ask({"op": "blocks"})["blocks"])

    def _ask(self, operation: dict[str, Any]) -> dict[str, Any]:
        self._socket.sendall(msgspec.json.encode(operation) + b"\n")
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            raise ProbeError(f"the scheduler probe ended; see {self._log}")
        answer = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in answer:
            raise ProbeError(answer["error"])
        return answer
