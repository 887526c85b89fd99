"""What a router process is told at its start."""

from __future__ import annotations

from typing import Final

import msgspec

from controlplane.bus import NatsOptions
from controlplane.core.coalesce import CoalesceConfig
from controlplane.core.plane import PlaneConfig
from controlplane.core.queue_lines import QueueConfig
from router.breaker import BreakerPolicy
from router.limits import ServerLimits, UpstreamLimits


class RouterConfig(msgspec.Struct, frozen=True):
    """Settings of one router process; everything per model comes from the bus.

    Attributes:
        bus_url: where the bus is, `nats://host:port[,…]`.
        bus_options: credentials and TLS, as `controlplane.bus.connect` takes them.
        host: address for clients.
        port: port for clients; 0 for a free one.
        admin_host: address for metrics, health and debugging; loopback unless told otherwise.
        admin_port: its port; 0 for a free one.
        router_id: name on the bus; made up if empty. Each process needs its own.
        reuse_port: share `port` with other router processes.
        plane: how decisions are made.
        server: limits towards clients.
        upstream: limits towards engines.
        breaker: when an instance counts as broken.
        queue: how requests wait while every instance is at `plane.batch_cap`; None to send them
            on all the same.
        coalesce: how requests wait for a prefix that another computes; None for not at all.
        latency_poll_s: how often the latency model on the bus is looked at, for the queue.
        prefix_cache_bytes: memory for tokenized prefixes.
        events_max: bus messages waiting to be taken in; beyond it the oldest are dropped, which
            shows as a gap and heals.
        events_slice_s: time given to bus messages before requests get their turn.
        join_s_max: how long a router that starts learns before it listens for clients: one that
            serves at once refuses them, or scatters their prefixes.
        register_s: how often this router says where it is, for people who look for it.
        forget_model_s: how long a model without instances is remembered.
        tick_s: how often ageing and sweeping run.
        flush_s: how long route events wait for company.
        snapshot_timeout_s: silence of a sidecar that was asked for a snapshot, or in the middle of
            one, after which it has failed. It and `IntakeConfig.retry_heard_s` together are how
            long a set may stay wrong after the last fault: less than 3 s.
        snapshots_at_once: snapshots fetched at the same time.
        stop_grace_s: how long running streams may take to end when the router is stopped.
        access_log: file for a line about every request, `-` for standard output; empty for none.
        otlp_endpoint: of an OpenTelemetry collector that gets a trace of requests, such as
            `http://host:4318`; empty for none.
        otlp_share: of the requests whose callers have not decided on that already.
        keys_path: file of API keys (`router.keys`); empty if callers need none. It, the tenants and
            the certificate are read anew when they change.
        tenants_path: file of tenants (`router.tenants`); empty if nobody has limits.
        engine_key_path: file with the engines' own API key; sent in place of the caller's.
        cors_origins: origins whose pages may call from a browser; `*` for all.
        tls_cert_path: certificate chain for clients, PEM; empty for plain HTTP.
        tls_key_path: its private key, PEM.
    """

    bus_url: str
    bus_options: NatsOptions = NatsOptions()
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    router_id: str = ""
    reuse_port: bool = False
    plane: PlaneConfig = PlaneConfig()
    server: ServerLimits = ServerLimits()
    upstream: UpstreamLimits = UpstreamLimits()
    breaker: BreakerPolicy = BreakerPolicy()
    queue: QueueConfig | None = None
    coalesce: CoalesceConfig | None = None
    latency_poll_s: float = 5.0
    prefix_cache_bytes: int = 500_000_000
    events_max: int = 100_000
    events_slice_s: float = 0.001
    join_s_max: float = 5.0
    register_s: float = 5.0
    forget_model_s: float = 600.0
    tick_s: float = 0.1
    flush_s: float = 0.01
    snapshot_timeout_s: float = 2.0
    snapshots_at_once: int = 8
    stop_grace_s: float = 60.0
    access_log: str = ""
    otlp_endpoint: str = ""
    otlp_share: float = 1.0
    keys_path: str = ""
    tenants_path: str = ""
    engine_key_path: str = ""
    cors_origins: tuple[str, ...] = ()
    tls_cert_path: str = ""
    tls_key_path: str = ""

    def __post_init__(self) -> None:
        """Refuse what makes no sense. Raises ValueError."""
        if self.queue is not None and self.plane.batch_cap is None:
            raise ValueError("a queue needs a batch cap: without one, every instance has room")


class WorkerOrder(msgspec.Struct, frozen=True):
    """What a supervisor tells a worker: how to run.

    Attributes:
        config: of the router.
        log_level: from which on it logs.
        stdout: descriptor of the supervisor's standard output, the worker's own once it serves.
    """

    config: RouterConfig
    log_level: str
    stdout: int


BEAT: Final = b"\n"
"""The line by which a worker tells its supervisor that its event loop turns."""


class WorkerReady(msgspec.Struct, frozen=True):
    """What a worker tells its supervisor, once it serves."""

    router_id: str
    pid: int
    address: tuple[str, int]
    admin_address: tuple[str, int]
