"""Follows decisions on the bus, with nothing of Multiplane but its documentation.

    pip install nats-py msgpack
    python follow.py nats://127.0.0.1:4222 [how many decisions]

What it knows is in docs/asyncapi.yaml and docs/schemas: the subject, that payloads are msgpack maps
with a `type`, that absent fields have their defaults, and how columns are packed.
"""

import asyncio
import sys

import msgpack
import nats


def column(packed: bytes, rows: int) -> list[int]:
    """Return the numbers of a column: little endian, as wide as its length says, or all zeros."""
    if not packed:
        return [0] * rows
    width = len(packed) // rows
    return [
        int.from_bytes(packed[at : at + width], "little") for at in range(0, len(packed), width)
    ]


def row_set(packed: bytes) -> set[int]:
    """Return the rows in a bit set."""
    number = int.from_bytes(packed, "little")
    return {row for row in range(8 * len(packed)) if number >> row & 1}


async def main(url: str, wanted: int) -> None:
    """Print decisions with their candidates until there were enough."""
    rows_told: dict[tuple[str, int, int], list[str]] = {}
    done = asyncio.Event()
    seen = 0

    async def on_route(message: nats.aio.msg.Msg) -> None:
        nonlocal seen
        batch = msgpack.unpackb(message.data)
        for event in batch.get("events", []):
            if event["type"] == "fleet_rows":
                key = (batch["router_id"], batch["epoch"], event["version"])
                rows_told[key] = event["instance_ids"]
            elif event["type"] == "routed":
                print_decision(event, batch, rows_told)
                seen += 1
                if seen >= wanted:
                    done.set()

    connection = await nats.connect(url)
    await connection.subscribe("mp.v1.route.>", cb=on_route)
    await connection.flush()
    print("following", flush=True)
    await done.wait()
    await connection.close()


def print_decision(
    event: dict, batch: dict, rows_told: dict[tuple[str, int, int], list[str]]
) -> None:
    """Print one decision, and every instance as it saw it."""
    print(f"{event['request_id']} -> {event['instance_id']} score {event.get('score', 0.0):.0f}")
    columns = event.get("candidates")
    if columns is None:
        return
    names = rows_told.get((batch["router_id"], batch["epoch"], columns["version"]))
    if names is None:
        return  # they were told before we listened, and will be told again within seconds
    hits = column(columns.get("hit_tokens", b""), len(names))
    queued = column(columns.get("queued_tokens", b""), len(names))
    batches = column(columns.get("batch_size", b""), len(names))
    excluded = set().union(*map(row_set, columns.get("excluded", {}).values()))
    prompt = event.get("prompt_tokens") or 0
    for row, name in enumerate(names):
        p = queued[row] + max(prompt - hits[row], 1)
        note = " excluded" if row in excluded else ""
        print(f"    {name}: P {p} x (B {batches[row]} + 1) = {p * (batches[row] + 1)}{note}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize))
