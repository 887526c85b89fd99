from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from controlplane.operator import Operator
from router.breaker import State
from schemas import subjects
from schemas.bus import Finished, FleetRows, Prefilled, Routed
from tests.core.plane_helpers import Publisher, prompt
from tests.router.fake_engine import Behaviour, Mode
from tests.router.service_rig import MODEL, ServiceRig, chat, until

pytestmark = pytest.mark.slow  # each starts a router with a real tokenizer

LONG = "one two three four five six seven eight nine ten " * 12


async def test_a_chat_goes_where_its_prefix_is_and_every_step_is_told() -> None:
    """The holder of the prefix gets the chat; routed, prefilled and finished are published."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        holder = await rig.instance("b")
        await rig.publish(rig.publishers["b"].store(await rig.keys(LONG)))
        for _ in range(3):
            await rig.chat(LONG)
        assert len(holder.received) == 3
        await until(lambda: len(rig.of_kind(Finished)) == 3)
        routed = rig.of_kind(Routed)[0]
        assert (routed.instance_id, routed.policy, routed.exact) == ("b", "multiplicative", True)
        assert routed.hit_tokens > 0
        assert routed.candidates is not None
        assert rig.of_kind(FleetRows)[0].instance_ids == ["a", "b"]
        assert len(rig.of_kind(Prefilled)) == 3
        rig.served.plane.ledger.check([])


async def test_a_stream_without_usage_is_told_by_its_events() -> None:
    """Few clients ask for usage: the other routers, and replays, learn about how long it was."""
    async with ServiceRig() as rig:
        await rig.instance("a", Behaviour(mode=Mode.STREAM, chunks=40, usage=False))
        url = f"{rig.url}/v1/chat/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=chat("hi")) as answer:
            await answer.read()
        await until(lambda: rig.of_kind(Finished))
        finished = rig.of_kind(Finished)[0]
        assert finished.output_tokens == pytest.approx(40, rel=0.15)
        assert finished.output_estimated
        assert finished.streamed


async def test_the_body_reaches_the_engine_byte_for_byte() -> None:
    """Unknown fields, spacing and order are the engine's business."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        await rig.chat("hi", some_future_field={"deep": [1, 2]}, temperature=0.5)
        body = engine.received[0].body
        assert b'"some_future_field":{"deep":[1,2]}' in body


async def test_unknown_models_are_told_what_there_is() -> None:
    """A wrong name gets a 404 in OpenAI's form that lists the models."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        error = await rig.refusal("/v1/chat/completions", {"model": "nope", "messages": []})
        assert error.status == 404
        assert "'nope' does not exist; there is tiny" in str(error)


async def test_no_instance_is_503_and_says_what_to_check() -> None:
    """Before any sidecar has registered, the answer says so."""
    async with ServiceRig() as rig:
        error = await rig.refusal("/v1/chat/completions", chat("hi"))
        assert error.status == 503
        assert "sidecars" in str(error)
        with pytest.raises(Exception, match="503"):
            await rig.http.get(f"{rig.url}/ready")
        await rig.instance("a")
        assert await rig.http.get(f"{rig.url}/ready") == {"status": "ready"}


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/chat/completions", {"model": 7, "messages": []}, 400, "model"),
        ("/v1/chat/completions", [1], 400, "Expected `object`"),
        ("/v1/completions", {"model": MODEL, "prompt": "a b c " * 3000}, 400, "context is 4096"),
        ("/v1/chat/completions", chat("a b c " * 3000), 400, "context is 4096"),
    ],
)
async def test_bad_requests_are_refused_with_the_reason(
    path: str, body: object, status: int, text: str
) -> None:
    """What the engine would refuse is refused here, with a message that names the field."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        error = await rig.refusal(path, body)
        assert error.status == status
        assert text in str(error)
        assert not engine.received


async def test_fields_of_unknown_types_are_the_engines_to_judge() -> None:
    """A body that is JSON but reads oddly passes through, routed by load."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        await rig.chat("hi", max_tokens="12")
        assert len(engine.received) == 1
        await until(lambda: rig.of_kind(Routed))
        assert rig.of_kind(Routed)[0].reason == "inexact:unsupported"


def _outcomes(rig: ServiceRig) -> list[str]:
    return [event.outcome for event in rig.of_kind(Finished)]


async def test_a_failing_instance_is_left_for_another() -> None:
    """A 5xx before the first byte is retried elsewhere, and the booking moves along."""
    async with ServiceRig() as rig:
        await rig.instance("a", Behaviour(status=500))
        await rig.instance("b")
        for number in range(4):
            await rig.chat(f"{number}")
        outcomes: list[str] = []

        def all_told() -> bool:
            outcomes[:] = [event.outcome for event in rig.of_kind(Finished)]
            return outcomes.count("ok") == 4

        await until(all_told)
        assert "retried" in outcomes
        assert not rig.served.plane.requests.tickets


async def test_a_request_that_no_engine_can_bear_is_blamed_on_none() -> None:
    """One that is a 5xx everywhere opens no breaker; an instance that fails alone opens its own."""
    async with ServiceRig() as rig:
        for name in "abc":
            await rig.instance(name)
        breakers = rig.process.router.instances.breakers
        for _ in range(20):
            error = await rig.refusal("/v1/chat/completions?mode=json&status=500", chat("hi"))
            assert error.status == 500
        assert {key[1]: breaker.state for key, breaker in breakers.items()} == dict.fromkeys(
            "abc", State.CLOSED
        )
        rig.engines["a"].behaviour = Behaviour(status=500)
        for number in range(40):
            await rig.chat(f"{number}")
        assert breakers[MODEL, "a"].state is State.OPEN
        assert breakers[MODEL, "b"].state is State.CLOSED


async def test_a_client_error_passes_through_and_is_not_retried() -> None:
    """A 4xx is the client's to see, once."""
    async with ServiceRig() as rig:
        first = await rig.instance("a", Behaviour(status=422))
        second = await rig.instance("b", Behaviour(status=422))
        error = await rig.refusal("/v1/chat/completions", chat("hi"))
        assert error.status == 422
        assert len(first.received) + len(second.received) == 1


async def test_when_nobody_can_be_reached_the_answer_says_so() -> None:
    """After every instance failed the client gets a 502 or 503, and nothing stays booked."""
    async with ServiceRig() as rig:
        for name in ("a", "b"):
            await (await rig.instance(name)).stop()
        error = await rig.refusal("/v1/chat/completions", chat("hi"))
        assert error.status in (502, 503)
        await until(lambda: not rig.served.plane.requests.tickets)
        rig.served.plane.ledger.check([])


async def test_a_client_that_leaves_frees_its_booking() -> None:
    """A hang-up cancels the engine's work and releases batch and queued tokens."""
    async with ServiceRig() as rig:
        await rig.instance("a", Behaviour(mode=Mode.NEVER))
        task = asyncio.create_task(rig.chat(LONG))
        await until(lambda: rig.served.plane.requests.tickets)
        task.cancel()
        await until(lambda: not rig.served.plane.requests.tickets)
        await until(lambda: rig.of_kind(Finished))
        assert rig.of_kind(Finished)[0].outcome == "client_gone"
        rig.served.plane.ledger.check([])


async def test_explain_shows_every_candidate_and_sends_nothing() -> None:
    """An operator sees P, B, hit and score of each instance; the engine sees no request."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        await rig.instance("b")
        await rig.publish(rig.publishers["a"].store(await rig.keys(LONG)))
        explained = await rig.explain(chat(LONG))
        assert explained["pick"] == "a"
        by_name = {candidate["instance"]: candidate for candidate in explained["candidates"]}
        assert by_name["a"]["hit_tokens"] > by_name["b"]["hit_tokens"] == 0
        assert by_name["b"]["score"] == by_name["b"]["p_tokens"] == explained["prompt_tokens"]
        assert not engine.received
        assert not rig.of_kind(Routed)


async def test_models_are_listed_once_with_adapters_and_aliases() -> None:
    """The list is merged over the fleet."""
    async with ServiceRig() as rig:
        await rig.instance("a", loras=["fr"])
        await rig.instance("b", aliases=["small"])
        listed = await rig.http.get(f"{rig.url}/v1/models")
        by_id = {card["id"]: card for card in listed["data"]}
        assert set(by_id) == {MODEL, "fr", "small"}
        assert by_id["fr"]["parent"] == MODEL
        assert by_id["small"]["parent"] is None


async def test_an_adapters_requests_go_to_its_instance_and_never_share_blocks() -> None:
    """The adapter's name is part of the block hashes."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        adapted = await rig.instance("b", loras=["fr"])
        plain = await rig.explain(chat(LONG))
        other = await rig.explain(chat(LONG) | {"model": "fr"})
        assert not set(plain["block_hashes"]) & set(other["block_hashes"])
        await rig.http.post(f"{rig.url}/v1/chat/completions", chat(LONG) | {"model": "fr"})
        assert len(adapted.received) == 1


async def test_images_are_routed_by_load_and_counted_as_inexact() -> None:
    """What cannot be tokenized exactly never pretends to hit."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
        await rig.http.post(f"{rig.url}/v1/chat/completions", body)
        await until(lambda: rig.of_kind(Routed))
        routed = rig.of_kind(Routed)[0]
        assert (routed.policy, routed.exact) == ("least_requests", False)
        assert routed.reason == "inexact:multimodal"
        metrics = rig.process.metrics.render().decode()
        assert 'multiplane_requests_inexact_total{reason="multimodal"} 1.0' in metrics


async def test_a_late_router_fetches_what_it_missed() -> None:
    """A router that joins a running stream gets the whole set by snapshot."""
    async with ServiceRig() as rig:
        await rig.instance("a", seen=False)
        await until(lambda: rig.known("a"))
        publisher = rig.publishers["a"] = Publisher("a")
        publisher.batch()
        publisher.store(prompt(1, 2, 3))
        await rig.bus.serve(subjects.snapshot(MODEL, "a"), rig.snapshots("a"))
        await until(lambda: rig.known("a").follower.exact)
        instance = rig.known("a")
        assert set(rig.served.plane.index.blocks(instance.slots[0])) == publisher.blocks


async def test_an_operators_drain_is_obeyed_also_by_late_instances() -> None:
    """A drain stands in the bucket: an instance that registers later finds it."""
    async with ServiceRig() as rig:
        first = await rig.instance("a")
        operator = Operator(rig.bus, by="test")
        await rig.instance("b")
        await operator.drain("b", on=True)
        await until(lambda: rig.known("b").drained)
        for number in range(4):
            await rig.chat(f"{number}")
        assert len(first.received) == 4
        await operator.drain("b", on=False)
        await until(lambda: not rig.known("b").drained)


async def test_operators_see_what_they_said() -> None:
    """A drain, a blacklist and an override are in a router's state, and in its explanations."""
    async with ServiceRig() as rig:
        for name in ("a", "b", "c"):
            await rig.instance(name)
        operator = Operator(rig.bus, by="test")
        await operator.drain("a", on=True)
        await operator.blacklist("b", on=True, ttl_s=600.0)
        await operator.policy(MODEL, "linear", reason="trial")
        await until(lambda: rig.served.plane.verdicts.policy(0.0) is not None)
        (served,) = (await rig.http.get(f"{rig.admin}/debug/state"))["models"].values()
        assert served["override"] == {"policy": "linear", "by": "test", "reason": "trial"}
        seen = {i["instance"]: (i["drained"], i["blacklisted"]) for i in served["instances"]}
        assert seen == {"a": (True, False), "b": (False, True), "c": (False, False)}
        explained = await rig.explain(chat("hi"))
        assert (explained["policy"], explained["pick"]) == ("linear", "c")
        barred = {c["instance"]: c["excluded_by"] for c in explained["candidates"]}
        assert barred == {"a": ["drained", "draining"], "b": ["blacklist"], "c": []}
        await operator.policy(MODEL, "")
        await until(lambda: rig.served.plane.verdicts.policy(0.0) is None)
        (served,) = (await rig.http.get(f"{rig.admin}/debug/state"))["models"].values()
        assert served["override"] is None


async def test_a_policy_override_reaches_the_routers() -> None:
    """`multiplane policy set` changes decisions at once, and `clear` changes them back."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        operator = Operator(rig.bus, by="test")
        await operator.policy(MODEL, "round_robin")
        await until(lambda: rig.served.plane.verdicts.policy(0.0) is not None)
        assert (await rig.explain(chat("hi")))["policy"] == "round_robin"
        await operator.policy(MODEL, "")
        await until(lambda: rig.served.plane.verdicts.policy(0.0) is None)


async def test_other_paths_pass_through_and_count_as_load() -> None:
    """An endpoint the router does not know is served, booked and released like any other."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        await rig.http.post(f"{rig.url}/v1/some/new/endpoint", {"model": MODEL, "x": 1})
        assert engine.received[0].head.startswith(b"POST /v1/some/new/endpoint ")
        await until(lambda: rig.of_kind(Finished))
        assert rig.of_kind(Routed)[0].exact is False


async def test_nonsense_on_the_bus_costs_only_itself() -> None:
    """Undecodable messages and records are counted, and nothing else happens."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        rig.bus.publish(subjects.kv(MODEL, "a"), b"\xff\x00nonsense")
        rig.bus.publish("mp.v1.kv.tiny", b"short")
        bucket = await rig.bus.bucket(subjects.INSTANCES)
        await bucket.put(subjects.key(MODEL, "x"), b"nonsense")
        await until(lambda: rig.process.events.counts["undecodable"] == 2)
        await rig.chat("still works")


async def test_a_stopped_instance_leaves_and_its_connections_with_it() -> None:
    """A record in state stopped removes the instance from the fleet and the pool."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        record = rig.known("a").record
        await rig.put(msgspec.structs.replace(record, state="stopped"))
        await until(lambda: rig.known("a") is None)
        error = await rig.refusal("/v1/chat/completions", chat("hi"))
        assert error.status == 503
