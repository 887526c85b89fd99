"""What recording the candidates of decisions costs a router.

    python -m bench.audit [--json]

For fleets of 16, 256 and 1,024 instances, on content made by `bench.caches`: the CPU time that a
router spends on a request's decision and its books, and on telling both to the bus: decide, book,
first byte, finish, and the encoding of what is told, in batches of a few requests as a busy router
sends them. HTTP and tokenization come on top and are the same in all columns.

Three planes are the same but for what they record of the candidates: nothing, a tenth of the
decisions, all of them. Rounds take turns, and for each plane the least of all rounds counts: what
else the machine does is nobody's.

Exits with 1 if a bar is missed: with 256 instances, all costs at most 1.25 times nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections import deque
from time import thread_time_ns
from typing import Any

import msgspec

from bench.caches import BLOCK_SIZE, FleetCaches, Shape
from controlplane.core.decision import RouteRequest
from controlplane.core.dispatch import Ticket
from controlplane.core.plane import Plane, PlaneConfig
from schemas.bus import InstanceRecord, KvBatch
from schemas.codec import encode

RATIO_MAX = 1.25
BARRED_INSTANCES = 256
SHARES = {"none": 0.0, "sampled": 0.1, "full": 1.0}
PROMPT_TOKENS = 8_192
PROMPTS = 400
RUNNING = 400
"""Requests under way: as many as a decision finds in the books."""
REQUESTS_A_BATCH = 5


class Cell(msgspec.Struct):
    """One fleet size.

    Attributes:
        cpu_us: CPU time a request, by what is recorded.
        nbytes: told to the bus a request, likewise.
        ratio: of `full` over `none`; `ratio_sampled` of `sampled`.
        missed: bars that were missed, in words.
    """

    instances: int
    cpu_us: dict[str, float]
    nbytes: dict[str, float]
    ratio: float
    ratio_sampled: float
    missed: list[str] = []


class Recorder:
    """A plane that records a share of its decisions, under steady load."""

    def __init__(self, caches: FleetCaches, share: float) -> None:
        config = PlaneConfig(audit_candidates=share, route_events_max=100_000)
        self.plane = Plane("m", "router", 1, config)
        self._running: deque[Ticket] = deque()
        self._now_s = 1.0
        batches = [
            KvBatch(f"instance-{number:04d}", 1, 0, 0.0) for number in range(caches.shape.instances)
        ]
        for batch in batches:
            record = InstanceRecord(
                batch.instance_id, "m", "http://h:1", 1, block_size=BLOCK_SIZE, max_num_seqs=256
            )
            self.plane.handle(record, 0.0)
            self.plane.handle(batch, 0.0)
        for stored in caches.stores:
            slots = self.plane.fleet.at(stored.instance).slots
            if not slots:
                slot = self.plane.index.acquire_slot()
                assert slot is not None
                self.plane.index.publish_slot(slot)
                slots[0] = slot
            self.plane.index.store(slots[0], stored.hashes.tobytes())
        for instance in self.plane.fleet:
            self.plane.fleet.refresh(instance, 0.0)

    def serve(self, chains: list[list[int]]) -> tuple[float, float]:
        """Serve a request for each chain; return CPU µs and bytes told, both a request."""
        nbytes = 0
        began = thread_time_ns()
        for number, chain in enumerate(chains):
            self._begin(number, chain)
            if len(self._running) > RUNNING:
                self._end(self._running.popleft())
            if number % REQUESTS_A_BATCH == 0:
                while (batch := self.plane.outbox.take(0.0)) is not None:
                    nbytes += len(encode(batch))
        took_us = (thread_time_ns() - began) / 1e3
        return took_us / len(chains), nbytes / len(chains)

    def _begin(self, number: int, chain: list[int]) -> None:
        self._now_s += 0.001
        requests = self.plane.requests
        asked = RouteRequest(f"request-{number:08d}", PROMPT_TOKENS, chain, BLOCK_SIZE)
        decision = requests.decide(asked, self._now_s)
        assert decision is not None
        ticket = requests.book(decision, self._now_s, 0.0, decide_s=5e-5, tokenize_s=1e-4)
        self._running.append(ticket)

    def _end(self, ticket: Ticket) -> None:
        requests = self.plane.requests
        requests.first_byte(ticket, 0.2)
        requests.finish(
            ticket, "ok", 200, self._now_s, 0.0, cached_tokens=1000, output_tokens=200, ttft_s=0.2
        )


def measure(instances: int, blocks: int, rounds: int) -> Cell:
    """Measure one fleet size."""
    caches = FleetCaches(Shape(instances, blocks, prompt_tokens=(PROMPT_TOKENS,)))
    recorders = {name: Recorder(caches, share) for name, share in SHARES.items()}
    chains = caches.prompts(PROMPT_TOKENS, PROMPTS)
    gc.collect()
    gc.freeze()  # as a router does once its index is filled
    for recorder in recorders.values():
        recorder.serve(chains)
        recorder.serve(chains)
    cpu_us = dict.fromkeys(SHARES, float("inf"))
    nbytes = dict.fromkeys(SHARES, 0.0)
    for _ in range(rounds):
        for name, recorder in recorders.items():
            took_us, nbytes[name] = recorder.serve(chains)
            cpu_us[name] = min(cpu_us[name], took_us)
    gc.unfreeze()
    cell = Cell(
        instances,
        cpu_us,
        nbytes,
        cpu_us["full"] / cpu_us["none"],
        cpu_us["sampled"] / cpu_us["none"],
    )
    cell.missed = missed(cell)
    return cell


def missed(cell: Cell) -> list[str]:
    """Return which bars a cell misses."""
    if cell.instances != BARRED_INSTANCES or cell.ratio <= RATIO_MAX:
        return []
    return [f"full costs {cell.ratio:.2f} × none > {RATIO_MAX}"]


def table(cells: list[Cell]) -> str:
    """Return the results for people."""
    lines = [
        "              CPU µs a request           bytes a request        over none",
        "instances   none  sampled   full     none  sampled   full    sampled   full",
    ]
    for cell in cells:
        times = "  ".join(f"{cell.cpu_us[name]:7.1f}" for name in SHARES)
        sizes = "  ".join(f"{cell.nbytes[name]:6.0f}" for name in SHARES)
        lines.append(
            f"{cell.instances:9} {times}   {sizes}    {cell.ratio_sampled:6.2f} {cell.ratio:6.2f}"
            f"  {'; '.join(cell.missed)}".rstrip()
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.audit", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--instances", type=int, nargs="+", default=[16, 256, 1_024])
    parser.add_argument("--blocks", type=int, default=200_000, help="distinct blocks, roughly")
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args(argv)
    cells = [measure(number, options.blocks, options.rounds) for number in options.instances]
    if options.json:
        about: dict[str, Any] = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cells": msgspec.to_builtins(cells),
        }
        print(json.dumps(about, indent=2))
    else:
        print(table(cells))
    return 1 if any(cell.missed for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
