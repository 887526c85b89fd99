"""What becomes of a tenant's registered prefixes: registered, used, released, forgotten.

A record (`TenantPrefixes`) is one value of a bucket, which routers change by revision: each
function here makes the next record of one. All of a tenant's prefixes are in it, so that its bounds
hold whoever registers where, and at the same time.

Time. No clock is compared with another one: a record says how long each prefix had been idle when
it was written, and whoever writes the next one adds what has passed since (`aged`). A prefix ends
`GRACE_S` after its own time, since its latest use may be told that late.

Hot prefixes. Every router adds the uses that it has seen, in windows of `WINDOW_S`. The one whose
change finds that there are too many for the instances that hold it takes them out and lets one more
instance compute it: a change succeeds once, so that one router does.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from schemas.bus import RegisteredPrefix, TenantPrefixes

PREFIXES_MAX: Final = 64
"""Prefixes of a tenant."""
BYTES_MAX: Final = 16 << 20
"""Bytes of a tenant's prefixes, as registered."""
CHANGES_KEPT: Final = 32
"""Marks of changes that a record keeps: an answer may be lost while so many others are made."""
GRACE_S: Final = 15.0
WINDOW_S: Final = 4.5
"""A little less than the time between two looks of a router, so that each counts once."""
HOT_USES: Final = 8
"""A prefix is hot if each instance that holds it would have got more uses than this in a window."""

_RENEWED_SHARE: Final = 1 / 8
"""A use is told once a prefix has been idle for this share of its time: most uses write nothing."""
_WRITTEN_SHARE: Final = 1 / 4
"""Idle time is written down at the latest after this share of a prefix's time."""


class Full(Exception):
    """There is no room for another prefix; says whose bound it is."""


class Unknown(Exception):
    """The tenant has no such prefix."""


def find(record: TenantPrefixes, handle: str) -> RegisteredPrefix | None:
    """Return the prefix that a handle stands for."""
    return next((each for each in record.prefixes if each.id == handle), None)


def aged(record: TenantPrefixes, elapsed_s: float) -> TenantPrefixes:
    """Return a record as of `elapsed_s` after it was written, without what has ended."""
    older = [
        msgspec.structs.replace(
            each, idle_s=each.idle_s + elapsed_s, window_s=each.window_s + elapsed_s
        )
        for each in record.prefixes
    ]
    return _with(record, [each for each in older if each.idle_s <= each.ttl_s + GRACE_S])


def marked(record: TenantPrefixes, mark: str) -> TenantPrefixes:
    """Return the record that a change makes of another one, to be written."""
    changes = [*record.changes, mark][-CHANGES_KEPT:]
    return msgspec.structs.replace(record, version=record.version + 1, changes=changes)


def register(record: TenantPrefixes, new: RegisteredPrefix) -> TenantPrefixes:
    """Return a record with one prefix more, or with one reference more to one that it has.

    A prefix keeps the options with which it was registered first, and the longest of its times.

    Raises:
        Full: a bound is reached.
    """
    known = find(record, new.id)
    if known is not None:
        again = msgspec.structs.replace(
            known,
            references=known.references + 1,
            ttl_s=max(known.ttl_s, new.ttl_s),
            idle_s=0.0,
        )
        return _with(record, [again if each is known else each for each in record.prefixes])
    if len(record.prefixes) >= PREFIXES_MAX:
        raise Full(f"tenant {record.tenant!r} has registered {PREFIXES_MAX} prefixes, its most")
    if sum(each.nbytes for each in record.prefixes) + new.nbytes > BYTES_MAX:
        raise Full(f"the prefixes of tenant {record.tenant!r} would exceed {BYTES_MAX >> 20} MiB")
    return _with(record, [*record.prefixes, new])


def release(record: TenantPrefixes, handle: str) -> TenantPrefixes:
    """Return a record with one reference less; with the last one the prefix is gone.

    Raises:
        Unknown: there is no such prefix.
    """
    known = find(record, handle)
    if known is None:
        raise Unknown(handle)
    less = msgspec.structs.replace(known, references=known.references - 1)
    changed = [less if each is known else each for each in record.prefixes]
    return _with(record, [each for each in changed if each.references > 0])


def tended(
    record: TenantPrefixes, uses: Mapping[str, int], holders: Mapping[str, int]
) -> tuple[TenantPrefixes, list[str]]:
    """Return a record with a router's uses in it, and which prefixes that router is to spread.

    Args:
        uses: by handle, since it told the last ones.
        holders: by handle, how many instances hold it: of those that this router can spread.
    """
    prefixes = []
    claimed = []
    for each in record.prefixes:
        count = uses.get(each.id, 0)
        if count:
            each = _used(each, count)
        if _is_hot(each, holders):
            claimed.append(each.id)
            each = msgspec.structs.replace(each, uses=0)
        prefixes.append(each)
    return _with(record, prefixes), claimed


def is_due(
    record: TenantPrefixes,
    elapsed_s: float,
    uses: Mapping[str, int],
    holders: Mapping[str, int],
) -> bool:
    """Say whether `tended` would change what others must know; arguments as there.

    Args:
        elapsed_s: since the record was written.
    """
    now = aged(record, elapsed_s)
    if len(now.prefixes) < len(record.prefixes):
        return True
    for each in now.prefixes:
        if elapsed_s > _WRITTEN_SHARE * each.ttl_s or _is_hot(each, holders):
            return True
        if each.id in uses and (each.spread or each.idle_s > _RENEWED_SHARE * each.ttl_s):
            return True
    return False


def _used(prefix: RegisteredPrefix, count: int) -> RegisteredPrefix:
    """Return a prefix that was used; the first use after a window begins the next one."""
    if prefix.window_s > WINDOW_S:
        prefix = msgspec.structs.replace(prefix, uses=0, window_s=0.0)
    return msgspec.structs.replace(prefix, uses=prefix.uses + count, idle_s=0.0)


def _is_hot(prefix: RegisteredPrefix, holders: Mapping[str, int]) -> bool:
    """Say whether a prefix is used so much that one more instance should hold it."""
    count = holders.get(prefix.id)
    if count is None or not prefix.spread or prefix.window_s > WINDOW_S:
        return False
    return prefix.uses > HOT_USES * max(count, 1)


def _with(record: TenantPrefixes, prefixes: Sequence[RegisteredPrefix]) -> TenantPrefixes:
    return msgspec.structs.replace(record, prefixes=list(prefixes))
