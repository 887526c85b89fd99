"""What reading a request yields is small, frozen, and fit for a metric's label."""

import msgspec
import pytest

from router.prompt import Inexact, Prompt, Reason


def test_reasons_are_labels() -> None:
    """Every reason is a short word of its own, so that a counter can carry it."""
    labels = [str(reason) for reason in Reason]
    assert len(set(labels)) == len(labels)
    assert all(label.replace("_", "").isalpha() and label.islower() for label in labels)


@pytest.mark.parametrize("outcome", [Inexact(Reason.BUSY), Prompt(0, [])])
def test_outcomes_are_frozen(outcome: msgspec.Struct) -> None:
    """Nobody changes an outcome that others hold."""
    with pytest.raises(AttributeError):
        outcome.reason = Reason.BATCH  # type: ignore[attr-defined]
