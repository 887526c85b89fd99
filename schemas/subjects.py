"""The subjects, buckets and streams of the bus: every name in one place.

`<m>` is an encoded model id, `<i>` an encoded instance id, `<r>` an encoded router id
(`schemas.ids.encode_token`).
"""

from __future__ import annotations

from schemas.codec import RemoteError
from schemas.ids import decode_token, encode_token

VERSION = "v1"
PREFIX = f"mp.{VERSION}"
KINDS: dict[str, bool] = {
    "kv": True,
    "load": True,
    "route": True,
    "hotspot": False,
    "policy": False,
    "snapshot": True,
}
"""Every kind of subject, and whether a last token (an instance or a router) follows the model."""

# Key-value buckets.
INSTANCES = "mp_instances"  # key <m>.<i>: InstanceRecord
ROUTERS = "mp_routers"  # key <m>.<r>: RouterLease
VERDICTS = "mp_verdicts"  # key <m>.<...>: current hotspots, policy overrides, drains
LEADERS = "mp_leaders"  # key <service>: LeaderLease
PREFIXES = "mp_prefixes"  # key <tenant>: TenantPrefixes
# Object stores.
MODELS = "mp_models"  # name: ModelCard digest
PREDICTORS = "mp_predictors"  # name <m>: latency model
# JetStream streams (the audit log), by name: the subjects that each one records.
STREAMS: dict[str, str] = {
    "MP_KV": f"{PREFIX}.kv.>",
    "MP_LOAD": f"{PREFIX}.load.>",
    "MP_ROUTE": f"{PREFIX}.route.>",
    "MP_HOTSPOT": f"{PREFIX}.hotspot.>",
    "MP_POLICY": f"{PREFIX}.policy.>",
}


def kv(model: str, instance_id: str) -> str:
    """KvBatch, from the sidecar of one instance."""
    return f"{PREFIX}.kv.{encode_token(model)}.{encode_token(instance_id)}"


def load(model: str, instance_id: str) -> str:
    """LoadReport, from the sidecar of one instance."""
    return f"{PREFIX}.load.{encode_token(model)}.{encode_token(instance_id)}"


def route(model: str, router_id: str) -> str:
    """RouteBatch, from one router."""
    return f"{PREFIX}.route.{encode_token(model)}.{encode_token(router_id)}"


def hotspot(model: str) -> str:
    """HotspotRaised and HotspotCleared, from the detector."""
    return f"{PREFIX}.hotspot.{encode_token(model)}"


def policy(model: str) -> str:
    """PolicyOverride, Drain and Blacklist, from the detector or an operator."""
    return f"{PREFIX}.policy.{encode_token(model)}"


def snapshot(model: str, instance_id: str) -> str:
    """Request/reply: SnapshotRequest to the sidecar of one instance, SnapshotChunk back."""
    return f"{PREFIX}.snapshot.{encode_token(model)}.{encode_token(instance_id)}"


def all_of(kind: str, model: str | None = None) -> str:
    """Return what to subscribe to for every subject of a kind, of one model or of all.

    Args:
        kind: a key of `KINDS`.
    """
    last = KINDS[kind]
    if model is None:
        return f"{PREFIX}.{kind}.>"
    return f"{PREFIX}.{kind}.{encode_token(model)}{'.>' if last else ''}"


def key(model: str, part: str) -> str:
    """Key `<m>.<part>` of a key-value bucket."""
    return f"{encode_token(model)}.{encode_token(part)}"


def parse_key(text: str) -> tuple[str, str]:
    """Return (model, part) of a key that `key` made. Raises RemoteError for anything else."""
    model, dot, part = text.partition(".")
    if not dot:
        raise RemoteError(f"not a bucket key: {text!r}")
    return decode_token(model), decode_token(part)


def parse(subject: str) -> tuple[str, str, str]:
    """Return (kind, model, last) of a subject, `last` empty where the kind has none.

    Raises:
        RemoteError: the subject is not one of ours.
    """
    prefix, _, rest = subject.partition(f"{PREFIX}.")
    kind, *tokens = rest.split(".")
    if prefix or kind not in KINDS or len(tokens) != 1 + KINDS[kind]:
        raise RemoteError(f"not one of our subjects: {subject!r}")
    ids = [decode_token(token) for token in tokens]
    return kind, ids[0], ids[1] if KINDS[kind] else ""
