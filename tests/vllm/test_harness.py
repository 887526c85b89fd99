"""Real vLLM servers start, answer, publish, show their caches, fail and come back."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tokenizers import Tokenizer

from tests.vllm.fleet import VllmFleet
from tests.vllm.harness import VllmServer, VllmSpec
from tests.vllm.kv_events import Event, copies, decode, replay, wait_for_events
from tests.vllm.launch import Nursery, VllmError, free_ports
from tests.vllm.token_rule import answer, prompt_seed

SIMULATED = VllmSpec()
REAL = VllmSpec(forward="real", num_blocks=256)


def complete(
    server: VllmServer, prompt: list[int], max_tokens: int = 1, **more: Any
) -> dict[str, Any]:
    """Returns the whole answer to a completion request over token ids."""
    request = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens}
    body = {**request, "ignore_eos": True, "return_token_ids": True, **more}
    return dict(server.post("/v1/completions", body))


def wait_for_copies(server: VllmServer, held: dict[int, int]) -> list[Event]:
    """Returns all events published so far, once they add up to this cache."""
    return wait_for_events(server, lambda events: copies(events) == held)


def stored(events: list[Event]) -> list[int]:
    """Returns the hashes that events store, in order."""
    return [h for event in events if event["type"] == "BlockStored" for h in event["block_hashes"]]


def test_tokens_are_those_of_the_packaged_tokenizer(vllm_fleet: VllmFleet) -> None:
    """The server and the tokenizers library agree on a text and on a chat with parts."""
    server = vllm_fleet.server(SIMULATED)
    tokenizer = Tokenizer.from_file(str(server.model_dir / "tokenizer.json"))
    text = "Grüße, 世界! def f(x):\n    return x"
    assert server.tokenize(text) == tokenizer.encode(text).ids
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": text}]
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
    ]
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\none\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert server.tokenize(chat) == tokenizer.encode(rendered).ids


def test_simulated_answers_follow_the_token_rule(vllm_fleet: VllmFleet) -> None:
    """Equal prompts get equal answers on every server, as the rule predicts."""
    prompt = list(range(1000, 1040))
    expected = answer(prompt_seed(prompt), len(prompt), 20)
    for server in vllm_fleet.servers(SIMULATED, SIMULATED):
        (choice,) = complete(server, prompt, 20)["choices"]
        assert choice["token_ids"] == expected


@pytest.mark.parametrize("spec", [SIMULATED, REAL], ids=lambda spec: spec.forward)
def test_events_and_the_true_cache_agree(vllm_fleet: VllmFleet, spec: VllmSpec) -> None:
    """What a completion publishes is what the block pool holds, generated tokens included."""
    server = vllm_fleet.server(spec)
    size = spec.block_size_tokens
    prompt = list(range(300, 300 + 2 * size + 5))
    body = complete(server, prompt, size)
    tokens = prompt + body["choices"][0]["token_ids"]
    held = server.cached_blocks()
    assert len(held) == (len(tokens) - 1) // size == 3
    events = wait_for_copies(server, held)
    new = [event for event in events if set(event.get("block_hashes", ())) & held.keys()]
    assert [t for event in new for t in event["token_ids"]] == tokens[: 3 * size]
    assert new[0]["parent_block_hash"] is None


def test_a_subscriber_hears_events(vllm_fleet: VllmFleet) -> None:
    """The publisher binds: a subscriber that connects gets topic, sequence number and payload."""
    server = vllm_fleet.server(SIMULATED)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(server.topic)
        subscriber.connect(server.kv_endpoint)
        for first in range(1, 100):  # a batch sent before the subscription arrives is lost
            complete(server, [first] * server.spec.block_size_tokens)
            if subscriber.poll(200):
                break
        topic, sequence, payload = subscriber.recv_multipart(zmq.NOBLOCK)
    assert topic.decode() == server.topic
    assert len(sequence) == 8
    assert set(stored(decode(payload))) <= server.cached_blocks().keys()


def test_duplicate_blocks_are_counted(vllm_fleet: VllmFleet) -> None:
    """A prompt of exactly two blocks recomputes its last one into a second copy."""
    server = vllm_fleet.server(SIMULATED)
    prompt = list(range(400, 400 + 2 * SIMULATED.block_size_tokens))
    complete(server, prompt)
    assert list(server.cached_blocks().values()) == [1, 1]
    usage = complete(server, prompt)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == SIMULATED.block_size_tokens
    assert sorted(server.cached_blocks().values()) == [1, 2]


def test_a_reset_is_announced(vllm_fleet: VllmFleet) -> None:
    """The cache is empty at once; consumers hear of it since a request follows."""
    server = vllm_fleet.server(SIMULATED)
    complete(server, list(range(500, 540)))
    server.reset_prefix_cache(announce=False)
    assert server.cached_blocks() == {}
    server.reset_prefix_cache()
    wait_for_events(server, lambda events: events[-1] == {"type": "AllBlocksCleared"})


def test_a_killed_server_comes_back_empty_under_its_address(vllm_fleet: VllmFleet) -> None:
    """After a kill nothing runs; the next start has the same hashes and numbers begin at 0."""
    server = vllm_fleet.server(SIMULATED)
    prompt = list(range(600, 640))
    complete(server, prompt)
    before = server.cached_blocks()
    server.kill()
    assert not server.alive
    with pytest.raises(VllmError, match="refused"):
        server.get("/health")
    server.start()
    server.wait_ready()
    assert server.cached_blocks() == {}
    complete(server, prompt)
    assert server.cached_blocks() == before
    wait_for_copies(server, before)
    assert replay(server)[0][0] == 0


def test_a_frozen_server_hangs_until_thawed(vllm_fleet: VllmFleet) -> None:
    """A frozen server accepts connections and answers nothing."""
    server = vllm_fleet.server(SIMULATED)
    server.freeze()
    assert server.alive
    with pytest.raises(VllmError, match="not ready in"):
        server.wait_ready(timeout_s=0.1)
    server.thaw()
    server.wait_ready(timeout_s=10.0)


def test_a_running_request_blocks_a_reset(vllm_fleet: VllmFleet) -> None:
    """A cache in use is not reset, and the error says so."""
    server = vllm_fleet.server(VllmSpec(step_s=0.2))
    thread = threading.Thread(target=complete, args=(server, list(range(40)), 10))
    thread.start()
    wait_for_events(server, lambda events: len(stored(events)) == 2)
    with pytest.raises(VllmError, match="has running requests"):
        server.reset_prefix_cache()
    thread.join()


def test_steps_take_the_time_they_are_given(vllm_fleet: VllmFleet) -> None:
    """The step-time model is the engine's clock: prefill tokens and steps add up."""
    server = vllm_fleet.server(VllmSpec(step_s=0.02, prefill_token_s=1e-4, sequence_s=0.0))
    complete(server, [7])
    started_s = time.monotonic()
    complete(server, list(range(1001)), max_tokens=5)
    assert time.monotonic() - started_s >= 5 * 0.02 + 1000 * 1e-4


def test_adapters_and_salts_change_hashes(vllm_fleet: VllmFleet) -> None:
    """The same tokens under an adapter or a salt are other blocks, and the events name both."""
    server = vllm_fleet.server(VllmSpec(loras=("adapter",)))
    prompt = list(range(700, 740))
    complete(server, prompt)
    complete(server, prompt, model="adapter")
    complete(server, prompt, cache_salt="salt")
    assert len(server.cached_blocks()) == 6
    events = wait_for_events(server, lambda events: len(stored(events)) >= 6)
    assert [event["lora_name"] for event in events[-3:]] == [None, "adapter", None]
    assert [event["extra_keys"] for event in events[-3:]] == [
        [None, None],
        [["adapter"], ["adapter"]],
        [["salt"], None],
    ]


def test_data_parallel_ranks_publish_apart(vllm_fleet: VllmFleet) -> None:
    """Each rank has a cache and an event stream of its own, on the next port."""
    server = vllm_fleet.server(VllmSpec(data_parallel=2))
    size = server.spec.block_size_tokens
    for rank in (0, 1):
        request = {"model": server.model, "prompt": [9] * size * (rank + 2), "max_tokens": 1}
        server.post("/v1/completions", request, **{"x-data-parallel-rank": str(rank)})
    for rank in (0, 1):
        events = wait_for_events(server, lambda events: stored(events) != [], rank=rank)
        assert len(stored(events)) == rank + 2
    server.stop()


def test_a_server_that_cannot_start_says_why(vllm_fleet: VllmFleet) -> None:
    """Too few blocks for one request: vLLM's own reason is in the error."""
    with pytest.raises(VllmError, match="To serve at least one request"):
        vllm_fleet.server(VllmSpec(num_blocks=10))


@pytest.mark.slow
def test_a_forked_server_is_like_a_fresh_one(vllm_fleet: VllmFleet) -> None:
    """Executed anew, the server publishes the same events for the same requests."""
    seen = []
    for spec in (VllmSpec(num_blocks=257), VllmSpec(num_blocks=257, forked=False)):
        server = vllm_fleet.server(spec)
        for start in (0, 0, 200, 400, 100):
            complete(server, list(range(start, start + 1600)), max_tokens=40)
        held = server.cached_blocks()
        seen.append((held, wait_for_copies(server, held)))
        server.stop()
    assert seen[0] == seen[1]
    assert any(event["type"] == "BlockRemoved" for event in seen[0][1])


def test_the_pool_reuses_and_revives(vllm_fleet: VllmFleet) -> None:
    """Equal specs get different servers; a later test gets the same ones, alive and empty."""
    first, second = vllm_fleet.servers(SIMULATED, SIMULATED)
    assert first.url != second.url
    complete(first, list(range(100)))
    second.kill()
    again = vllm_fleet.servers(SIMULATED, SIMULATED)
    assert {server.url for server in again} == {first.url, second.url}
    assert [server.cached_blocks() for server in again] == [{}, {}]


def test_the_pool_is_bounded(vllm_nursery: Nursery) -> None:
    """The longest unused server makes room; more at once than there is room for are refused."""
    fleet = VllmFleet(vllm_nursery, servers_max=1)
    first = fleet.server(SIMULATED)
    second = fleet.server(VllmSpec(num_blocks=300))
    assert (first.alive, second.alive) == (False, True)
    with pytest.raises(ValueError, match="2 servers asked for, 1 are the most"):
        fleet.servers(SIMULATED, SIMULATED)
    second.stop()


@pytest.mark.slow
def test_nothing_survives_the_nursery(vllm_python: Path, tmp_path: Path) -> None:
    """When the test run's end of the pipe closes, servers and their engines are killed."""
    with Nursery(vllm_python, tmp_path) as nursery:
        server = VllmServer(SIMULATED, nursery)
        server.start()
        server.wait_ready()
        (group,) = {os.getpgid(pid) for pid in processes_naming(server.log)}
    assert not server.alive
    assert processes_naming(server.log) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def processes_naming(log: Path) -> list[int]:
    """Returns the processes whose standard output is a file."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "fd" / "1").readlink() == log:
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile, or is not ours to read
            continue
    return found


def test_ports_are_free_and_different() -> None:
    """Ports asked for together never collide, nor do those that follow them."""
    ports = free_ports(50, width=3)
    assert len({port + i for port in ports for i in range(3)}) == 150


def test_specs_are_plain_data() -> None:
    """A spec is hashable and prints as JSON, so it can name a configuration."""
    assert hash(VllmSpec()) == hash(VllmSpec())
    assert json.loads(msgspec.json.encode(REAL))["forward"] == "real"
    assert (SIMULATED.block_size_tokens, REAL.block_size_tokens) == (16, 32)
