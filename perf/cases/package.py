"""Cases of the suite: package."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.perf.case import Case

CASES: Sequence[Case] = ()
