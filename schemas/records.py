"""The records in key-value buckets and object stores: who is there, and what models need."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

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
        mirror_complete: whether the engine can hold no block that the set lacks; False where the
            sidecar began too late to hear of all of them, until the engine's cache is reset.
        blind: events arrive and none applies, so that the set says nothing.
        host: the machine that its sidecar runs on, which is what a loopback `url` is relative to;
            empty where that is not known.
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
    mirror_complete: bool = True
    blind: bool = False
    host: str = ""

    @property
    def place(self) -> tuple[str, int | None, str]:
        """Where its engine is: the URL, the rank, and the machine if the URL is relative to one."""
        return self.url, self.dp_rank, self.host if _is_loopback(self.url) else ""

    def same_engine(self, other: InstanceRecord) -> bool:
        """Whether two records are about one engine, as far as can be known."""
        if self.url != other.url or self.dp_rank != other.dp_rank:
            return False
        mine, theirs = self.place[2], other.place[2]
        return mine == theirs or not mine or not theirs


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


class RegisteredPrefix(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt's beginning that a caller has registered; nothing of its text.

    Attributes:
        id: its handle.
        model: the model id on the bus.
        tokens: its length.
        blocks: its whole blocks.
        key: BlockHash of the last of them.
        nbytes: of what was registered.
        references: registrations that were not released.
        pin: routers keep its tokens in their prefix caches.
        spread: one more instance computes it whenever it is hot.
        ttl_s: it ends once it was neither used nor registered for so long.
        idle_s: how long it had been neither when this was written.
        uses: prompts that began with it in the present window, all routers' together.
        window_s: how long that window had lasted when this was written.
    """

    id: str
    model: str
    tokens: Count
    blocks: Count
    key: U64
    nbytes: Count = 0
    references: Count = 1
    pin: bool = False
    spread: bool = False
    ttl_s: Amount = 86_400.0
    idle_s: Amount = 0.0
    uses: Count = 0
    window_s: Amount = 0.0


class TenantPrefixes(Message, frozen=True, tag="prefixes"):
    """All that a tenant has registered; routers change it by revision only.

    Attributes:
        version: grows by one with each change.
        prefixes: in the order of their registration.
        changes: marks of the latest changes, so that whoever lost the answer to its own finds it.
    """

    tenant: str
    version: U64 = 0
    prefixes: list[RegisteredPrefix] = []
    changes: list[str] = []


class TokenProbe(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text as the engine itself tokenizes it.

    Attributes:
        token_ids: what the engine made of it.
        messages: of a chat of which nothing else was asked; empty for a plain prompt.
        prompt: the plain prompt.
    """

    token_ids: list[Count]
    messages: list[dict[str, str]] = []
    prompt: str = ""


class ModelCard(Message, frozen=True, tag="model_card"):
    """What turns a request into the engine's token ids.

    Attributes:
        tokenizer: the bytes of `tokenizer.json`; empty where there is none.
        chat_template: Jinja source; None where the model has none.
        special_tokens: name (`bos_token`, `eos_token` …) → text, for the template.
        adds_special_tokens: whether plain prompts get the tokenizer's special tokens (BOS).
        template_kwargs: the template's variables by default (`--default-chat-template-kwargs`).
        content_format: how the template gets contents (`--chat-template-content-format`).
        drop_unchosen_tools: `--exclude-tools-when-tool-choice-none`.
        probes: what a reader made of this card must reproduce; empty where the engine did not say.
    """

    model: str
    tokenizer: bytes
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}
    adds_special_tokens: bool = True
    block_size: Count = 0
    max_model_len: Count | None = None
    tokenizer_config: dict[str, Any] = {}
    template_kwargs: dict[str, Any] = {}
    content_format: Literal["auto", "string", "openai"] = "auto"
    drop_unchosen_tools: bool = False
    probes: list[TokenProbe] = []


class TreeSet(msgspec.Struct, frozen=True):
    """A sum of decision trees, each perfect and `depth` deep, in arrays of all its nodes.

    Inner node i of a tree goes on to node 2i + 1 where its feature is below its threshold, else to
    2i + 2; the leaves follow the inner nodes in order.

    Attributes:
        features: packed i16, little endian: a feature for each inner node, tree by tree; at one of
            -1 it always goes on to 2i + 1.
        thresholds: packed f32, likewise.
        leaves: packed f32: 2^depth values a tree.
        base: what is added to the sum.
    """

    depth: Count
    trees: Count
    features: bytes
    thresholds: bytes
    leaves: bytes
    base: float = 0.0


class LatencyModel(Message, frozen=True, tag="latency_model"):
    """What a model's requests take, by what is known when they are sent.

    Times to the first byte and to the end count from when a request was sent to an instance. The
    means are the sums; the p99s are exp(sum) times their margin, which is set so that 99 % of
    recent requests kept within.

    Attributes:
        version: grows with each model that replaces another.
        confirmed: grows each time that it was found no worse than a newer one, or replaced it.
        features: names of the trees' features, in order.
        requests: how many it was learnt from.
        margins: factors on the two p99s.
        within: shares of held-back requests within their p99s, before it was published.
        error_s: mean absolute errors of the two means on them.
    """

    model: str
    version: U64
    confirmed: Count
    trained_wall_s: float
    features: list[str]
    requests: Count
    ttft: TreeSet
    ttft_p99: TreeSet
    total: TreeSet
    total_p99: TreeSet
    margins: tuple[Amount, Amount] = (1.0, 1.0)
    within: tuple[Amount, Amount] = (0.0, 0.0)
    error_s: tuple[Amount, Amount] = (0.0, 0.0)


def _is_loopback(url: str) -> bool:
    """Whether a URL means whatever machine uses it."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, or no URL
        return False
