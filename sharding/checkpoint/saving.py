"""Saving: every rank writes the shards that it holds, and the whole appears under its name at once or not at all."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._version import __version__
from shardwise.embeddings.tiers import RowPart
from shardwise.planner.layout import fingerprint
from shardwise.sharding.comms.consensus import value_or_error
from shardwise.sharding.comms.failures import agreed
from shardwise.sharding.engine.fully_sharded import whole_tables

from .contents import Contents, Plain, contents_of, link_of
from .errors import ERRORS, Link, agree
from .files import write_streams
from .folder import Attempt
from .manifest import DENSE, OPTIMIZER, TABLE, WEIGHT, FileFacts, Manifest, Stored, TableFacts, require_json
from .object_saves import attempt_in
from .places import Place, absolute

# what is written, and its address
Part = tuple[Stored, Tensor | RowPart]
# saves of this process that are under way or failed, by folder
_under_way: dict[Place, Saving] = {}


class Saving:
    """A save: `path` is where the checkpoint is once it is done.

    Attributes:
        path: the step folder; of a folder with a scheme a `Url`.
    """

    def __init__(self, path: Path | Any) -> None:
        self.path = path
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is on the disk.

        Raises:
            Exception: what failed, on this rank or another; once.
        """
        if self._thread is not None:
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._failure = error


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = 3,
    asynchronous: bool = False,
) -> Saving:
    """Save a model and its optimizers as `<folder>/step-<step>`; all its ranks call this together.

    Every rank must see the same folder. A checkpoint is there whole or not at all, whatever dies when: files lie in a
    hidden folder until all are on the disk; in a store (docs/howto/object_storage.md) the manifest comes last. Ranks
    hold nothing twice in memory, unless `asynchronous`; of FULLY_SHARDED tables, whose parts are gathered first, a rank
    holds all of its shards meanwhile. Tables with a tier are read some rows at a time, and have the files that they
    would have without it.

    Args:
        folder: where step folders are; made if it is not there. A text with a scheme, "s3://bucket/runs/7", is a
            place in a store, which fsspec has to know. A second job that saves there at the same time is refused.
        model: a `DistributedModelParallel` or `DMPCollection` (of which the first replica is saved), a sharded
            collection, or any module of one process.
        optimizer: of the dense layers, alone or combined with the tables' own; None saves those of the tables alone,
            which are saved always.
        step: how far training is; a step that is there already is replaced.
        extra: anything that JSON has, of rank 0: where the loader stands, say. Nested at most 100 deep, and without
            keys that are the same text in JSON, such as 1 and "1".
        keep_last: how many good checkpoints stay; None keeps all.
        asynchronous: copy everything to the CPU, return, and write in a thread. A failure is raised by `Saving.wait`,
            or else by the next save. A save waits for the one before. It has no effect on a model with tables that have
            a tier, of which no copy has room: a warning says so.

    Raises:
        ValueError, TypeError: something cannot be saved; names it.
        OSError: the disk is full, or the folder cannot be written, or the store not asked.
        ImportError: the library for a scheme is not installed.
        BlockingIOError: another job is saving into the folder.
        RankFailure: the process of a rank is gone. All ranks raise each of these, and older checkpoints stay.

    Example:
        >>> import tempfile
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save(folder, tables, step=100, extra={"epoch": 3}).path.name
        'step-000000000100'
    """
    folder, link = absolute(folder), link_of(model)

    def prepare() -> tuple[tuple[Manifest, list[Part], list[str]], int]:
        before = _under_way.pop(folder, None)
        if before is not None:
            before.wait()
        if type(step) is not int or not 0 <= step < 10**12:
            raise ValueError(f"step must be a whole number from 0 to 10**12 - 1, got {step!r}")
        if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
            raise ValueError(f"keep_last must be at least 1, or None to keep all, got {keep_last!r}")
        require_json("extra", extra)
        contents = contents_of(model, optimizer, link)
        described, parts = describe(contents, link, step, extra or {})
        names = [(table.name, table.rows, table.dim) for table in contents.tables.values()]
        shards = [shard for table in contents.tables.values() for shard in table.shards]
        # replicas of tables (2D) have equal shards too
        number = fingerprint(shards, (step, *names, *contents.dense))
        return (described, parts, [name for name, table in contents.tables.items() if table.tiered]), number

    # memory that a part of each replica is gathered in goes again at the end
    with whole_tables(model):
        described, parts, tiered = agree(link, prepare)
        attempt = _begin(folder, step, link)
        found = Saving(attempt.target)
        if asynchronous and tiered:
            warnings.warn(
                f"asynchronous=True has no effect: tables {tiered} have tiers, and no copy of their rows has room while"
                " training changes them: the save is over when it returns",
                stacklevel=2,
            )
        if asynchronous and not tiered:
            parts = [(stored, part.detach().to("cpu", copy=True)) for stored, part in parts if isinstance(part, Tensor)]
            found._thread = threading.Thread(
                target=found._run,
                args=(lambda: write(attempt, described, parts, keep_last),),
                name=f"save {found.path.name}",
            )
            _under_way[folder] = found
            found._thread.start()
        else:
            write(attempt, described, parts, keep_last)
    return found


def describe(contents: Contents, link: Link, step: int, extra: Mapping[str, Any]) -> tuple[Manifest, list[Part]]:
    """The manifest as far as this rank knows it, and what it writes: its tensors have no file yet."""
    tables, parts = {}, []
    for name, table in contents.tables.items():
        tables[name] = TableFacts(
            table.table, table.rows, table.dim, table.dtype, table.row_state, table.rule, table.settings, table.steps,
            table.shards,
        )  # fmt: skip
        for home in table.homes if table.writer else ():
            for cells in table.cells(home):
                shared = cells.columns != home.shard.cols and not table.first_of_rows(home.shard)
                if not shared:
                    shape = tuple(cells.tensor.shape)
                    stored = Stored(TABLE, name, cells.state, shape, cells.tensor.dtype, cells.rows, cells.columns)
                    parts.append((stored, cells.tensor))
    values: dict[str, dict[str, Any]] = {}
    for leaf in contents.leaves:
        for name in leaf.params:
            for state, value in leaf.states(name).items():
                if isinstance(value, Tensor):
                    if hasattr(value, "to_local") or hasattr(value, "local_shards"):
                        raise ValueError(f"{name!r}: state {state} is in pieces (FSDP), which cannot be saved here")
                    parts.append((Stored(OPTIMIZER, name, state, tuple(value.shape), value.dtype), value))
                elif value is None or isinstance(value, Plain):
                    values.setdefault(name, {})[state] = value
                else:
                    raise TypeError(f"{name!r}: state {state} is a {type(value).__name__}, neither tensor nor number")
    for name, tensor in contents.dense.items():
        parts.append((Stored(DENSE, name, WEIGHT, tuple(tensor.shape), tensor.dtype), tensor))
    # what all ranks have alike is written by the first
    parts = [part for part in parts if part[0].kind == TABLE or link.rank == 0]
    found = Manifest(
        step, link.world_size, {"shardwise": __version__, "torch": torch.__version__}, extra, tables, (), (),
        contents.fused_groups(), contents.dense_groups(), values, contents.aliases,
    )  # fmt: skip
    return found, parts


def write(attempt: Attempt, described: Manifest, parts: Sequence[Part], keep_last: int | None) -> None:
    """This rank's part of a save: write, report, and wait for the end of it. Calls no collective.

    Raises:
        RankFailure, Exception: as `Attempt.settle`; nothing is left of the checkpoint then.
    """
    file = f"rank-{attempt.rank:05d}.safetensors"
    try:
        try:
            facts = (
                write_streams(attempt.data / file, [(stored, _blocks(part)) for stored, part in parts])
                if parts
                else None
            )
            steps = {name: table.steps for name, table in described.tables.items()}
            attempt.report(_as_json(facts, [stored for stored, _ in parts], steps))
            attempt.settle(lambda reports: compose(described, reports), keep_last)
        except BaseException as error:
            earlier = attempt.failure_of_others()
            if earlier is not None:
                # what this rank met may only be what that one left
                raise agreed(earlier) from error
            attempt.drop(file)
            attempt.fail(error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}"))
            # the others raise it too
            raise agreed(error) from None
    finally:
        attempt.leave()


def compose(described: Manifest, reports: Sequence[Mapping[str, Any]]) -> Manifest:
    """The manifest of what all ranks wrote."""
    files, tensors = [], []
    for report in reports:
        if report["file"] is not None:
            files.append(FileFacts(**report["file"]))
            for one in report["tensors"]:
                rows, columns = (None if span is None else tuple(span) for span in (one["rows"], one["columns"]))
                tensors.append(
                    Stored(
                        one["kind"], one["name"], one["state"], tuple(one["shape"]), getattr(torch, one["dtype"]), rows,
                        columns, files[-1].name,
                    )
                )  # fmt: skip
    tables = {
        # ranks without rows of a table do not know its count
        name: replace(one, steps=max(0, *(report["steps"][name] for report in reports)))
        for name, one in described.tables.items()
    }
    return replace(described, tables=tables, tensors=tuple(tensors), files=tuple(files))


def _as_json(file: FileFacts | None, tensors: Sequence[Stored], steps: Mapping[str, int]) -> dict[str, Any]:
    """What a rank reports."""
    return {
        "file": None if file is None else {"name": file.name, "bytes": file.bytes, "sha256": file.sha256},
        "tensors": [
            {
                "kind": one.kind, "name": one.name, "state": one.state, "shape": one.shape, "rows": one.rows,
                "columns": one.columns, "dtype": str(one.dtype).removeprefix("torch."),
            }
            for one in tensors
        ],
        "steps": dict(steps),
    }  # fmt: skip


def _blocks(part: Tensor | RowPart) -> Iterable[Tensor]:
    return part.blocks() if isinstance(part, RowPart) else [part]


def _begin(folder: Place, step: int, link: Link) -> Attempt:
    """An attempt that all ranks have joined.

    Raises:
        OSError: rank 0 cannot begin it, or a rank does not see the folder; on all ranks.
    """

    group = link.exchange.group

    def begin() -> Attempt:
        begun: Attempt = value_or_error(
            link.exchange, 0, lambda: attempt_in(folder).begin(folder, step, world_size=link.world_size, group=group),
            encode=lambda attempt: json.dumps([attempt.token, attempt.target.name]).encode(),
            decode=lambda data: attempt_in(folder)(
                folder, *json.loads(data), rank=link.rank, world_size=link.world_size, group=group
            ),
            errors=ERRORS, device=link.device,
        )  # fmt: skip
        return begun

    attempt = link.meet(begin)

    def join() -> tuple[None, int]:
        attempt.join()
        return None, 0

    try:
        agree(link, join)
    except BaseException:
        attempt.leave()
        raise
    return attempt
