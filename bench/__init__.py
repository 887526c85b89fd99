"""Benchmarks: ratios against peers in the same run; JSON out; a missed bar exits non-zero."""
