"""What a detector process is told at its start."""

from __future__ import annotations

import msgspec

from controlplane.bus import NatsOptions
from controlplane.core.detector import DetectorConfig


class DetectorServiceConfig(msgspec.Struct, frozen=True):
    """Settings of one detector process; it watches every model on the bus.

    Attributes:
        bus_url: where the bus is, `nats://host:port[,…]`.
        bus_options: credentials and TLS, as `controlplane.bus.connect` takes them.
        detector_id: name on the bus; made up if empty. Each process needs its own.
        detector: how it judges.
        lease_ttl_s: how long a leader may be silent before a standby takes over.
        lease_margin_s: a leader stops this long before its lease ends: the time that a write may
            be under way.
        lease_renew_s: how often a leader renews its lease.
        lease_poll_s: how often a standby looks at it.
        renew_s: verdicts are renewed this often; several times within their time to live.
        tick_s: how often time is looked at: silence, renewal, retries of writes that failed.
        operator_rest_s: how long the policy is left alone after somebody else changed ours.
        messages_max: bus messages waiting to be taken in; beyond it the oldest are dropped.
        slice_s: how long taking in may hold up everything else.
        models_max: models watched at once.
        metrics_host: address of the metrics.
        metrics_port: their port; 0 for a free one, None for none.
    """

    bus_url: str = "nats://127.0.0.1:4222"
    bus_options: NatsOptions = NatsOptions()
    detector_id: str = ""
    detector: DetectorConfig = DetectorConfig()
    lease_ttl_s: float = 3.0
    lease_margin_s: float = 0.5
    lease_renew_s: float = 1.0
    lease_poll_s: float = 0.25
    renew_s: float = 5.0
    tick_s: float = 0.25
    operator_rest_s: float = 600.0
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
        if not 0 < self.lease_renew_s < self.lease_ttl_s - self.lease_margin_s:
            raise ValueError(
                f"lease_renew_s={self.lease_renew_s} must be positive and less than "
                f"lease_ttl_s={self.lease_ttl_s} less lease_margin_s={self.lease_margin_s}"
            )
        for name in ("lease_margin_s", "lease_poll_s", "tick_s", "slice_s", "renew_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive: {getattr(self, name)}")
        if self.renew_s + self.lease_ttl_s >= self.detector.ttl_s:
            raise ValueError(
                f"ttl_s={self.detector.ttl_s} must exceed renew_s={self.renew_s} and "
                f"lease_ttl_s={self.lease_ttl_s} together: verdicts would lapse at a takeover"
            )
