"""What one run is like: sizes, rates and limits, drawn from its seed or set by a test."""

from __future__ import annotations

import msgspec

MODEL = "m"


class Settings(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        routers: how many there are.
        instances: likewise.
        faults_s: how long the safety phase lasts, seconds.
        fault_every_s: mean time between two faults.
        lasts_s: mean time until a fault is undone.
        kinds: names of the faults that may happen; empty for none.
        chats: clients that talk at the same time.
        talk_in_quiet: whether they go on talking once the faults are over; if not, only heartbeats
            can show what is missing.
        think_s: mean time between an answer and the next question.
        cancels: chance that a client leaves early.
        streamed: share of requests whose answers are streamed.
        reports: chance that a request asks for its hits to be reported as stores, which leaves the
            sidecar in doubt about them.
        foreign: requests at the engines that no router knows of, at most.
        delay_s: shortest and longest delay on the bus's links.
        engine_blocks: KV blocks of an engine, the null block included.
        engine_seqs: largest batch.
        engine_tokens: token budget of a step.
        slowness: factor on the engine's step times.
        context_tokens: longest prompt and answer.
        replay_max: messages in an engine's replay buffer.
        skew_s: largest error of a wall clock.
        scrape_s: how often a sidecar looks at its engine.
        inbox_max: messages that a router queues.
        stale_s: as in `PlaneConfig`.
        departed_s: as in `PlaneConfig`.
        promise_s: as in `PlaneConfig`.
        forge_every_s: mean time between two batches that no sidecar sent; 0 for none.
    """

    routers: int = 3
    instances: int = 4
    faults_s: float = 8.0
    fault_every_s: float = 0.4
    lasts_s: float = 1.0
    kinds: tuple[str, ...] = ()
    chats: int = 12
    talk_in_quiet: bool = True
    think_s: float = 0.2
    cancels: float = 0.1
    streamed: float = 0.7
    reports: float = 0.0
    foreign: int = 1
    delay_s: tuple[float, float] = (0.0002, 0.002)
    engine_blocks: int = 160
    engine_seqs: int = 8
    engine_tokens: int = 128
    slowness: float = 1.0
    context_tokens: int = 400
    replay_max: int = 10_000
    skew_s: float = 0.0
    scrape_s: float = 0.25
    inbox_max: int = 300
    stale_s: float = 5.0
    departed_s: float = 30.0
    promise_s: float = 0.0
    forge_every_s: float = 0.0
