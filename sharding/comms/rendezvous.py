"""How the ranks of a process group come to keys in its store that no group before them used.

torchrun keeps one store over its restarts, so workers find there what their dead predecessors left, an alarm for one.
No count of restarts tells the generations apart: ranks of one generation may have died at different points. So each
rank writes a token of its own, and rank 0 repeats the tokens of all beside its own, which names the keys. A rank that
reads its token there knows that a rank 0 is alive with it.
"""

from __future__ import annotations

import json
import secrets

from torch._C._distributed_c10d import Store

_ROSTER = "shardwise/roster"


class Meeting:
    """This rank's part in it: `look` now and then until `over`.

    Attributes:
        prefix: begins the keys of this group; None while rank 0 has not answered.
        over: whether no further look is needed, here or by another rank.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._token = secrets.token_hex(8)
        self.prefix = f"shardwise/{self._token}" if rank == 0 else None
        self.over = False

    def look(self, store: Store) -> None:
        """Say what this rank knows and read what the others said; never waits."""
        if self.over:
            return
        others = range(1, self._world_size)
        if self._rank == 0:
            said = [_read(store, f"shardwise/token{rank}") for rank in others]
            store.set(_ROSTER, json.dumps([self._token, *said]))
            self.over = store.check([f"{self.prefix}/met{rank}" for rank in others])
            return
        store.set(f"shardwise/token{self._rank}", self._token)
        roster = json.loads(_read(store, _ROSTER) or "[]")
        if len(roster) == self._world_size and roster[self._rank] == self._token:
            self.prefix, self.over = f"shardwise/{roster[0]}", True
            store.set(f"{self.prefix}/met{self._rank}", "")


def _read(store: Store, key: str) -> str:
    """What stands there, nothing if the key is not there."""
    return store.get(key).decode() if store.check([key]) else ""
