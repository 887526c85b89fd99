"""One message of every kind, by the name of its golden file: with the least and with every field.

    python -m tests.schemas.samples          # writes the golden files; then read the diff

A field that joins a message later gets a variant of its own here. What a golden file already holds
must not change: those bytes are in somebody's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from schemas import bus

HASHES = bytes.fromhex("0807060504030201 efcdab8967452301 0000000000000080")
KEY = 0xFEDC_BA98_7654_3210

TREES = bus.TreeSet(
    1,
    2,
    features=bytes.fromhex("0000 ffff"),
    thresholds=bytes.fromhex("0000803f 00000000"),
    leaves=bytes.fromhex("0000803f 00000040 0000803f 0000803f"),
    base=0.5,
)

ROUTED = bus.Routed(
    "req-1",
    "gpu-1:8000",
    1_700_000_000.25,
    attempt=1,
    prompt_tokens=8000,
    exact=False,
    hit_tokens=7936,
    new_tokens=64,
    batch_size=12,
    queued_tokens=512,
    score=7488.0,
    policy="least_requests",
    reason="no tokenizer",
    trust="resyncing",
    kv_seq=(3, 41),
    tenant="gold",
    fleet=16,
    classes=[bus.ClassCoverage(KEY, 4, 2, 7488.0, 9000.5), bus.ClassCoverage(1, 8, 0)],
    decide_s=0.000_05,
    tokenize_s=0.001,
    queue_s=0.25,
    block_size=16,
    prompt_key=KEY,
    alpha=1.5,
    beta=0.5,
    candidates=bus.CandidateColumns(
        3,
        hit_tokens=bytes.fromhex("001f 0000"),
        promised_tokens=bytes.fromhex("00 10"),
        queued_tokens=bytes.fromhex("0002 0000"),
        batch_size=bytes.fromhex("0c 00"),
        context_tokens=bytes.fromhex("00770100 00000000"),
        applied=bytes.fromhex("02 00"),
        inexact=bytes.fromhex("01"),
        excluded={"draining": bytes.fromhex("02"), "hotspot": bytes.fromhex("01")},
        levels=[bus.PrefixLevel(4, 1, KEY), bus.PrefixLevel(496, KEY)],
    ),
)

ROWS = bus.FleetRows(
    3,
    ["gpu-1:8000", "b"],
    epochs=HASHES[:16],
    applied=bytes.fromhex("2900 0000"),
    policy="linear",
    parameters={"weight": 0.5, "nothing": None},
    tier_credit=(1.0, 0.75),
    batch_cap=256,
)

FINISHED = bus.Finished(
    "req-1",
    "gpu-1:8000",
    "upstream_error",
    502,
    1_700_000_002.5,
    released_tokens=32,
    prompt_tokens=8000,
    hit_tokens=7936,
    cached_tokens=7920,
    output_tokens=128,
    ttft_s=0.125,
    duration_s=2.25,
    tenant="gold",
)

SAMPLES: dict[str, tuple[Callable[[bytes | memoryview], Any], dict[str, msgspec.Struct]]] = {
    "kv_batch": (
        bus.decode_kv,
        {
            "minimal": bus.KvBatch("a", 0, 0, 0.0),
            "full": bus.KvBatch(
                "gpu-1:8000",
                1_700_000_000_000_000_000,
                41,
                1_700_000_000.25,
                [
                    bus.KvCleared(),
                    bus.KvStored(HASHES),
                    bus.KvStored(HASHES[:8], parent=KEY, tier=1),
                    bus.KvRemoved(HASHES[8:], tier=2),
                ],
                count=2,
                digest=KEY,
            ),
        },
    ),
    "snapshot_request": (bus.decode_snapshot_request, {"full": bus.SnapshotRequest("router-1")}),
    "snapshot_chunk": (
        bus.decode_snapshot_chunk,
        {
            "minimal": bus.SnapshotChunk("a", 0, 0, 0, 1, b""),
            "full": bus.SnapshotChunk(
                "gpu-1:8000", 3, 41, 1, 2, HASHES, tier=1, count=6, digest=KEY
            ),
        },
    ),
    "load_report": (
        bus.decode_load,
        {
            "minimal": bus.LoadReport("a", 0, 0, 0.0, 0, 0),
            "full": bus.LoadReport(
                "gpu-1:8000", 3, 7, 1_700_000_000.25, 16, 8, 24, 0.5, 12_000.5, 900.25
            ),
        },
    ),
    "route_batch": (
        bus.decode_route,
        {
            "minimal": bus.RouteBatch("r", 0, 0, 0.0),
            "full": bus.RouteBatch(
                "router-1",
                5,
                99,
                1_700_000_000.25,
                [
                    ROWS,
                    ROUTED,
                    bus.Prefilled("req-1", "gpu-1:8000", 32, ttft_s=0.125),
                    FINISHED,
                    bus.RouterTotals({"gpu-1:8000": (12, 512, 96_000)}),
                ],
            ),
            "for the predictor": bus.RouteBatch(
                "router-1",
                5,
                101,
                1_700_000_000.25,
                [bus.Routed("q", "a", 0.0, head=KEY)],
            ),
            "a stream without usage": bus.RouteBatch(
                "router-1",
                5,
                102,
                1_700_000_000.25,
                [bus.Finished("q", "a", "ok", 200, 0.0, output_tokens=120, output_estimated=True)],
            ),
            "after a wait": bus.RouteBatch(
                "router-1",
                5,
                103,
                1_700_000_000.25,
                [bus.Finished("q", "a", "ok", 200, 0.0, ttft_s=3.2, duration_s=0.5, before_s=3.0)],
            ),
            "a stream": bus.RouteBatch(
                "router-1",
                5,
                104,
                1_700_000_000.25,
                [bus.Finished("q", "a", "ok", 200, 0.0, output_tokens=120, streamed=True)],
            ),
            "barest events": bus.RouteBatch(
                "router-1",
                5,
                100,
                1_700_000_000.25,
                [
                    bus.FleetRows(1, []),
                    bus.Routed("q", "a", 0.0, candidates=bus.CandidateColumns(1)),
                    bus.Routed("q", "a", 0.0),
                    bus.Prefilled("q", "a", 0),
                    bus.Finished("q", "a", "ok", 200, 0.0),
                    bus.RouterTotals(),
                ],
            ),
        },
    ),
    "hotspot_raised": (
        bus.decode_hotspot,
        {
            "minimal": bus.HotspotRaised(KEY, 1, ["a"], 1, 0.0, 30.0),
            "full": bus.HotspotRaised(
                KEY,
                8,
                ["gpu-1:8000", "gpu-2:8000"],
                17,
                1_700_000_000.25,
                30.0,
                share=(60, 100),
                holders=2,
                fleet=16,
                streak=4,
                best_inside=7488.0,
                best_outside=9000.5,
                reason="60% of requests, 2 of 16 instances",
            ),
        },
    ),
    "hotspot_cleared": (
        bus.decode_hotspot,
        {"full": bus.HotspotCleared(KEY, 8, 18, 1_700_000_000.25, reason="calm")},
    ),
    "policy_override": (
        bus.decode_policy,
        {
            "minimal": bus.PolicyOverride("", 1, 0.0),
            "full": bus.PolicyOverride(
                "round_robin", 2, 1_700_000_000.25, ttl_s=60.0, by="detector", reason="alarms"
            ),
        },
    ),
    "drain": (
        bus.decode_policy,
        {
            "full": bus.Drain(
                "gpu-1:8000", True, 3, 1_700_000_000.25, by="operator", reason="upgrade"
            )
        },
    ),
    "blacklist": (
        bus.decode_policy,
        {
            "full": bus.Blacklist(
                "gpu-1:8000", True, 4, 1_700_000_000.25, ttl_s=60.0, by="operator", reason="slow"
            )
        },
    ),
    "instance_record": (
        bus.decode_instance,
        {
            "minimal": bus.InstanceRecord("a", "m", "http://h:1", 0),
            "full": bus.InstanceRecord(
                "gpu-1:8000/1",
                "Qwen/Qwen3-8B",
                "http://gpu-1:8000",
                3,
                state="draining",
                aliases=["qwen"],
                loras=["adapter-a"],
                dp_rank=1,
                block_size=16,
                num_blocks=27_000,
                max_model_len=40_960,
                max_num_seqs=256,
                engine_version="0.32.0",
                card="9f86d081",
                kv_events=False,
                heartbeat_s=1.0,
                seq=12,
                sent_wall_s=1_700_000_000.25,
            ),
            "doubtful": bus.InstanceRecord(
                "a", "m", "http://h:1", 0, mirror_complete=False, blind=True
            ),
            "located": bus.InstanceRecord("a", "m", "http://127.0.0.1:1", 0, host="gpu-1"),
        },
    ),
    "router_lease": (
        bus.decode_router,
        {
            "full": bus.RouterLease("router-1", 5, 12, 1_700_000_000.25, heartbeat_s=0.5),
            "findable": bus.RouterLease(
                "router-1", 5, 12, 1_700_000_000.25, address="10.0.0.5:8000", admin="127.0.0.1:8001"
            ),
        },
    ),
    "leader_lease": (
        bus.decode_leader,
        {"full": bus.LeaderLease("detector-1", 1_700_000_000.25, 5.0)},
    ),
    "tenant_prefixes": (
        bus.decode_prefixes,
        {
            "minimal": bus.TenantPrefixes("default"),
            "full": bus.TenantPrefixes(
                "gold",
                7,
                [
                    bus.RegisteredPrefix(
                        "pfx_fedcba98765432101f0",
                        "Qwen/Qwen3-8B",
                        8000,
                        496,
                        KEY,
                        nbytes=31_000,
                        references=2,
                        pin=True,
                        spread=True,
                        ttl_s=3600.0,
                        idle_s=12.5,
                        uses=9,
                        window_s=2.25,
                    ),
                    bus.RegisteredPrefix("pfx_1", "m", 16, 1, 1),
                ],
                ["5ad1c0de", "00ff00ff"],
            ),
        },
    ),
    "model_card": (
        bus.decode_card,
        {
            "minimal": bus.ModelCard("m", b""),
            "full": bus.ModelCard(
                "Qwen/Qwen3-8B",
                b'{"version":"1.0"}',
                chat_template="{{ messages }}",
                special_tokens={"eos_token": "<|im_end|>"},
                adds_special_tokens=False,
                block_size=16,
                max_model_len=40_960,
                tokenizer_config={"clean_up_tokenization_spaces": False, "extra": [1, None]},
            ),
            "probed": bus.ModelCard(
                "m",
                b"{}",
                template_kwargs={"enable_thinking": False},
                content_format="string",
                drop_unchosen_tools=True,
                probes=[
                    bus.TokenProbe([7, 151_643], messages=[{"role": "user", "content": "hi"}]),
                    bus.TokenProbe([9], prompt="hi"),
                ],
            ),
        },
    ),
    "latency_model": (
        bus.decode_latency_model,
        {
            "full": bus.LatencyModel(
                "Qwen/Qwen3-8B",
                4,
                9,
                1_700_000_000.25,
                ["prompt_tokens", "batch_size"],
                8000,
                TREES,
                TREES,
                TREES,
                TREES,
                margins=(1.25, 1.5),
                within=(0.99, 0.985),
                error_s=(0.125, 0.75),
            ),
        },
    ),
}


def golden_text(name: str) -> str:
    """Returns what the golden file of a message says: readable JSON, then msgpack in hex."""
    sections = []
    for variant, message in SAMPLES[name][1].items():
        readable = msgspec.json.format(msgspec.json.encode(message), indent=2).decode()
        octets = msgspec.msgpack.encode(message).hex(" ")
        lines = [octets[at : at + 96].strip() for at in range(0, len(octets), 96)]
        sections += [f"== {variant}: json", readable, f"== {variant}: msgpack", *lines]
    return "\n".join(sections) + "\n"


if __name__ == "__main__":
    for each in SAMPLES:
        path = Path(__file__).parent / "golden" / f"{each}.txt"
        path.write_text(golden_text(each), encoding="utf-8")
