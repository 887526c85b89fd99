"""What the handler of a watch knows of a bucket, so that a restarted watch tells only the news."""

from __future__ import annotations

from controlplane.bus.protocol import Entry, EntryHandler


class BucketView:
    """Turns snapshots and changes of a bucket into calls of a handler, without repeats.

    Every (re)start of the watch is `restart()`, then `feed()` for each current entry, then
    `complete()`, then `feed()` for each change. What the handler knew and the new snapshot lacks
    has expired meanwhile: `complete` says so.

    Values are compared, not only revisions, since a server that lost its disk counts anew.
    """

    def __init__(self, handler: EntryHandler) -> None:
        self._handler = handler
        self._known: dict[str, Entry] = {}
        self._unconfirmed: set[str] = set()

    def restart(self) -> None:
        """A snapshot begins."""
        self._unconfirmed = set(self._known)

    def feed(self, entry: Entry) -> None:
        """Take one entry of the snapshot, or one change."""
        self._unconfirmed.discard(entry.key)
        if entry.value is None:
            if self._known.pop(entry.key, None) is not None:
                self._handler(entry)
            return
        known = self._known.get(entry.key)
        if known is None or (known.revision, known.value) != (entry.revision, entry.value):
            self._known[entry.key] = entry
            self._handler(entry)

    def complete(self) -> None:
        """The snapshot is whole."""
        for key in sorted(self._unconfirmed):
            gone = self._known.pop(key)
            self._handler(Entry(key, None, gone.revision, expired=True))
        self._unconfirmed.clear()
