"""`shardwise kernels autotune`: time the kernels' configs on this machine and keep the best."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._names import did_you_mean, did_you_mean_of
from .output import NO, json_option, load_torch, print_json, print_table, progress, table_of

if TYPE_CHECKING:
    from ..perf.tune.tuner import File, Found
    from ..perf.tune.tuner_inputs import Job

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600}


def add_autotune(kernels: click.Group) -> None:
    """Give a group of commands the command `autotune`."""

    @kernels.command()
    @click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
    @click.option(
        "--workload", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Tables to tune for: JSON."
    )
    @click.option("--batch", type=click.IntRange(1), help="Samples of a batch of the workload.  [default: 8192]")
    @click.option("--dims", help="Columns of tables, like 64,128.  [default: 64,128]")
    @click.option("--lengths", help="Mean ids of a bag, like 1,20.  [default: 1,20]")
    @click.option("--dtypes", help="Like fp32,fp16,bf16,int8,int4.  [default: fp32,fp16,int8; fp32 on a CPU]")
    @click.option("--kernel", default="", metavar="TEXT", help="Only entries with this in their name.")
    @click.option("--budget", default="300s", show_default=True, help="Stop after so long: 90, 300s, 10m.")
    @click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: where lookups find it.")
    @click.option("--again", is_flag=True, help="Also entries that the file has.")
    @click.option("--dry-run", is_flag=True, help="List what would be timed; needs no GPU.")
    @click.option("--small", is_flag=True, help="Sizes of a proof, that the interpreter bears too.")
    @json_option
    def autotune(
        device: str,
        workload: Path | None,
        batch: int | None,
        dims: str | None,
        lengths: str | None,
        dtypes: str | None,
        kernel: str,
        budget: str,
        out: Path | None,
        again: bool,
        dry_run: bool,
        small: bool,
        as_json: bool,
    ) -> None:
        """Time configs of the kernels on this machine and write the best of each to a file for its device.

        Inputs and tables are the command's own. Every candidate gives the bits that the heuristic gives, or is dropped.
        Entries that the file has are kept, each new one is written at once, and Ctrl-C ends a run with what it found.
        An entry that fails is told of; the status is 1 where all do.
        On a CPU: threads and sizes of the CPU path. See docs/howto/tuning.md.
        """
        if workload is not None and (dims or lengths):
            raise click.UsageError("--workload says dims and lengths: leave --dims and --lengths out")
        if batch is not None and workload is None:
            raise click.UsageError("--batch belongs to --workload")
        seconds = _seconds(budget)
        load_torch()
        types = _dtypes(dtypes, device)
        shapes = _workloads(device, workload, batch, _numbers("--dims", dims), _numbers("--lengths", lengths), small)
        if device == "cpu":
            _tune_cpu(shapes, types, kernel, seconds, out, again, dry_run, small, as_json)
        else:
            _tune_kernels(shapes, types, kernel, seconds, out, again, dry_run, small, as_json, workload is not None)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if match is None or match[2] not in _UNITS or float(match[1]) <= 0:
        raise click.BadParameter(f"{text!r} is no time: write 300s or 5m", param_hint="--budget")
    return float(match[1]) * _UNITS[match[2]]


def _numbers(option: str, text: str | None) -> list[int]:
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} must be positive whole numbers like 64,128", param_hint=option)
    return [int(part) for part in parts]


def _dtypes(text: str | None, device: str) -> list[str]:
    from ..perf.tune.tuner_inputs import FLOATS, FORMATS

    if text is None:
        return ["fp32"] if device == "cpu" else ["fp32", "fp16", "int8"]
    names = [part.strip() for part in text.split(",")]
    known = [*FLOATS] if device == "cpu" else [*FLOATS, *FORMATS]
    for name in names:
        if name not in known:
            near = did_you_mean(name, known) or f": expected one of {', '.join(known)}"
            raise click.BadParameter(f"unknown dtype {name!r}{near}", param_hint="--dtypes")
    return names


def _workloads(
    device: str, path: Path | None, batch: int | None, dims: list[int], lengths: list[int], small: bool
) -> list[Any]:
    from ..perf.tune import tuner_cpu, tuner_inputs

    if path is None:
        make = tuner_cpu.workloads_of if device == "cpu" else tuner_inputs.workloads_of
        return make(dims or [64, 128], lengths or [1, 20], small=small)
    try:
        return tuner_inputs.read_workload(path, batch or (1024 if device == "cpu" else 8192), small=small)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--workload") from error


def _tune_kernels(
    workloads: list[Any],
    dtypes: list[str],
    kernel: str,
    seconds: float,
    out: Path | None,
    again: bool,
    dry_run: bool,
    small: bool,
    as_json: bool,
    together: bool,
) -> None:
    from ..perf.tune import tuner_inputs

    every = [*tuner_inputs.jobs_of(workloads, dtypes, together=together)]
    jobs = [job for job in every if kernel in str(job)]
    if not jobs:
        near = did_you_mean_of(kernel, map(str, every)) or "; names are like 'pooled_lookup fp32 D=128 L=32'"
        raise click.UsageError(f"no entry has {kernel!r} in its name{near}")
    if dry_run:
        _list_jobs(jobs, as_json)
        return
    import torch

    from ..kernels import _op, configs
    from ..perf.tune.tuner import ROUNDS, tune_all

    if not _op.HAS_TRITON:
        raise click.UsageError("triton is not installed, and its kernels are what is tuned: pip install triton")
    if not torch.cuda.is_available() and not (_op.INTERPRETED and small):
        raise click.UsageError(
            "torch sees no CUDA device; --device cpu tunes the CPU path, --dry-run lists, and TRITON_INTERPRET=1 with"
            " --small proves the command"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    file = _file(out, *configs.identity(place), small)
    jobs = [tuner_inputs.fitted_job(job, device) for job in jobs]
    repeats, rounds = (1, 1) if small else (20, ROUNDS)
    with _tuning(len(jobs)) as update:
        results = tune_all(
            jobs, device, file=file, repeats=repeats, rounds=rounds, seconds=seconds, again=again, tell=update
        )
        _report(results, file, as_json)


def _tune_cpu(
    workloads: list[Any],
    dtypes: list[str],
    kernel: str,
    seconds: float,
    out: Path | None,
    again: bool,
    dry_run: bool,
    small: bool,
    as_json: bool,
) -> None:
    import torch

    from ..kernels import configs
    from ..perf.suite.workloads import tiny
    from ..perf.tune import tuner_cpu

    file = None if dry_run else _file(out, configs.cpu_name(), "cpu", small)
    # which settings there are is seen from what calls look up
    shapes = tuner_cpu.shapes_of([tiny(workload) for workload in workloads] if dry_run else workloads, dtypes)
    known = tuner_cpu.settings_of(shapes)
    chosen = {name: value for name, (value, _) in known.items() if kernel in name}
    if not chosen:
        near = did_you_mean_of(kernel, known) or f"; there are {', '.join(known)}"
        raise click.UsageError(f"no setting has {kernel!r} in its name{near}")
    turns, threads = 2 if small else 9, torch.get_num_threads()
    if dry_run and as_json:
        tried = {name: [value, *tuner_cpu.values_of(name, value)] for name, value in chosen.items()}
        print_json({"entries": [{"entry": name, "values": values} for name, values in tried.items()]})
        return
    if dry_run:
        for name, value in chosen.items():
            click.echo(f"{name}: {value} against {', '.join(map(str, tuner_cpu.values_of(name, value)))}")
        click.echo(
            f"{len(chosen)} settings for {threads} threads, {turns} turns of each value; larger calls may have more"
        )
        return
    with _tuning(len(chosen)) as update:
        results = tuner_cpu.tune_all(
            known, [*chosen], file=file, turns=turns, seconds=seconds, again=again, tell=update
        )
        _report(results, file, as_json)


def _list_jobs(jobs: list[Job], as_json: bool) -> None:
    from ..perf.tune.candidates import candidates
    from ..perf.tune.tuner import SECONDS_A_CANDIDATE, text_of

    if as_json:
        tries = [(job, candidates(job.key.kernel, job.key.dtype, job.key.dim)) for job in jobs]
        print_json({"entries": [{"entry": str(job), "configs": [{}, *map(dict, tried)]} for job, tried in tries]})
        return
    count = 0
    for job in jobs:
        tried = candidates(job.key.kernel, job.key.dtype, job.key.dim)
        count += 1 + len(tried)
        click.echo(f"{job}: heuristic against {'; '.join(map(text_of, tried)) or 'nothing'}")
    click.echo(f"{len(jobs)} entries, {count} configs, about {count * SECONDS_A_CANDIDATE / 60:.0f} minutes")


def _file(out: Path | None, device: str, architecture: str, small: bool) -> File | None:
    """The file to write; None where nobody asked for one of a proof's numbers."""
    from ..kernels import configs
    from ..perf.tune.tuner import File

    if small and out is None:
        return None
    path = out or configs.FOLDER / f"{configs.slug(device)}.json"
    try:
        return File(path, device, architecture)
    except ValueError as error:
        raise click.BadParameter(f"{path}: {error}; name another file, or remove it", param_hint="--out") from error
    except OSError as error:
        raise click.BadParameter(f"nothing can be written to {path}: {error.strerror}", param_hint="--out") from error


@contextmanager
def _tuning(total: int) -> Iterator[Callable[[int, str], None]]:
    with progress("tuning", total) as shown:
        yield lambda done, doing: shown(completed=done, description=doing or "tuned")


def _report(results: Iterable[Found], file: File | None, as_json: bool) -> None:
    """Print what is found, also of a run that is interrupted, and where it went."""
    from ..perf.tune.tuner import text_of

    table = table_of("entry", right=("default us", "best us", "ratio"), last=("config",))
    dropped: list[str] = []
    entries: list[dict[str, Any]] = []
    failed = 0
    ended = "the budget or the list"
    try:
        for result in results:
            dropped += result.dropped
            entries.append({**vars(result), "failed": result.failed, "ratio": result.ratio})
            if result.failed:
                failed += 1
                table.add_row(result.what, "failed")
                continue
            table.add_row(
                result.what,
                f"{result.default_us:.1f}",
                f"{result.best_us:.1f}",
                f"{result.ratio:.2f}",
                text_of(result.config),
            )
    except KeyboardInterrupt:
        ended = "Ctrl-C"
    if as_json:
        print_json({"entries": entries, "ended": ended, "file": None if file is None else str(file.path)})
    else:
        print_table(table)
    for sentence in dropped:
        click.echo(sentence, err=as_json)
    where = "nothing is kept of a proof: give --out" if file is None else f"written to {file.path}"
    failed_text = f", {failed} failed" * (failed > 0)
    click.echo(f"{table.row_count - failed} entries until {ended} ended{failed_text}; {where}", err=as_json)
    if failed and failed == table.row_count:
        sys.exit(NO)
