"""What a sidecar is told at its start."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from controlplane.bus import NatsOptions
from sidecar.engine_stream import EngineStreamConfig
from sidecar.mirror import MirrorConfig
from sidecar.relay import RelayConfig


class SidecarConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one sidecar; what is empty or None is found out from the engine.

    Attributes:
        engine_url: base URL of the engine's API server, as the sidecar reaches it.
        bus_url: where the bus is, `nats://host:port[,…]`.
        bus_options: credentials and TLS, as `controlplane.bus.connect` takes them.
        instance_id: name on the bus, unique in the fleet; made of the host's name and the engine's
            port if empty. With several data-parallel ranks, `-dp<rank>` is appended.
        host: this machine's name.
        advertise_url: base URL for routers, where it differs from `engine_url`.
        model: model id on the bus; the engine's first served name if empty.
        api_key: the engine's `--api-key`; sent to the engine only, never logged.
        model_path: folder with the model's tokenizer and chat template.
        chat_template: file that replaces the model's own template, as `--chat-template` does.
        template_kwargs: the template's variables by default, as `--default-chat-template-kwargs`.
        content_format: how the template gets contents, as `--chat-template-content-format`.
        drop_unchosen_tools: as `--exclude-tools-when-tool-choice-none`.
        hub_cache: folder of the Hugging Face cache, where models named by hub id are looked up.
        kv_endpoint: where rank 0 publishes KV events (`tcp://host:5557`); further ranks at the
            ports above. Asked from the engine if empty.
        kv_replay_endpoint: of rank 0's replay socket; goes with `kv_endpoint`.
        kv_topic: only events of this topic, where `kv_endpoint` is given; None for all.
        kv_bind: listen at `kv_endpoint`, for engines that connect.
        kv_queue_messages_max: events waiting to be taken in; more are dropped and replayed.
        server_load: ask `/load`, which counts the requests of one API process.
        max_num_seqs: the engine's largest batch, for routers; engines do not tell.
        heartbeat_s: how often the instance record is renewed.
        flush_s: how long block changes wait for company.
        load_s: how often the load is looked at, and published unless all is idle.
        metrics_s: how often `/metrics` is read, which costs the engine some 15 ms.
        health_s: how often `/health` is asked.
        health_failures_max: failures in a row before the engine counts as lost.
        http_timeout_s: for one request to the engine.
        probe_s: an event stream silent for this long is compared with the engine's replay buffer,
            which is what shows the loss of an event that no other one follows.
        replay_silence_s_max: silence within a replay before it has failed.
        still_s_max: requests that run for this long while nothing is computed are an alarm.
        join_s_max: how long registration waits for the first replay.
        drain_s_max: how long running requests may take to end when the sidecar is stopped.
        settle_s: the least time that a drain takes: routers learn of it within this.
        metrics_host: address of the sidecar's own metrics.
        metrics_port: their port; 0 for a free one, None for none.
        mirror: bounds of the mirror.
        relay: how block sets are published.
        stream: bounds of the event sequence.
    """

    engine_url: str
    bus_url: str = "nats://127.0.0.1:4222"
    bus_options: NatsOptions = NatsOptions()
    instance_id: str = ""
    host: str = ""
    advertise_url: str = ""
    model: str = ""
    api_key: str = ""
    model_path: str = ""
    chat_template: str = ""
    template_kwargs: dict[str, Any] = {}
    content_format: Literal["auto", "string", "openai"] = "auto"
    drop_unchosen_tools: bool = False
    hub_cache: str = ""
    kv_endpoint: str = ""
    kv_replay_endpoint: str = ""
    kv_topic: str | None = None
    kv_bind: bool = False
    kv_queue_messages_max: int = 100_000
    server_load: bool = True
    max_num_seqs: int | None = None
    heartbeat_s: float = 2.0
    flush_s: float = 0.005
    load_s: float = 0.1
    metrics_s: float = 0.5
    health_s: float = 1.0
    health_failures_max: int = 3
    http_timeout_s: float = 2.0
    probe_s: float = 2.0
    replay_silence_s_max: float = 2.0
    still_s_max: float = 60.0
    join_s_max: float = 5.0
    drain_s_max: float = 60.0
    settle_s: float = 0.5
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    mirror: MirrorConfig = MirrorConfig()
    relay: RelayConfig = RelayConfig()
    stream: EngineStreamConfig = EngineStreamConfig()

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: names the setting.
        """
        if not self.engine_url.startswith(("http://", "https://")):
            raise ValueError(f"engine_url must begin with http:// or https://: {self.engine_url!r}")
        if self.kv_bind and not self.kv_endpoint:
            raise ValueError("kv_bind needs kv_endpoint: the address to listen at")
        for name in ("heartbeat_s", "flush_s", "load_s", "metrics_s", "health_s", "probe_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive: {getattr(self, name)}")
