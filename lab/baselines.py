"""Rival policies that need more than the plane's own arrays: formulas and defaults of their makers.

    name          picks                                                         looks at
    -----------   -----------------------------------------------------------   -------------------
    vllm_jsq      least 4 × waiting + running                                   engines' reports
    llm_d         most 2 × queue + 2 × (1 − KV use) + 3 × hit share             reports, index
    sglang        balanced: longest match of a tree; else the shortest queue    its own sendings
    aibrix        longest match of its table among the not too busy             its own sendings
    preble        exploit a long match, else least load + own prefill           its own sendings
    oracle_ttft   least time to first token                                     engines' very state

What the plane itself offers (`controlplane.core.policies`) is compared as well: `round_robin`,
`least_requests`, `linear`, `dynamo_cost` and, untuned, `simulated_ttft`.

A rival decides within the plane's own request path: filters come first, equal scores rotate. What
depends on past decisions is kept from the hooks `sent`, `began` and `ended`; reports of engines are
as late as the plane's own. Each is told in its class how it differs from its model, if it does.

Sources: vLLM's data-parallel load balancer; llm-d-router ebab6879, `defaults.go`; SGLang 01f6c92a,
`policies/mod.rs`, with the defaults of its command line; AIBrix e3e10f9e, `prefix_cache.go`; Preble
(WukLab/preble 8e7906a); Vidur for the simulated time to first token.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, ClassVar

import msgspec
import numpy as np

from controlplane.core.decision import RouteRequest
from controlplane.core.fleet import Fleet
from controlplane.core.scoring import FleetView, FloatArray, IntArray, Request, new_tokens
from lab.baselines_prefixes import SeenPrefixes
from lab.engine_types import EngineConfig, StepResult


class Surroundings(msgspec.Struct, frozen=True):
    """What a rival may look at: instances' own reports, and how their engines are configured."""

    fleet: Fleet
    engine: EngineConfig
    rng: random.Random


class Rival:
    """A policy that is told what happens.

    Attributes:
        parameters: what can be set, and the defaults.
        uses_index: whether it looks at `hit_tokens`.
    """

    name: ClassVar[str]
    parameters: ClassVar[dict[str, float]] = {}
    uses_index: ClassVar[bool] = False

    def __init__(self, around: Surroundings, **parameters: float) -> None:
        self.around = around
        self.set = {**self.parameters, **parameters}
        self.now_s = 0.0
        self.hashes: tuple[int, ...] | Any = ()

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return (n,) scores: the lowest is best, equal ones are equally good."""
        raise AssertionError(f"{type(self).__name__} has no score")

    def arriving(self, request: RouteRequest, now_s: float) -> None:
        """Note which request is about to be scored."""
        self.hashes, self.now_s = request.hashes, now_s

    def sent(self, row: int, request: RouteRequest, hit_tokens: int) -> None:
        """Note where that request went."""

    def began(self, row: int, request_id: str) -> None:
        """Note that a request's first token came."""

    def ended(self, row: int, request_id: str, output_tokens: int, tpot_s: float) -> None:
        """Note that a request ended."""

    def stepped(self, row: int, result: StepResult, due_s: float) -> None:
        """Note what a step that has just begun does; only an oracle knows of it."""


def only(best: IntArray | list[int], count: int) -> FloatArray:
    """Return (count,) scores that leave no choice but the rows in `best`."""
    scores = np.ones(count)
    scores[best] = 0.0
    return scores


def _where_least(values: Any, among: IntArray | None = None) -> IntArray:
    """Return the rows with the least value, of all or `among` some."""
    rows = np.arange(len(values)) if among is None else among
    chosen = np.asarray(values)[rows]
    least: IntArray = rows[chosen == chosen.min()]
    return least


class VllmJsq(Rival):
    """Joins the shortest queue by engines' reports, plus what was sent since each of them."""

    name = "vllm_jsq"
    parameters: ClassVar[dict[str, float]] = {"waiting": 4.0}

    def __init__(self, around: Surroundings, **parameters: float) -> None:
        super().__init__(around, **parameters)
        self._since: dict[int, tuple[object, int]] = {}

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return 4 × waiting + running."""
        scores = np.zeros(len(view))
        for row, instance in enumerate(self.around.fleet.rows):
            report, sent = self._known(row)
            running = 0 if instance.load is None else instance.load.running
            waiting = sent + (0 if instance.load is None else instance.load.waiting)
            scores[row] = self.set["waiting"] * waiting + running
            self._since[row] = (report, sent)
        return scores

    def _known(self, row: int) -> tuple[object, int]:
        """Return the last report, and how many requests were sent after it had come."""
        report = self.around.fleet.rows[row].load
        known, sent = self._since.get(row, (None, 0))
        return report, sent if known is report else 0

    def sent(self, row: int, request: RouteRequest, hit_tokens: int) -> None:
        """Count a request as waiting until the next report."""
        report, sent = self._known(row)
        self._since[row] = (report, sent + 1)


class LlmD(Rival):
    """llm-d's built-in scorers; its prefix scorer sees the plane's exact index here."""

    name = "llm_d"
    parameters: ClassVar[dict[str, float]] = {"queue": 2.0, "kv": 2.0, "prefix": 3.0}
    uses_index = True

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return the negative of queue, memory and prefix scores, each 0 to 1 and weighted."""
        loads = [instance.load for instance in self.around.fleet.rows]
        waiting = np.array([0 if load is None else load.waiting for load in loads])
        usage = np.array([0.0 if load is None else load.kv_usage for load in loads])
        span = waiting.max() - waiting.min()
        queue = (waiting.max() - waiting) / span if span else np.ones(len(waiting))
        hits = 0 if request.hit_tokens is None else request.hit_tokens
        match = hits / max(request.prompt_tokens, 1)
        weight = self.set
        scores: FloatArray = -(
            weight["queue"] * queue + weight["kv"] * (1.0 - usage) + weight["prefix"] * match
        )
        return scores


class Sglang(Rival):
    """SGLang's cache_aware: a tree of what was sent where, unless the queues are too uneven.

    Its tree holds text; here it holds blocks, four characters a token. Among those who have the
    longest match, the last one that got it is taken.
    """

    name = "sglang"
    parameters: ClassVar[dict[str, float]] = {
        "threshold": 0.3,
        "absolute": 64,
        "relative": 1.5,
        "tree_tokens": 2**24,
    }

    def __init__(self, around: Surroundings, **parameters: float) -> None:
        super().__init__(around, **parameters)
        size = around.engine.block_size
        self._seen = SeenPrefixes(int(self.set["tree_tokens"]) // size)

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Leave the one that the rules name."""
        count, batch = len(view), view.batch_size
        most, least = int(batch.max()), int(batch.min())
        if most - least > self.set["absolute"] and most > self.set["relative"] * least:
            return only(_where_least(batch), count)
        depths = self._seen.depths(self.hashes, count)
        matched = int(depths.max()) * self.around.engine.block_size
        if matched > self.set["threshold"] * request.prompt_tokens:
            holders = np.flatnonzero(depths == depths.max())
            return only([self._seen.latest(holders, self.hashes[int(depths.max()) - 1])], count)
        return only(_where_least(self._seen.sizes(count)), count)

    def sent(self, row: int, request: RouteRequest, hit_tokens: int) -> None:
        """Put the prompt into the tree."""
        self._seen.add(row, request.hashes)


class Aibrix(Rival):
    """AIBrix's prefix-cache: the longest match among those that are not too busy."""

    name = "aibrix"
    parameters: ClassVar[dict[str, float]] = {
        "imbalance": 8,
        "deviations": 1.0,
        "table_tokens": 2**24,
    }

    def __init__(self, around: Surroundings, **parameters: float) -> None:
        super().__init__(around, **parameters)
        size = around.engine.block_size
        self._seen = SeenPrefixes(int(self.set["table_tokens"]) // size)

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Leave those that the rules name."""
        count, batch = len(view), view.batch_size
        rows: IntArray = np.arange(count)
        if int(batch.max()) - int(batch.min()) > self.set["imbalance"]:
            rows = _where_least(batch)
        depths = self._seen.depths(self.hashes, count)
        busy = batch.mean() + self.set["deviations"] * batch.std()
        matched = rows[(depths[rows] > 0) & (batch[rows] <= busy)]
        if not len(matched):
            return only(_where_least(batch, rows), count)
        matched = matched[depths[matched] == depths[matched].max()]
        return only(_where_least(batch, matched), count)

    def sent(self, row: int, request: RouteRequest, hit_tokens: int) -> None:
        """Put the prompt into the table."""
        self._seen.add(row, request.hashes)


class _Window:
    """Seconds of work that instances got within a window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._entries: deque[tuple[float, int, float]] = deque()
        self._sums: dict[int, float] = {}

    def add(self, row: int, work_s: float, now_s: float) -> None:
        """Note work."""
        self._entries.append((now_s, row, work_s))
        self._sums[row] = self._sums.get(row, 0.0) + work_s

    def loads(self, count: int, now_s: float) -> FloatArray:
        """Return (count,) seconds of work."""
        while self._entries and self._entries[0][0] <= now_s - self._window_s:
            _, row, work_s = self._entries.popleft()
            self._sums[row] -= work_s
        return np.array([max(self._sums.get(row, 0.0), 0.0) for row in range(count)])


class Preble(Rival):
    """Preble's E2 without the eviction term, which its released code leaves off by default.

    Prefill is taken to cost what the engines' own profile says of a token; decoding costs the mean
    answer (`output_tokens` before there is one) at the measured time a token (`tpot_s` likewise).
    """

    name = "preble"
    parameters: ClassVar[dict[str, float]] = {
        "window_s": 180.0,
        "rebalance": 1.5,
        "tpot_s": 0.15,
        "output_tokens": 45.0,
        "tree_tokens": 2**24,
    }
    _SMOOTHING: ClassVar[float] = 0.05

    def __init__(self, around: Surroundings, **parameters: float) -> None:
        super().__init__(around, **parameters)
        self._seen = SeenPrefixes(int(self.set["tree_tokens"]) // around.engine.block_size)
        self._work = _Window(self.set["window_s"])
        self._token_s = around.engine.step_times.token
        self._tpot_s, self._output = self.set["tpot_s"], self.set["output_tokens"]
        self._missing = np.zeros(0, np.int64)

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Exploit if more is cached than not; else least load plus own prefill."""
        count = len(view)
        cached = self._seen.depths(self.hashes, count) * self.around.engine.block_size
        self._missing = np.maximum(request.prompt_tokens - cached, 1)
        loads = self._work.loads(count, self.now_s)
        if 2 * int(cached.max()) > request.prompt_tokens:
            holders = np.flatnonzero(cached == cached.max())
            chosen = _where_least(loads, holders)
            load = loads[chosen[0]]
            if load == loads.max() and load > self.set["rebalance"] * loads.min():
                chosen = _where_least(loads)
            return only(chosen, count)
        scores: FloatArray = loads + self._missing * self._token_s
        return scores

    def sent(self, row: int, request: RouteRequest, hit_tokens: int) -> None:
        """Count the request as work of that instance."""
        work_s = float(self._missing[row]) * self._token_s + self._output * self._tpot_s
        self._work.add(row, work_s, self.now_s)
        self._seen.add(row, request.hashes)

    def ended(self, row: int, request_id: str, output_tokens: int, tpot_s: float) -> None:
        """Learn how long answers are and take."""
        self._output += self._SMOOTHING * (output_tokens - self._output)
        if output_tokens > 1:
            self._tpot_s += self._SMOOTHING * (tpot_s - self._tpot_s)


class _Prefill(msgspec.Struct):
    """A request whose prompt is being computed: tokens done, and to do."""

    done: int
    left: int


class OracleTtft(Rival):
    """The time to first token by the engines' own step times and very state.

    No router could know what it knows: what each engine has computed as of the step under way, and
    when that ends. It takes the queue to be served in order and nobody to finish meanwhile.
    """

    name = "oracle_ttft"
    uses_index = True

    def __init__(self, around: Surroundings, **parameters: float) -> None:
        super().__init__(around, **parameters)
        self._prefills: list[dict[str, _Prefill]] = []
        self._decoding: list[dict[str, int]] = []
        self._due_s: list[float] = []

    def score(self, view: FleetView, request: Request) -> FloatArray:
        """Return seconds until the first token."""
        self._grow(len(view))
        new = np.broadcast_to(new_tokens(request), len(view)).tolist()
        times, limit = self.around.engine.step_times, self.around.engine.max_num_batched_tokens
        scores = np.zeros(len(view))
        for row, own in enumerate(new):
            queue = self._prefills[row].values()
            tokens = own + sum(each.left for each in queue)
            pairs = _pairs(request.prompt_tokens - own, own)
            pairs += sum(_pairs(each.done, each.left) for each in queue)
            decoding = self._decoding[row]
            batch, context = len(decoding), sum(decoding.values())
            steps = -(-tokens // max(limit - batch, 1))
            each_s = times.step + times.sequence * (batch + 1) + times.kv_token * context
            compute_s = (tokens + steps * batch) * times.token
            least_s = steps * (times.weights + times.experts)
            busy_s = max(self._due_s[row] - self.now_s, 0.0)
            scores[row] = busy_s + steps * each_s + max(compute_s, least_s) + pairs * times.pair
        return scores

    def sent(self, row: int, request: RouteRequest, hit_tokens: int) -> None:
        """Put the request into the instance's queue."""
        self._grow(row + 1)
        left = max(request.prompt_tokens - hit_tokens, 1)
        self._prefills[row][request.request_id] = _Prefill(request.prompt_tokens - left, left)

    def stepped(self, row: int, result: StepResult, due_s: float) -> None:
        """Follow what the engine computes."""
        self._grow(row + 1)
        self._due_s[row] = due_s
        prefills, decoding = self._prefills[row], self._decoding[row]
        for request_id in result.preempted:
            context = decoding.pop(request_id, None)
            if context is not None:
                prefills[request_id] = _Prefill(0, context)
        for request_id, tokens in result.scheduled_tokens.items():
            prefill = prefills.get(request_id)
            if prefill is None:
                decoding[request_id] = decoding.get(request_id, 0) + tokens
            else:
                prefill.done += tokens
                prefill.left = max(prefill.left - tokens, 1)
        for output in result.outputs:
            begun = prefills.pop(output.request_id, None)
            if begun is not None:
                decoding[output.request_id] = begun.done
            if output.finish_reason is not None:
                decoding.pop(output.request_id, None)

    def _grow(self, count: int) -> None:
        while len(self._prefills) < count:
            self._prefills.append({})
            self._decoding.append({})
            self._due_s.append(0.0)


def _pairs(done: int, left: int) -> int:
    """Return how many (query, key) pairs are left of a prompt."""
    return left * done + left * (left + 1) // 2


BASELINES: dict[str, type[Rival]] = {
    kind.name: kind for kind in (VllmJsq, LlmD, Sglang, Aibrix, Preble, OracleTtft)
}
"""Every rival by its name."""
