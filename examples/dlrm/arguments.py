"""The options of `train.py`. Nothing here needs torch, so that what is mistyped is told at once."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# model.py and training.py have what these are
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
PIPELINES = ("none", "base", "sparse_dist", "prefetch")
TIERS = ("none", "ram", "file")


class BadArguments(SystemExit):
    """Status 2; rank 0 has said why, and the others know it too."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class Parser(argparse.ArgumentParser):
    """Says what is wrong once, not on every rank, and without the list of all options."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: error: {message} (--help lists the options)", file=sys.stderr, flush=True)
        raise BadArguments(f"{self.prog}: error: {message}")


def parse(summary: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked as far as it goes without torch; the folders of files to be written are made.

    Raises:
        SystemExit: something is wrong with them; stderr says what.
    """
    parser = Parser(
        prog="train.py", description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", default="clicks", help="'clicks' (generated), or a MovieLens or Criteo folder")
    add("--on-bad-row", choices=("raise", "skip"), default="raise", help="what to do with bad rows")
    add("--epochs", type=int, default=5, help="the weights of the best one, by test NE, are what is left at the end")
    add("--steps", type=int, default=None, help="end each epoch after this many steps")
    add("--patience", type=int, default=None, help="end after so many epochs in a row without a better test NE")
    add("--batch-size", type=int, default=512, help="samples of a step, all ranks together")
    add("--dim", type=int, default=32, help="width of the embeddings")
    add("--optimizer", choices=OPTIMIZERS, default="adagrad")
    add("--lr", type=float, default=0.02)
    add("--seed", type=int, default=0, help="of the initial weights, and of generated clicks")
    add("--device", choices=("cpu", "cuda"), default=None, help="cuda where torch finds one, if it is not given")
    add("--pipeline", choices=PIPELINES, default="none", help="overlaps steps, with the same results")
    add("--tier", choices=TIERS, default="none", help="where rows are that the device has no room for; same results")
    add("--tier-slots", type=float, default=0.25, help="the share of each table's rows that the device has room for")
    add("--tier-folder", type=Path, default=Path("runs/rows"), help="of scratch files of --tier file")
    add("--explain", action="store_true", help="print the whole plan and why it is so, instead of three lines")
    add("--checkpoint-dir", type=Path, default=None, help="save checkpoints there, at ends of epochs")
    add("--checkpoint-every", type=int, default=None, help="and after every so many steps")
    add("--checkpoint-async", action="store_true", help="write checkpoints while training goes on")
    add("--keep-last", type=int, default=3, help="checkpoints to keep")
    add("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    add("--overwrite", action="store_true", help="start anew where there are checkpoints, unless --resume is given")
    add("--metrics", type=Path, default=None, help="write metrics to this file, a JSON object a line")
    add("--log-every", type=int, default=50, help="steps of a line of metrics")
    add("--json", type=Path, default=None, help="write configuration and results to this file")
    add("--page", type=Path, default=None, help="write the run as one page of HTML to this file")
    add("--export", type=Path, default=None, help="write the model, its tables int8, into this folder")
    args = parser.parse_args(argv)
    for name in ("epochs", "steps", "patience", "batch_size", "dim", "checkpoint_every", "keep_last", "log_every"):
        if getattr(args, name) is not None and getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(args, name)}")
    if not (args.lr > 0 and math.isfinite(args.lr)):
        parser.error(f"--lr must be positive and finite, got {args.lr}")
    if not 0 < args.tier_slots <= 1:
        parser.error(f"--tier-slots is a share of the rows, more than 0 and at most 1, got {args.tier_slots}")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch_size % ranks:
        near = args.batch_size + ranks - args.batch_size % ranks
        parser.error(f"--batch-size {args.batch_size} cannot be shared equally by {ranks} ranks: pass {near}, say")
    for name in ("checkpoint_every", "checkpoint_async", "resume", "overwrite"):
        if getattr(args, name) and args.checkpoint_dir is None:
            parser.error(f"--{name.replace('_', '-')} needs --checkpoint-dir")
    for name in ("json", "metrics", "page", "checkpoint_dir", "export"):
        path, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if path is None:
            continue
        folder = path if name == "checkpoint_dir" else path.parent
        # before training, which would be lost
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{option} {path}: {error}")
        if not os.access(folder, os.W_OK | os.X_OK):
            parser.error(f"{option} {path}: {folder} cannot be written to")
        if path.is_dir() and name in ("json", "metrics", "page"):
            parser.error(f"{option} {path} is a folder, name a file")
    return args
