"""What metrics show of the planes, the breakers and the tenants: states, read at the scrape."""

from __future__ import annotations

from collections.abc import Iterator

from controlplane.core.stream import Trust
from router.access import Access
from router.breaker import State
from router.directory import Directory, ServedModel
from router.instances import Instances
from router.metrics import Sample

_OF_MODEL = ("model",)
_OF_INSTANCE = ("model", "instance")
_BREAKER_STATES = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}
_TRUST = {Trust.EXACT: 0, Trust.RESYNCING: 1, Trust.STALE: 2}


def plane_samples(directory: Directory, instances: Instances, now_s: float) -> Iterator[Sample]:
    """Yield the state of every model and of its instances."""
    trust = Sample(
        "instances", "Instances by trust in their block sets.", labels=("model", "trust")
    )
    usable = Sample("instances_usable", "Instances that take requests.", labels=_OF_MODEL)
    batch = Sample(
        "inflight_requests",
        "Requests assigned and unfinished, by all that this router knows.",
        labels=_OF_INSTANCE,
    )
    queued = Sample(
        "queued_prefill_tokens", "Prompt tokens booked, not yet computed.", labels=_OF_INSTANCE
    )
    context = Sample(
        "inflight_tokens", "Prompt tokens of unfinished requests.", labels=_OF_INSTANCE
    )
    breaker = Sample(
        "cb_state", "Circuit breaker: 0 closed, 1 half open, 2 open.", labels=_OF_INSTANCE
    )
    doubt = Sample(
        "instance_trust",
        "Trust in an instance's block set: 0 exact, 1 resyncing, 2 stale.",
        labels=_OF_INSTANCE,
    )
    silence = Sample(
        "instance_silence_seconds", "Since its sidecar was last heard.", labels=_OF_INSTANCE
    )
    for served in directory:
        fleet, ledger, model = served.plane.fleet, served.plane.ledger, served.model
        for state in Trust:
            trust.values[model, state] = sum(instance.trust is state for instance in fleet)
        usable.values[(model,)] = int((fleet.ready & fleet.healthy).sum())
        for instance in fleet:
            name, row = instance.record.instance_id, instance.row
            batch.values[model, name] = int(ledger.batch[row])
            queued.values[model, name] = int(ledger.queued[row])
            context.values[model, name] = int(ledger.context[row])
            found = instances.breakers.get((model, name))
            breaker.values[model, name] = 0 if found is None else _BREAKER_STATES[found.state]
            doubt.values[model, name] = _TRUST[instance.trust]
            silence.values[model, name] = max(0.0, now_s - instance.heard_s)
    yield from (trust, usable, batch, queued, context, breaker, doubt, silence)
    yield from _whole_planes(directory)


def _whole_planes(directory: Directory) -> Iterator[Sample]:
    """Yield what is one number, or a set of counts, a model."""
    blocks = Sample("index_blocks", "Distinct blocks.", labels=_OF_MODEL)
    memory = Sample("index_memory_bytes", "Estimated memory of the index.", labels=_OF_MODEL)
    peers = Sample("peer_routers", "Other routers whose bookings count.", labels=_OF_MODEL)
    hotspots = Sample("hotspots", "Hotspot verdicts in force.", labels=_OF_MODEL)
    doubled = Sample(
        "instances_sharing_address",
        "Instances at an address that another one has too: what its engine does counts twice.",
        labels=_OF_MODEL,
    )
    tickets = Sample("requests_running", "Requests on their way, of this router.", labels=_OF_MODEL)
    events = Sample("plane_events_total", "What happened in a plane.", labels=("model", "event"))
    for served in directory:
        plane, key = served.plane, (served.model,)
        blocks.values[key] = len(plane.index)
        memory.values[key] = plane.index.memory_bytes()
        peers.values[key] = plane.ledger.peers
        hotspots.values[key] = len(plane.verdicts.hotspots)
        doubled.values[key] = plane.doubled()
        tickets.values[key] = len(plane.requests.tickets)
        for name, value in _counts(served):
            events.values[served.model, name] = value
    yield from (blocks, memory, peers, hotspots, doubled, tickets, events)


def _counts(served: ServedModel) -> Iterator[tuple[str, float]]:
    plane = served.plane
    for counts in (plane.counts, plane.intake.counts, plane.requests.counts):
        yield from counts.items()
    yield "outbox_dropped", plane.outbox.dropped
    yield "peer_gaps", plane.ledger.peer_gaps
    yield "peers_refused", plane.ledger.peers_refused
    yield "instances_refused", plane.fleet.refused
    yield "hotspots_refused", plane.verdicts.refused


def tenant_samples(access: Access, now_s: float) -> Iterator[Sample]:
    """Yield what each tenant has in use."""
    running = Sample("tenant_requests_running", "Requests let in.", labels=("tenant",))
    tokens = Sample(
        "tenant_tokens_available", "Tokens that could be used at once.", labels=("tenant",)
    )
    for gate in access.gates:
        key = (gate.tenant.name,)
        running.values[key] = gate.running
        level = gate.level(now_s)
        if level is not None:
            tokens.values[key] = level
    yield from (running, tokens)
