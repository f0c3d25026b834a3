"""Train TorchRec's model on two gloo ranks with `shardwise.canary` on a third of its tables, and without.

docs/howto/canary.md tells how and keeps what was printed. Not as it has to be: losses differ, a checkpoint of one does
not load into the other or has other keys, a shadow is off or misses a planted fault, or something global was changed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise
from shardwise.migration.canary.shadow import CanaryDifference
from shardwise.perf.evidence.compare_checkpoint import load_theirs, save_theirs
from shardwise.perf.evidence.report import Report, Section, grid, report_of
from shardwise.perf.suite import libraries
from shardwise.perf.suite.libraries import torchrec
from shardwise.perf.suite.options import Options
from shardwise.perf.suite.ranks import of_ranks, on_ranks

from .model import (
    LARGE,
    LR,
    OURS,
    POOLED,
    ROWS,
    SMALL,
    Case,
    batch_of,
    fill,
    head_optimizer,
    of_torchrec,
    sharded,
    train,
    unsharded,
)

RANKS, STEPS, LOSS_BOUND = 2, 500, 1e-6
CASES = [
    *(Case("table_wise", optimizer, False) for optimizer in ("sgd", "adagrad", "rowwise_adagrad")),
    Case("column_wise", "rowwise_adagrad", False),
    Case("table_wise", "rowwise_adagrad", True),
]


def losses_of(case: Case, steps: int, how: str) -> list[float]:
    """This rank's losses without a canary, with one from "before" or from "after" DMP on, or of a "shadow"."""
    model = unsharded(case, SMALL)
    if how == "before":
        shardwise.canary(model, OURS)
    made = sharded(case, model)
    if how in ("after", "shadow"):
        shardwise.canary(made, OURS, shadow=how == "shadow")
    return train(made, head_optimizer(made), range(steps), pipelined=case.pipelined)


def worst(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference of losses over steps and ranks."""
    own = max(abs(a - b) for a, b in zip(losses, others, strict=True))
    return float(max(of_ranks(own)))


def loss_section(steps: int) -> Section:
    """Losses with the canary against those without it."""
    lines = [
        "## Losses", "",
        f"{len(OURS)} of {len(POOLED) + len(ROWS)} tables ({', '.join(OURS)}) on ours, {steps} steps of {SMALL.batch}"
        f" samples a rank. Largest difference to the run without the line, over steps and ranks; bound"
        f" {LOSS_BOUND:g}. A shadow answers nothing: its losses are the same bits.", "",
    ]  # fmt: skip
    bad, cells = [], []
    for case in CASES:
        plain = losses_of(case, steps, "without")
        off = {how: worst(plain, losses_of(case, steps, how)) for how in ("after", "before", "shadow")}
        loop = "TrainPipelineSparseDist" if case.pipelined else "plain"
        ends = f"{plain[0]:.4f}, {plain[-1]:.4f}"
        cells.append([case.strategy, case.optimizer, loop, ends, *(f"{value:.1e}" for value in off.values())])
        bad += [f"losses of {case}, canary {how} DMP, differ by {value:.1e}" for how, value in off.items()
                if not value <= (0.0 if how == "shadow" else LOSS_BOUND)]  # fmt: skip
    header = [
        "pooled tables",
        "optimizer",
        "loop",
        "loss of rank 0, first and last",
        "after DMP",
        "before DMP",
        "shadow",
    ]
    return Section([*lines, *grid(header, cells), ""], bad)


def shapes_of(state: dict[str, Any], path: str = "") -> dict[str, tuple[int, ...]]:
    """Names and sizes of all tensors of a state dict."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            shapes |= shapes_of(value, f"{path}{name}/")
        elif hasattr(value, "size"):
            shapes[f"{path}{name}"] = tuple(value.size())
    return shapes


def checkpoint_section(folder: Path, steps: int) -> Section:
    """A checkpoint of a job with the line goes on without it, and the other way round."""
    lines = [
        "## Checkpoints", "",
        f"A job trains {steps // 2} steps and saves by torch.distributed.checkpoint, optimizer states included;"
        f" another loads that and trains as many. Largest difference to {steps} steps without the line and without a"
        f" break; bound {LOSS_BOUND:g}.", "",
    ]  # fmt: skip
    bad, cells = [], []
    half = steps // 2
    for number, optimizer_name in enumerate(("sgd", "adagrad", "rowwise_adagrad")):
        case = Case("table_wise", optimizer_name, False)
        unbroken = losses_of(case, steps, "without")
        shapes, row = [], [optimizer_name]
        for first, second in ((True, False), (False, True)):
            place = folder / f"{number} {first}"
            model = sharded(case, unsharded(case, SMALL))
            trial = shardwise.canary(model, OURS) if first else None
            optimizer = head_optimizer(model)
            losses = train(model, optimizer, range(half), pipelined=False)
            shapes.append(shapes_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()}))
            save_theirs(model, optimizer, place)
            dist.barrier()
            other = sharded(case, unsharded(case, SMALL))
            if second:
                shardwise.canary(other, OURS)
            optimizer = head_optimizer(other)
            load_theirs(other, optimizer, place)
            losses += train(other, optimizer, range(half, steps), pipelined=False)
            off = worst(unbroken, losses)
            row.append(f"{off:.1e}")
            if not off <= LOSS_BOUND:
                bad.append(f"{optimizer_name}: losses over a checkpoint differ by {off:.1e}")
            if trial is not None:
                # the same job, taken back
                trial.remove()
                taken_back = train(model, head_optimizer(model), range(half, steps), pipelined=False)
                off = worst(unbroken[half:], taken_back)
                row.append(f"{off:.1e}")
                if not off <= LOSS_BOUND:
                    bad.append(f"{optimizer_name}: losses after remove() differ by {off:.1e}")
        same = shapes[0] == shapes[1]
        row.append(f"{len(shapes[0])}, {'the same' if same else 'OTHERS'}")
        if not same:
            bad.append(
                f"{optimizer_name}: other names or sizes: {sorted(set(shapes[0].items()) ^ set(shapes[1].items()))}"
            )
        cells.append(row)
    header = ["optimizer", "with the line, then without", "remove() in the same job", "without, then with",
              "tensors of both checkpoints"]  # fmt: skip
    return Section([*lines, *grid(header, cells), ""], bad)


def shadow_section(steps: int) -> Section:
    """What shadows saw, and that they see a planted fault."""
    lines = ["## Shadow", "", f"{steps} steps, rowwise Adagrad; what each rank's report says.", ""]
    bad, case = [], Case("table_wise", "rowwise_adagrad", False)
    model = sharded(case, unsharded(case, SMALL))
    trial = shardwise.canary(model, OURS, shadow=True)
    train(model, head_optimizer(model), range(steps), pipelined=False)
    report = trial.report()
    for difference in [difference for rank in of_ranks(report.differences) for difference in rank]:
        if difference.recopied or difference.steps != steps:
            bad.append(
                f"the shadow of {difference.path} compared {difference.steps} steps, {difference.recopied} copied"
            )
    for rank, text in enumerate(of_ranks(str(report))):
        lines += [f"Rank {rank}:", "", "```", *text.split("\n\n")[1].splitlines(), "```", ""]
    # as a fault of ours would be: a learning rate that is one percent off
    for lookup in trial._lookups:
        for run in lookup.runs:
            run.group.hyper[0] *= 1.01
    caught = ""
    try:
        train(model, head_optimizer(model), [steps], pipelined=False)
    except CanaryDifference as error:
        caught = str(error)
    missed = [rank for rank, message in enumerate(of_ranks(caught)) if not message]
    bad += [f"rank {rank}: the shadow missed a learning rate that is off" for rank in missed]
    return Section([*lines, "Ours with a learning rate that is one percent off, planted:", "", f"> {caught}", ""], bad)


class Kind(NamedTuple):
    """A collection of its own: whether ids have weights, features have batch sizes, and the type of its numbers."""

    weighted: bool = False
    sizes: bool = False
    dtype: str = "FP32"

    def __str__(self) -> str:
        words = ["per-sample weights"] * self.weighted + ["batch sizes of features"] * self.sizes
        return ", ".join([*words, self.dtype.lower()])


KINDS = [Kind(weighted=True), Kind(sizes=True), Kind(dtype="FP16")]


def outputs_of(kind: Kind, steps: int, how: str) -> tuple[list[Tensor], Any]:
    """Pooled outputs of this rank in some steps of four tables, t1 and t2 of which are tried, and the report."""
    side, world, size, keys = torchrec(), dist.get_world_size(), SMALL, [f"f{n}" for n in range(4)]
    configs = [
        side.EmbeddingBagConfig(
            name=f"t{n}", num_embeddings=size.rows, embedding_dim=8, feature_names=[key],
            data_type=of_torchrec("modules.embedding_configs", "DataType")[kind.dtype],
        ) for n, key in enumerate(keys)
    ]  # fmt: skip
    collection = side.EmbeddingBagCollection(tables=configs, is_weighted=kind.weighted, device=torch.device("cpu"))
    side.apply_optimizer_in_backward(side.RowWiseAdagrad, collection.parameters(), {"lr": LR})
    sharder = side.EmbeddingBagCollectionSharder()
    plan = side.construct_module_sharding_plan(
        collection, {f"t{n}": side.table_wise(rank=n // world, compute_kernel="fused") for n in range(4)}, sharder,
        local_size=world, world_size=world, device_type="cpu",
    )  # fmt: skip
    env = side.ShardingEnv.from_process_group(dist.group.WORLD)
    model = sharder.shard(collection, plan, env, torch.device("cpu"))
    fill(model)
    trial = None if how == "without" else shardwise.canary(model, ["t1", "t2"], shadow=how == "shadow")
    outputs = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        of_keys = [5, 9, 3, 7] if kind.sizes else [size.batch] * 4
        lengths = torch.randint(0, size.ids + 1, (sum(of_keys),), generator=generator)
        ids = torch.randint(0, size.rows, (int(lengths.sum()),), generator=generator)
        more: dict[str, Any] = {"weights": torch.rand(len(ids), generator=generator)} if kind.weighted else {}
        if kind.sizes:
            inverse = torch.stack([torch.randint(0, n, (size.batch,), generator=generator) for n in of_keys])
            more |= {"stride_per_key_per_rank": [[n] for n in of_keys], "inverse_indices": (keys, inverse)}
        values = model(side.KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, **more)).values()
        values.backward(torch.randn(values.shape, generator=generator))
        outputs.append(values.detach().float())
    return outputs, None if trial is None else trial.report()


def kinds_section(steps: int) -> Section:
    """Batches and tables of other kinds."""
    lines = [
        "## Other batches and tables", "",
        f"Two of four pooled tables, rowwise Adagrad, {steps} steps of fixed gradients: the largest difference of an"
        " output to that without the line, and what a shadow saw, both relative to the largest number. Rows of fp16 are"
        " rounded up or down by chance, by each library's own random numbers: only steps of a shadow compare.", "",
    ]  # fmt: skip
    cells, bad = [], []
    for kind in KINDS:
        plain, _ = outputs_of(kind, steps, "without")
        outputs, _ = outputs_of(kind, steps, "canary")
        largest = max(float(x.abs().max()) for x in plain)
        off = max(float((a - b).abs().max()) for a, b in zip(plain, outputs, strict=True)) / largest
        seen = [
            difference for rank in of_ranks(outputs_of(kind, steps, "shadow")[1]) for difference in rank.differences
        ]
        off, rounded = max(of_ranks(off)), kind.dtype != "FP32"
        largest_seen = [max(getattr(d, what) for d in seen) for what in ("outputs", "weights", "states")]
        cells.append([kind, "-" if rounded else f"{off:.1e}", *(f"{value:.1e}" for value in largest_seen)])
        if not rounded and not off <= 1e-5:
            bad.append(f"{kind}: outputs differ by {off:.1e}")
        if {d.updates for d in seen} != {steps}:
            bad.append(f"{kind}: the shadow compared {seen}")
    header = ["batches and tables", "outputs", "shadow: outputs", "weights", "states"]
    return Section([*lines, *grid(header, cells), ""], bad)


def cost_section(turns: int) -> Section:
    """The report of time and memory at a size where it says something."""
    lines, case = [], Case("table_wise", "rowwise_adagrad", False)
    for shadow, ours in ((False, OURS), (True, [*POOLED, *ROWS])):
        model = sharded(case, unsharded(case, LARGE))
        trial = shardwise.canary(model, ours, shadow=shadow)
        train(model, head_optimizer(model), range(turns), size=LARGE, pipelined=False)
        what = "all tables in a shadow: both libraries on the same ids" if shadow else "a third of the tables"
        lines += [
            f"## Time and memory: {what}",
            "",
            f"{len(POOLED) + len(ROWS)} tables of {LARGE.rows} x 64, {LARGE.batch} samples a rank, 0 to {LARGE.ids} ids"
            f" a bag, rowwise Adagrad, {turns} steps; what `print(trial.report())` says on each rank.",
            "",
        ]
        for rank, text in enumerate(of_ranks(str(trial.report()))):
            lines += [f"Rank {rank}:", "", "```", *text.splitlines(), "```", ""]  # fmt: skip
    return Section(lines, [])


def global_section() -> Section:
    """TorchRec and FBGEMM are the installed ones, whatever was tried above."""
    from shardwise.fbgemm import registered_ops

    side, bad = torchrec(), []
    case = CASES[0]
    model: Any = sharded(case, unsharded(case, SMALL))
    shardwise.canary(model, OURS)
    pooled = model.module.pooled(batch_of(SMALL, 0).sparse_features)
    rows = model.module.rows(batch_of(SMALL, 0).sparse_features)
    kinds = {
        "pooled output": (pooled.wait(), side.KeyedTensor),
        "rows of a feature": (rows.wait()["g1"], side.JaggedTensor),
    }
    for what, (value, kind) in kinds.items():
        if type(value) is not kind:
            bad.append(f"{what} is a {type(value)}, not TorchRec's {kind}")
    for name in ("torchrec", "fbgemm_gpu"):
        if "shardwise" in str(getattr(sys.modules[name], "__file__", "")):
            bad.append(f"{name} was replaced")
    if registered_ops():
        bad.append(f"ops of FBGEMM are ours: {registered_ops()}")
    lines = [
        "## What stays TorchRec's", "",
        "- outputs are its KeyedTensor and its JaggedTensor",
        "- `sys.modules` has its torchrec and FBGEMM's fbgemm_gpu",
        f"- {len(registered_ops())} ops of `torch.ops.fbgemm` are ours", "",
    ]  # fmt: skip
    return Section(lines, bad)


def sections(folder: Path, steps: int, turns: int) -> list[Section]:
    """All sections, on every rank."""
    makers: list[Callable[[], Section]] = [
        lambda: loss_section(steps), lambda: checkpoint_section(folder, steps), lambda: shadow_section(steps),
        lambda: kinds_section(min(steps, 50)),
        lambda: cost_section(turns), global_section,
    ]  # fmt: skip
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    made = []
    for make in makers:
        made.append(make())
        if dist.get_rank() == 0:
            print("\n".join(made[-1].lines), *made[-1].bad, sep="\n", file=sys.stderr, flush=True)
    return made


OPTIONS: Options = {
    "--steps": {"type": int, "default": STEPS, "help": "of the losses"},
    "--turns": {"type": int, "default": 30, "help": "steps that are timed"},
}


def run(options: argparse.Namespace) -> Report:
    """Train and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    libraries.torchrec()
    with tempfile.TemporaryDirectory() as folder:
        made = on_ranks(RANKS, sections, Path(folder), options.steps, options.turns)
    return report_of(made, f"{RANKS} ranks x 1 thread over gloo, load of the machine {os.getloadavg()[1]:.1f}")
