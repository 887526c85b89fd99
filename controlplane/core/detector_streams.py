"""Which messages of routers are new: repeats are left out, and losses are counted.

Each router numbers its messages from 0 within an epoch. The bus may lose messages and, around a
reconnection, repeat them; a request that counts twice would make its class look hotter than it is.
One message with an absurd epoch or number makes all that follow look old: so many in a row are
no repeats, and the router is heard anew.
"""

from __future__ import annotations

from schemas.bus import RouteBatch

REPEATED_MAX = 256
"""A bus repeats what was on its way around a reconnection: far fewer, and then there is news."""


class RouterStreams:
    """Where the stream of each router stands, for one model.

    Attributes:
        routers_max: routers remembered; the one that was silent longest is forgotten first.
        lost: messages that never came.
        repeated: messages that came before, or belong to an earlier life of their router.
    """

    def __init__(self, routers_max: int = 1024) -> None:
        assert routers_max > 0
        self.routers_max = routers_max
        self.lost = 0
        self.repeated = 0
        self._at: dict[str, tuple[int, int, int]] = {}  # epoch, seq, repeats in a row

    def __len__(self) -> int:
        return len(self._at)

    def is_new(self, batch: RouteBatch) -> bool:
        """Say whether a message counts, and remember it. O(1)."""
        epoch, seq, repeats = self._at.pop(batch.router_id, (-1, -1, 0))
        if (batch.epoch, batch.seq) <= (epoch, seq):
            if repeats < REPEATED_MAX:
                self._at[batch.router_id] = epoch, seq, repeats + 1
                self.repeated += 1
                return False
            epoch = -1
        if batch.epoch == epoch:
            self.lost += batch.seq - seq - 1
        self._at[batch.router_id] = batch.epoch, batch.seq, 0
        if len(self._at) > self.routers_max:
            del self._at[next(iter(self._at))]
        return True
