"""NATS subject wildcards: `*` is one token, a final `>` is one or more."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1024)
def _tokens(pattern: str) -> tuple[str, ...]:
    tokens = tuple(pattern.split("."))
    if not all(tokens) or ">" in tokens[:-1]:
        raise ValueError(f"not a subject: {pattern!r}")
    return tokens


def check_pattern(pattern: str) -> None:
    """Raise ValueError for what is no subject, wildcards allowed."""
    if any(character in pattern for character in " \t\r\n"):
        raise ValueError(f"not a subject: {pattern!r}")
    _tokens(pattern)


def matches(pattern: str, subject: str) -> bool:
    """Return whether `pattern` matches `subject`, which has no wildcards.

    Raises:
        ValueError: `pattern` has an empty token, or a `>` that is not its last token.
    """
    wanted = _tokens(pattern)
    given = subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(given) <= len(wanted):
            return False
    elif len(given) != len(wanted):
        return False
    return all(want in ("*", have) for want, have in zip(wanted, given, strict=False))
