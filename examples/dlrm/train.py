"""Trains a DLRM on generated clicks, a MovieLens folder or a Criteo folder, on any number of ranks.

    python examples/dlrm/train.py
    torchrun --nproc_per_node=2 examples/dlrm/train.py --data <MovieLens folder>
    torchrun --standalone --nproc_per_node=2 --max-restarts=100 examples/dlrm/train.py --pipeline sparse_dist \
        --checkpoint-dir runs/1/checkpoints --checkpoint-every 1000 --resume --metrics runs/1/metrics.jsonl

Every rank takes its slice of the same global batches, so a run at one rank and a run at two are the same training, and
so is one that was killed and goes on from its last checkpoint. After each epoch it prints the area under the ROC curve
(AUC, higher is better) and the normalized entropy (NE, lower is better, 1 is what predicting the mean click rate
scores) on samples that are never trained on; at the end, the AUC with the tables quantized to int8. `--export DIR`
writes that model into a folder that serves it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import OPTIMIZERS, build_model, build_optimizer
from progress import Checkpoints, Progress
from report import Logger, Report, without_nan
from serving import CPU, export, quantize, table_bytes
from torch import Tensor, nn

import shardwise
from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    PrefetchTrainPipelineSparseDist,
    RankFailure,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from shardwise.data import Batch, Clicks, Source, open_folder
from shardwise.inference.folder import require_free
from shardwise.models import auc, normalized_entropy

# name -> what trains on a stream of batches; None is the plain loop
PIPELINES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}


def main(argv: Sequence[str] | None = None, logger: Logger | None = None) -> dict[str, Any]:
    """Trains as the arguments say and returns what `--json` writes; rank 0 gives its metrics to `logger` too."""
    args = parse(argv)
    started_here = not dist.is_initialized()
    device = start(args.device)
    try:
        return run(args, device, logger)
    except RankFailure as failure:
        # the rank that is the cause has said more; torchrun starts all of them anew
        raise SystemExit(f"train.py: {failure}") from failure
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
    parser.add_argument("--pipeline", choices=PIPELINES, default="none", help="overlaps steps, with the same results")
    parser.add_argument("--checkpoint-dir", type=Path, default=None, help="save checkpoints there, at ends of epochs")
    parser.add_argument("--checkpoint-every", type=int, default=None, help="and after every so many steps")
    parser.add_argument("--checkpoint-async", action="store_true", help="write checkpoints while training goes on")
    parser.add_argument("--keep-last", type=int, default=3, help="checkpoints to keep")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument("--metrics", type=Path, default=None, help="write metrics to this file, a JSON object a line")
    parser.add_argument("--log-every", type=int, default=50, help="steps of a line of metrics")
    parser.add_argument("--json", type=Path, default=None, help="write configuration and results to this file")
    parser.add_argument("--export", type=Path, default=None, help="write the model, its tables int8, into this folder")
    args = parser.parse_args(argv)
    for name in ("epochs", "steps", "batch_size", "dim", "checkpoint_every", "keep_last", "log_every"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if not (args.lr > 0 and math.isfinite(args.lr)):
        parser.error(f"--lr must be positive and finite, got {args.lr}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here, pass --device cpu")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch_size % ranks:
        parser.error(f"--batch-size {args.batch_size} cannot be shared equally by {ranks} ranks")
    for name in ("checkpoint_every", "checkpoint_async", "resume"):
        if getattr(args, name) and args.checkpoint_dir is None:
            parser.error(f"--{name.replace('_', '-')} needs --checkpoint-dir")
    for name in ("json", "metrics"):
        path = getattr(args, name)
        if path is None:
            continue
        # before training, which would be lost
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--{name} {path}: {error}")
        if path.is_dir():
            parser.error(f"--{name} {path} is a folder, name a file")
    if args.export is not None:
        try:
            require_free(args.export, force=True)
        except FileExistsError as error:
            parser.error(f"--export: {error}")
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


def run(args: argparse.Namespace, device: torch.device, logger: Logger | None) -> dict[str, Any]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else silent
    source = open_source(args)
    model = build_model(source, args, device)
    optimizer = build_optimizer(model, args)
    say(model.plan)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        say("restarted workers may hang: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/reliability.md says why)")

    checkpoints = Checkpoints(args, source, model, optimizer)
    progress = checkpoints.resume()
    if progress.step:
        say(f"resumed at step {progress.step}, which is step {progress.epoch_step} of epoch {progress.epoch + 1}")
    share: dict[str, int] = {"rank": rank, "world_size": world_size}
    start = {"step": progress.step, "finished_epochs": len(progress.epochs)}
    total = None if args.steps is None else args.steps * args.batch_size
    # what fails on one rank from here on, a bad row for one, the others say by its name
    with Report(args.metrics, logger, active=rank == 0, **start) as report, model.watched("in training"):
        while progress.epoch < args.epochs:
            begun = {"epoch": progress.epoch, "start_step": progress.epoch_step}
            batches = read(source.train(args.batch_size, **begun, **share))
            if args.steps is not None:
                batches = islice(batches, args.steps - progress.epoch_step)
            report.begin_epoch(progress.epoch, args.epochs, progress.epoch_step * args.batch_size, total)
            losses = train_steps(args, model, optimizer, batches, device)
            train_epoch(args, losses, device, progress, checkpoints, report)
            report.end_epoch()
            if progress.epoch_step == 0:
                short = f"the training samples of {args.data} do not fill a batch of {args.batch_size}"
                raise SystemExit(f"train.py: {short}")
            logits, labels = evaluate(model, read(source.evaluate(args.batch_size, **share)), device)
            done = {
                "epoch": progress.epoch + 1,
                "steps": progress.epoch_step,
                "train_loss": progress.epoch_loss / progress.epoch_step,
                "test_auc": auc(logits, labels),
                "test_ne": normalized_entropy(logits, labels),
                "samples_per_s": progress.samples_per_s(args.batch_size),
                "seconds": progress.seconds,
            }
            progress.end_epoch(done)
            report.write(done, epoch=progress.epoch, step=progress.step)
            checkpoints.save(progress)
            say(f"epoch {progress.epoch}: test AUC {done['test_auc']:.4f}, {done['samples_per_s']:,.0f} samples/s")
        checkpoints.finish()

    epochs = progress.epochs
    quantized = evaluate_quantized(args, model, source, share)
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
        "int8": quantized,
        "skipped_rows": dict(source.skipped),
    }
    if isinstance(source, Clicks):
        result["ceiling_auc"] = source.bayes_auc()
        say(f"the labels are noisy by design: a perfect model would score a test AUC of {result['ceiling_auc']:.4f}")
    say(
        f"int8 tables: test AUC {quantized['test_auc']:.4f} (fp32 {epochs[-1]['test_auc']:.4f}),"
        f" {quantized['fp32_table_bytes'] / 1e6:.2f} MB become {quantized['table_bytes'] / 1e6:.2f} MB,"
        f" {quantized['ratio']:.2f}x smaller"
    )
    if args.export is not None:
        say(f"exported to {args.export}: shardwise.inference.load_program loads it")
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


def train_steps(
    args: argparse.Namespace,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    batches: Iterator[Batch],
    device: torch.device,
) -> Iterator[Tensor]:
    """Trains a step for each batch and yields its loss, the mean over this rank's samples."""
    model.train()
    make_pipeline = PIPELINES[args.pipeline]
    if make_pipeline is None:
        for batch in batches:
            optimizer.zero_grad()
            loss, (detached, _, _) = model(batch.to(device))
            loss.backward()
            optimizer.step()
            yield detached
    else:
        pipeline = make_pipeline(model, optimizer, device)
        while True:
            try:
                detached, _, _ = pipeline.progress(batches)
            except StopIteration:
                return
            yield detached


def train_epoch(
    args: argparse.Namespace,
    losses: Iterator[Tensor],
    device: torch.device,
    progress: Progress,
    checkpoints: Checkpoints,
    report: Report,
) -> None:
    """Trains the rest of an epoch by drawing its `losses`; writes metrics and saves checkpoints on the way."""
    rank_sum = torch.zeros((), dtype=torch.float64, device=device)
    begin = time.perf_counter()
    for loss in losses:
        rank_sum += loss
        progress.advance()
        report.advance(args.batch_size)
        ends_line, save = progress.step % args.log_every == 0, checkpoints.due(progress.step)
        if ends_line or save:
            progress.gather(rank_sum, seconds=time.perf_counter() - begin)
        if ends_line:
            rate = progress.samples_per_s(args.batch_size)
            line = {"loss": progress.end_line(), "lr": args.lr, "samples_per_s": rate}
            report.write(line, epoch=progress.epoch + 1, step=progress.step)
        if save:
            checkpoints.save(progress)
        if ends_line or save:
            begin = time.perf_counter()
    progress.gather(rank_sum, seconds=time.perf_counter() - begin)


def evaluate_quantized(
    args: argparse.Namespace, model: DistributedModelParallel, source: Source, share: dict[str, int]
) -> dict[str, float]:
    """How the model does on the same test samples with int8 tables; rank 0 exports it where that is asked for."""
    served = quantize(model, source, args.dim)
    logits, labels = evaluate(served, read(source.evaluate(args.batch_size, **share)), CPU)
    before, after = 4 * args.dim * sum(source.feature_rows.values()), table_bytes(served)
    if args.export is not None and dist.get_rank() == 0:
        export(served, source, args.export)
    return {
        "test_auc": auc(logits, labels),
        "fp32_table_bytes": before,
        "table_bytes": after,
        "ratio": before / after,
    }


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


def silent(*_: object) -> None:
    """Ranks other than 0 print nothing."""


if __name__ == "__main__":
    main()
