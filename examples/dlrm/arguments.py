"""The options of `train.py`. Nothing here needs torch, so that what is mistyped is told at once."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_type_hints

# what a run does with files of another one, not what it is
STARTS = ("config", "resume", "overwrite")
# model.py and training.py have what these are
Optimizer = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
Pipeline = Literal["none", "base", "sparse_dist", "prefetch"]
Tier = Literal["none", "ram", "file"]
OPTIMIZERS, PIPELINES = get_args(Optimizer), get_args(Pipeline)


class BadArguments(SystemExit):
    """Status 2; rank 0 has said why, and the others know it too."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


@dataclass(frozen=True)
class Options:
    """All options of a run, on the command line with dashes. The comment behind one is what `--help` says of it."""

    config: Path | None = None  # read options from this TOML file; the command line wins over it
    data: str = "clicks"  # 'clicks' (generated), or a MovieLens or Criteo folder
    on_bad_row: Literal["raise", "skip"] = "raise"  # what to do with bad rows
    epochs: int = 5  # the weights of the best one, by test NE, are what is left at the end
    steps: int | None = None  # end each epoch after this many steps
    patience: int | None = None  # end after so many epochs in a row without a better test NE
    batch_size: int = 512  # samples of a step, all ranks together
    dim: int = 32  # width of the embeddings
    optimizer: Optimizer = "adagrad"  # of the tables and of the dense layers
    lr: float = 0.02  # learning rate of both
    seed: int = 0  # of the initial weights, and of generated clicks
    device: Literal["cpu", "cuda"] | None = None  # cuda where torch finds one, if it is not given
    pipeline: Pipeline = "none"  # overlaps steps, with the same results
    tier: Tier = "none"  # where rows are that the device has no room for; same results
    tier_slots: float = 0.25  # the share of each table's rows that the device has room for
    tier_folder: Path = Path("runs/rows")  # of scratch files of --tier file
    explain: bool = False  # print the whole plan and why it is so, instead of three lines
    checkpoint_dir: str | None = None  # save checkpoints there, at ends of epochs; a folder, or s3://... and the like
    checkpoint_every: int | None = None  # and after every so many steps
    checkpoint_async: bool = False  # write checkpoints while training goes on
    keep_last: int = 3  # checkpoints to keep
    resume: bool = False  # go on from the last checkpoint, if there is one
    overwrite: bool = False  # start anew where there are checkpoints, unless --resume is given
    metrics: Path | None = None  # write metrics to this file, a JSON object a line
    tensorboard: Path | None = None  # write metrics into this folder for TensorBoard
    wandb: str | None = None  # send metrics to this project of Weights & Biases; WANDB_MODE=offline keeps them here
    log_every: int = 50  # steps of a line of metrics
    json: Path | None = None  # write configuration and results to this file
    page: Path | None = None  # write the run as one page of HTML to this file
    export: Path | None = None  # write the model, its tables int8, into this folder


def parse(summary: str, argv: Sequence[str] | None) -> Options:
    """The arguments, checked as far as it goes without torch; the folders of files to be written are made.

    Raises:
        BadArguments: something is wrong with them; stderr says what.
    """
    try:
        options = read_command(summary, argv, Options())
        if options.config is not None:
            options = read_command(summary, argv, Options(**read_file(options.config)))
        check(options)
    except ValueError as error:
        refuse(str(error))
    except ModuleNotFoundError as error:
        refuse(f'{error}, which reads the options: pip install ".[examples]" in a checkout of shardwise')
    return options


def refuse(message: str) -> NoReturn:
    """Says what is wrong once, not on every rank, and without the list of all options."""
    if os.environ.get("RANK", "0") == "0":
        print(f"train.py: error: {message} (--help lists the options)", file=sys.stderr, flush=True)
    raise BadArguments(f"train.py: error: {message}")


def read_command(summary: str, argv: Sequence[str] | None, default: Options) -> Options:
    """What the command line says, and of what it does not say the default."""
    import tyro

    read = partial(tyro.cli, Options, prog="train.py", description=summary, args=argv, default=default)
    try:
        with redirect_stderr(StringIO()):
            return read()
    except SystemExit as stop:
        if stop.code != 2:
            # --help
            raise
    raise ValueError(first_error(read))


def first_error(read: Callable[[], object]) -> str:
    """What is wrong with a command line, in a line: tyro tells it by a box of several and by nothing else."""
    from unittest.mock import patch

    box = StringIO()
    # wide and plain
    with patch.dict(os.environ, COLUMNS="9999"), redirect_stderr(box), redirect_stdout(box), suppress(SystemExit):
        read()
    lines = [line.strip() for line in box.getvalue().splitlines()]
    # below the title, between rules: what is wrong, what is meant perhaps, where there is help
    rules = [number for number, line in enumerate(lines) if line and not line.strip("-")]
    if len(rules) < 2:
        # drawn otherwise by another version
        return " ".join(filter(None, lines))
    wrong = " ".join(lines[rules[0] + 1 : rules[1]]).rstrip(".")
    near = [line.split()[0].rstrip(",") for line in lines[rules[1] + 1 :] if re.match(r"--\w", line)]
    return f"{wrong}; perhaps {near[0]} is meant" if near and "Perhaps you meant:" in lines else wrong


def read_file(path: Path) -> dict[str, Any]:
    """`read_toml` of a file.

    Raises:
        ValueError: the file cannot be read, or has something that is no option or of another type.
    """
    try:
        return read_toml(path.read_bytes(), path)
    except OSError as error:
        raise ValueError(f"--config {path}: {error}") from None


def read_toml(content: bytes, path: object) -> dict[str, Any]:
    """The options of a TOML file, by name; errors name its path.

    Raises:
        ValueError: it is no TOML, or has something that is no option or of another type.
    """
    import msgspec

    try:
        table = msgspec.toml.decode(content)
    except ValueError as error:
        raise ValueError(f"--config {path}: {error}") from None
    except RecursionError:
        raise ValueError(f"--config {path}: it is nested too deeply") from None
    kinds = get_type_hints(Options)
    # a file that reads another one would say the half of what is set
    del kinds["config"]
    options: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in kinds:
            near = get_close_matches(name, kinds, n=1)
            raise ValueError(f"--config {path}: no option {key!r}{f', perhaps {near[0]!r} is meant' if near else ''}")
        if name in options:
            raise ValueError(f"--config {path}: {key!r} is there twice")
        try:
            options[name] = msgspec.convert(value, kinds[name], dec_hook=lambda kind, text: kind(text))
        except msgspec.ValidationError as error:
            raise ValueError(f"--config {path}: {key!r}: {error}, got {value!r}") from None
    return options


def check(options: Options) -> None:
    """ValueError where an option has a value that cannot be, or one that another one does not go with."""
    for name, text in as_text(options).items():
        if isinstance(text, str) and "\0" in text:
            raise ValueError(f"{flag(name)} {text!r}: no file and no name has a NUL in it")
    for name in ("epochs", "steps", "patience", "batch_size", "dim", "checkpoint_every", "keep_last", "log_every"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            raise ValueError(f"{flag(name)} must be positive, got {getattr(options, name)}")
    if not (options.lr > 0 and math.isfinite(options.lr)):
        raise ValueError(f"--lr must be positive and finite, got {options.lr}")
    # what torch.manual_seed takes
    if not -(2**63) <= options.seed < 2**64:
        raise ValueError(f"--seed must be of 64 bits, got {options.seed}")
    if options.export is not None and str(options.export) != str(options.export).encode(errors="replace").decode():
        # torch, which writes there, would end the process
        raise ValueError(f"--export {str(options.export)!r}: the name must be UTF-8")
    if not 0 < options.tier_slots <= 1:
        raise ValueError(f"--tier-slots is a share of the rows, more than 0 and at most 1, got {options.tier_slots}")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if options.batch_size % ranks:
        near = options.batch_size + ranks - options.batch_size % ranks
        shared = f"--batch-size {options.batch_size} cannot be shared equally by {ranks} ranks"
        raise ValueError(f"{shared}: pass {near}, say")
    for name in ("checkpoint_every", "checkpoint_async", "resume", "overwrite"):
        if getattr(options, name) and options.checkpoint_dir is None:
            raise ValueError(f"{flag(name)} needs --checkpoint-dir")
    for name in ("tensorboard", "wandb"):
        found = None if getattr(options, name) is None else find_spec(name)
        # a folder of that name, such as wandb makes, is found as a package without a file
        if getattr(options, name) is not None and (found is None or found.origin is None):
            raise ValueError(f'{flag(name)} needs {name}: pip install ".[track]" in a checkout of shardwise')
    scratch = ("tier_folder",) if options.tier == "file" else ()
    for name in ("json", "metrics", "page", "tensorboard", "checkpoint_dir", "export", *scratch):
        given: Path | str | None = getattr(options, name)
        if isinstance(given, str) and re.match(r"[a-z][a-z0-9+.-]+:/(?!/)", given):
            raise ValueError(f"{flag(name)} {given}: a URL has two slashes, {given.replace(':/', '://', 1)}")
        if isinstance(given, str):
            # a folder of this machine
            given = given.removeprefix("file://")
        # a store is asked by the first save
        if given is None or (isinstance(given, str) and "://" in given):
            continue
        path = Path(given)
        folder = path if name in ("checkpoint_dir", "tensorboard", "tier_folder") else path.parent
        # before training, which would be lost
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{flag(name)} {path}: {error}") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{flag(name)} {path}: {folder} cannot be written to")
        if path.is_dir() and name in ("json", "metrics", "page"):
            raise ValueError(f"{flag(name)} {path} is a folder, name a file")


def flag(name: str) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def as_text(options: Options) -> dict[str, Any]:
    """Every option by its name, as JSON and TOML can hold it."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def as_toml(options: Options) -> bytes:
    """All options that are set, as a file for `--config`."""
    import tomli_w

    table = {name: value for name, value in as_text(options).items() if value is not None and name not in STARTS}
    return tomli_w.dumps(table).encode()


def differences(before: Options, now: Options) -> list[str]:
    """What is set otherwise, in words."""
    pairs = ((name, value, as_text(now)[name]) for name, value in as_text(before).items() if name not in STARTS)
    return [f"{flag(name)} was {old} and is {new}" for name, old, new in pairs if old != new]
