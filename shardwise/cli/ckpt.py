"""`shardwise ckpt`: looks at checkpoints, compares them, writes them anew. It needs no model and no process group."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._names import did_you_mean
from .output import (
    FINE,
    NO,
    Place,
    console,
    json_option,
    load_torch,
    one_line,
    print_json,
    print_table,
    require_writable,
    show,
    spinner,
    table_of,
)

if TYPE_CHECKING:
    from ..checkpoint import Manifest, Stored, TableFacts

_MIB = 2**20
# what names of tables end with, as state dicts have them
_WEIGHT = ".weight"
_WRONG = (ValueError, OSError, ImportError)


def add_ckpt(commands: click.Group) -> None:
    """Give a group of commands the group `ckpt`."""
    there = Place(exists=True)

    @commands.group()
    def ckpt() -> None:
        """Look at checkpoints, compare them, and write them anew.

        PATH is a step folder, or a folder of them: of that the newest good one is taken. It may be a URL as well,
        s3://bucket/runs/7 say, wherever fsspec knows the scheme.
        """

    @ckpt.command()
    @click.argument("path", type=there)
    @json_option
    def show(path: Path, as_json: bool) -> None:
        """Tables, optimizer states, shards, sizes, versions and the step of the checkpoint at PATH.

        Reads the manifest alone; `verify` looks at the files.
        """
        load_torch()
        from ..checkpoint import read_manifest

        with one_line(*_WRONG):
            place = _at(path)
            manifest = read_manifest(place)
        if as_json:
            print_json(_shown(place, manifest))
        else:
            _show(place, manifest)

    @ckpt.command()
    @click.argument("path", type=there)
    @json_option
    def verify(path: Path, as_json: bool) -> None:
        """Read all bytes of the checkpoint at PATH, or of every one in that folder, and compare their checksums.

        Ends with status 1, and a line for each thing that is wrong.
        """
        load_torch()
        from ..checkpoint import verify as problems_of

        problems: dict[str, list[str]] = {}
        with one_line(*_WRONG), spinner(f"reading {path}") as update:
            for place in _all(path):
                update(f"reading all of {place}")
                problems[str(place)] = problems_of(place)
        if as_json:
            print_json({folder: {"good": not wrong, "problems": wrong} for folder, wrong in problems.items()})
        else:
            for folder, wrong in problems.items():
                for line in wrong or [f"{folder}: good"]:
                    click.echo(line)
        sys.exit(NO if any(problems.values()) else FINE)

    @ckpt.command()
    @click.argument("a", type=there)
    @click.argument("b", type=there)
    @click.option("--any-plan", is_flag=True, help="Pass over differences of plans and numbers of ranks.")
    @json_option
    def diff(a: Path, b: Path, any_plan: bool, as_json: bool) -> None:
        """What checkpoints A and B do not share: tables, shapes, dtypes, plans, settings, and values, read in blocks.

        Ends with status 1 if there is anything.
        """
        load_torch()
        from ..checkpoint import diff

        with one_line(*_WRONG):
            places = _at(a), _at(b)
            with spinner(f"comparing {places[0]} and {places[1]}"):
                differences = diff(*places)
        same = differences.same_content if any_plan else not differences
        if as_json:
            print_json({"same": same, "same_content": differences.same_content, **differences.as_json()})
        else:
            for line in differences.lines() or ["no difference"]:
                click.echo(line)
            if differences and differences.same_content:
                click.echo("a model loads the same from both")
        sys.exit(FINE if same else NO)

    @ckpt.command()
    @click.argument("source", type=there)
    @click.argument("target", type=Place(file_okay=False))
    @click.option("--world-size", type=click.IntRange(1), help="Ranks; by default as many as before.")
    @click.option("--plan", metavar="STRATEGY", help="How all tables are cut, row_wise say; by default as before.")
    @click.option(
        "--resplit", type=click.Choice(["mean"]), help="What becomes of numbers per row where columns are cut anew."
    )
    @json_option
    def reshard(
        source: Path, target: Path, world_size: int | None, plan: str | None, resplit: str | None, as_json: bool
    ) -> None:
        """Write the checkpoint at SOURCE into the folder TARGET, cut for other ranks; loading fits any plan without."""
        load_torch()
        from ..checkpoint import reshard
        from ..sharding.checkpoint.recut import STRATEGIES

        if plan is not None and plan not in STRATEGIES:
            near = did_you_mean(plan, STRATEGIES) or f": there are {', '.join(STRATEGIES)}"
            raise click.BadParameter(f"unknown strategy {plan!r}{near}", param_hint="--plan")
        with one_line(*_WRONG):
            place = _at(source)
            with spinner(f"writing {place} into {target}"):
                made = reshard(place, target, world_size=world_size, plan=plan, resplit=resplit)
        _made(made, as_json)

    @ckpt.command()
    @click.argument("path", type=there)
    @click.argument("target", type=Place(dir_okay=False))
    @click.option("--states", is_flag=True, help="Also the states of all optimizers.")
    @json_option
    def export(path: Path, target: Path, states: bool, as_json: bool) -> None:
        """Write the checkpoint at PATH as one safetensors file TARGET of whole tensors."""
        # what is written first has another name, which no user knows
        require_writable(target)
        load_torch()
        from ..checkpoint import export

        with one_line(*_WRONG):
            place = _at(path)
            with spinner(f"writing {place} into {target}"):
                made = export(place, target, states=states)
        _made(made, as_json)


def _at(path: Path) -> Path:
    """The step folder that is meant; says so on stderr where it was chosen."""
    from ..sharding.checkpoint.offline import checkpoint_at

    place = checkpoint_at(path)
    if place != path:
        click.echo(f"{place.name} is the newest good checkpoint of {path}", err=True)
    return place


def _all(path: Path) -> Sequence[Path]:
    """A step folder, or all of a folder of them.

    Raises:
        FileNotFoundError: it is neither.
    """
    from ..checkpoint import steps
    from ..sharding.checkpoint.storage import has

    folders = steps(path)
    if not folders and not has(path, "manifest.json"):
        raise FileNotFoundError(f"{path} is no checkpoint, and no folder that has one")
    return folders or [path]


def _made(path: Path, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(path)})
    else:
        click.echo(str(path))


def _shown(path: Path, manifest: Manifest) -> dict[str, Any]:
    """What `show` prints, as JSON has it."""
    tables = {
        name: {
            "rows": table.rows, "dim": table.dim, "dtype": _dtype(table.dtype), "optimizer": table.rule,
            "updates": table.steps, "states": _states(manifest, name), "bytes": _bytes(manifest, name),
            "shards": [
                {"rank": shard.rank, "rows": list(shard.rows), "columns": list(shard.cols), "replica": shard.replica}
                for shard in table.shards
            ],
        }
        for name, table in manifest.tables.items()
    }  # fmt: skip
    dense = {tensor.name: {"shape": list(tensor.shape), "dtype": _dtype(tensor.dtype)} for tensor in _dense(manifest)}
    return {
        "path": str(path), "step": manifest.step, "world_size": manifest.world_size,
        "versions": dict(manifest.versions), "extra": dict(manifest.extra), "tables": tables, "dense": dense,
        "files": {file.name: file.bytes for file in manifest.files},
    }  # fmt: skip


def _show(path: Path, manifest: Manifest) -> None:
    table = table_of("table", right=("rows", "dim", "MiB"), last=("shards", "dtype", "optimizer", "states", "updates"))
    begin, end = _around(manifest.tables)
    for name, facts in manifest.tables.items():
        states = " ".join(_states(manifest, name)) or "-"
        table.add_row(
            name.removeprefix(begin).removesuffix(end), f"{facts.rows:,}", str(facts.dim),
            f"{_bytes(manifest, name) / _MIB:,.1f}", _cut(facts),
            _dtype(facts.dtype), facts.rule or "-", states, f"{facts.steps:,}",
        )  # fmt: skip
    dense = _dense(manifest)
    elements = sum(math.prod(tensor.shape) for tensor in dense)
    whole = sum(file.bytes for file in manifest.files)
    show(f"{path}: step {manifest.step} of {manifest.world_size} ranks")
    show(", ".join(f"{name} {version}" for name, version in manifest.versions.items()))
    if begin:
        show(f"tables are {begin}<table>{end}")
    print_table(table, drop=("updates", "dtype", "states", "optimizer"))
    files = f"{len(manifest.files)} files, {whole / _MIB:,.1f} MiB"
    show(f"{len(dense)} dense tensors, {elements:,} elements; {files}")
    if manifest.extra:
        show(f"extra: {', '.join(manifest.extra)}")


def _around(names: Iterable[str]) -> tuple[str, str]:
    """What long names of tables begin and end with, all of them: modules, and ".weight"; "" where names are short."""
    every = [*names]
    if max(map(len, every), default=0) <= console().width // 4:
        return "", ""
    end = _WEIGHT if all(name.endswith(_WEIGHT) for name in every) else ""
    modules, dot, _ = os.path.commonprefix([name.removesuffix(end) for name in every]).rpartition(".")
    return (modules + dot, end) if dot else ("", "")


def _states(manifest: Manifest, name: str) -> list[str]:
    """A table's optimizer states."""
    from ..sharding.checkpoint.manifest import TABLE, WEIGHT

    states = {state for kind, table, state in manifest.by_address if kind == TABLE and table == name}
    return sorted(states - {WEIGHT})


def _bytes(manifest: Manifest, name: str) -> int:
    """Of a table and its states."""
    from ..sharding.checkpoint.manifest import TABLE

    tensors = [tensor for tensor in manifest.tensors if tensor.kind == TABLE and tensor.name == name]
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def _dense(manifest: Manifest) -> list[Stored]:
    from ..sharding.checkpoint.manifest import DENSE

    return [tensor for tensor in manifest.tensors if tensor.kind == DENSE]


def _cut(table: TableFacts) -> str:
    """A table's shards in a few words."""
    if table.shards and table.shards[0].replica:
        return "whole on every rank"
    ranks = sorted({shard.rank for shard in table.shards})
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_ranges(ranks)}"
    rows, columns = {shard.rows for shard in table.shards}, {shard.cols for shard in table.shards}
    if len(table.shards) == 1:
        return where
    return f"{len(rows)} x {len(columns)} on {where}"


def _ranges(ranks: Sequence[int]) -> str:
    """ "0-3, 8" of ranks in order."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
