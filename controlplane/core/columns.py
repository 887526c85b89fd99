"""What decisions saw, as they are told: a column a quantity, in bytes that numpy makes at once.

Theory of operation. A decision over N instances is N rows of the same few numbers. A list of
objects would cost the router more than the decision did, so a decision tells columns, and what all
decisions have in common (whose row is which, how scores are made) is told once, as `FleetRows`,
whenever it changes, and again every few seconds while decisions refer to it: so who reads from a
few seconds earlier on knows what all of them mean. `candidates` is the reader's side.

Columns of numbers are little-endian unsigned integers, of 1, 2, 4 or 8 bytes, which the length and
the number of rows tell: as narrow as the largest of them allows, but 8 where they are few. A column
of zeros is empty.
Sets of rows are bit sets: row r is bit r mod 8 of byte r // 8.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from controlplane.core.decision import Decision
from controlplane.core.fleet import Fleet
from controlplane.core.index import usable_blocks
from controlplane.core.scoring import BoolArray, IntArray, Policy
from schemas.bus import CandidateColumns, FleetRows, PrefixLevel

_NARROWEST = tuple(
    np.dtype(f"<u{next(width for width in (1, 2, 4, 8) if bits <= 8 * width)}")
    for bits in range(65)
)
"""The type of a column, by the bits of its largest number."""

_WIDEST = np.dtype("<i8")

FEW_ROWS = 8
"""So few numbers are told as they are: to find the narrowest type costs more than it saves."""


def pack(values: IntArray) -> bytes:
    """Return a column of numbers, none of them negative; of none, too: a fleet may be empty."""
    if len(values) <= FEW_ROWS:
        return values.astype(_WIDEST, copy=False).tobytes() if any(values.tolist()) else b""
    largest = int(values[values.argmax()])
    return values.astype(_NARROWEST[largest.bit_length()]).tobytes() if largest else b""


def unpack(column: bytes, rows: int) -> IntArray:
    """Return the (rows,) numbers of a column.

    Raises:
        ValueError: its length does not fit that many rows.
    """
    if not column:
        return np.zeros(rows, np.int64)
    width, rest = divmod(len(column), rows) if rows else (0, 1)
    if rest or width not in (1, 2, 4, 8):
        raise ValueError(f"a column of {len(column)} bytes does not fit {rows} rows")
    return np.frombuffer(column, f"<u{width}").astype(np.int64)


def pack_bits(rows: BoolArray) -> bytes:
    """Return a set of rows."""
    return np.packbits(rows, bitorder="little").tobytes()


def unpack_bits(packed: bytes, rows: int) -> BoolArray:
    """Return a set of rows as a (rows,) mask; an empty one is nobody.

    Raises:
        ValueError: its length does not fit that many rows.
    """
    if not packed:
        return np.zeros(rows, np.bool_)
    if len(packed) != (rows + 7) // 8:
        raise ValueError(f"a set of {len(packed)} bytes does not fit {rows} rows")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=rows, bitorder="little")
    return bits.astype(np.bool_)


class ColumnTeller:
    """Turns decisions into columns, and knows when the rows have to be told anew.

    Args:
        policy: the configured one.
        every_s: how long the rows may have been told before a decision that refers to them.
    """

    def __init__(
        self, fleet: Fleet, policy: Policy, tier_credit: Sequence[float], every_s: float
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._tier_credit = tuple(tier_credit)
        self._version = 0
        self._of_fleet = -1
        self._applied: IntArray = np.zeros(0, np.int64)
        self._every_s = every_s
        self._told_s = float("-inf")

    def due(self, now_s: float) -> bool:
        """Whether the rows have to be told before the next decision."""
        changed = self._of_fleet != self._fleet.version
        return changed or now_s - self._told_s >= self._every_s

    def rows(self, batch_cap: int | None, now_s: float) -> FleetRows:
        """Return what the columns from now on stand for."""
        fleet = self._fleet
        self._version += 1
        self._of_fleet = fleet.version
        self._applied = fleet.applied.copy()
        self._told_s = now_s
        policy = self._policy
        parameters = msgspec.structs.asdict(policy) if isinstance(policy, msgspec.Struct) else {}
        return FleetRows(
            self._version,
            [instance.record.instance_id for instance in fleet.rows],
            epochs=fleet.epochs.astype("<u8").tobytes(),
            applied=pack(self._applied),
            policy=policy.name,
            parameters=parameters,
            tier_credit=self._tier_credit,
            batch_cap=batch_cap,
        )

    def columns(self, decision: Decision) -> CandidateColumns | None:
        """Return what a decision saw; None if its rows are no longer those told.

        What it saw of the block streams is taken as of now: it has to be told before anything else
        happens.
        """
        fleet = self._fleet
        if decision.rows is not fleet.rows or self._of_fleet != fleet.version:
            return None
        hits, promised, context = (
            decision.hit_tokens,
            decision.promised_tokens,
            decision.context_tokens,
        )
        exact, filters = fleet.exact, decision.choice.filters
        return CandidateColumns(
            self._version,
            hit_tokens=b"" if hits is None else pack(hits),
            promised_tokens=b"" if promised is None else pack(promised),
            queued_tokens=pack(decision.queued_tokens),
            batch_size=pack(decision.batch_size),
            context_tokens=b"" if context is None else pack(context),
            applied=pack(fleet.applied - self._applied),
            inexact=b"" if exact[exact.argmin()] else pack_bits(~exact),
            excluded={name: pack_bits(~keep) for name, keep in filters if not keep.all()}
            if filters
            else {},
            levels=levels_of(decision) if decision.match.levels else [],
        )


def levels_of(decision: Decision) -> list[PrefixLevel]:
    """Return the depths at which instances drop out of a prompt, with the blocks that show it."""
    request = decision.request
    hashes = request.hashes
    usable = min(usable_blocks(request.prompt_tokens, request.block_size), len(hashes))
    found = []
    for depth, _ in decision.match.levels:
        following = hashes[depth] if depth < usable else None
        found.append(PrefixLevel(depth, hashes[depth - 1], following))
    return found
