"""Sizes and ages as listings write them."""

from __future__ import annotations

import pytest

from controlplane.cli.tables import ago, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (48_200, "48.2 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (67_108_864, "67.1 MB"),
        (6_200_000_000, "6.2 GB"),
        (2e12, "2.0 TB"),
        (5e15, "5000 TB"),
    ],
)
def test_sizes_have_the_unit_that_suits_them(nbytes: float, text: str) -> None:
    """Nothing that there is reads as none."""
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-0.3, "0 s ago"),
        (7.4, "7 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (7_199, "120 min ago"),
        (7_200, "2 h ago"),
        (180_000, "2 d ago"),
    ],
)
def test_ages_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    """A clock that is behind does not make anything come from the future."""
    assert ago(seconds) == text
