"""The order of an engine's KV events: gaps, replays, restarts.

Theory of operation. vLLM numbers its messages from 0 in each process, publishes them on a PUB
socket that drops what nobody takes, and keeps the last 10,000 or so for replay on request. There is
no epoch and no heartbeat. This module puts live and replayed messages into one gapless sequence, or
says that the state built from it is lost.

    state       input                               → state      effect
    ---------   ---------------------------------   ---------    ----------------------------------
    LIVE        seq = next                          LIVE         Apply
    LIVE        seq > next                          REPLAYING    RequestReplay, keep the message
    LIVE        seq < next, as replayed before      LIVE         none: replay and live overlap
    any         seq < next, or not above the last   REPLAYING    NewEpoch, RequestReplay(0):
                  live one                                         the engine restarted
    REPLAYING   live message                        REPLAYING    keep it (bounded)
    REPLAYING   replayed, seq = next                REPLAYING    Apply
    REPLAYING   end, and the kept messages join     LIVE         Apply them
    REPLAYING   end, and there is a gap             REPLAYING    RequestReplay again; after a few
                                                      or LIVE      tries NewEpoch

A replay is asked for from the message *before* the next one, the anchor: if the engine sends
another message under that number, or none at all, it is another process, even if its numbers happen
to go on where the old ones stopped. Started late, the stream asks from 0; if the engine's buffer
does not reach back that far, blocks stored earlier are unknown and the state is not `complete`.

Without a replay socket every gap means NewEpoch.
"""

from __future__ import annotations

from collections import deque

import msgspec


class Apply(msgspec.Struct, frozen=True):
    """The next message of the sequence."""

    seq: int
    payload: bytes


class RequestReplay(msgspec.Struct, frozen=True):
    """Ask the engine for its messages from `from_seq` on; an earlier request is void."""

    from_seq: int


class NewEpoch(msgspec.Struct, frozen=True):
    """What was built from earlier messages is lost: begin anew with nothing.

    Attributes:
        complete: whether the messages that follow go back to the engine's start.
    """

    reason: str
    complete: bool


StreamEffect = Apply | RequestReplay | NewEpoch


class EngineStreamConfig(msgspec.Struct, frozen=True):
    """Bounds of a stream.

    Attributes:
        replay: whether the engine has a replay socket.
        kept_messages_max: live messages kept during a replay; at the bound they are dropped, which
            leaves a gap for the next replay.
        kept_bytes_max: the same in bytes of payload.
        overlap_max: replayed messages remembered, to tell an overlap from a restart.
        tries_max: replays in a row that bring nothing new before the state is given up.
    """

    replay: bool = True
    kept_messages_max: int = 20_000
    kept_bytes_max: int = 256 * 1024 * 1024
    overlap_max: int = 50_000
    tries_max: int = 3


class EngineStream:
    """The sequence of one engine rank.

    Attributes:
        live: whether the sequence is joined up to the last message heard.
        gaps: how often messages were missing.
        restarts: how often another engine process was found.
        losses: how often a gap could not be closed.
        overlaps: live messages that a replay had brought already.
        kept_dropped: live messages that found no room during a replay.
    """

    def __init__(self, config: EngineStreamConfig | None = None) -> None:
        self.config = config or EngineStreamConfig()
        self.live = False
        self.gaps = self.restarts = self.losses = self.overlaps = self.kept_dropped = 0
        self._next: int | None = None
        self._last_live = -1
        self._anchor: tuple[int, int] | None = None
        self._last_digest = 0
        self._floor = 0
        self._replayed: deque[tuple[int, int]] = deque(maxlen=self.config.overlap_max)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._tries = 0
        self._heard = False
        self._broken = False
        self._lenient = False

    @property
    def next_seq(self) -> int | None:
        """The sequence number that is applied next; None if any is."""
        return self._next

    @property
    def kept(self) -> int:
        """Live messages waiting for a replay."""
        return len(self._kept)

    # --- inputs

    def start(self) -> list[StreamEffect]:
        """Begin to follow an engine about which nothing is known."""
        if not self.config.replay:
            self._next = None
            self.live = True
            return [NewEpoch("started without a replay socket", complete=False)]
        return [NewEpoch("started", complete=True), *self._from_zero()]

    def probe(self, *, after_outage: bool) -> list[StreamEffect]:
        """Find out whether the engine is still the same process, and has sent more than came.

        Args:
            after_outage: the engine was away, so an unanswered probe loses the state; else it
                shows only that the replay socket does not answer.
        """
        if not self.config.replay:
            return self._lose("the engine was away without a replay socket") if after_outage else []
        if not self.live:
            return []
        effects = self._request()
        self._lenient = not after_outage
        return effects

    def message(self, seq: int, payload: bytes) -> list[StreamEffect]:
        """Take a live message."""
        if seq <= self._last_live:
            return self._restart(f"seq went back from {self._last_live} to {seq}", seq, payload)
        self._last_live = seq
        if not self.live:
            self._keep(seq, payload)
            return []
        return self._take(seq, payload)

    def replayed(self, seq: int, payload: bytes) -> list[StreamEffect]:
        """Take a message that the last request brought."""
        if self.live or self._broken:
            return []
        first, self._heard = not self._heard, True
        assert self._next is not None
        if seq < self._next:
            if self._anchor is not None and self._anchor != (seq, hash(payload)):
                return self._restart(f"message {seq} is not the one applied before")
            self._anchor = None
            return []
        if seq > self._next or self._anchor is not None:  # nothing proves that it joins
            if first and self._tries > 1:
                return self._join_late(seq, payload)
            self._broken = True
            return []
        self._tries = 1
        self._replayed.append((seq, hash(payload)))
        return [self._applied(seq, payload)]

    def replay_ended(self) -> list[StreamEffect]:
        """Take note that the last request is answered in full."""
        if self.live:
            return []
        if self._anchor is not None and not self._heard:
            return self._restart("it does not know the message applied last")
        if self._broken:
            return self._again("replays are truncated")
        self.live = True
        return self._drain()

    def replay_failed(self, reason: str) -> list[StreamEffect]:
        """Take note that the last request got no full answer."""
        if self.live:
            return []
        if self._lenient:
            self.live = True
            return self._drain()
        return self._again(reason)

    # --- the sequence

    def _applied(self, seq: int, payload: bytes) -> Apply:
        self._next = seq + 1
        self._last_digest = hash(payload)
        return Apply(seq, payload)

    def _take(self, seq: int, payload: bytes) -> list[StreamEffect]:
        """Take the next live message of a joined sequence."""
        if self._next is None:
            effects: list[StreamEffect] = []
            if seq == 0:
                effects.append(NewEpoch("the engine's first message", complete=True))
            return [*effects, self._applied(seq, payload)]
        if seq == self._next:
            return [self._applied(seq, payload)]
        if seq < self._next:
            if self._overlaps(seq, payload):
                self.overlaps += 1
                return []
            return self._restart(f"seq went back from {self._next - 1} to {seq}", seq, payload)
        self.gaps += 1
        missing = f"messages {self._next} to {seq - 1} are missing"
        self._kept.appendleft((seq, payload))
        self._kept_bytes += len(payload)
        if not self.config.replay:
            return self._lose(missing)
        return self._again(missing)

    def _overlaps(self, seq: int, payload: bytes) -> bool:
        """Whether a live message is one that a replay has brought, or one from before it."""
        if seq < self._floor:
            return True
        replayed = self._replayed
        while replayed and replayed[0][0] < seq:
            replayed.popleft()
        return bool(replayed) and replayed[0] == (seq, hash(payload))

    def _drain(self) -> list[StreamEffect]:
        """Take the kept live messages, as far as they join."""
        effects: list[StreamEffect] = []
        while self.live and self._kept:
            seq, payload = self._kept.popleft()
            self._kept_bytes -= len(payload)
            effects += self._take(seq, payload)
        if self.live:
            self._tries = 0
        return effects

    def _keep(self, seq: int, payload: bytes) -> None:
        if (
            len(self._kept) >= self.config.kept_messages_max
            or self._kept_bytes + len(payload) > self.config.kept_bytes_max
        ):
            self.kept_dropped += len(self._kept)
            self._forget_kept()
        self._kept.append((seq, payload))
        self._kept_bytes += len(payload)

    def _forget_kept(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0

    # --- replays and losses

    def _request(self) -> list[StreamEffect]:
        """Ask for what follows the last applied message, and for that one to compare."""
        self.live = False
        self._tries += 1
        self._heard = self._broken = self._lenient = False
        if not self._next:
            self._next = 0
            self._anchor = None
            return [RequestReplay(0)]
        self._anchor = (self._next - 1, self._last_digest)
        return [RequestReplay(self._next - 1)]

    def _from_zero(self) -> list[StreamEffect]:
        self._next = self._floor = 0
        self._tries = 0
        self._replayed.clear()
        return self._request()

    def _again(self, reason: str) -> list[StreamEffect]:
        return self._request() if self._tries < self.config.tries_max else self._lose(reason)

    def _restart(self, evidence: str, seq: int = -1, payload: bytes = b"") -> list[StreamEffect]:
        """Follow another process of the engine.

        Args:
            seq: of the live message that shows it; -1 if a replay does.
        """
        self.restarts += 1
        self._last_live = seq
        self._forget_kept()
        reason = f"the engine restarted: {evidence}"
        if not self.config.replay:
            self._next = None
            return [NewEpoch(reason, complete=False), *self._take(seq, payload)]
        if seq == 0:
            self._replayed.clear()
            self._tries = self._floor = 0
            self.live = True
            return [NewEpoch(reason, complete=True), self._applied(seq, payload)]
        effects = [NewEpoch(reason, complete=True), *self._from_zero()]
        if seq > 0:
            self._keep(seq, payload)
        return effects

    def _join_late(self, seq: int, payload: bytes) -> list[StreamEffect]:
        """Accept that the engine's buffer begins at `seq`: what was before is lost for good."""
        self.losses += 1
        reason = f"the engine's replay buffer begins at {seq}, messages from {self._next} are lost"
        self._anchor = None
        self._tries = 1
        self._floor = seq
        self._replayed.clear()
        self._replayed.append((seq, hash(payload)))
        return [NewEpoch(reason, complete=False), self._applied(seq, payload)]

    def _lose(self, reason: str) -> list[StreamEffect]:
        """Give up the state, and go on with the next live message, whatever its number."""
        self.losses += 1
        self._next = None
        self._anchor = None
        self._tries = 0
        self._replayed.clear()
        self.live = True
        return [NewEpoch(reason, complete=False), *self._drain()]
