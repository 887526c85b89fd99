"""The emulated server speaks as vLLM's does: bodies, streams, errors, metrics and events.

Both get the same requests. Values differ where the model does; what must agree is the shape: every
field that the emulated server sends exists in vLLM's answer, and those that clients rely on are
there with the same meaning.
"""

from __future__ import annotations

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from lab.driver import LocalFleet
from tests.vllm.fleet import VllmFleet
from tests.vllm.harness import VllmSpec
from tests.vllm.kv_events import replay

MODEL = "tiny"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
PROMPT = {"model": MODEL, "prompt": list(range(300, 340)), "max_tokens": 4}
MESSAGE = {**CHAT, "system": "Be brief."}
RESPONSE = {"model": MODEL, "input": "hello", "max_output_tokens": 4}
USAGE = {"stream_options": {"include_usage": True}}
FULL = {"return_token_ids": True}


class Pair(NamedTuple):
    """Base URLs of a real and an emulated server."""

    real: str
    emulated: str


class Answer(NamedTuple):
    """Status, content type and body."""

    status: int
    kind: str
    body: bytes

    @property
    def json(self) -> Any:
        """The body, if it is JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str, Any]]:
        """The names and JSON objects of a stream of named events."""
        lines = self.body.decode().split("\n\n")
        assert lines.pop() == ""
        pairs = [line.split("\n") for line in lines]
        return [(name[len("event: ") :], json.loads(data[len("data: ") :])) for name, data in pairs]

    @property
    def chunks(self) -> list[Any]:
        """The JSON objects of a stream."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def ask(url: str, body: Any = None) -> Answer:
    """POST a body, or GET without one."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return Answer(answer.status, answer.headers["Content-Type"] or "", answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers["Content-Type"] or "", error.read())


SPEC = VllmSpec(extra_arguments=("--enable-prompt-tokens-details",))


@pytest.fixture(scope="module")
def emulated_url() -> Iterator[str]:
    """An emulated server with the limits of the real one."""
    limits = ("--blocks", str(SPEC.num_blocks), "--max-model-len", str(SPEC.max_model_len))
    with asyncio.Runner() as runner:
        fleet = LocalFleet("--name", MODEL, *limits)
        (instance,) = runner.run(fleet.start(1))
        yield instance.url
        runner.run(fleet.close())


@pytest.fixture
def pair(vllm_fleet: VllmFleet, emulated_url: str) -> Pair:
    """A real and an emulated server, their caches empty."""
    ask(f"{emulated_url}/reset_prefix_cache", b"")
    ask(f"{emulated_url}/v1/completions", {**PROMPT, "prompt": [7]})  # tells of the reset
    return Pair(vllm_fleet.server(SPEC).url, emulated_url)


def shape(value: Any) -> Any:
    """A JSON value's keys, without what is null: the type of each leaf, the first of a list."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def assert_within(emulated: Any, real: Any, place: str = "body") -> None:
    """Every key of the one is in the other, with the same type below it."""
    if isinstance(emulated, dict) and isinstance(real, dict):
        assert emulated.keys() <= real.keys(), f"{place}: {emulated.keys() - real.keys()}"
        for key, value in emulated.items():
            assert_within(value, real[key], f"{place}.{key}")
    elif isinstance(emulated, list) and isinstance(real, list):
        for one, other in zip(emulated, real, strict=False):
            assert_within(one, other, f"{place}[]")
    else:
        assert emulated == real, place


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, **FULL}),
        ("/v1/completions", PROMPT),
        ("/v1/completions", {**PROMPT, **FULL}),
        ("/v1/messages", MESSAGE),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": CHAT["messages"]}),
        ("/v1/responses", RESPONSE),
        ("/tokenize", {"model": MODEL, "prompt": "hello there", "return_token_strs": True}),
        ("/tokenize", {"model": MODEL, "messages": CHAT["messages"]}),
        ("/detokenize", {"model": MODEL, "tokens": [300, 301]}),
        ("/v1/models", None),
        ("/version", None),
        ("/load", None),
    ],
)
def test_bodies_have_the_same_shape(pair: Pair, path: str, body: Any) -> None:
    """Whole answers hold no field that vLLM's lack."""
    real, emulated = ask(pair.real + path, body), ask(pair.emulated + path, body)
    assert (emulated.status, real.status) == (200, 200)
    assert emulated.kind.partition(";")[0] == real.kind.partition(";")[0]
    assert_within(shape(emulated.json), shape(real.json))


def test_usage_means_the_same(pair: Pair) -> None:
    """Prompt, answer and cached tokens are counted alike, cold and warm."""
    for _ in range(2):
        found = [ask(f"{url}/v1/completions", PROMPT).json["usage"] for url in pair]
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert found[0][name] == found[1][name]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in found]
        assert cached[0] == cached[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, **USAGE}),
        ("/v1/chat/completions", {**CHAT, **FULL}),
        ("/v1/completions", {**PROMPT, **USAGE}),
        ("/v1/completions", {**PROMPT, **FULL}),
    ],
)
def test_streams_have_the_same_chunks(pair: Pair, path: str, body: dict[str, Any]) -> None:
    """First, middle, last and usage chunks hold the same fields, in the same places."""
    body = {**body, "stream": True}
    real, emulated = (ask(url + path, body) for url in pair)
    assert emulated.kind == real.kind
    for position in (0, 1, -2, -1):
        assert_within(shape(emulated.chunks[position]), shape(real.chunks[position]))
    assert emulated.chunks[0].keys() == {k for k, v in real.chunks[0].items() if v is not None}


@pytest.mark.parametrize(("path", "body"), [("/v1/messages", MESSAGE), ("/v1/responses", RESPONSE)])
def test_named_events_come_in_the_same_order(pair: Pair, path: str, body: dict[str, Any]) -> None:
    """Streams of messages and responses have vLLM's events, with no field that vLLM's lack."""
    real, emulated = (ask(url + path, {**body, "stream": True}) for url in pair)
    assert emulated.kind == real.kind
    names = [[name for name, _ in answer.events] for answer in (real, emulated)]
    once = [list(dict.fromkeys(each)) for each in names]
    assert once[0] == once[1]
    of_real = dict(reversed(real.events))
    for name, data in emulated.events:
        assert_within(shape(data), shape(of_real[name]), name)


@pytest.mark.parametrize(
    ("path", "body", "exact"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "other"}, True),
        ("/v1/completions", {**PROMPT, "prompt": [300] * 5000}, True),
        ("/v1/completions", {**PROMPT, "prompt": [99_999_999]}, False),
        ("/v1/messages", {**MESSAGE, "model": "other"}, False),
        ("/v1/responses", {**RESPONSE, "model": "other"}, True),
        ("/v1/chat/completions", b"{", False),
        ("/v1/chat/completions", {"model": MODEL}, False),
        ("/nowhere", {}, False),
    ],
)
def test_refusals_are_alike(pair: Pair, path: str, body: Any, exact: bool) -> None:
    """Bad requests get the same status and error body; type and parameter where they are fixed."""
    real, emulated = (ask(url + path, body) for url in pair)
    assert emulated.status == real.status
    assert_within(shape(emulated.json), shape(real.json))
    if exact:
        for field in ("type", "param", "code"):
            assert emulated.json["error"][field] == real.json["error"][field], field


def test_metrics_have_vllms_names_and_labels(pair: Pair) -> None:
    """Every series that the emulated server shows exists in vLLM with the same label names."""
    for url in pair:
        ask(f"{url}/v1/completions", PROMPT)
    real, emulated = (series(ask(f"{url}/metrics").body.decode()) for url in pair)
    for name, labels in emulated.items():
        assert name in real, name
        if name != "vllm:cache_config_info":  # whose labels are settings, of which vLLM has more
            assert labels == real[name], name
    assert emulated["vllm:cache_config_info"] <= real["vllm:cache_config_info"]
    assert len(emulated) > 30


def series(text: str) -> dict[str, frozenset[str]]:
    """The series of vLLM: name → label names."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"(vllm:\w+)\{(.*)\} ", line):
            found[match[1]] = frozenset(re.findall(r'(\w+)="', match[2]))
    return found


def test_events_have_the_same_fields(pair: Pair) -> None:
    """Prompt, generated and repeated blocks are told with the same fields, in the same order."""
    told = []
    for url in pair:
        source = ask(f"{url}/kv_event_sources").json["0"]
        server = SimpleNamespace(url=url, replay_endpoints=[source["replay_endpoint"]])
        before = len(replay(server))
        ask(f"{url}/v1/completions", {**PROMPT, "max_tokens": 12})
        ask(f"{url}/v1/completions", {**PROMPT, "prompt": PROMPT["prompt"][:32]})
        told.append([event for _, events in replay(server, before) for event in events])
    real, emulated = ([outline(event) for event in events] for events in told)
    assert emulated == real
    assert [event["token_ids"] for event in told[0]][::2] == (
        [event["token_ids"] for event in told[1]][::2]
    )


def outline(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what depends on names and generated tokens."""
    lengths = {name: len(event[name]) for name in ("block_hashes", "token_ids", "extra_keys")}
    rest = {name: value for name, value in event.items() if name not in lengths}
    return {**rest, **lengths, "parent_block_hash": event["parent_block_hash"] is not None}


def test_event_sources_are_told_alike(pair: Pair) -> None:
    """What the emulated server says of its event socket, vLLM says too, rank by rank."""
    real, emulated = (ask(f"{url}/kv_event_sources").json for url in pair)
    assert_within(shape(emulated), shape(real))
