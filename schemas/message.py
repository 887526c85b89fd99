"""What all messages on the bus are made of."""

from __future__ import annotations

from typing import Annotated

import msgspec

U64 = Annotated[int, msgspec.Meta(ge=0)]
"""A block hash, an epoch or a revision: msgpack carries no larger integers."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""How many there are of something; bounded so that sums of counts fit in 64 bits."""

AMOUNT_MAX = 1e15
Amount = Annotated[float, msgspec.Meta(ge=0, le=AMOUNT_MAX)]
"""Seconds, a rate or a share: finite and not negative."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type"):
    """Base of all messages."""
