"""Events as lines of text, one each, and as plain data for JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from controlplane.audit.heard import Message, is_time
from controlplane.audit.why import sentence, why
from controlplane.core.candidates import Candidates
from schemas.bus import (
    Blacklist,
    Drain,
    Finished,
    HotspotCleared,
    HotspotRaised,
    PolicyOverride,
    Prefilled,
    Routed,
    RouteEvent,
)

ID_LENGTH = 12
"""As many characters of a request id, from its end, are shown in lines."""


def clock(wall_s: float) -> str:
    """Return a time of day, UTC, in milliseconds; dashes for what is no time."""
    if not is_time(wall_s):
        return "--:--:--.---"
    return datetime.fromtimestamp(wall_s, UTC).strftime("%H:%M:%S.%f")[:-3]


def seconds(value: float | None) -> str:
    """Return a duration, in the unit that suits it."""
    if value is None:
        return "–"
    if value < 0.000_999_5:
        return f"{1e6 * value:.0f} µs"
    return f"{1e3 * value:.0f} ms" if value < 0.9995 else f"{value:.1f} s"


def key_text(key: int) -> str:
    """Return a block hash as it is written for people, and read by `--class`."""
    return f"{key:016x}"


def route_line(event: RouteEvent, at_wall_s: float, seen: Candidates | None) -> str:
    """Return a line on a route event."""
    assert isinstance(event, Routed | Prefilled | Finished)
    kind = type(event).__name__.lower()
    head = f"{clock(at_wall_s)} {kind:<9} {event.request_id[-ID_LENGTH:]:>{ID_LENGTH}}"
    if isinstance(event, Routed):
        return f"{head} → {event.instance_id}  {_routed(event, seen)}"
    if isinstance(event, Prefilled):
        ttft = "" if event.ttft_s is None else f", first byte after {seconds(event.ttft_s)}"
        return f"{head}   {event.instance_id}  {event.new_tokens:,} tokens computed by then{ttft}"
    return f"{head}   {event.instance_id}  {_finished(event)}"


def _routed(event: Routed, seen: Candidates | None) -> str:
    prompt = event.prompt_tokens or 0
    size = f"{prompt:,}" if event.exact else f"about {prompt:,}"
    parts = [f"{size} tokens, {event.hit_tokens:,} cached ({event.trust})"]
    if event.attempt:
        parts.insert(0, f"attempt {event.attempt + 1}")
    parts.append(sentence(event, why(event, seen)) if seen is not None else event.policy)
    parts.append(f"took {seconds(event.decide_s)}")
    return "; ".join(parts)


def _finished(event: Finished) -> str:
    parts = [
        f"{event.outcome} {event.status or ''}".strip(),
        f"in {seconds(event.before_s + event.duration_s)}",
    ]
    if event.output_tokens is not None:
        about = "about " if event.output_estimated else ""
        parts.append(f"{about}{event.output_tokens:,} tokens out")
    if event.cached_tokens is not None:
        parts.append(f"{event.cached_tokens:,} tokens cached, {event.hit_tokens:,} promised")
    return ", ".join(parts)


def statement_line(message: Message, at_wall_s: float) -> str:
    """Return a line on what a detector or an operator said."""
    head = clock(at_wall_s)
    if isinstance(message, HotspotRaised):
        who = ", ".join(message.instances) or f"{message.holders} instances"
        return f"{head} hotspot   class {key_text(message.key)} bars {who}: {message.reason}"
    if isinstance(message, HotspotCleared):
        return f"{head} hotspot   class {key_text(message.key)} cleared: {message.reason}"
    if isinstance(message, PolicyOverride):
        what = f"{message.policy or 'the configured policy'} by {message.by or 'operator'}"
        return f"{head} policy    {what}: {message.reason}".rstrip(": ")
    assert isinstance(message, Drain | Blacklist)
    kind = "drain" if isinstance(message, Drain) else "blacklist"
    state = "on" if message.on else "off"
    return f"{head} {kind:<9} {message.instance_id} {state}: {message.reason}".rstrip(": ")


def route_data(
    event: RouteEvent, model: str, router_id: str, at_wall_s: float, seen: Candidates | None
) -> dict[str, Any]:
    """Return a route event for JSON: candidates by name, and why."""
    data: dict[str, Any] = {"at_wall_s": at_wall_s, "model": model, "router_id": router_id}
    data |= msgspec.to_builtins(event)
    if isinstance(event, Routed):
        data.pop("candidates", None)
        data["classes"] = [
            {"key": key_text(each.key), "depth_blocks": each.depth_blocks, "holders": each.holders}
            for each in event.classes
        ]
        if event.prompt_key is not None:
            data["prompt_key"] = key_text(event.prompt_key)
        if seen is not None:
            data["why"] = msgspec.to_builtins(why(event, seen))
            data["candidates"] = msgspec.to_builtins(seen.listed())
    return data


def statement_data(message: Message, model: str, at_wall_s: float) -> dict[str, Any]:
    """Return a statement for JSON."""
    data: dict[str, Any] = {"at_wall_s": at_wall_s, "model": model} | msgspec.to_builtins(message)
    if "key" in data:
        data["key"] = key_text(data["key"])
    return data
