"""What every test gets: our own test modules on the path, and one way of running Hypothesis."""

import os
import sys
from pathlib import Path

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
