"""The hits that a plane decides by are those of the blocks that its instances published."""

from __future__ import annotations

import random

import pytest

from controlplane.core.events import InstanceGone, Tick
from controlplane.core.plane import Plane
from tests.core.plane_helpers import BLOCK, Publisher, plane, prompt, record, request

PROMPTS = [prompt(1, *range(100 * n, 100 * n + 6)) for n in range(1, 5)]


def truth(made: Plane, published: dict[str, Publisher], hashes: list[int]) -> dict[str, int]:
    """Return how many tokens of a prompt each instance of the fleet published."""
    found = {}
    for instance in made.fleet:
        name = instance.record.instance_id
        depth = 0
        while depth < len(hashes) and hashes[depth] in published[name].blocks:
            depth += 1
        found[name] = depth * BLOCK
    return found


def hits(made: Plane, hashes: list[int]) -> dict[str, int]:
    """Return how many of them the plane believes in when it decides."""
    decision = made.requests.decide(request(hashes), 1.0)
    assert decision is not None
    row = decision.hit_tokens
    return {
        each.record.instance_id: 0 if row is None else int(row[number])
        for number, each in enumerate(decision.rows)
    }


@pytest.mark.parametrize("seed", range(6))
def test_hits_follow_every_change_of_rows_and_slots(seed: int) -> None:
    """Instances come, go, restart and are cleared: their numbers are reused, their hits are not."""
    rng = random.Random(seed)
    names = [f"i{number}" for number in range(12)]
    made = plane(*names, promise_s=0.0)
    published = {name: Publisher(name) for name in names}
    for each in published.values():
        each.seq = 0
    for _ in range(120):
        name = rng.choice(names)
        each = published[name]
        match rng.randrange(6):
            case 0:
                made.handle(InstanceGone(name), 1.0)
            case 1:
                each = published[name] = Publisher(name, each.epoch + 1)
                made.handle(record(name, epoch=each.epoch), 1.0)
                made.handle(each.batch(), 1.0)
            case 2:
                made.handle(each.clear(), 1.0)
            case 3:
                made.handle(Tick(), 1.0)
            case _:
                chosen = rng.choice(PROMPTS)
                made.handle(each.store(chosen[: rng.randint(1, len(chosen))]), 1.0)
        if not len(made.fleet):
            continue
        for hashes in PROMPTS:
            assert hits(made, hashes) == truth(made, published, hashes)
