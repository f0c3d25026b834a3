"""A run from its data to its results; `train.py` says what it does and starts it."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from arguments import Options, as_text
from best import BestWeights, best_epoch
from compiling import compile_loops
from evaluation import evaluate, evaluate_quantized, read
from health import LookupCounts, health_of_tables
from model import build_model, build_optimizer
from page import Run, write_page
from progress import Checkpoints, Progress, require_no_checkpoints
from report import Report, Tracker, without_nan
from serving import quantize
from summary import caches, closing, epochs_table, hit_rate, plan_in_short
from terminal import Bar, Terminal
from torch import Tensor
from trackers import trackers_of
from try_next import TABLES, example_request, next_steps, write_tables

import shardwise
from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    cache_metrics,
)
from shardwise.data import Batch, Clicks, Source, open_folder
from shardwise.inference.folder import require_free
from shardwise.planner.plan.planned import Planned

# name -> what trains on a stream of batches; None is the plain loop
PIPELINES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}
# a process's first steps fill caches and buffers; its speed is told without them
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Job:
    """What the parts of a run share."""

    args: Options
    device: torch.device
    source: Source
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    counts: LookupCounts
    terminal: Terminal

    @property
    def share(self) -> dict[str, int]:
        """Which part of the data is this rank's."""
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}


def run(args: Options, device: torch.device, trackers: Sequence[Tracker], terminal: Terminal) -> dict[str, Any]:
    """Trains as the arguments say, on all ranks together; what `--json` writes. Rank 0 tells `trackers` besides."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if args.export is not None:
        try:
            require_free(args.export, force=True)
        except FileExistsError as error:
            raise SystemExit(f"train.py: --export: {error}") from None
    require_no_checkpoints(args)
    with terminal.doing(f"opening {args.data}"):
        source = open_source(args)
    with terminal.doing("planning and building the model"):
        model = build_model(source, args, device)
        optimizer = build_optimizer(model, args)
    planned: Planned | None = getattr(model.plan.explanation, "planned", None)
    terminal.say(model.plan if args.explain or planned is None else plan_in_short(planned))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_MAX_RESTARTS"] != "0":
        terminal.say(
            "restarted workers may hang: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (docs/howto/reliability.md says why)"
        )
    with terminal.doing("loops of numba, which it compiles once a machine, in most of a minute"):
        loops = compile_loops(args, device)
    terminal.say(loops)
    counts = LookupCounts(source.feature_rows, active=args.page is not None)
    job = Job(args, device, source, model, optimizer, counts, terminal)

    best = BestWeights(args, model, source)
    with Report([*trackers_of(args), *trackers], terminal, active=rank == 0) as report:
        progress = train(job, best, report)
        epochs, chosen = progress.epochs, best_epoch(progress.epochs)
        best_step = int(sum(epoch["steps"] for epoch in epochs[: chosen + 1]))
        kept = True
        with terminal.doing("testing the best epoch's tables as int8"):
            if chosen < len(epochs) - 1:
                kept = best.restore(best_step)
            served, weights = quantize(model, source, args.dim)
            quantized = evaluate_quantized(args, served, source, job.share)
        if not kept:
            terminal.say(f"the weights of epoch {chosen + 1} were not kept: what follows is of the last one")
            chosen = len(epochs) - 1
        final = {name: epochs[chosen][name] for name in ("epoch", "train_loss", "test_auc", "test_ne")}
        report.finish({**final, "int8_test_auc": quantized["test_auc"], "int8_test_ne": quantized["test_ne"]})
    result: dict[str, Any] = {
        "config": as_text(args),
        "world_size": world_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "shardwise": shardwise.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "epochs": epochs,
        "best_epoch": chosen + 1,
        "int8": quantized,
        "skipped_rows": dict(source.skipped),
    }
    if isinstance(source, Clicks):
        result["ceiling_auc"] = source.bayes_auc()
    metrics = cache_metrics(model)
    if metrics:
        result["caches"] = {name: {"below": table.below, **table.as_dict()} for name, table in metrics.items()}
    terminal.say("\n".join(["", *epochs_table(epochs, chosen), *caches(metrics), "", *closing(result)]))
    if args.export is not None:
        terminal.say(f"exported to {args.export}: shardwise.inference.load_program loads it")
    if source.skipped:
        terminal.say(f"rank 0 skipped bad rows: {dict(source.skipped)}")
    if args.json is not None and rank == 0:
        args.json.write_text(json.dumps(without_nan(result), indent=2) + "\n")
    tables = args.page.with_name(args.page.stem + TABLES) if args.page is not None and planned is not None else None
    lookups = counts.of_all_ranks(device) if args.page is not None else {}
    best_path = best.path(best_step) if kept else None
    if rank == 0:
        if tables is not None and planned is not None:
            write_tables(planned, tables)
        request = example_request(next(read(source.train(args.batch_size))))
        steps = next_steps(args, world_size, best_path, request, tables)
        if args.page is not None:
            health = health_of_tables(lookups, weights, served)
            write_page(args.page, Run(result, progress.history, str(model.plan), planned, health, steps, loops))
            terminal.say(f"\nthe page of this run, for a browser: {args.page}")
        lines = [line for step in steps for line in (f"  {step.what}:", f"    {step.command}")]
        terminal.say("\n".join(["", "what to try next", *lines]))
    return result


def open_source(args: Options) -> Source:
    if args.data == "clicks":
        return Clicks(args.seed)
    try:
        return open_folder(args.data, on_bad_row=args.on_bad_row)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"train.py: {error}") from None


def train(job: Job, best: BestWeights, report: Report) -> Progress:
    """Trains until the last epoch, or until `--patience` ends it, and keeps the best epoch's weights on the way."""
    args, source, model, terminal = job.args, job.source, job.model, job.terminal
    checkpoints = Checkpoints(args, source, model, job.optimizer)
    progress = checkpoints.resume()
    if checkpoints.removed:
        terminal.say(f"--overwrite: removed {checkpoints.removed} checkpoints of an earlier run")
    if progress.step:
        terminal.say(
            f"resumed at step {progress.step}, which is step {progress.epoch_step} of epoch {progress.epoch + 1}"
        )
    notice = checkpoints.record_options(resumed=progress.step > 0)
    if notice is not None:
        terminal.say(notice)
    report.start(as_text(args), step=progress.step, finished_epochs=len(progress.epochs))
    with terminal.doing("counting the training samples"):
        samples = source.train_samples
    steps = args.steps if samples is None else min(samples // args.batch_size, args.steps or samples)
    clock = Clock()
    # what fails on one rank from here on, a bad row for one, the others say by its name
    with (
        model.watched("in training"),
        terminal.bar(None if steps is None else args.epochs * steps) as bar,
    ):
        report.bar = bar
        bar.at(progress.step)
        while progress.epoch < args.epochs and not _out_of_patience(args, progress):
            begun = {"epoch": progress.epoch, "start_step": progress.epoch_step}
            batches = read(source.train(args.batch_size, **begun, **job.share))
            if args.steps is not None:
                batches = islice(batches, args.steps - progress.epoch_step)
            bar.phase(f"epoch {progress.epoch + 1}/{args.epochs}")
            losses = train_steps(job, job.counts.counted(batches))
            train_epoch(job, losses, progress, checkpoints, report, bar, clock)
            if progress.epoch_step == 0:
                short = f"the training samples of {args.data} do not fill a batch of {args.batch_size}"
                raise SystemExit(f"train.py: {short}")
            bar.phase(f"epoch {progress.epoch + 1}/{args.epochs}, testing")
            scores = evaluate(model, read(source.evaluate(args.batch_size, **job.share)), job.device)
            done = {
                "epoch": progress.epoch + 1,
                "steps": progress.epoch_step,
                "train_loss": progress.epoch_loss / progress.epoch_step,
                "test_auc": scores.auc,
                "test_ne": scores.ne,
                "samples_per_s": progress.samples_per_s(args.batch_size),
                "seconds": progress.seconds,
            }
            progress.end_epoch(done)
            report.write(done, epoch=progress.epoch, step=progress.step)
            # the best weights come first: a checkpoint that counts on them is never without
            if best_epoch(progress.epochs) == progress.epoch - 1:
                best.keep(progress.step)
            checkpoints.save(progress)
            terminal.say(
                f"epoch {progress.epoch}: test AUC {done['test_auc']:.4f}, NE {done['test_ne']:.4f},"
                f" {done['samples_per_s']:,.0f} samples/s"
            )
        checkpoints.finish()
        best.finish()
    if progress.epoch < args.epochs:
        terminal.say(f"no better test NE for {args.patience} epochs: it ends here")
    return progress


def _out_of_patience(args: Options, progress: Progress) -> bool:
    if args.patience is None or not progress.epochs:
        return False
    best = best_epoch(progress.epochs)
    # none is best where no epoch has an NE
    since = progress.epoch if math.isnan(progress.epochs[best]["test_ne"]) else progress.epoch - 1 - best
    return since >= args.patience


def train_steps(job: Job, batches: Iterator[Batch]) -> Iterator[Tensor]:
    """Trains a step for each batch and yields its loss, the mean over this rank's samples."""
    model, optimizer = job.model, job.optimizer
    model.train()
    make_pipeline = PIPELINES[job.args.pipeline]
    if make_pipeline is None:
        for batch in batches:
            optimizer.zero_grad()
            loss, (detached, _, _) = model(batch.to(job.device))
            loss.backward()
            optimizer.step()
            yield detached
    else:
        pipeline = make_pipeline(model, optimizer, job.device)
        while True:
            try:
                detached, _, _ = pipeline.progress(batches)
            except StopIteration:
                return
            yield detached


class Clock:
    """Seconds of training since the last look, and of those past this process's first steps."""

    def __init__(self) -> None:
        self._process_steps = 0
        self._steps = 0
        self._begin = self._timed = time.perf_counter()

    def start(self) -> None:
        """Training goes on: what passed since the last look is not counted."""
        self._begin = self._timed = time.perf_counter()
        self._steps = 0

    def advance(self) -> bool:
        """One more step is done; whether it is the last of the warm-up."""
        self._process_steps += 1
        if self._process_steps > WARM_UP_STEPS:
            self._steps += 1
            return False
        self._timed = time.perf_counter()
        return self._process_steps == WARM_UP_STEPS

    def look(self) -> dict[str, Any]:
        """What `Progress.gather` takes."""
        now = time.perf_counter()
        timed = now - self._timed if self._steps else 0.0
        return {"seconds": now - self._begin, "timed_seconds": timed, "timed_steps": self._steps}


def train_epoch(
    job: Job,
    losses: Iterator[Tensor],
    progress: Progress,
    checkpoints: Checkpoints,
    report: Report,
    bar: Bar,
    clock: Clock,
) -> None:
    """Trains the rest of an epoch by drawing its `losses`; writes metrics and saves checkpoints on the way."""
    args = job.args
    rank_sum = torch.zeros((), dtype=torch.float64, device=job.device)
    cached = cache_metrics(job.model)
    clock.start()
    for loss in losses:
        rank_sum += loss
        progress.advance()
        if clock.advance():
            bar.restart_clock()
        bar.at(progress.step)
        ends_line, save = progress.step % args.log_every == 0, checkpoints.due(progress.step)
        if ends_line or save:
            progress.gather(rank_sum, **clock.look())
        if ends_line:
            rate = progress.samples_per_s(args.batch_size)
            line = {"loss": progress.end_line(args.batch_size), "lr": args.lr, "samples_per_s": rate}
            if cached:
                # of rank 0, since the line before
                line["hit_rate"] = hit_rate(cache_metrics(job.model, since=cached))
                cached = cache_metrics(job.model)
            report.write(line, epoch=progress.epoch + 1, step=progress.step)
        if save:
            checkpoints.save(progress)
        if ends_line or save:
            clock.start()
    progress.gather(rank_sum, **clock.look())
