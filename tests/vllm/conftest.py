"""Fixtures for tests against real vLLM: its environment, and a pool of running servers.

Every test below this folder is marked `vllm`, and may wait for the environment to be built once.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.fleet import VllmFleet
from tests.vllm.launch import Nursery
from tests.vllm.probe import SchedulerProbe

BUILD = Path(__file__).parents[1] / "vllm_env" / "build.py"
TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks this folder's tests and gives them time for a cold start."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=True)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Returns the interpreter of the vLLM environment, built on the first use outside CI.

    Under CI the environment must be there: a test run that cannot have vLLM fails, it never skips.
    """
    given = os.environ.get("MULTIPLANE_VLLM_PYTHON")
    if given:
        if not Path(given).is_file():
            pytest.fail(f"MULTIPLANE_VLLM_PYTHON={given} does not exist; `make vllm-env` prints it")
        return Path(given)
    only_look = ["--check"] if os.environ.get("CI") == "true" else []
    found = subprocess.run(
        [sys.executable, str(BUILD), *only_look], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        pytest.fail(f"no vLLM environment (`make vllm-env` builds it):\n{found.stderr[-2000:]}")
    return Path(found.stdout.strip())


@pytest.fixture(scope="session")
def vllm_nursery(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Yields the process that starts servers and probes; with it they all end."""
    with Nursery(vllm_python, tmp_path_factory.mktemp("vllm")) as nursery:
        yield nursery


@pytest.fixture(scope="session")
def vllm_fleet(vllm_nursery: Nursery) -> VllmFleet:
    """Returns the session's pool of running vLLM servers."""
    return VllmFleet(vllm_nursery)


@pytest.fixture(scope="session")
def scheduler_probe(vllm_nursery: Nursery) -> Iterator[SchedulerProbe]:
    """Yields vLLM's scheduler without a server; each test opens an engine in it."""
    with SchedulerProbe(vllm_nursery) as probe:
        yield probe
