"""Benchmarks: ratios against peers in the same run, JSON out, non-zero exit when a bar is missed."""
