"""Cases of the suite: sharded."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.perf.case import Case

CASES: Sequence[Case] = ()
