"""From an engine's own words to instances and their sockets."""

from __future__ import annotations

import pytest

from sidecar.config import SidecarConfig
from sidecar.discovery import (
    EngineFacts,
    discover,
    endpoint_of_rank,
    reachable,
    refuse_others,
)
from sidecar.engine_http import KvSource, NotAnEngine, Served
from sidecar.metrics_text import CacheInfo, EngineSample, MetricsPage

MODELS = [
    Served("m", root="/models/m", max_model_len=4096),
    Served("also"),
    Served("lo", parent="m"),
]
NOTHING = MetricsPage({}, {})


def found(
    metrics: MetricsPage = NOTHING,
    sources: dict[int, KvSource] | None = None,
    **settings: object,
) -> EngineFacts:
    """Discover an engine at a host of some name."""
    config = SidecarConfig(engine_url="http://gpu-7:8000", **settings)  # type: ignore[arg-type]
    return discover(config, MODELS, metrics, sources, "0.32.0")


def test_only_a_vllm_server_is_taken_for_one() -> None:
    """By its statistics, or where those are off by the owner of its models."""
    refuse_others("http://e", MODELS, MetricsPage({0: EngineSample()}, {}))
    refuse_others("http://e", MODELS, MetricsPage({}, {0: CacheInfo()}))
    refuse_others("http://e", [Served("m", owned_by="vllm")], NOTHING)
    with pytest.raises(NotAnEngine, match=r"http://e is no vLLM .* names sglang"):
        refuse_others("http://e", [Served("m", owned_by="sglang")], NOTHING)


def test_names_are_told_apart_by_their_parent() -> None:
    """The first base model is the id; other names are aliases, adapters are not."""
    facts = found()
    assert (facts.model, facts.aliases, facts.loras) == ("m", ("also",), ("lo",))
    assert (facts.root, facts.max_model_len, facts.version) == ("/models/m", 4096, "0.32.0")
    renamed = found(model="also")
    assert (renamed.model, renamed.aliases) == ("also", ("m",))


def test_each_rank_has_its_own_sockets_and_cache() -> None:
    """The engine says where each rank publishes; wildcards mean the engine's host."""
    sources = {
        rank: KvSource(f"tcp://*:{5557 + rank}", f"tcp://0.0.0.0:{6000 + rank}", "kv")
        for rank in (0, 1)
    }
    metrics = MetricsPage({0: EngineSample(), 1: EngineSample()}, {1: CacheInfo(32, 72, True)})
    first, second = found(metrics, sources).ranks
    assert first.source is not None
    assert (first.source.endpoint, first.source.topic) == ("tcp://gpu-7:5557", "kv")
    assert second.source is not None
    assert second.source.replay_endpoint == "tcp://gpu-7:6001"
    assert (first.block_size, second.block_size, second.num_blocks) == (0, 32, 72)


def test_an_engine_that_publishes_nothing_has_no_source() -> None:
    """No entry, a disabled one, or no prefix caching at an engine that cannot say."""
    assert found(sources={}).ranks[0].source is None
    off = KvSource("tcp://*:1", enable_kv_cache_events=False)
    assert found(sources={0: off}).ranks[0].source is None
    uncached = MetricsPage({}, {0: CacheInfo(16, 10, False)})
    assert found(uncached).ranks[0].source is None


def test_an_older_engine_is_sought_where_vllm_publishes_by_default() -> None:
    """Without the route there is only the usual port, and no replay."""
    source = found(MetricsPage({1: EngineSample()}, {})).ranks[0].source
    assert source is not None
    assert (source.endpoint, source.replay_endpoint) == ("tcp://gpu-7:5558", "")


def test_settings_come_before_what_the_engine_says() -> None:
    """Configured endpoints are rank 0's; the others count up."""
    metrics = MetricsPage({0: EngineSample(), 1: EngineSample()}, {})
    ranks = found(
        metrics,
        {0: KvSource("tcp://*:1"), 1: KvSource("tcp://*:2")},
        kv_endpoint="tcp://0.0.0.0:7000",
        kv_replay_endpoint="tcp://gpu-7:7100",
        kv_topic="t",
        kv_bind=True,
    ).ranks
    source = ranks[1].source
    assert source is not None
    assert (source.endpoint, source.replay_endpoint) == ("tcp://0.0.0.0:7001", "tcp://gpu-7:7101")
    assert (source.topic, source.bind) == ("t", True)


def test_endpoints_of_all_forms() -> None:
    """TCP ports count; other transports and addresses stay as they are."""
    assert endpoint_of_rank("ipc:///tmp/kv", 1) == "ipc:///tmp/kv"
    assert endpoint_of_rank("", 3) == ""
    assert reachable("tcp://[::]:5557", "fe80::1") == "tcp://[fe80::1]:5557"
    assert reachable("tcp://10.0.0.7:5557", "gpu-7") == "tcp://10.0.0.7:5557"
