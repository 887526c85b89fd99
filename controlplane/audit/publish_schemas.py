"""The messages on the bus for readers in any language: JSON Schemas, and AsyncAPI over them.

    python -m controlplane.audit.publish_schemas          # writes docs/schemas, docs/asyncapi.yaml
    python -m controlplane.audit.publish_schemas --check  # exits with 1 if they are not current

Everything follows from `schemas`; nothing in those files is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from controlplane.bus.layout import layout
from schemas import bus, subjects

ROOT = Path(__file__).parents[2] / "docs"

MESSAGES: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "kv": (bus.KvBatch,),
    "load": (bus.LoadReport,),
    "route": (bus.RouteBatch,),
    "hotspot": (bus.HotspotRaised, bus.HotspotCleared),
    "policy": (bus.PolicyOverride, bus.Drain, bus.Blacklist),
    "snapshot": (bus.SnapshotRequest, bus.SnapshotChunk),
}
"""Kind of subject → what is said on it."""

RECORDS: dict[str, type[msgspec.Struct]] = {
    subjects.INSTANCES: bus.InstanceRecord,
    subjects.ROUTERS: bus.RouterLease,
    subjects.LEADERS: bus.LeaderLease,
    subjects.PREFIXES: bus.TenantPrefixes,
    subjects.MODELS: bus.ModelCard,
    subjects.PREDICTORS: bus.LatencyModel,
}
"""Bucket or store → what is kept in it."""

WHAT: dict[str, str] = {
    "kv": "The block set of one instance: changes, numbered, and heartbeats.",
    "load": "What the engine of one instance says of itself, a few times a second.",
    "route": "What one router decided for one model, in order, in numbered batches.",
    "hotspot": "Verdicts of the hotspot detector.",
    "policy": "What detectors and operators order: policy overrides, drains, blacklists.",
    "snapshot": "Request/reply: the whole block set of one instance, in chunks.",
}

_ATTRIBUTE = re.compile(r"    (\w+): (.*)")

_ENCODING = (
    "Payloads are msgpack. Every message is a map whose `type` names it; a struct without a `type` "
    "is an array where its schema says so. Fields that have their default are left out. Readers "
    "must ignore fields that they do not know. Where a schema says base64, msgpack has binary."
)


def documents() -> dict[str, str]:
    """Return every file, by its path below `docs`."""
    everything = [kind for kinds in MESSAGES.values() for kind in kinds] + list(RECORDS.values())
    _, components = msgspec.json.schema_components(everything, ref_template="{name}.json")
    found = {
        f"schemas/{name}.json": _schema(name, _explained(body)) for name, body in components.items()
    }
    found["asyncapi.yaml"] = (
        "\n".join(["# Made by controlplane.audit.publish_schemas.", *_yaml(_asyncapi())]) + "\n"
    )
    return found


def _explained(body: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which what its docstring says of each attribute is at that attribute."""
    text, _, attributes = body.get("description", "").partition("\n\nAttributes:\n")
    said: dict[str, list[str]] = {}
    latest: list[str] = []
    for line in attributes.splitlines():
        named = _ATTRIBUTE.match(line)
        if named is not None:
            latest = said[named[1]] = [named[2]]
        else:
            latest.append(line.strip())
    properties = {
        name: {"description": " ".join(said[name]), **inner} if name in said else inner
        for name, inner in body.get("properties", {}).items()
    }
    found = body | {"description": text}
    if properties:
        found["properties"] = properties
    if "prefixItems" in body:
        names = getattr(bus, body["title"]).__struct_fields__
        found["prefixItems"] = [
            {
                "title": name,
                **({"description": " ".join(said[name])} if name in said else {}),
                **item,
            }
            for name, item in zip(names, body["prefixItems"], strict=True)
        ]
    return found


def _schema(name: str, body: dict[str, Any]) -> str:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"{name}.json"}
    return json.dumps(head | body, indent=2, ensure_ascii=False) + "\n"


def _asyncapi() -> dict[str, Any]:
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Multiplane event plane",
            "version": subjects.VERSION,
            "description": _ENCODING,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/msgpack",
        "servers": {
            "nats": {
                "host": "localhost:4222",
                "protocol": "nats",
                "description": "Any NATS server with JetStream.",
            }
        },
        "channels": {kind: _channel(kind) for kind in MESSAGES},
        "operations": {
            f"follow_{kind}": {
                "action": "receive",
                "summary": WHAT[kind],
                "channel": {"$ref": f"#/channels/{kind}"},
            }
            for kind in MESSAGES
            if kind != "snapshot"
        }
        | {
            "fetch_snapshot": {
                "action": "send",
                "summary": WHAT["snapshot"],
                "channel": {"$ref": "#/channels/snapshot"},
                "reply": {"channel": {"$ref": "#/channels/snapshot"}},
            }
        },
        "x-streams": _streams(),
        "x-buckets": {
            name: {"value": {"$ref": f"schemas/{kind.__name__}.json"}}
            for name, kind in RECORDS.items()
        },
    }


def _channel(kind: str) -> dict[str, Any]:
    last = {"kv": "instance", "load": "instance", "snapshot": "instance", "route": "router"}
    tokens = [subjects.PREFIX, kind, "{model}", *(["{" + last[kind] + "}"] if kind in last else [])]
    parameters = {"model": {"description": "Encoded model id; see docs/audit.md, Ids in subjects."}}
    if kind in last:
        parameters[last[kind]] = {"description": f"Encoded {last[kind]} id."}
    return {
        "address": ".".join(tokens),
        "description": WHAT[kind],
        "parameters": parameters,
        "messages": {
            each.__name__: {
                "name": each.__name__,
                "contentType": "application/msgpack",
                "payload": {"$ref": f"schemas/{each.__name__}.json"},
            }
            for each in MESSAGES[kind]
        },
    }


def _streams() -> dict[str, Any]:
    return {
        spec.name: {
            "subjects": spec.subject,
            "age_s_max": spec.age_s_max,
            "bytes_max": spec.bytes_max,
        }
        for spec in layout().streams
    }


def _yaml(value: Any, indent: int = 0) -> Iterator[str]:
    """Yield a tree of maps as YAML, in its plain block form; scalars are written as JSON."""
    pad = "  " * indent
    for key, inner in value.items():
        name = key if key.replace("_", "").replace("-", "").isalnum() else json.dumps(key)
        if isinstance(inner, dict) and inner:
            yield f"{pad}{name}:"
            yield from _yaml(inner, indent + 1)
        else:
            yield f"{pad}{name}: {json.dumps(inner, ensure_ascii=False)}"


def stale(root: Path = ROOT) -> list[str]:
    """Return the files that differ from what they should be, and those that should not exist."""
    wanted = documents()
    different = [
        path
        for path, text in wanted.items()
        if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text
    ]
    present = {f"schemas/{path.name}" for path in (root / "schemas").glob("*.json")}
    return sorted(different + list(present - wanted.keys()))


def write(root: Path = ROOT) -> None:
    """Write every file, and remove those that should not exist."""
    (root / "schemas").mkdir(parents=True, exist_ok=True)
    wanted = documents()
    for path in (root / "schemas").glob("*.json"):
        if f"schemas/{path.name}" not in wanted:
            path.unlink()
    for path_text, text in wanted.items():
        (root / path_text).write_text(text, encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Write or check the files; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say which are not current")
    if not parser.parse_args(argv).check:
        write()
        return 0
    different = stale()
    for path in different:
        print(f"docs/{path} is not current: run python -m controlplane.audit.publish_schemas")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
