"""Wire contracts: what crosses a process boundary, and nothing else."""
