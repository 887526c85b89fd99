"""What a model's chat template makes of two things that only the Messages API needs.

vLLM tries a template out at its start, and decides by the outcome; so is it done here, in the same
way (vLLM 0.32, entrypoints/anthropic/serving.py): in a bare Jinja environment, where a template
that needs more than Jinja fails, for the one; with a whole rendering for the other.
"""

from __future__ import annotations

from typing import Any, Final

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.chat_template import ChatTemplate, TemplateSyntaxError
from schemas.bus import ModelCard
from schemas.openai import ChatRequest

_LATE_SYSTEM: Final = [
    {"role": role, "content": "t"} for role in ("system", "user", "system", "user")
]
_HI: Final = [{"role": "user", "content": "Hi"}]
# What a template may raise on a chat that it was not written for.
_ERRORS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")


class Habits(msgspec.Struct, frozen=True):
    """How a model's chats are built from Anthropic's messages.

    Attributes:
        merges_system: system messages in the middle of a chat join the first one.
        effort_without_thinking: the reasoning effort that stands for "no thinking".
    """

    merges_system: bool = True
    effort_without_thinking: str = "none"


def habits_of(card: ModelCard) -> Habits:
    """Try a card's template out; takes some milliseconds."""
    source = card.chat_template
    if source is None:
        return Habits()
    return Habits(not _takes_late_system(source), _effort_without_thinking(card, source))


def _takes_late_system(source: str) -> bool:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        environment.from_string(source).render(messages=_LATE_SYSTEM, add_generation_prompt=False)
    except _ERRORS:
        return False
    return True


def _effort_without_thinking(card: ModelCard, source: str) -> str:
    """Return `none` if the template takes it and it makes a difference, else `low`."""
    try:
        template = ChatTemplate(source, card.special_tokens)
    except TemplateSyntaxError:
        return "none"

    def rendered(effort: str) -> Any:
        return template.render(ChatRequest(messages=_HI, reasoning_effort=effort))

    none = rendered("none")
    if not isinstance(none, str) or any(rendered(effort) == none for effort in _EFFORTS):
        return "low"
    return "none"
