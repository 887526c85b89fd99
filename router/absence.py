"""Why nobody can take a request, and what an operator can do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.refusals import RETRY_AFTER_S, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.directory import Directory, ServedModel

_LOOK = "`multiplane instances` lists them"
_NEVER = (
    "no instance has registered yet; check that sidecars run and reach the same NATS "
    "(`multiplane instances`), and that `multiplane bus init` was done"
)


def unavailable(reason: str, message: str) -> Refusal:
    """Return a 503 that asks to come back."""
    return Refusal(
        503,
        reason,
        message,
        "service_unavailable",
        code=reason,
        retry_after_s=RETRY_AFTER_S,
    )


def starting(problem: str) -> Refusal:
    """Refuse a request that came before this router knew where it could go."""
    return unavailable(
        "starting", f"this router has not learnt yet which instances there are: {problem}"
    )


def no_model(
    directory: Directory, name: str, unusable: Mapping[tuple[str, str], str]
) -> Refusal | None:
    """Return why a name that stands for nothing does; None if it is just unknown.

    Args:
        directory: the models there are, and were.
        name: in the request; empty if it named none.
        unusable: (model, instance id) → why its record is of no use.
    """
    problems = [text for (model, _), text in unusable.items() if name in ("", model)]
    if problems and (name or not directory.names):
        return unavailable(
            "no_instance",
            f"{len(problems)} registered, and none can be used; the first one: {problems[0]}; "
            "correct what its sidecar was told (`--advertise-url`)",
        )
    known = len(directory) + directory.forgotten
    if directory.get(name) is not None or (known and not directory.names):
        of = f"every instance of {name!r}" if directory.get(name) else "every instance"
        return unavailable("no_instance", f"{of} has left; {_LOOK}, lost ones too")
    return None if directory.names else unavailable("no_instance", _NEVER)


def no_instance(served: ServedModel, lora: str | None) -> Refusal:
    """Return why no instance of a model may get a request."""
    fleet = served.plane.fleet
    if not len(fleet):
        text = f"every instance of {served.model!r} has left; {_LOOK}, lost ones too"
        return unavailable("no_instance", text)
    able = f" that have the adapter {lora!r}" if lora else ""
    return unavailable(
        "drained",
        f"operators have drained all instances of {served.model!r}{able}; `multiplane drain ID "
        f"--off` takes one back, and {_LOOK}",
    )
