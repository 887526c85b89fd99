"""The records in key-value buckets and object stores: who is there, and what models need."""

from __future__ import annotations

from typing import Any, Literal

from schemas.message import U64, Amount, Count, Message


class InstanceRecord(Message, frozen=True, tag="instance"):
    """What a router must know of an instance; renewed by the sidecar as a heartbeat.

    Attributes:
        model: the model id on the bus: the engine's first served name.
        aliases: other names that the engine answers to (served names, LoRA adapters).
        url: base URL of the engine's API server.
        dp_rank: value for `X-data-parallel-rank`; None where the engine has a single rank.
        block_size: tokens a block; 0 where the engine publishes no blocks.
        card: digest of its ModelCard in the object store; empty where it has none.
        epoch: of its block stream.
        state: starting, ready, draining or stopped.
        kv_events: whether its block set is published at all.
    """

    instance_id: str
    model: str
    url: str
    epoch: U64
    state: Literal["starting", "ready", "draining", "stopped"] = "ready"
    aliases: list[str] = []
    loras: list[str] = []
    dp_rank: Count | None = None
    block_size: Count = 0
    num_blocks: Count | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    engine_version: str = ""
    card: str = ""
    kv_events: bool = True
    heartbeat_s: Amount = 2.0
    seq: Count = 0
    sent_wall_s: float = 0.0


class RouterLease(Message, frozen=True, tag="router"):
    """A router serves a model; renewed as a heartbeat, for people who look for it.

    Attributes:
        address: where it listens for clients, `host:port`.
        admin: where it listens for operators: metrics, state, explanations.
    """

    router_id: str
    epoch: U64
    seq: Count
    sent_wall_s: float
    heartbeat_s: Amount = 1.0
    address: str = ""
    admin: str = ""


class LeaderLease(Message, frozen=True, tag="leader"):
    """Who leads a service that must have one leader."""

    holder: str
    sent_wall_s: float
    ttl_s: Amount


class ModelCard(Message, frozen=True, tag="model_card"):
    """What turns a request into the engine's token ids.

    Attributes:
        tokenizer: the bytes of `tokenizer.json`; empty where there is none.
        chat_template: Jinja source; None where the model has none.
        special_tokens: name (`bos_token`, `eos_token` …) → text, for the template.
        adds_special_tokens: whether plain prompts get the tokenizer's special tokens (BOS).
    """

    model: str
    tokenizer: bytes
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    adds_special_tokens: bool = True
    block_size: Count = 0
    max_model_len: Count | None = None
    tokenizer_config: dict[str, Any] = {}
