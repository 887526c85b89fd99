"""What other routers let in, by tenant, also when messages are lost."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router import tenant_peers
from router.tenant_peers import PeerUse
from schemas.bus import Finished, RouteBatch, Routed, RouteEvent, RouterTotals

TENANTS = ("acme", "umbrella", "")


def batch(*events: RouteEvent, router: str = "b", epoch: int = 1) -> RouteBatch:
    """Return a message of another router."""
    return RouteBatch(router, epoch, 0, 0.0, list(events))


def routed(number: int, tenant: str = "acme", **fields: object) -> Routed:
    """Return the start of a request."""
    return Routed(f"r{number}", "i", 0.0, tenant=tenant, prompt_tokens=10, **fields)  # type: ignore[arg-type]


def finished(number: int, tenant: str = "acme", outcome: str = "ok", output: int = 5) -> Finished:
    """Return the end of one."""
    return Finished(f"r{number}", "i", outcome, 200, 0.0, tenant=tenant, output_tokens=output)


def totals(requests: int) -> RouterTotals:
    """Return a router's own count."""
    return RouterTotals({"i": (requests, 0, 0)} if requests else {})


def test_requests_and_tokens_are_counted_by_tenant() -> None:
    """In flight until they end; prompts at the start, answers at the end, each once."""
    use = PeerUse("a", 2.0)
    use.told("m", batch(routed(1), routed(2), routed(3, "umbrella")), 0.0)
    assert use.take_changes() == {"acme": (2, 20), "umbrella": (1, 10)}
    use.told("m", batch(finished(1)), 0.0)
    assert use.take_changes() == {"acme": (1, 5)}
    assert use.take_changes() == {}


def test_a_retry_is_one_request() -> None:
    """It moves to another instance; its prompt is not charged again."""
    use = PeerUse("a", 2.0)
    use.told("m", batch(routed(1), finished(1, outcome="retried", output=0)), 0.0)
    use.told("m", batch(routed(1, attempt=1)), 0.0)
    assert use.take_changes() == {"acme": (1, 10)}


def test_requests_of_one_id_are_as_many_as_there_are() -> None:
    """A client that gives all its requests the same id does not get past its tenant's limit."""
    use = PeerUse("a", 2.0)
    use.told("m", batch(*[routed(1)] * 5, routed(1, "umbrella")), 0.0)
    assert use.running == {"acme": 5, "umbrella": 1}
    retry = finished(1, outcome="retried", output=0), routed(1, attempt=1)
    use.told("m", batch(*retry, finished(1, "umbrella"), finished(1)), 0.0)
    assert use.running == {"acme": 4}
    use.told("m", batch(totals(2)), 0.0)
    assert use.running == {"acme": 2}


def test_own_messages_and_old_incarnations_are_ignored() -> None:
    """What this router did it knows itself; what a dead process said is void."""
    use = PeerUse("a", 2.0)
    use.told("m", batch(routed(1), router="a"), 0.0)
    assert use.take_changes() == {}
    use.told("m", batch(routed(1), epoch=5), 0.0)
    use.told("m", batch(routed(2), epoch=4), 0.0)
    assert use.running == {"acme": 1}
    use.told("m", batch(routed(3), epoch=6), 0.0)
    assert use.running == {"acme": 1}


def test_a_silent_router_has_nothing_in_flight() -> None:
    """After the lease; another model of it, or another router, is not concerned."""
    use = PeerUse("a", 2.0)
    use.told("m", batch(routed(1)), 0.0)
    use.told("n", batch(routed(2)), 1.5)
    use.told("m", batch(routed(1), router="c"), 1.5)
    use.expire(2.5)
    assert use.running == {"acme": 2}
    use.take_changes()
    use.expire(9.0)
    assert use.take_changes() == {"acme": (0, 0)}


def test_a_lost_end_is_healed_by_the_totals() -> None:
    """Of more requests than a router says it has, the oldest have ended."""
    use = PeerUse("a", 2.0)
    use.told("m", batch(routed(1), routed(2, "umbrella"), routed(3)), 0.0)
    use.told("m", batch(totals(1)), 0.0)
    assert use.running == {"acme": 1}
    use.told("m", batch(finished(3), totals(0)), 0.0)
    assert use.running == {}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many streams are ignored, too many requests of one are forgotten."""
    monkeypatch.setattr(tenant_peers, "PEERS_MAX", 2)
    monkeypatch.setattr(tenant_peers, "REQUESTS_MAX", 3)
    use = PeerUse("a", 2.0)
    for router in "bcd":
        use.told("m", batch(*map(routed, range(5)), router=router), 0.0)
    assert use.running == {"acme": 6}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "end", "totals"]),
        st.sampled_from(TENANTS),
        st.booleans(),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_is_lost_the_totals_heal_it(steps: list[tuple[str, str, bool]]) -> None:
    """Never more than there is after totals; exact when everything has been heard, or all ended."""
    use, running, lost_any = PeerUse("a", 2.0), dict[int, str](), False
    for number, (kind, tenant, lost) in enumerate(steps):
        event: RouteEvent
        if kind == "start":
            running[number] = tenant
            event = routed(number, tenant)
        elif kind == "end" and running:
            oldest = next(iter(running))
            event = finished(oldest, running.pop(oldest))
        else:
            event, lost = totals(len(running)), False
        lost_any |= lost
        if not lost:
            use.told("m", batch(event), 0.0)
        if isinstance(event, RouterTotals):
            assert sum(use.running.values()) <= len(running)
        if not lost_any:
            assert use.running == Counter(running.values())
    use.told("m", batch(totals(0)), 0.0)
    assert not use.running
