"""TorchRec's planner beside ours under TorchRec's own formulas: `python -m shardwise.perf.evidence.beside_planner WHAT`.

Run where torchrec 1.8.0 is installed. WHAT is one of

    golden    prints what tests/support/golden/planner_estimates.json has
    formulas  many random options: our Perf and Storage against torchrec's
    options   models and topologies: our enumerator's options against torchrec's
    times     sets of 26 tables (--tables DIR): CPU seconds of planning for 8 ranks, TorchRec's, ours, our bound
    plans     sets of tables (--tables DIR): each of TorchRec's proposers, and our search over the same options and over
              those with 32-wide column shards too, all rated by torchrec's NoopPerfModel

Exit status 1: a number differs, or a plan of ours is worse; 2: no torchrec.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

from shardwise.embeddings import DataType, RowWiseAdagrad
from shardwise.planner.torchrec import estimators as shard_estimators
from shardwise.planner.torchrec import types
from shardwise.sharding.plan.plan import CacheParams

from .planner_cases import Library, estimate, random_cases

DENSE_OPTIMIZERS: dict[str, type] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "Adagrad": torch.optim.Adagrad,
}
GOLDEN = 24


def our_library() -> Library:
    """shardwise's classes."""
    return Library(
        types, shard_estimators, CacheParams, SimpleNamespace, DataType,
        {**DENSE_OPTIMIZERS, "RowWiseAdagrad": RowWiseAdagrad},
    )  # fmt: skip


def their_library() -> Library:
    """torchrec's classes."""
    plans = import_module("torchrec.distributed.types")
    both = ModuleType("types")
    # ours has them in one place
    vars(both).update(vars(import_module("torchrec.distributed.planner.types")))
    vars(both).update(PipelineType=plans.PipelineType, StorageUsageType=plans.StorageUsageType)
    estimators = import_module("torchrec.distributed.planner.shard_estimators")
    rowwise = import_module("torchrec.optim").RowWiseAdagrad
    return Library(
        both, estimators, plans.CacheParams, plans.KeyValueParams,
        import_module("torchrec.modules.embedding_configs").DataType, {**DENSE_OPTIMIZERS, "RowWiseAdagrad": rowwise},
    )  # fmt: skip


def golden() -> int:
    """Prints as JSON, for each of the first random cases, how many shards there are and what the first costs."""
    theirs = their_library()
    lines = []
    for case in random_cases(GOLDEN):
        _, perfs, storages = estimate(case, theirs)
        lines.append(json.dumps([len(perfs), [float(f"{ms:.14g}") for ms in perfs[0]], storages[0]]))
    print("[", ",\n ".join(lines), "]", sep="\n ")
    return 0


def formulas(count: int) -> int:
    """Compares estimates of many random options."""
    ours, theirs = our_library(), their_library()
    shards, unequal, worst = 0, 0, 0.0
    for case in random_cases(count, seed=1):
        _, perfs, storages = estimate(case, theirs)
        _, our_perfs, our_storages = estimate(case, ours)
        shards += len(perfs)
        unequal += sum(a != b for a, b in zip(storages, our_storages, strict=True))
        for theirs_ms, ours_ms in zip(perfs, our_perfs, strict=True):
            for a, b in zip(theirs_ms, ours_ms, strict=True):
                worst = max(worst, abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0)
    print(
        f"{count} options, {shards} shards: largest relative difference of a time {worst:g}, {unequal} storages differ"
    )
    return int(worst > 1e-12 or unequal > 0)


def options() -> int:
    """Compares what the enumerators list."""
    from .beside_planner_options import compare

    unequal = 0
    for name, ours, theirs, same in compare():
        print(f"{name}: {theirs} options of torchrec, {ours} of ours, {'the same' if same else 'DIFFERENT'}")
        unequal += not same
    return int(unequal > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("golden", "formulas", "options", "plans", "times"))
    parser.add_argument("--count", type=int, default=5000, help="random options of `formulas`")
    parser.add_argument("--tables", type=Path, help="folder of the sets of tables, for `plans`")
    parser.add_argument("--only", default="", help="plans: sets whose name has this in it")
    parser.add_argument("--shapes", default="", help="plans: shapes whose text has this in it, '8x1' say")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results" / "planner")
    parser.add_argument("--largest", type=int, default=2000, help="plans: most tables x ranks for TorchRec")
    parser.add_argument("--again", action="store_true", help="plans: ours anew, TorchRec's as stored")
    given = parser.parse_args(arguments)
    try:
        import_module("torchrec")
    except ImportError:
        print("torchrec is not installed")
        return 2
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if given.what == "times":
        from .beside_planner_plans import times

        return times(given.tables, only=given.only)
    if given.what == "plans":
        from .beside_planner_plans import plans

        return plans(given.tables, given.results, only=given.only, shapes=given.shapes, largest=given.largest,
                     again=given.again)  # fmt: skip
    return {"golden": golden, "options": options}[given.what]() if given.what != "formulas" else formulas(given.count)


if __name__ == "__main__":
    sys.exit(main())
