"""How large a layout a server has room for.

nats-server says to nobody but its own operators how much it may store; it only refuses a stream
whose cap exceeds what is left. So the room is found by bisection, with a stream of no content that
is created and deleted again.
"""

from __future__ import annotations

import math
from typing import Final

from controlplane.bus.jetstream import JetStream, JetStreamError
from controlplane.bus.layout import MIB, Layout, layout
from controlplane.bus.nats_bus import NatsBus
from controlplane.bus.setup import describe, is_no_room
from schemas.subjects import PREFIX

_PROBE: Final = "MP_ROOM"
_SIZE_MIN: Final = 0.001
_NOT_FOUND: Final = 404


async def fitting_size(bus: NatsBus, plan: Layout) -> float | None:
    """Return the largest `size` of a layout that fits, with two digits; None if none does.

    Takes a dozen round trips, and nobody else can create a stream that needs the same room
    meanwhile.

    Args:
        plan: what did not fit; gives storage and replicas.

    Raises:
        BusError: the server is away, or lets us create none but the plane's own streams.
    """
    held = await describe(bus, plan)
    ours = sum(holding.bytes_max for holding in held)  # can shrink
    room = ours + await _room(bus.jetstream, plan)
    size = room / layout().nbytes_max
    if size < _SIZE_MIN:
        return None
    unit = 10.0 ** (math.floor(math.log10(size)) - 1)
    return float(f"{math.floor(size / unit) * unit:.2g}")


async def _room(js: JetStream, plan: Layout) -> int:
    """Return how many bytes a stream beside all that there are could have, to a MiB."""
    await _delete(js)  # somebody may have been killed while looking
    fits, too_many = 0, plan.nbytes_max // MIB + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if await _fits(js, plan, middle * MIB):
            fits = middle
        else:
            too_many = middle
    return fits * MIB


async def _fits(js: JetStream, plan: Layout, nbytes: int) -> bool:
    config = {
        "name": _PROBE,
        "subjects": [f"{PREFIX}.room"],
        "storage": plan.storage,
        "num_replicas": plan.replicas,
        "max_bytes": nbytes,
    }
    try:
        await js.api(f"STREAM.CREATE.{_PROBE}", config)
    except JetStreamError as error:
        if is_no_room(error):
            return False
        raise
    await _delete(js)
    return True


async def _delete(js: JetStream) -> None:
    try:
        await js.api(f"STREAM.DELETE.{_PROBE}")
    except JetStreamError as error:
        if error.code != _NOT_FOUND:
            raise
