"""What a predictor process is told at its start."""

from __future__ import annotations

import msgspec

from controlplane.bus import NatsOptions


class PredictorConfig(msgspec.Struct, frozen=True):
    """Settings of one predictor process; it learns of every model on the bus.

    Attributes:
        bus_url: where the bus is, `nats://host:port[,…]`.
        bus_options: credentials and TLS, as `controlplane.bus.connect` takes them.
        predictor_id: name on the bus; made up if empty. Each process needs its own.
        retrain_requests: a model is trained whenever so many requests have ended.
        samples_max: requests of each model that it learns from, the newest.
        trees: in each of a model's four sums.
        lease_ttl_s: how long a leader may be silent before a standby takes over.
        lease_margin_s: a leader stops this long before its lease ends.
        tick_s: how often what came is looked at.
        messages_max: bus messages waiting to be taken in; beyond it the oldest are dropped.
        slice_s: how long taking in may hold up everything else.
        models_max: models learnt of at once.
        metrics_host: address of the metrics.
        metrics_port: their port; 0 for a free one, None for none.
    """

    bus_url: str = "nats://127.0.0.1:4222"
    bus_options: NatsOptions = NatsOptions()
    predictor_id: str = ""
    retrain_requests: int = 1000
    samples_max: int = 8000
    trees: int = 60
    lease_ttl_s: float = 5.0
    lease_margin_s: float = 0.5
    tick_s: float = 0.25
    messages_max: int = 20_000
    slice_s: float = 0.005
    models_max: int = 64
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no sense.

        Raises:
            ValueError: names the setting.
        """
        for name in ("retrain_requests", "samples_max", "trees", "messages_max", "models_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        for name in ("tick_s", "slice_s", "lease_margin_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive: {getattr(self, name)}")
        if self.lease_ttl_s <= 2 * self.lease_margin_s:
            raise ValueError(
                f"lease_ttl_s={self.lease_ttl_s} must exceed twice "
                f"lease_margin_s={self.lease_margin_s}"
            )
