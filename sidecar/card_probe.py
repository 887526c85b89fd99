"""What the engine makes of a chat and of a prompt, so that routers can prove that they read alike.

A card is made of files on this machine, and of what the sidecar was told; the engine may have been
started with another template, or other variables for it, and nothing else would show that.
"""

from __future__ import annotations

import logging

from schemas.bus import TokenProbe
from sidecar.engine_http import EngineError, EngineHttp

logger = logging.getLogger(__name__)

CHAT = [
    {"role": "user", "content": "What is 12 × 1,024? Answer in one word."},
    {"role": "assistant", "content": "12288\n\nDoes that help you, O'Hara?"},
    {"role": "user", "content": "  It's für   later. Thanks!"},
]
"""Three turns that differ in what tokenizers treat differently, and that every template takes."""

PROMPT = "It's 3.14, naïve\n\tand  x_1 = {0}!"

_CLOCK = "strftime_now"
"""A template that prints the date gives other tokens tomorrow."""


async def probes_of(http: EngineHttp, model: str, template: str | None) -> list[TokenProbe]:
    """Return the probes that an engine answers; fewer, or none, where it does not.

    Args:
        model: a name that the engine serves.
        template: chats are left out if there is none, or if it depends on the date.
    """
    found: list[TokenProbe] = []
    try:
        found.append(TokenProbe(await http.tokenize(PROMPT, model), prompt=PROMPT))
        if template is not None and _CLOCK not in template:
            found.append(TokenProbe(await http.tokenize_chat(CHAT, model), messages=CHAT))
    except EngineError as error:
        logger.info("the card of %s cannot be compared with its engine: %s", model, error)
    return found
