"""What every test gets: our own test modules on the path, and one way of running Hypothesis."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Tests are imported by file (`--import-mode=importlib`), which puts nothing on the path; helpers
# such as `tests.models` are found from here.
sys.path.insert(0, str(Path(__file__).parent.parent))

# No deadline: on a busy machine an example's wall time says nothing. CI repeats the same examples,
# so that a change is never blamed for another's luck; at home every run tries new ones.
settings.register_profile(
    "multiplane", deadline=None, print_blob=True, derandomize="CI" in os.environ
)
settings.load_profile("multiplane")

# Real processes run at the machine's pace: where two cores are shared with others, one may stand
# still for longer than any deadline. Such a test is tried once more, and the summary counts it as
# rerun. What fails twice fails; tests within one process never get a second try.
_PACED = ("live", "vllm", "peer", "docker")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of real processes a second try."""
    for item in items:
        if any(item.get_closest_marker(name) for name in _PACED):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True, scope="session")
def _no_planes_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let commands find only planes that tests start, whoever else runs `multiplane up` here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        yield
