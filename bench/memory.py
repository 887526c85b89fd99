"""What the index costs in memory, how fast it takes in events, and how long it may hold things up.

    python -m bench.memory [--json]

For fleets of 16, 256 and 1,024 instances with a million distinct blocks made by `bench.caches`, and
once more at 256 with every conversation on several instances. Each index is filled by a process of
its own, which reads the batches from a file, so that no memory was there to be used again:

- bytes a distinct block: growth of the process's resident memory while the index is filled;
- intake: blocks a second of CPU, from packed bytes as they are on the bus, in batches of an
  engine's step (up to 512 blocks); the best of three fills counts;
- resync: 100,000 blocks of one instance replaced by a snapshot in chunks of 4,096 blocks, and the
  old set swept; the longest single step is what a decision may have to wait.

Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import IO

import msgspec
import numpy as np

from bench.caches import FleetCaches, Shape
from controlplane.core.index import PrefixIndex
from controlplane.core.plane import PlaneConfig

ROOT = Path(__file__).parents[1]

BYTES_A_BLOCK_MAX = 160.0
"""Bar at 256 instances."""

INTAKE_BLOCKS_PER_S_MIN = 1_500_000.0
"""Bar where a block has one or two owners."""

RESYNC_S_MAX = 0.3

STEP_MS_MAX = 5.0

FILLS = 3
STEP_BLOCKS = 512
RESYNC_BLOCKS = 100_000
CHUNK_BLOCKS = 4_096
SWEEP_BLOCKS = PlaneConfig().sweep_blocks

HEADER = struct.Struct("<II")

CASES = {
    "16": Shape(16),
    "256": Shape(256),
    "1024": Shape(1_024),
    "256 shared": Shape(256, moved=1.0, moved_holders=6),
}


class Result(msgspec.Struct):
    """One fleet.

    Attributes:
        holdings: (instance, block) pairs: blocks as the instances count them.
        estimated_bytes_a_block: what `PrefixIndex.memory_bytes` says, for comparison.
        resync_s: CPU time to fill the new set, after which decisions see it.
        step_ms_max: longest store or sweep step of the resync, CPU time.
        missed: bars that were missed, in words.
    """

    case: str
    instances: int
    distinct_blocks: int
    holdings: int
    bytes_a_block: float
    estimated_bytes_a_block: float
    intake_blocks_per_s: float
    resync_s: float
    step_ms_max: float
    missed: list[str] = []


def resident_bytes() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def empty_index(instances: int) -> PrefixIndex:
    """Return an index with a live slot for every instance."""
    index = PrefixIndex()
    for slot in range(instances):
        assert index.acquire_slot() == slot
        index.publish_slot(slot)
    return index


def write_batches(caches: FleetCaches, file: IO[bytes]) -> None:
    """Write what is stored as records: slot and blocks as u32, then the packed hashes."""
    for stored in caches.stores:
        for at in range(0, len(stored.hashes), STEP_BLOCKS):
            part = stored.hashes[at : at + STEP_BLOCKS]
            file.write(HEADER.pack(stored.instance, len(part)) + part.tobytes())
    file.flush()


def fill(index: PrefixIndex, file: IO[bytes]) -> tuple[int, float]:
    """Store all records; return how many blocks there were and the CPU seconds it took."""
    blocks, spent_s = 0, 0.0
    while header := file.read(HEADER.size):
        slot, count = HEADER.unpack(header)
        packed = file.read(8 * count)
        start = process_time()
        refusal = index.store(slot, packed)
        spent_s += process_time() - start
        assert refusal is None
        blocks += count
    return blocks, spent_s


def measure(case: str, file: IO[bytes]) -> Result:
    """Fill an index and resync one instance."""
    instances = CASES[case].instances
    index = empty_index(instances)
    gc.collect()
    before = resident_bytes()
    holdings, spent_s = fill(index, file)
    grown, blocks = resident_bytes() - before, len(index)
    estimate = index.memory_bytes() / blocks
    resync_s, step_ms = resync(index)
    for _ in range(FILLS - 1):
        del index
        index = empty_index(instances)
        file.seek(0)
        spent_s = min(spent_s, fill(index, file)[1])
    result = Result(
        case=case,
        instances=instances,
        distinct_blocks=blocks,
        holdings=holdings,
        bytes_a_block=grown / blocks,
        estimated_bytes_a_block=estimate,
        intake_blocks_per_s=holdings / spent_s,
        resync_s=resync_s,
        step_ms_max=step_ms,
    )
    result.missed = missed(result)
    return result


def resync(index: PrefixIndex) -> tuple[float, float]:
    """Replace a set of 100,000 blocks by a snapshot; return seconds to fill, longest step in ms."""
    hashes = np.random.default_rng(5).integers(1, 2**64, RESYNC_BLOCKS, np.uint64)
    chunks = [
        hashes[at : at + CHUNK_BLOCKS].tobytes() for at in range(0, RESYNC_BLOCKS, CHUNK_BLOCKS)
    ]
    old, new = index.acquire_slot(), index.acquire_slot()
    assert old is not None
    assert new is not None
    index.publish_slot(old)
    for chunk in chunks:
        index.store(old, chunk)
    steps: list[float] = []
    for chunk in chunks:
        start = process_time()
        index.store(new, chunk)
        steps.append(process_time() - start)
    index.publish_slot(new)
    index.release_slot(old)
    visited = 1
    while visited:
        start = process_time()
        visited = index.sweep(SWEEP_BLOCKS)
        steps.append(process_time() - start)
    return sum(steps[: len(chunks)]), max(steps) * 1e3


def missed(result: Result) -> list[str]:
    """Return which bars a result misses."""
    found: list[str] = []
    if result.instances == 256 and result.bytes_a_block > BYTES_A_BLOCK_MAX:
        found.append(f"{result.bytes_a_block:.0f} bytes a block > {BYTES_A_BLOCK_MAX:.0f}")
    shared = result.holdings > 2 * result.distinct_blocks
    if result.intake_blocks_per_s < INTAKE_BLOCKS_PER_S_MIN and not shared:
        found.append(f"{result.intake_blocks_per_s / 1e6:.2f} M blocks/s < 1.5")
    if result.resync_s > RESYNC_S_MAX:
        found.append(f"resync {result.resync_s:.2f} s > {RESYNC_S_MAX}")
    if result.step_ms_max > STEP_MS_MAX:
        found.append(f"step of {result.step_ms_max:.1f} ms > {STEP_MS_MAX}")
    return found


def table(results: list[Result]) -> str:
    """Return the results for people."""
    lines = [
        "instances    distinct   holdings   bytes/block   estimate   M blocks/s   resync   step"
    ]
    lines += [
        f"{r.case:10} {r.distinct_blocks:10} {r.holdings:10} {r.bytes_a_block:13.1f} "
        f"{r.estimated_bytes_a_block:10.1f} {r.intake_blocks_per_s / 1e6:12.2f} "
        f"{r.resync_s:6.3f} s {r.step_ms_max:4.1f} ms  {'; '.join(r.missed)}"
        for r in results
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(prog="bench.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--case", choices=CASES, help="measure this one, with its batches on standard input"
    )
    options = parser.parse_args()
    if options.case:
        sys.stdout.buffer.write(msgspec.json.encode(measure(options.case, sys.stdin.buffer)))
        return 0
    results: list[Result] = []
    for case, shape in CASES.items():
        command = [sys.executable, "-m", "bench.memory", "--case", case]
        with tempfile.TemporaryFile() as file:
            write_batches(FleetCaches(shape), file)
            file.seek(0)
            done = subprocess.run(command, stdin=file, stdout=subprocess.PIPE, check=True, cwd=ROOT)
        results.append(msgspec.json.decode(done.stdout, type=Result))
    if options.json:
        about = {"python": platform.python_version(), "machine": platform.machine()}
        print(json.dumps(about | {"fleets": msgspec.to_builtins(results)}, indent=2))
    else:
        print(table(results))
    return 1 if any(result.missed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
