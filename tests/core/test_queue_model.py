from itertools import accumulate
from operator import or_
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.core.openings import Hits, Openings
from controlplane.core.queue import AdmissionQueue
from controlplane.core.queue_lines import ORDERS, QueueConfig, Service, Waiting
from tests.models.naive_queue import NaiveQueue

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
LANES = (None, "lora")
INFINITY = float("inf")
MASKS = [(-1, 0), (1, 6), (2, 5), (4, 3), (3, 4), (0, 7), (5, 0)]
"""Who has room, and who is full, of three instances."""


@st.composite
def nested(draw: st.DrawFn) -> Hits:
    """Draws hits: the fewer tokens, the more instances have them."""
    depths = sorted(draw(st.sets(st.integers(1, 400), max_size=3)), reverse=True)
    masks = accumulate(draw(st.lists(st.integers(1, 7), min_size=3, max_size=3)), or_)
    return tuple(zip(depths, masks, strict=False))


HITS = nested()


class QueueMachine(RuleBasedStateMachine):
    """The real queue and the naive one, told the same things."""

    @initialize(order=st.sampled_from(ORDERS), k=st.integers(1, 4), room=st.integers(2, 12))
    def begin(self, order: Any, k: int, room: int) -> None:
        """Make both."""
        config = QueueConfig(
            order, k, requests_max=room, bytes_max=1000, quantum_tokens=64, band_requests_max=4
        )
        self.real, self.naive = AdmissionQueue(config), NaiveQueue(config)
        self.now_s = 0.0

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        lane=st.sampled_from(LANES),
        budget_s=st.sampled_from([INFINITY, 0.5, 1.0, 4.0]),
        tokens=st.integers(1, 500),
        hits=HITS,
        size=st.integers(0, 200),
        group=st.sampled_from([None, None, 1, 2]),
    )
    def add(self, **drawn: Any) -> None:
        """A request comes."""
        one = self.request(self.now_s, drawn)
        expected = self.naive.add(one)
        assert self.real.add(one, Service(ttft_s=0.1, ttft_p99_s=0.3)) is expected

    @rule(
        tenant=st.sampled_from(sorted(WEIGHTS)),
        lane=st.sampled_from(LANES),
        budget_s=st.sampled_from([INFINITY, 0.5, 4.0]),
        waited_s=st.sampled_from([0.0, 0.3, 59.9]),
        group=st.sampled_from([None, 1]),
    )
    def take_back(self, waited_s: float, **drawn: Any) -> None:
        """One comes back that an instance has failed, however many wait."""
        one = self.request(self.now_s - waited_s, {"tokens": 9, "hits": (), "size": 50, **drawn})
        self.naive.take_back(one)
        self.real.take_back(one, Service(ttft_s=0.1, ttft_p99_s=0.3), self.now_s)

    def request(self, arrived_s: float, drawn: dict[str, Any]) -> Waiting:
        """Returns what was drawn as a request."""
        tenant = drawn["tenant"]
        return Waiting(
            "payload",
            arrived_s,
            tenant=tenant,
            weight=WEIGHTS[tenant],
            lane=drawn["lane"],
            ttft_by_s=self.now_s + drawn["budget_s"],
            tokens=drawn["tokens"],
            hits=drawn["hits"],
            size_bytes=drawn["size"],
            group=drawn["group"],
        )

    @precondition(lambda self: self.naive.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A client leaves."""
        one = data.draw(st.sampled_from(self.naive.waiting))
        self.naive.cancel(one)
        assert self.real.cancel(one)
        assert not self.real.cancel(one)

    @rule(
        lanes=st.sampled_from([{None, "lora"}, {None}, {"lora"}, set()]),
        masks=st.sampled_from(MASKS),
        place_s=st.sampled_from([0.0, 0.05, 0.2]),
        token_s=st.sampled_from([0.0, 0.001, 0.01]),
    )
    def take(self, lanes: set[Any], masks: tuple[int, int], place_s: float, token_s: float) -> None:
        """Some instances have room, others are full."""
        openings = Openings(*masks, place_s, token_s)

        def room(lane: Any) -> Openings | None:
            return openings if lane in lanes else None

        expected = self.naive.take(room, self.now_s)
        taken = self.real.take(room, self.now_s)
        assert taken is expected
        if taken is not None and masks[0] > 0:
            self.real.went(taken.group, masks[0] & -masks[0])

    @rule(data=st.data())
    def refresh(self, data: st.DataObject) -> None:
        """Predictions and hits change."""
        seconds = st.floats(0.0, 2.0)
        self.real.refresh(
            [(one, Service(0.1, data.draw(seconds)), data.draw(HITS)) for one in self.naive.waiting]
        )

    @rule(passed_s=st.sampled_from([0.01, 0.3, 30.0]))
    def time_passes(self, passed_s: float) -> None:
        """Who waited too long, or hopes in vain, leaves."""
        self.now_s += passed_s
        config = self.real.config
        naive = (*self.naive.returned, *self.naive.lined)
        late = [w for w in naive if self.now_s - w.arrived_s >= config.wait_s_max]
        assert self.real.expire(self.now_s) == late
        for one in late:
            self.naive.cancel(one)
        vain = {
            w.number for w in self.naive.waiting if w.hope_until_s < self.now_s and w.looks >= 1
        }
        given_up = self.real.hopeless(self.now_s, looks_max=1)
        assert {one.number for one in given_up} == vain
        for one in given_up:
            self.naive.cancel(one)

    @invariant()
    def same(self) -> None:
        """Both hold the same requests, and the real one is in order."""
        if hasattr(self, "real"):
            self.real.check()
            assert list(self.real) == self.naive.waiting


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
