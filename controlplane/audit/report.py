"""What checking the record came to: what was checked, what could not be, and what is wrong."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

Kind = Literal["unreadable", "kv", "numbers", "score", "choice", "policy", "filter", "hits"]

MEANINGS: dict[Kind, str] = {
    "unreadable": "messages that cannot be read",
    "kv": "block streams that contradict themselves",
    "numbers": "decisions whose numbers differ from their own columns",
    "score": "decisions whose score does not follow from their numbers",
    "choice": "decisions that another instance should have got",
    "policy": "decisions by a policy that nothing calls for",
    "filter": "decisions with a filter that nothing calls for",
    "hits": "decisions whose hits differ from the block streams",
}
"""Every kind of fault, in words."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong, and where.

    Attributes:
        where: the event, by what finds it again: stream and place, router or instance, request.
        text: what is wrong, with both values.
    """

    kind: Kind
    where: str
    text: str
    at_wall_s: float


class Promised(msgspec.Struct):
    """Prompt tokens promised and found, over requests with one cause of difference."""

    requests: int = 0
    promised_tokens: int = 0
    cached_tokens: int = 0


class Report:
    """The outcome of a check.

    Attributes:
        decisions: decisions heard, retries included.
        chosen: decisions whose choice was computed again, and is right.
        hits: decisions whose hits were computed again for at least one instance, and are right.
        instances: (decision, instance) pairs whose hits were computed again.
        unchecked: why decisions, or instances of a decision, could not be checked, by reason.
        found: faults by kind; of them `findings` holds the first `findings_max`.
        promised: promised against cached tokens, by cause of the difference.
        first_wall_s: when the first message was stored; `last_wall_s` the last.
    """

    def __init__(self, findings_max: int = 1_000) -> None:
        self.decisions = 0
        self.chosen = 0
        self.hits = 0
        self.instances = 0
        self.messages: Counter[str] = Counter()
        self.unchecked: Counter[str] = Counter()
        self.found: Counter[Kind] = Counter()
        self.findings: list[Finding] = []
        self.promised: dict[str, Promised] = {}
        self.first_wall_s = self.last_wall_s = 0.0
        self._findings_max = findings_max

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.found

    def add(self, finding: Finding) -> None:
        """Note a fault."""
        self.found[finding.kind] += 1
        if len(self.findings) < self._findings_max:
            self.findings.append(finding)

    def told(self, cause: str, promised_tokens: int, cached_tokens: int) -> None:
        """Note how a promise was kept."""
        entry = self.promised.setdefault(cause, Promised())
        entry.requests += 1
        entry.promised_tokens += promised_tokens
        entry.cached_tokens += cached_tokens

    def as_dict(self) -> dict[str, object]:
        """Return everything, for JSON."""
        return {
            "clean": self.clean,
            "decisions": self.decisions,
            "chosen": self.chosen,
            "hits": self.hits,
            "instances": self.instances,
            "messages": dict(self.messages),
            "unchecked": dict(self.unchecked),
            "found": dict(self.found),
            "findings": msgspec.to_builtins(self.findings),
            "promised": msgspec.to_builtins(self.promised),
            "first_wall_s": self.first_wall_s,
            "last_wall_s": self.last_wall_s,
        }
