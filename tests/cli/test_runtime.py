"""What every process asks of the machine at its start."""

from __future__ import annotations

import resource

from controlplane.runtime import raise_file_limit


def test_a_process_may_open_as_many_files_as_the_machine_lets_it() -> None:
    """A shell's soft limit of 1,024 would end a router at 500 streams."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
