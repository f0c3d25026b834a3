"""Trains a DLRM on generated clicks, a MovieLens folder or a Criteo folder, on any number of ranks.

    python examples/dlrm/train.py
    torchrun --nproc_per_node=2 examples/dlrm/train.py --data <MovieLens folder>

Every rank takes its slice of the same global batches, so a run at one rank and a run at two are the same training.
After each epoch it prints the area under the ROC curve (AUC, higher is better) and the normalized entropy (NE, lower is
better, 1 is what predicting the mean click rate scores) on samples that are never trained on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

import shardwise
from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedOptimizerWrapper,
    PoolingType,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.data import Batch, Clicks, Source, open_folder
from shardwise.models import DLRM, DLRMTrain, auc, normalized_entropy

# name -> what updates the tables during backward, and what updates the dense layers
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
    "rowwise_adagrad": (RowWiseAdagrad, torch.optim.Adagrad),
    "adam": (torch.optim.Adam, torch.optim.Adam),
}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse(argv)
    started_here = not dist.is_initialized()
    device = start(args.device)
    try:
        return run(args, device)
    finally:
        if started_here:
            dist.destroy_process_group()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    summary = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="clicks", help="'clicks' (generated), or a MovieLens or Criteo folder")
    parser.add_argument("--on-bad-row", choices=("raise", "skip"), default="raise", help="what to do with bad rows")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=None, help="end each epoch after this many steps")
    parser.add_argument("--batch-size", type=int, default=512, help="samples of a step, all ranks together")
    parser.add_argument("--dim", type=int, default=32, help="width of the embeddings")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights, and of generated clicks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None, help="write configuration and results to this file")
    args = parser.parse_args(argv)
    for name in ("epochs", "steps", "batch_size", "dim"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if not (args.lr > 0 and math.isfinite(args.lr)):
        parser.error(f"--lr must be positive and finite, got {args.lr}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here, pass --device cpu")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch_size % ranks:
        parser.error(f"--batch-size {args.batch_size} cannot be shared equally by {ranks} ranks")
    if args.json is not None:
        # before training, which would be lost
        try:
            args.json.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--json {args.json}: {error}")
        if args.json.is_dir():
            parser.error(f"--json {args.json} is a folder, name a file")
    return args


def start(device_type: str) -> torch.device:
    """Joins the process group that torchrun describes, or makes one of this process alone; this rank's device."""
    device = torch.device("cpu" if device_type == "cpu" else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else silent
    source = open_source(args)
    model = build_model(source, args, device)
    optimizer = build_optimizer(model, args)
    say(model.plan)

    share: dict[str, int] = {"rank": rank, "world_size": world_size}
    epochs: list[dict[str, float]] = []
    for epoch in range(args.epochs):
        batches = islice(read(source.train(args.batch_size, epoch=epoch, **share)), args.steps)
        bar = tqdm(batches, desc=f"epoch {epoch + 1}/{args.epochs}", unit=" steps", disable=rank != 0, leave=False)
        begin = time.perf_counter()
        loss, steps = train_epoch(model, optimizer, bar, device)
        seconds = time.perf_counter() - begin
        if steps == 0:
            raise SystemExit(f"train.py: the training samples of {args.data} do not fill a batch of {args.batch_size}")
        logits, labels = evaluate(model, read(source.evaluate(args.batch_size, **share)), device)
        epochs.append(
            {
                "epoch": epoch + 1,
                "steps": steps,
                "train_loss": loss,
                "test_auc": auc(logits, labels),
                "test_ne": normalized_entropy(logits, labels),
                "samples_per_s": steps * args.batch_size / seconds,
                "seconds": seconds,
            }
        )
        done = epochs[-1]
        say(f"epoch {epoch + 1}: test AUC {done['test_auc']:.4f}, {done['samples_per_s']:,.0f} samples/s")

    say("\n".join(["", "  ".join(f"{name:>13}" for name in epochs[0]), *map(row, epochs)]))
    result: dict[str, Any] = {
        "config": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "world_size": world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "shardwise": shardwise.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "epochs": epochs,
        "skipped_rows": dict(source.skipped),
    }
    if isinstance(source, Clicks):
        result["ceiling_auc"] = source.bayes_auc()
        say(f"the labels are noisy by design: a perfect model would score a test AUC of {result['ceiling_auc']:.4f}")
    if source.skipped:
        say(f"rank 0 skipped bad rows: {dict(source.skipped)}")
    if args.json is not None and rank == 0:
        args.json.write_text(json.dumps(without_nan(result), indent=2) + "\n")
    return result


def open_source(args: argparse.Namespace) -> Source:
    if args.data == "clicks":
        return Clicks(args.seed)
    try:
        return open_folder(args.data, on_bad_row=args.on_bad_row)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"train.py: {error}") from None


def read(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; what the reader refuses on the way, such as a bad row, ends the run with its message."""
    try:
        yield from batches
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from None


def build_model(source: Source, args: argparse.Namespace, device: torch.device) -> DistributedModelParallel:
    # Seeded weights on the CPU, the same on each rank: sharding keeps them, so the run does not depend on the number of
    # ranks. Tables too large for one process go on device="meta" instead, and each rank makes its own shards.
    torch.manual_seed(args.seed)
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature}",
            embedding_dim=args.dim,
            num_embeddings=rows,
            feature_names=[feature],
            pooling=PoolingType.MEAN,
        )
        for feature, rows in source.feature_rows.items()
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    sparse_optimizer, _ = OPTIMIZERS[args.optimizer]
    apply_optimizer_in_backward(sparse_optimizer, ebc.parameters(), {"lr": args.lr})
    model = DLRM(
        ebc,
        dense_in_features=len(source.dense_names),
        dense_arch_layer_sizes=[64, args.dim],
        over_arch_layer_sizes=[16, 1],
        dense_device=device,
    )
    return DistributedModelParallel(DLRMTrain(model), device=device)


def build_optimizer(model: DistributedModelParallel, args: argparse.Namespace) -> CombinedOptimizer:
    """The tables' optimizer, which runs inside backward, and the dense layers' optimizer, as one."""
    _, dense_optimizer = OPTIMIZERS[args.optimizer]
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), partial(dense_optimizer, lr=args.lr)
    )
    return CombinedOptimizer([model.fused_optimizer, dense])


def train_epoch(
    model: nn.Module, optimizer: CombinedOptimizer, batches: Iterable[Batch], device: torch.device
) -> tuple[float, int]:
    """The mean loss over all ranks, and the number of steps."""
    model.train()
    total, steps = torch.zeros((), device=device), 0
    for batch in batches:
        optimizer.zero_grad()
        loss, (detached, _, _) = model(batch.to(device))
        loss.backward()
        optimizer.step()
        total += detached
        steps += 1
    return float(gather((total / max(steps, 1)).reshape(1)).mean()), steps


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterator[Batch], device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits and labels of all ranks' samples, on the CPU."""
    model.eval()
    # the empty starts serve a source without test samples
    logits, labels = [torch.empty(0)], [torch.empty(0)]
    for batch in batches:
        _, (_, batch_logits, batch_labels) = model(batch.to(device))
        logits.append(batch_logits.cpu())
        labels.append(batch_labels.cpu())
    return gather(torch.cat(logits)), gather(torch.cat(labels))


def gather(part: Tensor) -> Tensor:
    """The parts of all ranks, which may differ in length, end to end on the CPU."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.cpu())
    return torch.cat(parts)


def row(epoch: dict[str, float]) -> str:
    return "  ".join(f"{value:13d}" if isinstance(value, int) else f"{value:13.4f}" for value in epoch.values())


def without_nan(value: Any) -> Any:
    """JSON has no nan."""
    if isinstance(value, dict):
        return {name: without_nan(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_nan(entry) for entry in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def silent(*_: object) -> None:
    """Ranks other than 0 print nothing."""


if __name__ == "__main__":
    main()
