"""Cases of the suite: a training step of a sharded collection on two gloo ranks, without a dense model around it.

Rowwise Adagrad in the backward; a step takes as long as its slower rank. TorchRec is beside ours where it can shard
that way over gloo and trains in the backward, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardwise.perf.evidence.sharded_ranks import RANKS, Asked, Ranks
from shardwise.perf.evidence.sharded_sides import Shape
from shardwise.perf.suite.case import Case, Ready, Setting

FULL, SMALL = Shape(26, 20_000, 64, 2048, 1), Shape(4, 40, 64, 8, 3)
# of TorchRec: row shards need a reduce-scatter, which gloo has not; replicas need DDP around them and a dense optimizer
BESIDE = ("table_wise", "column_wise")
IN_CPU_SUITE = ("table_wise", "row_wise", "planned")


def make(setting: Setting, *, strategy: str) -> Ready:
    """Ranks that have the collections of this strategy."""
    shape = SMALL if setting.small else FULL
    ranks = Ranks(Asked(shape, strategy, strategy in BESIDE and "torchrec" in setting.peers))
    return Ready(
        check=ranks.check, rounds=ranks.rounds, close=ranks.close, graph=False,
        notes={"ranks": RANKS, "backend": "gloo", "shape": str(shape)},
    )  # fmt: skip


CASES: Sequence[Case] = tuple(
    Case(f"sharded EBC step, {strategy}", "sharded", partial(make, strategy=strategy),
         frozenset({"cpu", "full"} if strategy in IN_CPU_SUITE else {"full"}), devices=frozenset({"cpu"}))
    for strategy in ("table_wise", "row_wise", "column_wise", "data_parallel", "mixed", "planned")
)  # fmt: skip
