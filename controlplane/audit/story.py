"""The whole story of one request: every attempt, what each saw, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from controlplane.audit.heard import Heard, Unreadable
from controlplane.audit.lines import clock, key_text, route_data, seconds
from controlplane.audit.why import formula, ranked, sentence, why
from controlplane.core.candidates import Candidates, RowsBook
from controlplane.core.decision import Candidate
from schemas.bus import Finished, FleetRows, Prefilled, RouteBatch, Routed

SHOWN_MAX = 8
"""Candidates that are listed, unless all are wanted."""


class Attempt(msgspec.Struct):
    """One instance that the request was sent to."""

    routed: Routed
    seen: Candidates | None
    prefilled: list[tuple[Prefilled, float]] = msgspec.field(default_factory=list)
    finished: Finished | None = None


class Story(msgspec.Struct):
    """What is known of a request.

    Attributes:
        request_id: the whole of it.
        attempts: in order.
    """

    request_id: str
    model: str
    router_id: str
    attempts: list[Attempt] = msgspec.field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the last attempt ended, and was not retried elsewhere."""
        last = self.attempts[-1].finished if self.attempts else None
        return last is not None and last.outcome != "retried"

    def as_dict(self) -> dict[str, object]:
        """Return all of it, for JSON: candidates by name, and why each attempt went where."""
        return {
            "request_id": self.request_id,
            "model": self.model,
            "router_id": self.router_id,
            "ended": self.ended,
            "attempts": [
                {
                    "routed": route_data(
                        each.routed, self.model, self.router_id, each.routed.at_wall_s, each.seen
                    ),
                    "prefilled": [
                        {"at_wall_s": at_wall_s, **msgspec.to_builtins(event)}
                        for event, at_wall_s in each.prefilled
                    ],
                    "finished": msgspec.to_builtins(each.finished),
                }
                for each in self.attempts
            ],
        }


class StoryTeller:
    """Gathers the story of one request.

    Args:
        request: its id, or the end of it; the first that fits is told.

    Attributes:
        story: so far; None before the request is found.
    """

    def __init__(self, request: str) -> None:
        self.story: Story | None = None
        self._request = request
        self._rows: dict[str, RowsBook] = {}

    def hear(self, heard: Heard | Unreadable) -> None:
        """Take the next message."""
        if isinstance(heard, Unreadable) or not isinstance(heard.message, RouteBatch):
            return
        batch = heard.message
        rows = self._rows.setdefault(heard.model, RowsBook())
        for event in batch.events:
            if isinstance(event, FleetRows):
                rows.told(batch.router_id, batch.epoch, event)
            elif isinstance(event, Routed):
                if self._is_it(event.request_id, batch.router_id):
                    seen = rows.read(batch.router_id, batch.epoch, event)
                    self._began(event, seen, heard.model, batch.router_id)
            elif (
                isinstance(event, Prefilled | Finished)
                and self.story is not None
                and self._is_it(event.request_id, batch.router_id)
            ):
                self._went_on(event, batch.sent_wall_s)

    def _is_it(self, request_id: str, router_id: str) -> bool:
        if self.story is None:
            return request_id.endswith(self._request)
        return (request_id, router_id) == (self.story.request_id, self.story.router_id)

    def _began(self, event: Routed, seen: Candidates | None, model: str, router_id: str) -> None:
        if self.story is None:
            self.story = Story(event.request_id, model, router_id)
        self.story.attempts.append(Attempt(event, seen))

    def _went_on(self, event: Prefilled | Finished, at_wall_s: float) -> None:
        assert self.story is not None
        for attempt in reversed(self.story.attempts):
            if attempt.routed.instance_id == event.instance_id:
                if isinstance(event, Finished):
                    attempt.finished = event
                else:
                    attempt.prefilled.append((event, at_wall_s))
                return


def told(story: Story, most: int | None = SHOWN_MAX) -> Iterator[str]:
    """Yield a story as lines of text.

    Args:
        most: candidates that are listed of each attempt; None for all.
    """
    yield f"request   {story.request_id}"
    yield f"model     {story.model}, at router {story.router_id}"
    for attempt in story.attempts:
        yield ""
        yield from _attempt(attempt, most)
    if not story.ended:
        yield ""
        yield "it has not ended, as far as the record goes"


def _attempt(attempt: Attempt, most: int | None) -> Iterator[str]:
    event = attempt.routed
    number = f"attempt {event.attempt + 1}: " if event.attempt else ""
    yield f"{clock(event.at_wall_s)}  {number}sent to {event.instance_id}"
    yield from _prompt(event)
    times = f"tokenized in {seconds(event.tokenize_s)}, decided in {seconds(event.decide_s)}"
    queued = f", queued for {seconds(event.queue_s)}" if event.queue_s else ""
    yield f"  times     {times}{queued}"
    if attempt.seen is None:
        yield f"  why       {formula(event)}; {event.reason or 'candidates were not recorded'}"
    else:
        yield f"  why       {sentence(event, why(event, attempt.seen))}"
        yield from _candidates(attempt.seen, event, most)
    for prefilled, at_wall_s in attempt.prefilled:
        ttft = prefilled.ttft_s
        first = "" if ttft is None else f", first byte {seconds(ttft)} after the request"
        if attempt.finished is not None:  # batches leave later than what they tell of
            at_wall_s = min(at_wall_s, attempt.finished.at_wall_s)
        yield f"{clock(at_wall_s)}  {prefilled.new_tokens:,} tokens computed{first}"
    if attempt.finished is not None:
        yield from _end(event, attempt.finished)


def _prompt(event: Routed) -> Iterator[str]:
    size = f"{event.prompt_tokens or 0:,} tokens"
    if not event.exact:
        size = f"about {size}: not tokenized exactly"
    elif event.prompt_key is not None:
        size += f" in blocks of {event.block_size}, key {key_text(event.prompt_key)}"
    tenant = f", tenant {event.tenant}" if event.tenant else ""
    yield f"  prompt    {size}{tenant}"
    position = ""
    if event.kv_seq is not None:
        position = f", as of epoch {event.kv_seq[0]} seq {event.kv_seq[1]}"
    yield (
        f"  cached    {event.hit_tokens:,} tokens promised, {event.new_tokens:,} to compute; "
        f"block set {event.trust}{position}"
    )


def _candidates(seen: Candidates, event: Routed, most: int | None) -> Iterator[str]:
    listed = ranked(seen, most)
    width = max(12, *(len(each.instance_id) for each in listed))
    yield f"    {'instance':<{width}}  {'cached':>9} {'queued':>9} {'batch':>6} {'score':>14}"
    for each in listed:
        yield f"  {'→' if each.instance_id == event.instance_id else ' '} {_row(each, width)}"
    if len(listed) < len(seen):
        yield f"    … and {len(seen) - len(listed):,} more"


def _row(each: Candidate, width: int) -> str:
    numbers = f"{each.hit_tokens:>9,} {each.queued_tokens:>9,} {each.batch_size:>6,}"
    out = f"  {', '.join(each.excluded_by)}" if each.excluded_by else ""
    return f"{each.instance_id:<{width}}  {numbers} {each.score:>14,.0f}{out}"


def _end(event: Routed, end: Finished) -> Iterator[str]:
    yield (
        f"{clock(end.at_wall_s)}  ended: {end.outcome}, status {end.status or 'none'}, "
        f"{seconds(end.before_s + end.duration_s)} after the request"
    )
    if end.output_tokens is not None:
        counted = ", by the stream's events" if end.output_estimated else ""
        yield f"  answer    {end.output_tokens:,} tokens{counted}"
    if end.cached_tokens is not None:
        differs = end.cached_tokens - event.hit_tokens
        verdict = "as promised" if not differs else f"{differs:+,} against the promise"
        yield f"  cached    {end.cached_tokens:,} tokens found by the engine: {verdict}"
