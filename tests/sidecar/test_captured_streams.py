"""Streams recorded from a real vLLM go through the mirror and the relay."""

from __future__ import annotations

import pytest

from controlplane.core.hashing import Extras, chain, pack_tokens
from schemas.vllm_events import AllBlocksCleared, BlockStored, decode_batch
from sidecar.mirror import Mirror, Outcome
from sidecar.relay import Relay
from tests.models.naive_mirror import NaiveMirror
from tests.models.naive_relay import Receiver
from tests.sidecar.captures import capture

BASIC, EVICT, SMALL = "block32_basic", "block32_evict_reset", "block16_basic"


@pytest.mark.parametrize("names", [(BASIC,), (SMALL,), (BASIC, EVICT)])
def test_every_recorded_event_applies(names: tuple[str, ...]) -> None:
    """Mirror, relay and a receiver follow whole recordings, and agree with the naive mirror."""
    mirror, relay, twin, receiver = Mirror(), Relay("i", 1), NaiveMirror(), Receiver()
    for _, payload in [message for name in names for message in capture(name)]:
        batch = decode_batch(payload)
        relay.apply(mirror.apply(batch))
        for event in batch.events:
            twin.apply(event)
        while (sent := relay.flush(0.0, 0.0)) is not None:
            receiver.take(sent)
        mirror.validate()
        relay.validate()
        assert mirror.held() == twin.held(0)
        assert receiver.sets.get(0, set()) == relay.published()
        assert len(mirror.held()) <= 71, "the recording server had 71 blocks"
    applied = {Outcome.STORED, Outcome.REPEATED, Outcome.REMOVED, Outcome.CLEARED}
    assert {outcome for outcome, count in mirror.outcomes.items() if count} <= applied
    assert mirror.unknown_removals == 0


def test_a_salted_prompt_has_the_hashes_that_a_router_computes() -> None:
    """The recording's salted prompt is found under tokens and salt, and not without the salt."""
    mirror = Mirror()
    salted = None
    for _, payload in capture(BASIC):
        batch = decode_batch(payload)
        mirror.apply(batch)
        for event in batch.events:
            if isinstance(event, BlockStored) and event.extra_keys and event.extra_keys[0]:
                salted = event
    assert salted is not None
    tokens = pack_tokens(salted.token_ids)
    with_salt = chain(tokens, salted.block_size, extras=Extras(salt="tenant-a"))
    assert mirror.held().issuperset(with_salt)
    assert with_salt != chain(tokens, salted.block_size)


def test_the_reset_leaves_what_was_stored_after_it() -> None:
    """The last recorded batch clears the cache and stores one prompt of three blocks."""
    mirror = Mirror()
    messages = capture(BASIC) + capture(EVICT)
    assert [seq for seq, _ in messages] == list(range(41))
    for _, payload in messages:
        mirror.apply(decode_batch(payload))
    cleared, stored = decode_batch(messages[-1][1]).events
    assert isinstance(cleared, AllBlocksCleared)
    assert isinstance(stored, BlockStored)
    assert mirror.held() == set(chain(pack_tokens(stored.token_ids), stored.block_size))
