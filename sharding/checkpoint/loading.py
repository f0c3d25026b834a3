"""Loading under any plan and number of ranks: each rank reads the boxes that it holds, a block at a time.

First everything is checked on all ranks: names, shapes, dtypes, files, optimizer states. Only then is anything changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings.optim.keyed_optimizer import KeyedOptimizer, _hyper_of
from shardwise.embeddings.tiers import CachedRows, RowPart
from shardwise.kernels import rule_named
from shardwise.planner.layout import fingerprint
from shardwise.sharding.engine.fully_sharded import whole_tables
from shardwise.sharding.engine.state import Box, overlap, part_of

from .compare import Matched, compare
from .contents import Cells, Contents, Home, Leaf, contents_of, link_of
from .errors import STRICT, Link, LoadPolicy, Report, agree, mismatch
from .files import TensorFiles, check_checksum, check_header, check_size
from .manifest import WEIGHT, Manifest, Stored, read_manifest
from .places import locate
from .storage import Files, StoreError, files_in


@dataclass(frozen=True)
class Loaded:
    """The result of a load besides tensors: step and `extra` of the save, and how checkpoint and model differed."""

    step: int
    extra: Mapping[str, Any]
    report: Report


@dataclass(frozen=True)
class Fill:
    """Cells of `box` of a stored tensor go into `target`, which fills `place` of it; of their value `share` counts.

    `shift` is where the stored tensor's own cells begin.
    """

    what: str
    stored: Stored
    shift: tuple[int, ...]
    box: Box
    target: Tensor | RowPart
    place: Box
    share: float = 1.0


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: LoadPolicy = STRICT,
    resplit: str | None = None,
    verify: bool = True,
) -> Loaded:
    """Load a step folder into a model and its optimizers, under any plan; all ranks of the model call this together.

    Weights, optimizer states, counts of steps, learning rates, dense layers and buffers. A rank holds no more than a
    block of a tensor besides what it fills.

    Args:
        path: the step folder, which may have a scheme; `latest(folder)` finds the newest.
        model, optimizer: as for `save`. Without an optimizer states of dense layers are left aside.
        policy: what to do where checkpoint and model differ; by default raise.
        resplit: "mean" gives a column block whose rows have no number of their own in the checkpoint (of a rule that
            keeps one a row) the mean over its columns of the numbers there.
        verify: compare the checksum of each file first, each on one rank.

    Raises:
        CheckpointDamaged: a file is cut off, changed, or not what it should be.
        CheckpointMismatch: checkpoint and model differ in what the policy does not allow; has the whole report.
        ValueError: an optimizer state is not finite, or states per row would have to be split without `resplit`.
        FileNotFoundError: there is no finished checkpoint.
        OSError: a store cannot be asked, a StoreError. All ranks raise each of these, and nothing was changed, unless a
            store fails after all checks, while the model is filled: the message says so.

    Example:
        >>> import tempfile
        >>> config = EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])
        >>> saved, model = EmbeddingBagCollection([config]), EmbeddingBagCollection([config])
        >>> folder = tempfile.mkdtemp()
        >>> _ = checkpoint.save(folder, saved, step=100, extra={"epoch": 3})
        >>> loaded = checkpoint.load(checkpoint.latest(folder), model)
        >>> loaded.step, loaded.extra
        (100, {'epoch': 3})
        >>> torch.equal(model.embedding_bags["item"].weight, saved.embedding_bags["item"].weight)
        True
    """
    link = link_of(model)

    def prepare() -> tuple[tuple[Callable[[], None], Manifest, Report], int]:
        if resplit not in (None, "mean"):
            raise ValueError(f"resplit must be 'mean' or None, got {resplit!r}")
        found = files_in(locate(path))
        manifest = read_manifest(path)
        contents = contents_of(model, optimizer, link)
        matched, report = compare(manifest, contents, policy, with_optimizer=optimizer is not None)
        if report.refused_by(policy):
            raise mismatch(report, policy, str(path))
        check_files(found, manifest, link, checksums=verify)
        files = TensorFiles(found, manifest)
        work = _Work(manifest, contents, matched, files, resplit)
        work.check()

        def go() -> None:
            work.go()
            if isinstance(optimizer, KeyedOptimizer):
                optimizer.post_load_state_dict()
            files.close()

        return (go, manifest, report), fingerprint((), (manifest.step, manifest.files))

    with whole_tables(model, keep=True):
        go, manifest, report = agree(link, prepare)

        def fill() -> tuple[None, int]:
            try:
                with torch.no_grad():
                    go()
            except StoreError as error:
                raise StoreError(f"{error}; the model is changed in part: load it once more") from error
            return None, 0

        agree(link, fill)
    return Loaded(manifest.step, manifest.extra, report)


def check_files(files: Files, manifest: Manifest, link: Link, *, checksums: bool) -> None:
    """Check the files, each on one rank; that they are there in their size on all.

    Headers are looked at by all ranks where that costs nothing, and again by who reads of a file.

    Raises:
        CheckpointDamaged: as `check_header`, `check_checksum`.
    """
    for number, facts in enumerate(manifest.files):
        own = number % link.world_size == link.rank
        if own or not files.costly:
            check_header(files, facts, manifest.by_file[facts.name])
        else:
            check_size(files, facts)
        if checksums and own:
            check_checksum(files, facts)


class _Work:
    """All that a load changes on this rank, checked before the first of it is."""

    def __init__(
        self, manifest: Manifest, contents: Contents, matched: Matched, files: TensorFiles, resplit: str | None
    ) -> None:
        self._manifest, self._contents, self._matched = manifest, contents, matched
        self._files, self._resplit = files, resplit
        self._fills = [fill for name in contents.tables for fill in self._table(name)]
        for name, tensor in contents.dense.items():
            self._fills += self._whole(name, matched.pieces.get((name, WEIGHT), []), tensor)
        self._made: list[tuple[Leaf, str, dict[str, Any]]] = []
        for leaf in contents.leaves:
            for name in leaf.params:
                self._dense_states(leaf, name)
        self._steps = self._counted_steps()
        self._groups = self._settings()

    def check(self) -> None:
        """Read all optimizer states once.

        Raises:
            ValueError: one is not finite; names it.
        """
        seen: set[tuple[Stored, Box]] = set()
        for fill in self._fills:
            if fill.stored.state == WEIGHT or not fill.stored.dtype.is_floating_point:
                continue
            box = within(fill.box, fill.shift)
            if (fill.stored, box) in seen:
                continue
            seen.add((fill.stored, box))
            for part, block in self._files.blocks(fill.stored, box):
                if not bool(torch.isfinite(block).all()):
                    raise ValueError(_not_finite(fill, part, block))

    def go(self) -> None:
        """Change everything."""
        for leaf, name, states in self._made:
            leaf.put_states(name, states)
        below: dict[tuple[CachedRows, int], list[Fill]] = {}
        here: list[tuple[Fill, Tensor]] = []
        for fill in self._fills:
            if isinstance(fill.target, RowPart):
                below.setdefault((fill.target.store, fill.target.table), []).append(fill)
            else:
                here.append((fill, fill.target))
        self._fill(here)
        for (store, table), fills in below.items():
            self._fill_below(store, table, fills)
        for group, steps in self._steps:
            group.step.fill_(steps)
        for group, values in self._groups:
            group.update(values)
        for _, fused in self._contents.fused:
            fused.step()
        for leaf in self._contents.leaves:
            for name in leaf.params:
                for key, value in self._matched.values.get(name, {}).items():
                    if leaf.optimizer.state.get(leaf.params[name]):
                        leaf.put_value(name, key, value)

    def _fill(self, fills: Sequence[tuple[Fill, Tensor]]) -> None:
        """Fill tensors, each of which is the target of its fill."""
        for fill, target in fills:
            if fill.share != 1:
                part_of(target, fill.place, fill.box).zero_()
        for fill, target in fills:
            for part, block in self._files.blocks(fill.stored, within(fill.box, fill.shift)):
                box = tuple((low + at, high + at) for (low, high), at in zip(part, fill.shift, strict=True))
                place = part_of(target, fill.place, box)
                if fill.share == 1:
                    place.copy_(block)
                else:
                    place.add_(block.to(place.device), alpha=fill.share)

    def _fill_below(self, store: CachedRows, table: int, fills: Sequence[Fill]) -> None:
        """Fill a shard of a table with a tier, weights and states of some rows at a time."""
        for begin, end in store.chunks(table):
            parts = store.read(table, begin, end)
            of_rows = []
            for fill in fills:
                assert isinstance(fill.target, RowPart)
                first = fill.place[0][0]
                rows = (first + begin, first + end)
                shared = overlap((fill.box[0],), (rows,))
                if shared is not None:
                    target, box = parts[fill.target.part], (*shared, *fill.box[1:])
                    of_rows.append((replace(fill, box=box, place=(rows, *fill.place[1:])), target))
            if of_rows:
                self._fill(of_rows)
                store.write(table, begin, parts)

    def _table(self, name: str) -> list[Fill]:
        table, fills = self._contents.tables[name], []
        for home in table.homes:
            for cells in table.cells(home):
                pieces = self._matched.pieces.get((name, cells.state), [])
                what = name if cells.state == WEIGHT else f"{name}: {table.rule} {cells.state}"
                if cells.tensor.dim() == 2:
                    fills += _cells_of(what, pieces, cells)
                else:
                    fills += self._rows_of(what, pieces, cells)
        return fills

    def _rows_of(self, what: str, pieces: list[Stored], cells: Cells) -> list[Fill]:
        """How the numbers of rows, made of some columns, come out of those that are stored."""
        have = {piece.cells[1] for piece in pieces}
        wanted = cells.columns
        if pieces and wanted not in have and self._resplit is None:
            raise ValueError(
                f"{what} is one number for each row of columns {sorted(have)} in the checkpoint, the model wants them"
                f" for columns {wanted}: resplit='mean' takes the mean over columns, and tables with"
                " row_state='table' have one number for whole rows"
            )
        fills = []
        for piece in pieces:
            made_of = piece.cells[1]
            shared = overlap((made_of,), (wanted,))
            rows = overlap((piece.cells[0],), (cells.rows,))
            if shared is None or rows is None or (wanted in have and made_of != wanted):
                continue
            share = 1.0 if made_of == wanted else (shared[0][1] - shared[0][0]) / (wanted[1] - wanted[0])
            fills.append(Fill(what, piece, (piece.cells[0][0],), rows, cells.tensor, (cells.rows,), share))
        return fills

    def _whole(self, what: str, pieces: list[Stored], tensor: Tensor) -> list[Fill]:
        """A dense tensor, from one piece or from those of a table."""
        place = tuple((0, size) for size in tensor.shape)
        fills = []
        for piece in pieces:
            box = box_of(piece)
            shared = overlap(place, box) if place else ()
            if shared is not None:
                fills.append(Fill(what, piece, tuple(low for low, _ in box), shared, tensor, place))
        return fills

    def _dense_states(self, leaf: Leaf, name: str) -> None:
        """States of a dense parameter; one that has none yet gets them."""
        have, param = leaf.states(name), leaf.params[name]
        saved = self._matched.states.get(name, {})
        made: dict[str, Any] = {}
        for key, stored in saved.items():
            target = have.get(key)
            if not have:
                # of a resized parameter: rows that were not there have states of zeros
                shape = (
                    param.shape
                    if stored.shape != tuple(param.shape) and len(stored.shape) == param.dim() > 0
                    else stored.shape
                )
                # counts of steps stay on the CPU, as in torch.optim
                device = param.device if stored.shape else torch.device("cpu")
                target = made[key] = torch.zeros(shape, dtype=stored.dtype, device=device)
            assert isinstance(target, Tensor)
            self._fills += self._whole(f"{name}: {key}", [stored], target)
        if not have and (saved or name in self._matched.values):
            self._made.append((leaf, name, {**made, **self._matched.values.get(name, {})}))

    def _counted_steps(self) -> list[tuple[Any, int]]:
        """The step that each group of tables counts on from.

        Raises:
            ValueError: its tables saw different numbers of updates, and their rule reads the number.
        """
        homes: dict[int, list[tuple[str, Home]]] = {}
        for name, table in self._contents.tables.items():
            for home in table.homes if table.optimizer is not None else ():
                homes.setdefault(id(home.group), []).append((name, home))
        counted = []
        for members in homes.values():
            names = dict.fromkeys(name for name, _ in members if name in self._matched.steps)
            # tables that no feature looks up are never updated
            looked_up = [name for name in names if self._contents.tables[name].has_features]
            counts = {name: self._matched.steps[name] for name in looked_up or names}
            rule = self._contents.tables[members[0][0]].rule
            if rule is not None and rule_named(rule).counts_steps and len(set(counts.values())) > 1:
                raise ValueError(
                    f"tables {sorted(counts)} have seen different numbers of updates, {list(counts.values())}, and the"
                    " model counts them together: give them optimizers of their own"
                )
            if counts:
                counted.append((members[0][1].group, max(counts.values())))
        return counted

    def _settings(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Settings of all groups of all optimizers, and what they become."""
        settings = []
        rename = self._matched.rename
        saved = [{**g, "params": [rename.get(n, n) for n in g["params"]]} for g in self._manifest.fused]
        for prefix, optimizer in self._contents.fused:
            names = {id(param): prefix + name for name, param in optimizer.params.items()}
            settings += [(group, _settings_of(group, names, saved)) for group in optimizer.param_groups]
        for leaf in self._contents.leaves:
            saved = [
                {**_settings(g), "params": [rename.get(n, n) for n in g["params"]]}
                for g in self._manifest.dense
                # settings of another class mean something else
                if g.get("optimizer", leaf.kind) == leaf.kind
            ]
            names = {id(param): name for name, param in leaf.params.items()}
            settings += [(group, _settings_of(group, names, saved)) for group in leaf.optimizer.param_groups]
        return settings


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "optimizer"}


def _settings_of(group: Mapping[str, Any], names: Mapping[int, str], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved settings of a group, in the types that its own have."""
    values = _hyper_of([names.get(id(param), "") for param in group["params"]], saved)
    for key, value in values.items():
        current = group.get(key)
        if isinstance(current, Tensor):
            values[key] = torch.full_like(current, value)
        elif isinstance(current, tuple):
            values[key] = tuple(value)
    return values


def _cells_of(what: str, pieces: list[Stored], cells: Cells) -> list[Fill]:
    place, fills = (cells.rows, cells.columns), []
    for piece in pieces:
        box = box_of(piece)
        shared = overlap(place, box)
        if shared is not None:
            fills.append(Fill(what, piece, (box[0][0], box[1][0]), shared, cells.tensor, place))
    return fills


def box_of(stored: Stored) -> Box:
    """Where the cells of a stored tensor lie in the whole."""
    if stored.rows is None or stored.columns is None:
        return tuple((0, size) for size in stored.shape)
    return (stored.rows, stored.columns)


def within(box: Box, shift: tuple[int, ...]) -> Box:
    """A box of the whole as one of the stored tensor."""
    return tuple((low - at, high - at) for (low, high), at in zip(box, shift, strict=True))


def _not_finite(fill: Fill, part: Box, block: Tensor) -> str:
    """Which number of an optimizer state is not finite."""
    where = torch.nonzero(~torch.isfinite(block))[0].tolist() if block.dim() else []
    value = block[tuple(where)].item()
    cell = [at + low + begin for at, (low, _), begin in zip(where, part, fill.shift, strict=True)]
    return f"{fill.what}: {value} at {cell} of the optimizer state in {fill.stored.file}: nothing was loaded"
