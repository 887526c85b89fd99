"""Run simulated worlds: `--seed 7 --verbose` repeats one, `--seconds 60` tries new ones."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.sim.simulation import SimulationFailed, run_seed


def fresh_seed() -> int:
    """Return a seed that nobody has tried."""
    return int.from_bytes(os.urandom(4), "little")


def main() -> int:
    """Run as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description="Run the whole plane in simulated time.")
    parser.add_argument("--seed", type=int, help="the first seed (default: a fresh one)")
    parser.add_argument("--seconds", type=float, help="go on with further seeds for this long")
    parser.add_argument("--count", type=int, default=1, help="or: this many seeds")
    parser.add_argument("--verbose", action="store_true", help="print all that happens")
    parser.add_argument("--go-on", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args()
    seed = fresh_seed() if options.seed is None else options.seed
    began_s, ran, failed = time.monotonic(), 0, 0
    while ran < options.count or time.monotonic() - began_s < (options.seconds or 0.0):
        try:
            report = run_seed(seed, verbose=options.verbose)
        except SimulationFailed as error:
            failed += 1
            print(error if not options.go_on else str(error).splitlines()[0])
            if not options.go_on:
                return 1
        else:
            if options.verbose or (options.count == 1 and not options.seconds):
                print(report)
        seed, ran = seed + 1, ran + 1
    took_s = time.monotonic() - began_s
    print(f"{ran} seeds in {took_s:.1f} s, {failed} failed; the last was {seed - 1}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
