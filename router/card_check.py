"""A card's tokenizer and template, and whether they give what the engine itself says it gives."""

from __future__ import annotations

from controlplane.core.hashing import pack_tokens
from router.chat_template import ChatTemplate, Clock, RenderOptions, TemplateSyntaxError
from router.prompt import Inexact
from router.tokenizer import TextError, Tokenizer, TokenizerError
from schemas.bus import ModelCard, TokenProbe
from schemas.openai import ChatRequest

_TOKEN_BYTES = 4


def options_of(card: ModelCard) -> RenderOptions:
    """Return how the engine of a card was started, as far as chats go."""
    return RenderOptions(card.content_format, card.template_kwargs, card.drop_unchosen_tools)


def tokenizer_of(card: ModelCard) -> tuple[Tokenizer | None, str]:
    """Return a card's tokenizer; or None, and why there is none to be used."""
    if not card.tokenizer:
        return None, "the model card has no tokenizer"
    try:
        tokenizer = Tokenizer(card.tokenizer)
    except TokenizerError as error:
        return None, str(error)
    problem = tokenizer.explain_mismatch(card.special_tokens, card.tokenizer_config)
    return (tokenizer, "") if problem is None else (None, problem)


def template_of(
    card: ModelCard, options: RenderOptions, now: Clock
) -> tuple[ChatTemplate | None, str]:
    """Return a card's chat template, likewise."""
    if card.chat_template is None:
        return None, "the model card has no chat template"
    try:
        return ChatTemplate(card.chat_template, card.special_tokens, options, now), ""
    except TemplateSyntaxError as error:
        return None, str(error)


def mismatch(
    card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate | None, *, chats: bool
) -> str:
    """Return how the engine reads otherwise, by the card's probes; empty if it does not.

    Args:
        chats: look at chats, or (False) at plain prompts. What cannot be read here at all is no
            mismatch: requests like it are not read either.
    """
    for probe in card.probes:
        if bool(probe.messages) is not chats:
            continue
        try:
            mine = _tokens(probe, card, tokenizer, template)
        except TextError:
            continue
        difference = None if mine is None else _difference(mine, pack_tokens(probe.token_ids))
        if difference:
            return f"the engine tokenizes {_KINDS[chats]} otherwise ({difference}){_HINTS[chats]}"
    return ""


_KINDS = ("a prompt", "a chat")
_HINTS = (
    ": its tokenizer is not the card's; give the sidecar its --model-path",
    ": its chat template, or the variables it was started with, are not the card's; give the "
    "sidecar the engine's --chat-template and --chat-template-kwargs",
)


def _tokens(
    probe: TokenProbe, card: ModelCard, tokenizer: Tokenizer, template: ChatTemplate | None
) -> bytes | None:
    """Return our packed token ids of a probe, None if it cannot be read."""
    if not probe.messages:
        tokens = tokenizer.encode(probe.prompt)
        if not card.adds_special_tokens:
            return tokens
        return tokenizer.opening + tokens + tokenizer.closing
    if template is None:
        return None
    text = template.render(ChatRequest(messages=list(probe.messages)))
    return None if isinstance(text, Inexact) else tokenizer.encode(text)


def _difference(mine: bytes, engines: bytes) -> str:
    """Return where two packed sequences part; empty if they do not."""
    if mine == engines:
        return ""
    shorter = min(len(mine), len(engines))
    at = next(
        (
            start // _TOKEN_BYTES
            for start in range(0, shorter, _TOKEN_BYTES)
            if mine[start : start + _TOKEN_BYTES] != engines[start : start + _TOKEN_BYTES]
        ),
        shorter // _TOKEN_BYTES,
    )
    return f"from token {at} of {len(engines) // _TOKEN_BYTES} on"
