"""From an engine's own words to what its instances are: pure."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from sidecar.config import SidecarConfig
from sidecar.engine_http import KvSource, NotAnEngine, Served
from sidecar.metrics_text import CacheInfo, MetricsPage
from sidecar.zmq_source import SourceConfig

VLLM_DEFAULT_PORT = 5557

OWNER = "vllm"
"""Who owns the models that vLLM lists, also where its statistics are off."""


class RankFacts(msgspec.Struct, frozen=True):
    """One data-parallel rank.

    Attributes:
        block_size: as the engine's settings have it; 0 where they do not say.
        source: where its KV events come from; None where it publishes none.
    """

    rank: int
    block_size: int = 0
    num_blocks: int | None = None
    source: SourceConfig | None = None


class EngineFacts(msgspec.Struct, frozen=True):
    """One engine.

    Attributes:
        model: its first served name, or the one configured.
        aliases: its other names.
        loras: its adapters.
        root: what it was started with: a folder, or a name on the hub.
        ranks: at least one.
    """

    model: str
    ranks: tuple[RankFacts, ...]
    aliases: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    root: str = ""
    max_model_len: int | None = None
    version: str = ""


def refuse_others(url: str, models: list[Served], metrics: MetricsPage) -> None:
    """Return if this is how a vLLM server speaks of itself. Raises NotAnEngine."""
    if metrics.engines or metrics.caches or any(each.owned_by == OWNER for each in models):
        return
    owners = sorted({each.owned_by or "nobody" for each in models})
    raise NotAnEngine(
        f"{url} is no vLLM server: its /metrics has no vllm: series, and /v1/models names "
        f"{', '.join(owners)} as owner; give the URL of one with --engine"
    )


def discover(
    config: SidecarConfig,
    models: list[Served],
    metrics: MetricsPage,
    sources: dict[int, KvSource] | None,
    version: str,
) -> EngineFacts:
    """Return what the engine is.

    Args:
        models: of `/v1/models`, at least one.
        sources: of `/kv_event_sources`; None where the engine has no such route.
    """
    base = next((served for served in models if served.parent is None), models[0])
    model = config.model or base.id
    aliases, loras = names_of(models, model)
    return EngineFacts(
        model=model,
        ranks=tuple(_ranks(config, metrics, sources)),
        aliases=aliases,
        loras=loras,
        root=base.root or "",
        max_model_len=base.max_model_len,
        version=version,
    )


def names_of(models: list[Served], model: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (other names of a model, its adapters) of what `/v1/models` lists."""
    names = (served.id for served in models if served.parent is None)
    return (
        tuple(name for name in names if name != model),
        tuple(served.id for served in models if served.parent is not None),
    )


def _ranks(
    config: SidecarConfig, metrics: MetricsPage, sources: dict[int, KvSource] | None
) -> list[RankFacts]:
    known = set(metrics.engines) | set(metrics.caches) | set(sources or ())
    facts = []
    for rank in sorted(known) or [0]:
        cache = metrics.caches.get(rank, CacheInfo())
        source = _source(config, rank, sources, cached=cache.prefix_caching is not False)
        facts.append(RankFacts(rank, cache.block_size, cache.num_blocks, source))
    return facts


def _source(
    config: SidecarConfig, rank: int, sources: dict[int, KvSource] | None, *, cached: bool
) -> SourceConfig | None:
    """Return where a rank's events come from: as configured, as the engine says, or as usual."""
    host = urlsplit(config.engine_url).hostname or "127.0.0.1"
    topic: str | None = None
    if config.kv_endpoint:
        endpoint = endpoint_of_rank(config.kv_endpoint, rank)
        replay = endpoint_of_rank(config.kv_replay_endpoint, rank)
        topic = config.kv_topic
    elif sources is not None:
        said = sources.get(rank)
        if said is None or not said.enable_kv_cache_events or said.publisher != "zmq":
            return None
        endpoint = reachable(said.endpoint, host)
        replay = reachable(said.replay_endpoint or "", host)
        topic = said.topic
    elif cached:
        endpoint = f"tcp://{_bracketed(host)}:{VLLM_DEFAULT_PORT + rank}"
        replay = ""
    else:
        return None
    return SourceConfig(
        endpoint,
        replay,
        bind=config.kv_bind,
        topic=topic,
        queue_messages_max=config.kv_queue_messages_max,
        replay_silence_s_max=config.replay_silence_s_max,
    )


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Return a rank's endpoint: vLLM counts TCP ports up from rank 0's."""
    head, colon, port = endpoint.rpartition(":")
    if not (endpoint.startswith("tcp://") and colon and port.isdecimal()):
        return endpoint
    return f"{head}:{int(port) + rank}"


def reachable(endpoint: str, host: str) -> str:
    """Return an endpoint that the engine listens at as one to connect to.

    Args:
        host: where the engine is; stands in for `*` and other wildcards.
    """
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::"):
        if endpoint.startswith(wildcard):
            return f"tcp://{_bracketed(host)}:{endpoint[len(wildcard) :]}"
    return endpoint


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
