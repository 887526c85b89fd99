"""What the bus says of instances, however odd: each record and each model for itself."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import msgspec
import pytest

from controlplane.operator import Operator
from controlplane.operator_view import instance_rows
from router.directory import CARDS_SEEN_MAX
from schemas import subjects
from schemas.bus import InstanceRecord
from schemas.codec import encode
from tests.router.fake_engine import Behaviour, FakeEngine, Mode
from tests.router.service_rig import MODEL, ServiceRig, chat, tiny_card, until

pytestmark = pytest.mark.slow  # each starts a router with a real tokenizer

OTHER = "other"


async def _other_model(rig: ServiceRig, name: str, behaviour: Behaviour) -> FakeEngine:
    """Register an engine for a second model, whose prompts cannot be read."""
    engine = rig.engines[f"{OTHER}/{name}"] = FakeEngine(behaviour)
    url = f"http://127.0.0.1:{await engine.start()}"
    await rig.put(InstanceRecord(name, OTHER, url, epoch=1, kv_events=False))
    await until(lambda: OTHER in rig.process.router.directory.names)
    return engine


async def test_instances_of_two_models_may_have_the_same_id() -> None:
    """Each model's requests reach its own engine, and each engine has a breaker of its own."""
    async with ServiceRig() as rig:
        first = await rig.instance("vllm-0")
        second = await _other_model(rig, "vllm-0", Behaviour(mode=Mode.DIE_BEFORE_HEAD))
        body = {"model": OTHER, "prompt": "hi"}
        for _ in range(5):
            assert (await rig.refusal("/v1/completions", body)).status == 502
        await until(lambda: "cb_state" in rig.process.metrics.render().decode())
        metrics = rig.process.metrics.render().decode()
        assert 'cb_state{instance="vllm-0",model="other"} 2.0' in metrics
        assert 'cb_state{instance="vllm-0",model="tiny"} 0.0' in metrics
        await rig.chat("hi")
        assert (len(first.received), len(second.received)) == (1, 5)


@pytest.mark.parametrize(
    "url",
    ["http://h:99999", "http://[::1", "ftp://h", "", "http://h/v1", "http://u:p@h", "http://h:0"],
)
async def test_a_record_with_a_bad_url_concerns_nobody_else(url: str) -> None:
    """It is told, never chosen, and does not keep later instances out; corrected, it joins."""
    async with ServiceRig() as rig:
        bad = InstanceRecord("bad", MODEL, url, epoch=1, kv_events=False)
        await rig.put(bad)
        good = await rig.instance("good")
        for number in range(4):
            await rig.chat(f"{number}")
        assert len(good.received) == 4
        state = await rig.http.get(f"{rig.admin}/debug/state")
        (unusable,) = state["unusable"]
        assert (unusable["model"], unusable["instance"]) == (MODEL, "bad")
        assert "url" in unusable["problem"]
        assert rig.process.events.counts["unusable_record"] == 1
        assert "multiplane_records_unusable 1.0" in rig.process.metrics.render().decode()
        await rig.put(msgspec.structs.replace(bad, url=f"http://127.0.0.1:{good.port}"))
        await until(lambda: rig.known("bad"))
        assert not rig.process.events.unusable


async def test_an_instance_whose_url_turns_bad_leaves() -> None:
    """Its old address is not used any more."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        record = rig.known("a").record
        await rig.put(msgspec.structs.replace(record, url="nonsense"))
        await until(lambda: rig.known("a") is None)
        assert (await rig.refusal("/v1/chat/completions", chat("hi"))).status == 503


async def test_a_record_under_anothers_key_is_not_believed() -> None:
    """Whoever may write one key speaks for one instance."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        bucket = await rig.bus.bucket(subjects.INSTANCES)
        stranger = InstanceRecord("a", MODEL, "http://127.0.0.1:1", epoch=9)
        await bucket.put(subjects.key(MODEL, "b"), encode(stranger))
        await until(lambda: rig.process.events.counts["undecodable"])
        assert rig.known("a").record.epoch == 1


async def test_an_override_that_names_no_known_policy_is_told_and_ignored() -> None:
    """Requests and explanations go on by the configured policy."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        await Operator(rig.bus, by="test").policy(MODEL, "no_such_policy")
        await until(lambda: rig.process.events.counts["unknown_policy"])
        await rig.chat("hi")
        assert (await rig.explain(chat("hi")))["policy"] == "multiplicative"


async def test_an_explanation_that_fails_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator never waits for an answer that will not come."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        monkeypatch.setattr(rig.served.plane.requests, "decide", None)
        with pytest.raises(Exception, match="500"):
            await rig.explain(chat("hi"))


async def test_a_model_whose_instances_are_gone_is_forgotten() -> None:
    """It vanishes from state, metrics and lists, and is as new when it comes back."""
    async with ServiceRig({"forget_model_s": 0.1}) as rig:
        await rig.instance("a")
        await rig.chat("hi")
        record = rig.known("a").record
        await rig.put(msgspec.structs.replace(record, state="stopped"))
        await until(lambda: rig.served is None)
        assert (await rig.http.get(f"{rig.admin}/debug/state"))["models"] == {}
        assert 'model="tiny"' not in rig.process.metrics.render().decode()
        assert "has left" in str(await rig.refusal("/v1/chat/completions", chat("hi")))
        await rig.put(record)
        await until(lambda: rig.served is not None and rig.served.reader is not None)
        await rig.chat("hi")


async def test_junk_models_do_not_keep_real_ones_out() -> None:
    """One whose instances are gone makes room; while all have some, the refused are counted."""
    async with ServiceRig() as rig:
        directory = rig.process.router.directory
        directory.models_max = 2
        junk = [
            InstanceRecord("x", f"junk-{n}", "http://127.0.0.1:1", epoch=1, kv_events=False)
            for n in range(2)
        ]
        for record in junk:
            await rig.put(record)
        await until(lambda: len(directory) == 2)
        await _refused(rig, "other")
        await rig.put(msgspec.structs.replace(junk[0], state="stopped"))
        await rig.instance("a")
        await rig.chat("hi")
        assert set(directory.names) == {"junk-1", MODEL}


async def _refused(rig: ServiceRig, model: str) -> None:
    """Register an instance of one model too many."""
    await rig.put(InstanceRecord("x", model, "http://127.0.0.1:1", epoch=1, kv_events=False))
    await until(lambda: rig.process.router.directory.refused == 1)
    assert "multiplane_model_records_refused_total 1.0" in rig.process.metrics.render().decode()


async def test_a_card_that_is_not_what_its_name_says_is_not_used() -> None:
    """Damaged or forged, it is told, and requests are routed by load."""
    async with ServiceRig() as rig:
        forged = "0" * 64
        await (await rig.bus.objects(subjects.MODELS)).put(forged, encode(tiny_card()))
        engine = rig.engines["a"] = FakeEngine(Behaviour())
        url = f"http://127.0.0.1:{await engine.start()}"
        await rig.put(InstanceRecord("a", MODEL, url, epoch=1, kv_events=False, card=forged))
        await until(lambda: rig.process.events.counts["bad_card"])
        assert rig.served.reader is None
        await rig.chat("hi")
        assert len(engine.received) == 1


async def _with_card(rig: ServiceRig, name: str, **changes: Any) -> None:
    """Put a card on the bus, and an instance that has it."""
    data = encode(msgspec.structs.replace(tiny_card(), **changes))
    digest = hashlib.sha256(data).hexdigest()
    await (await rig.bus.objects(subjects.MODELS)).put(digest, data)
    url = f"http://127.0.0.1:{sum(name.encode())}"
    await rig.put(InstanceRecord(name, MODEL, url, epoch=1, kv_events=False, card=digest))


async def test_an_instance_whose_card_reads_otherwise_is_named() -> None:
    """Every instance's card is looked at, not only the one that prompts are read by."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        used = rig.served.card
        await _with_card(rig, "longer", max_model_len=512)
        await until(lambda: len(rig.served.cards_seen) == 2)
        assert rig.process.events.counts["card_differs"] == 0
        await _with_card(rig, "odd", chat_template="{{ messages[0].content }}")
        await until(lambda: rig.process.events.counts["card_differs"])
        state = await rig.http.get(f"{rig.admin}/debug/state")
        differs = {i["instance"]: i["card_differs"] for i in state["models"][MODEL]["instances"]}
        assert differs == {"a": False, "longer": False, "odd": True}
        await _with_card(rig, "odd", chat_template="{{ messages[0].content }}")
        await _with_card(rig, "odd-too", chat_template="{{ messages[0].content }}")
        await until(lambda: rig.known("odd-too"))
        assert rig.process.events.counts["card_differs"] == 1
        assert rig.served.card == used


async def test_a_bad_card_beside_a_good_one_is_told_once() -> None:
    """Its instance renews its record every 2 s: the card is not fetched each time."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        forged = "0" * 64
        await (await rig.bus.objects(subjects.MODELS)).put(forged, encode(tiny_card()))
        url = rig.served.plane.fleet.at(0).record.url
        bad = InstanceRecord("b", MODEL, url, epoch=1, kv_events=False, card=forged)
        for seq in range(3):
            await rig.put(msgspec.structs.replace(bad, seq=seq))
            await until(lambda seq=seq: rig.known("b") and rig.known("b").record.seq == seq)  # type: ignore[misc]
            await until(lambda: not rig.process.events._loading)
        assert rig.process.events.counts["bad_card"] == 1
        assert rig.served.cards_seen[forged] is False


async def test_of_two_cards_that_come_at_once_one_is_used_and_the_other_named() -> None:
    """Whichever is read first; that they come together hides nothing."""
    async with ServiceRig() as rig:
        await _with_card(rig, "one")
        await _with_card(rig, "two", chat_template="{{ messages[0].content }}")
        await until(lambda: rig.process.events.counts["card_differs"])
        assert sorted(rig.served.cards_seen.values()) == [False, True]
        assert rig.served.cards_seen[rig.served.card]


async def test_the_last_card_that_is_left_is_used() -> None:
    """Once nobody has the one before, prompts are read by what the remaining engines have."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        await _with_card(rig, "odd", chat_template="{{ messages[0].content }}")
        await until(lambda: rig.process.events.counts["card_differs"])
        await rig.put(msgspec.structs.replace(rig.known("a").record, state="stopped"))
        record = rig.known("odd").record
        await rig.put(msgspec.structs.replace(record, seq=record.seq + 1))
        await until(lambda: rig.served.card == record.card)
        assert rig.served.cards_seen == {record.card: True}


async def test_cards_that_were_seen_are_remembered_up_to_a_bound() -> None:
    """Beyond it they are looked at again."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        for number in range(CARDS_SEEN_MAX):
            rig.served.saw_card(f"{number}", alike=False)
        assert len(rig.served.cards_seen) == 1


async def test_an_engine_whose_sidecar_was_gone_for_an_hour_is_used_by_a_new_router() -> None:
    """Its record is still there, and nothing else says that it does not serve."""
    async with ServiceRig() as rig:
        await rig.instance("a", seen=False, sent_wall_s=time.time() - 3600.0)
        await until(lambda: rig.known("a") and rig.served.reader is not None)
        await rig.chat("hi")
        assert len(rig.engines["a"].received) == 1
        (row,) = instance_rows([rig.known("a").record], [], set(), time.time())
        assert (row.state, row.broken) == ("silent", True)
