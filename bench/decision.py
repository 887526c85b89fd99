"""How long a decision takes: match, score and pick, beside a Rust radix tree's look-up alone.

    python -m bench.decision [--json] [--no-peer]

For fleets of 16, 256 and 1,024 instances and prompts of 1k, 8k and 64k tokens, on content made by
`bench.caches`. What is timed of ours is what the router does per request once the prompt's hash
chain is ready: match the chain against all instances, turn the match into hit tokens by instance,
pass all filters, score and pick. What is timed of the peer is `RadixTree.find_matches` of
ai-dynamo-runtime, called from Python, in the same process, on the same content, with its thread
hop and its conversions, as any Python caller has them. It returns a handle; `.scores` reads the
answer. Both times are reported: the look-up alone, and with its answer in hand. All answers are
compared. Rounds alternate; of each percentile the least of all rounds counts, for both alike: what
else the machine does is neither's.

Exits with 1 if a bar is missed, with 2 if the peer could not be had.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

import msgspec
import numpy as np

from bench import dynamo_env
from bench.caches import BLOCK_SIZE, FleetCaches, Shape, Stored
from controlplane.core.hit_rows import SlotRows
from controlplane.core.index import PrefixIndex, usable_blocks
from controlplane.core.policies import Multiplicative
from controlplane.core.scoring import FleetView, FloatArray, Request, decide

P50_US_MAX = 75.0
P99_US_MAX = 300.0
RATIO_MAX = {16: 1.0, 256: 0.8, 1_024: 0.3}
"""Our p50 over that of the peer's look-up alone, its answer unread, by number of instances."""

BARRED_TOKENS_MIN = 8_192
"""Shorter prompts are measured but have no bars."""

ROUNDS = 24
PROMPTS = 300


class Cell(msgspec.Struct):
    """One fleet size and one prompt length.

    Attributes:
        drops: median number of depths at which instances drop out of a match.
        peer_p50_us: the peer's look-up alone.
        peer_read_p50_us: the peer's look-up with its answer read.
        ratio: our p50 over `peer_read_p50_us`.
        ratio_alone: our p50 over `peer_p50_us`.
        missed: bars that were missed, in words.
    """

    instances: int
    prompt_tokens: int
    distinct_blocks: int
    drops: float
    p50_us: float
    p99_us: float
    peer_p50_us: float | None = None
    peer_p99_us: float | None = None
    peer_read_p50_us: float | None = None
    ratio: float | None = None
    ratio_alone: float | None = None
    missed: list[str] = []


class Tree(Protocol):
    """What is used of the peer's class."""

    def apply_event(self, worker_id: int, kv_cache_event_bytes: bytes) -> None:
        """Store or remove blocks; positional arguments."""

    def find_matches(self, sequence: list[int]) -> Any:
        """Return an object whose `scores` maps (instance, rank) to a number of blocks."""


class Ours:
    """The production functions, with the state a router would keep for them."""

    def __init__(self, instances: int, stores: list[Stored]) -> None:
        rng = np.random.default_rng(instances)
        self.index = PrefixIndex()
        self.rows = SlotRows(np.arange(instances))
        for slot in range(instances):
            assert self.index.acquire_slot() == slot
            self.index.publish_slot(slot)
        for stored in stores:
            refusal = self.index.store(stored.instance, stored.hashes.tobytes())
            assert refusal is None
        self.view = FleetView(
            rng.integers(0, 24, instances),
            rng.integers(0, 24_000, instances),
            rng.integers(0, 240_000, instances),
            batch_cap=256,
        )
        # As the ledger of a router keeps them, booking by booking.
        self.view.weight = self.view.batch_size.astype(np.float64) + 1
        self.view.backlog = self.view.queued_tokens.astype(np.float64)
        self.policy = Multiplicative()
        self.turn = 0

    def decide(self, chain: list[int], prompt_tokens: int) -> int:
        """Return the row of the instance that should get the prompt: what is timed."""
        match = self.index.match(chain, usable_blocks(prompt_tokens, BLOCK_SIZE))
        hits = self.rows.hits(match, BLOCK_SIZE)
        self.turn += 1
        choice = decide(self.view, Request(prompt_tokens, hits), self.policy, self.turn)
        assert choice is not None
        return choice.index

    def blocks_held(self, chain: list[int]) -> dict[int, int]:
        """Return instance → blocks of the chain, for those that have any."""
        hits = self.rows.hits(self.index.match(chain)).tolist()
        return {instance: blocks for instance, blocks in enumerate(hits) if blocks}


def plant(stores: list[Stored]) -> Tree:
    """Return the peer's tree with the same content."""
    from dynamo._core import RadixTree  # type: ignore[import-not-found]

    tree: Tree = RadixTree()
    for number, stored in enumerate(stores):
        blocks = [{"block_hash": h, "tokens_hash": h} for h in stored.hashes.tolist()]
        data = {"stored": {"parent_hash": stored.parent, "blocks": blocks}}
        event = {"event_id": number, "data": data, "dp_rank": 0}
        tree.apply_event(stored.instance, json.dumps(event).encode())
    return tree


def percentiles_us(call: Callable[[list[int]], object], chains: list[list[int]]) -> FloatArray:
    """Return p50 and p99 of one round, in microseconds."""
    times: list[int] = []
    for chain in chains:
        start = perf_counter_ns()
        call(chain)
        times.append(perf_counter_ns() - start)
    return np.percentile(times, (50, 99)) / 1e3


def measure(
    ours: Ours, tree: Tree | None, caches: FleetCaches, prompt_tokens: int, rounds: int
) -> Cell:
    """Time one prompt length and compare the answers."""
    chains = caches.prompts(prompt_tokens, PROMPTS)
    usable = [chain[: usable_blocks(prompt_tokens, BLOCK_SIZE)] for chain in chains]
    calls: list[tuple[Callable[[list[int]], object], list[list[int]]]]
    calls = [(lambda chain: ours.decide(chain, prompt_tokens), chains)]
    if tree is not None:
        find = tree.find_matches
        calls += [(find, usable), (lambda chain: find(chain).scores, usable)]
    times = [[percentiles_us(*call) for call in calls] for _ in range(rounds)]
    best = np.min(times, axis=0).tolist()
    cell = Cell(
        instances=caches.shape.instances,
        prompt_tokens=prompt_tokens,
        distinct_blocks=len(ours.index),
        drops=float(np.median([len(ours.index.match(chain).levels) for chain in usable])),
        p50_us=best[0][0],
        p99_us=best[0][1],
    )
    if tree is not None:
        for chain in usable:
            scores = {key[0]: blocks for key, blocks in tree.find_matches(chain).scores.items()}
            assert scores == ours.blocks_held(chain), "the two indices disagree"
        cell.peer_p50_us, cell.peer_p99_us = best[1]
        cell.peer_read_p50_us = best[2][0]
        cell.ratio, cell.ratio_alone = cell.p50_us / best[2][0], cell.p50_us / best[1][0]
    cell.missed = missed(cell)
    return cell


def missed(cell: Cell) -> list[str]:
    """Return which bars a cell misses."""
    if cell.prompt_tokens < BARRED_TOKENS_MIN:
        return []
    bars = [
        ("p50 µs", cell.p50_us, P50_US_MAX),
        ("p99 µs", cell.p99_us, P99_US_MAX),
        ("of the peer's look-up alone", cell.ratio_alone, RATIO_MAX.get(cell.instances)),
    ]
    return [
        f"{value:.2f} {what} > {bar}"
        for what, value, bar in bars
        if value is not None and bar is not None and value > bar
    ]


def run(fleets: list[int], blocks: int, rounds: int, with_peer: bool) -> list[Cell]:
    """Measure all cells, a fleet at a time."""
    cells: list[Cell] = []
    for instances in fleets:
        caches = FleetCaches(Shape(instances, blocks))
        ours = Ours(instances, caches.stores)
        tree = plant(caches.stores) if with_peer else None
        # As a router does once its index is filled.
        gc.collect()
        gc.freeze()
        cells += [
            measure(ours, tree, caches, tokens, rounds) for tokens in caches.shape.prompt_tokens
        ]
        gc.unfreeze()
    return cells


def table(cells: list[Cell]) -> str:
    """Return the results for people."""
    lines = [
        "                           ours, all       peer, look-up alone    and read       ratio",
        "instances  prompt  drops  p50 µs   p99 µs      p50 µs   p99 µs      p50 µs   read  alone",
    ]
    for c in cells:
        peer = ""
        if c.ratio is not None:
            peer = (
                f"{c.peer_p50_us:12.1f} {c.peer_p99_us:8.1f} {c.peer_read_p50_us:11.1f} "
                f"{c.ratio:6.2f} {c.ratio_alone:6.2f}"
            )
        lines.append(
            f"{c.instances:9} {c.prompt_tokens:7} {c.drops:6.0f} {c.p50_us:7.1f} {c.p99_us:8.1f}"
            f"{peer}  {'; '.join(c.missed)}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.decision", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--no-peer", action="store_true", help="measure ours alone")
    parser.add_argument("--instances", type=int, nargs="+", default=sorted(RATIO_MAX))
    parser.add_argument("--blocks", type=int, default=1_000_000, help="distinct blocks, roughly")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if not options.no_peer:
        try:
            dynamo_env.enter("bench.decision")
        except dynamo_env.PeerUnavailable as error:
            print(f"{error}\nWithout the peer: --no-peer", file=sys.stderr)
            return 2
    cells = run(options.instances, options.blocks, options.rounds, not options.no_peer)
    if options.json:
        about = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "peer": None if options.no_peer else dynamo_env.PEER,
            "cells": msgspec.to_builtins(cells),
        }
        print(json.dumps(about, indent=2))
    else:
        print(table(cells))
    return 1 if any(cell.missed for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
