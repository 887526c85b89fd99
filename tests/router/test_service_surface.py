"""The endpoints of a whole router: where each goes, what is booked, what is answered here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.bus import Finished, Prefilled, Routed
from tests.router.fake_engine import Behaviour, Mode
from tests.router.service_rig import MODEL, ServiceRig, chat, until

pytestmark = pytest.mark.slow  # each starts a router with a real tokenizer

LONG = "one two three four five six seven eight nine ten " * 12
ASKED = chat(LONG)["messages"]
BY_PREFIX: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED},
    "/v1/messages": {"messages": ASKED, "max_tokens": 5},
    "/v1/responses": {"input": LONG},
}
BY_LOAD: dict[str, dict[str, Any]] = {
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": {"messages": ASKED},
    "/v1/some/new/endpoint": {"x": 1},
}


@pytest.mark.parametrize("path", sorted(BY_PREFIX))
async def test_a_chat_in_any_form_goes_where_its_prefix_is(path: str) -> None:
    """Its prompt is known exactly, and its holder gets it."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        holder = await rig.instance("b")
        await rig.publish(rig.publishers["b"].store(await rig.keys(LONG)))
        for _ in range(3):
            await rig.http.post(rig.url + path, {"model": MODEL, **BY_PREFIX[path]})
        assert len(holder.received) == 3
        await until(lambda: len(rig.of_kind(Routed)) == 3)
        assert all(event.exact and event.hit_tokens for event in rig.of_kind(Routed))


async def test_an_embedding_goes_where_its_prefix_is() -> None:
    """One text is a prompt like any other."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        await rig.http.post(f"{rig.url}/v1/embeddings", {"model": MODEL, "input": LONG})
        await rig.http.post(f"{rig.url}/v1/embeddings", {"model": MODEL, "input": [LONG, LONG]})
        await until(lambda: len(rig.of_kind(Finished)) == 2)
        assert [event.exact for event in rig.of_kind(Routed)] == [True, False]
        assert rig.of_kind(Routed)[1].reason == "inexact:batch"


@pytest.mark.parametrize("path", sorted(BY_LOAD))
async def test_everything_else_is_booked_and_released(path: str) -> None:
    """By load, under its reason, and as no prefill where the engine computes none."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        await rig.http.post(rig.url + path, {"model": MODEL, **BY_LOAD[path]})
        assert engine.received[0].head.startswith(f"POST {path} ".encode())
        await until(lambda: rig.of_kind(Finished))
        (routed,) = rig.of_kind(Routed)
        assert not routed.exact
        computes = not path.endswith(("tokenize", "count_tokens"))
        assert (routed.prompt_tokens > 1) is computes
        rig.served.plane.ledger.check([])


async def test_a_response_that_opens_early_stays_queued() -> None:
    """The first byte of a Responses stream says nothing of its prompt: it is still to compute."""
    async with ServiceRig() as rig:
        await rig.instance("a", Behaviour(mode=Mode.STREAM, chunks=3))
        for path in ("/v1/responses", "/v1/messages"):
            body = {"model": MODEL, "stream": True, **BY_PREFIX[path]}
            with pytest.raises(Exception, match="no JSON"):
                await rig.http.post(rig.url + path, body)
        await until(lambda: len(rig.of_kind(Finished)) == 2)
        assert len(rig.of_kind(Prefilled)) == 1
        early, usual = rig.of_kind(Finished)
        assert (early.ttft_s, early.released_tokens > 0) == (None, True)
        assert usual.released_tokens == 0


@pytest.mark.parametrize("path", ["/metrics", "/sleep", "/reset_prefix_cache"])
async def test_what_concerns_one_engine_is_not_passed_on(path: str) -> None:
    """Nobody puts a random engine of the fleet to sleep by way of the router."""
    async with ServiceRig() as rig:
        engine = await rig.instance("a")
        error = await rig.refusal(path, {})
        assert (error.status, "one engine" in str(error)) == (404, True)
        assert not engine.received


async def test_methods_are_checked_where_they_matter() -> None:
    """A GET of a completion is told what to do."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        with pytest.raises(Exception, match=r"405 .* takes POST"):
            await rig.http.get(f"{rig.url}/v1/completions")
        await rig.http.get(f"{rig.url}/version")


async def test_errors_have_the_endpoints_form() -> None:
    """Anthropic's clients can read ours."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        too_long = {"model": MODEL, "messages": chat("a b c " * 3000)["messages"], "max_tokens": 1}
        error = await rig.refusal("/v1/messages", too_long)
        assert (error.status, "context is 4096" in str(error)) == (400, True)
        error = await rig.refusal("/v1/messages", {"model": "nope", "messages": []})
        assert (error.status, "there is tiny" in str(error)) == (404, True)


async def test_explain_reads_every_form() -> None:
    """An operator can ask about any request that has a prompt."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        plain = await rig.explain(chat(LONG))
        url = f"{rig.admin}/debug/explain?endpoint="
        for path, name in (("/v1/messages", "messages"), ("/v1/responses", "responses")):
            body = {"model": MODEL, **BY_PREFIX[path]}
            explained = await rig.http.post(url + name, body)
            assert explained["block_hashes"] == plain["block_hashes"]
        completion = await rig.explain({"model": MODEL, "prompt": LONG})
        assert completion["exact"]


async def test_metrics_have_bounded_labels_and_the_names_of_the_field() -> None:
    """Whatever clients send, no label value comes from them."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        await rig.publish(rig.publishers["a"].store(await rig.keys(LONG)))
        await rig.chat(LONG)
        for odd in ("/v1/odd/1", "/v1/odd/2"):
            await rig.http.post(rig.url + odd, {"model": MODEL})
        await rig.refusal("/v1/completions", {"model": "x" * 50, "prompt": "a"})
        text = rig.process.metrics.render().decode()
        assert "odd" not in text
        assert "xxx" not in text
        for name in (
            *("request_ttft_seconds_bucket", "scheduler_e2e_duration_seconds_sum"),
            *("inflight_tokens", "kv_cache_index_lookup_hits_total 1.0", "cb_state"),
            *("policy_decisions_total", "kv_selected_cached_prefix_tokens_total"),
            *("kv_best_cached_prefix_tokens_total", "kv_reused_tokens_total", "loop_lag_seconds"),
        ):
            assert f"multiplane_{name}" in text, name
        labels = 'endpoint="other",model="tiny",outcome="ok",status="2xx"'
        assert f"multiplane_requests_total{{{labels}}} 2.0" in text


async def test_a_card_that_reads_alike_keeps_its_reader() -> None:
    """Another length of context costs no second tokenizer; another template does."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        reader = rig.served.reader
        await rig.chat(LONG)
        nodes = rig.process._cache.stats.nodes
        assert nodes > 0
        await rig.swap_card(max_model_len=8192)
        assert rig.served.reader is reader
        await rig.swap_card(chat_template="{{ messages[0].content }}")
        assert rig.served.reader is not reader
        assert rig.process._cache.stats.nodes < nodes, "the old prompts are forgotten"
        await rig.chat(LONG)


async def test_a_card_that_is_no_use_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log says why prompts are routed by load."""
    async with ServiceRig() as rig:
        await rig.instance("a")
        await rig.swap_card(tokenizer=b"nonsense")
        await rig.chat("hi")
        await rig.chat("ho")
        await until(lambda: len(rig.of_kind(Routed)) == 2)
        assert rig.of_kind(Routed)[1].reason == "inexact:no_tokenizer"
    warnings = [r for r in caplog.records if "cannot be read exactly" in r.getMessage()]
    assert len(warnings) == 1
    assert json.dumps("nonsense") not in caplog.text
