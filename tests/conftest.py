"""What every test gets: our modules on the path, one way of running Hypothesis, blame for leaks."""

import gc
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests are imported by file (`--import-mode=importlib`), which puts nothing on the path; helpers
# such as `tests.models` are found from here.
sys.path.insert(0, str(Path(__file__).parent.parent))

# No deadline, and no check for slowness: on a busy machine wall time says nothing. CI repeats the
# same examples, so that a change is never blamed for another's luck; at home every run tries new
# ones.
settings.register_profile(
    "multiplane",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="CI" in os.environ,
)
settings.load_profile("multiplane")

# Real processes run at the machine's pace: where two cores are shared with others, one may stand
# still for longer than any deadline. Such a test is tried once more, and the summary counts it as
# rerun. What fails twice fails; tests within one process never get a second try.
_PACED = ("live", "vllm", "peer", "docker")


@pytest.hookimpl(trylast=True)  # folders mark their tests first
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests of real processes a second try, and begin with the files that take longest.

    A file is run by one process: a long one that began last would be waited for by all others.
    """
    cost_s: dict[Path, float] = defaultdict(float)
    for item in items:
        if _is_paced(item):
            item.add_marker(pytest.mark.flaky(reruns=1))
        cost_s[item.path] += _cost_s(item)
    items.sort(key=lambda item: -cost_s[item.path])


def _is_paced(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in _PACED)


def _cost_s(item: pytest.Item) -> float:
    """Guess what a test takes, from what its marks say of it."""
    timeout = item.get_closest_marker("timeout")
    if timeout is not None:
        return float(timeout.args[0]) / 20  # who needs more time than others says how much
    return 3.0 if _is_paced(item) else 1.0 if item.get_closest_marker("slow") else 0.01


class _Watch:
    """What has happened since the last test began.

    Attributes:
        opened: something that must be closed: a socket, a child process, a loop with its sockets.
        failed: a test; what it had open is kept by its traceback, until another one runs.
    """

    _OPENINGS = frozenset({"socket.__new__", "subprocess.Popen"})

    def __init__(self) -> None:
        self.opened = self.failed = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: object) -> None:
        if event in self._OPENINGS:
            self.opened = True


_watch = _Watch()


def pytest_collection_finish() -> None:
    """Take what is imported by now out of the collector's sight, which makes it quick."""
    gc.collect()
    gc.freeze()


def pytest_exception_interact() -> None:
    """Note that a test, or a fixture, has failed."""
    _watch.failed = True


@pytest.fixture(autouse=True)
def _blamed_if_it_leaves_anything_open() -> Iterator[None]:
    """Find what is left open while it is known who did it; set up first, and so ended last.

    A socket, file or loop that nobody closed warns when the collector finds it, and warnings are
    errors. Left to itself the collector comes by much later, in a test that has opened nothing.
    What failed has its blame already: its second try, or the next test, is not to have more of it.
    """
    if _watch.failed:
        _forgive()
    _watch.opened = False
    yield
    if _watch.opened and not _watch.failed:
        gc.collect()


def _forgive() -> None:
    """Collect what a failed test has left open, without a word."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        sys.__dict__.pop(name, None)  # where pytest keeps the failure for debuggers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    _watch.failed = False


@pytest.fixture(autouse=True, scope="module")
def _module_blamed_if_it_leaves_anything_open() -> Iterator[None]:
    """The same for what a module's tests share; what is there after it (caches) stays."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_planes_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let commands find only planes that tests start, whoever else runs `multiplane up` here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        yield
