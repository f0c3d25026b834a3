"""One run of tables with rows below the device beside the same with all rows on it: random cases, and their digests.

A case is a mix of `same_bits` (tables, rules, dtypes, strategies, pooled and in sequence, weights, codecs, clipping,
micro-batches) with larger tables, and what of it has to do with caches: pipelines, how far they look ahead, slots, what
lies below. The runs train through other programs, a plain loop and a pipeline, so that both are told apart by their
bits alone.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import (
    Batch,
    DistributedModelParallel,
    PrefetchTrainPipelineSparseDist,
    Tier,
    TrainPipelineSparseDist,
    accumulate,
    cache_metrics,
    in_backward_optimizer_filter,
)
from shardwise.perf.evidence.same_bits import worker
from shardwise.perf.evidence.same_bits.worker import Mix, batch_of, digest, mix_of, model_of

STEPS, CPU = 8, torch.device("cpu")
# batches of which rows come, and of which ids are known, before they train
PREFETCHES = tuple((prefetch, ahead) for prefetch in (1, 4) for ahead in (0, 8, 64))
PIPELINES: tuple[str, ...] = ("none", "sparse_dist", *(f"prefetch {k}, ahead {ahead}" for k, ahead in PREFETCHES))
SLOTS: dict[str, int | float] = {"just enough": 1, "10 %": 0.1, "all": 1.0}
# by this name why a model trains no more
_ENDED = "end"
BELOW, POLICIES = ("ram", "file", "ram over file"), ("aged_lfu", "lru", "lfu")


@dataclass(frozen=True)
class Case:
    """A mix, and its caches."""

    mix: Mix
    pipeline: str
    slots: str
    below: str
    policy: str

    def tier(self, folder: Path) -> Tier:
        """Of all its tables; slots grow where a batch needs more."""
        on_file = {} if self.below == "ram" else {"below": "file", "folder": str(folder)}
        ram_rows = 0.3 if self.below == "ram over file" else None
        return Tier(SLOTS[self.slots], max_slots=1.0, policy=self.policy, ram_rows=ram_rows, **on_file)  # type: ignore[arg-type]


@dataclass
class Outcome:
    """What differed between both runs on a rank, by name, and what the caches did; `ended`: numbers grew too large."""

    compared: int
    differs: list[str]
    ended: int
    wanted: int
    misses: int
    saves: int
    grown: int


def case_of(seed: int) -> Case:
    """All pipelines with all slots and files in the first 72; the rest of a case is random."""
    mix = mix_of(seed)
    # rows that are not wanted by most batches
    tables = tuple(replace(table, rows=table.rows * 12 if table.rows > 3 else table.rows) for table in mix.tables)
    pipeline = PIPELINES[seed % len(PIPELINES)]
    accumulated = seed % 3 == 0 and pipeline == "none"
    mix = replace(mix, tables=tables, on_cuda=False, way="accumulated" if accumulated else "plain")
    at = seed // len(PIPELINES)
    return Case(mix, pipeline, [*SLOTS][at % 3], BELOW[at // 3 % 3], POLICIES[seed % 3])


def compare(case: Case, rank: int, world: int, folder: Path) -> Outcome:
    """Train both ways, on all ranks together."""
    whole, _ = train(case, rank, world, None)
    cached, model = train(case, rank, world, case.tier(folder))
    names = [*whole, *(name for name in cached if name not in whole)]
    differs = [name for name in names if whole.get(name) != cached.get(name)]
    metrics = cache_metrics(model).values()
    sums = {name: sum(getattr(table, name) for table in metrics) for name in ("wanted", "misses", "saves", "grown")}
    return Outcome(len(names), differs, int(_ENDED in whole), **sums)


def train(case: Case, rank: int, world: int, tier: Tier | None) -> tuple[dict[str, str], DistributedModelParallel]:
    """SHA-256 by name of losses, outputs, weights and states; with a `tier` through the pipeline of the case.

    Some models diverge. One whose loss is infinite ends there, as not a number is the same bits as another; one whose
    exchange refuses a number ends there too, as it was before that step.
    """
    model = model_of(case.mix, world, CPU, tier)
    trained = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = torch.optim.SGD([param for param in trained.values() if param.requires_grad] or [torch.zeros(1)], lr=0.01)
    steps = _steps if tier is None or case.pipeline == "none" else _pipelined
    digests: dict[str, str] = {}
    try:
        for step, (loss, rows) in enumerate(steps(case, model, dense, rank, world)):
            digests |= {f"loss of step {step}": digest(loss), f"output of step {step}": digest(rows)}
            finite = loss.isfinite().float()
            # ranks end together
            dist.all_reduce(finite, dist.ReduceOp.MIN)
            if not finite:
                digests[_ENDED] = f"step {step}: a loss is not finite"
                return digests, model
    except ArithmeticError as error:
        digests[_ENDED] = str(error)
    model.eval()
    try:
        with torch.no_grad():
            _, (_, rows) = model(batch_of(case.mix, STEPS, rank, world, learned=False))
        digests["output of evaluation"] = digest(rows)
    except ArithmeticError as error:
        digests["output of evaluation"] = str(error)
    for name, value in model.state_dict().items():
        digests |= {f"weight {name}{where}": digest(part) for where, part in worker._parts(value)}
    for name, of_table in model.fused_optimizer.state_dict()["state"].items():
        for key, value in of_table.items():
            digests |= {f"state {name}: {key}{where}": digest(part) for where, part in worker._parts(value)}
    return digests, model


def _steps(case: Case, model: Any, dense: Any, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
    accumulated = case.mix.way == "accumulated"
    for turn in range(STEPS):
        waits = accumulated and turn % 2 == 0
        with accumulate(model) if waits else nullcontext():
            loss, (value, rows) = model(batch_of(case.mix, turn, rank, world, learned=False))
            loss.backward()
        if not waits:
            dense.step()
            dense.zero_grad()
            if accumulated:
                model.fused_optimizer.step()
        yield value, rows


def _pipelined(case: Case, model: Any, dense: Any, rank: int, world: int) -> Iterator[tuple[Tensor, Tensor]]:
    pipeline: Any
    if case.pipeline == "sparse_dist":
        pipeline = TrainPipelineSparseDist(model, dense, CPU)
    else:
        prefetch, ahead = PREFETCHES[PIPELINES.index(case.pipeline) - 2]
        pipeline = PrefetchTrainPipelineSparseDist(model, dense, CPU, ahead=ahead, prefetch=prefetch)
    batches: Iterator[Batch] = (batch_of(case.mix, turn, rank, world, learned=False) for turn in range(STEPS))
    for _ in range(STEPS):
        yield pipeline.progress(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of the cases of bits.py.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--store", required=True, help="The file by which the ranks meet.")
    parser.add_argument("--seeds", type=int, nargs=2, required=True, help="From, and to this one.")
    parser.add_argument("--out", type=Path, required=True, help="Scratch files lie beside it.")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{given.store}", rank=given.rank, world_size=given.world,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    outcomes: dict[str, dict[str, Any]] = {}
    for seed in range(*given.seeds):
        case = case_of(seed)
        try:
            outcomes[str(seed)] = vars(compare(case, given.rank, given.world, given.out.parent))
        except Exception as error:
            raise RuntimeError(f"case {seed}: {case}") from error
    given.out.write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
