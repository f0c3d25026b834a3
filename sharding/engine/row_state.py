"""Rules that look at a whole row, for tables that are cut by columns: `row_state="table"`.

The shards of a row see the same ids, so each has the sums of its columns' gradients for the same rows. They give them
to each other (with weights and states where the rule looks at those), and each applies the rule to the whole rows and
keeps its columns: the numbers of the uncut table, bit for bit. U touched rows of w of the table's D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.embeddings import GradientCheckMode, TableGroup
from shardwise.embeddings.tables.row_sums import RowSums
from shardwise.kernels import (
    Feature,
    Segment,
    check_gradient,
    flatten_segments,
    fused_update,
    origin_of,
    pack_features,
    rule_named,
)

from ...planner.layout import Shard
from ..comms.exchange import Exchange
from .routes import Group, Routes

# rules whose norms are of the gradient alone: other columns of weights and states need not travel
_OF_GRADIENT = ("rowwise_adagrad", "partial_rowwise_adam")


@dataclass
class Touched:
    """What one shard's batch comes to: rows [U], their ids in the shard and the sums of their gradients [U, w]."""

    group: TableGroup
    number: int
    shard: Shard
    rows: Tensor
    ids: Tensor
    gradient: Tensor
    # frozen since the other shards were promised the gradients: they travel, and here nothing changes
    frozen: bool = False


class WholeRows:
    """The shards that share rows, rank by rank: made once."""

    def __init__(self, routes: Routes) -> None:
        self.blocks: dict[tuple[str, tuple[int, int]], list[Shard]] = {}
        self._dims = {table.name: table.dim for table in routes.tables}
        for serving in routes.serving:
            for part in serving.groups:
                for shard in part.shards if self.concerns(routes, part) else ():
                    if shard.rows[0] < shard.rows[1]:
                        self.blocks.setdefault((shard.table, shard.rows), []).append(shard)
        for (name, rows), shards in self.blocks.items():
            shards.sort(key=lambda shard: shard.cols)
            if sum(shard.cols[1] - shard.cols[0] for shard in shards) != self._dims[name]:
                raise ValueError(
                    f'table {name!r}: row_state="table" needs all columns cut into the same rows, rows {rows} are only'
                    f" held for columns {[shard.cols for shard in shards]}"
                )
        self.blocks = {key: shards for key, shards in self.blocks.items() if len(shards) > 1}

    @staticmethod
    def concerns(routes: Routes, part: Group) -> bool:
        """Whether a group's rule looks at whole rows of a table that wants one state for all columns."""
        table = next(table for table in routes.tables if table.name == part.shards[0].table)
        wanted = table.options.row_state == "table" and not part.is_replica
        return wanted and table.optimizer is not None and rule_named(table.optimizer.rule).takes_row

    def has(self, shard: Shard) -> bool:
        """Whether other shards have columns of its rows."""
        return (shard.table, shard.rows) in self.blocks

    def update(self, touched: Sequence[Touched], exchange: Exchange, device: torch.device) -> None:
        """Give each other the gradients and update; every rank takes part, one with nothing to give too."""
        by_place = {(t.shard.table, t.shard.rows, t.shard.cols): t for t in touched}
        parts: list[list[Tensor]] = [[] for _ in range(exchange.world_size)]
        sizes = [0] * exchange.world_size
        for shards, owned in self._shared(by_place, exchange.rank):
            for rank in sorted({shard.rank for shard in shards} - {exchange.rank}):
                parts[rank] += [_given(of_shard).flatten() for of_shard in owned]
                rows = owned[0].rows.shape[0] * _copies(owned[0].group)
                sizes[rank] += rows * sum(s.cols[1] - s.cols[0] for s in shards if s.rank == rank)
        flat = [tensor for part in parts for tensor in part]
        send = torch.cat(flat) if flat else torch.empty(0, device=device)
        pending = exchange.rows_transpose(send, [sum(t.numel() for t in part) for part in parts], sizes)
        came = list(torch.split(pending.wait(), sizes))
        for shards, owned in self._shared(by_place, exchange.rank):
            pieces = []
            for shard in shards:
                of_shard = by_place.get((shard.table, shard.rows, shard.cols)) if shard.rank == exchange.rank else None
                width = shard.cols[1] - shard.cols[0]
                if of_shard is not None:
                    pieces.append(_given(of_shard))
                else:
                    count = owned[0].rows.shape[0]
                    size = count * _copies(owned[0].group) * width
                    pieces.append(came[shard.rank][:size].view(_copies(owned[0].group), count, width))
                    came[shard.rank] = came[shard.rank][size:]
            if not owned[0].frozen:
                _apply(torch.cat(pieces, dim=2), owned)
        for group in {id(t.group): t.group for t in touched}.values():
            group.step += 1

    def _shared(
        self, by_place: dict[tuple[str, tuple[int, int], tuple[int, int]], Touched], rank: int
    ) -> list[tuple[list[Shard], list[Touched]]]:
        """Blocks that this rank has shards of, in an order that all ranks share, and those shards."""
        shared = []
        for shards in self.blocks.values():
            owned = [by_place[s.table, s.rows, s.cols] for s in shards if s.rank == rank]
            if owned:
                shared.append((shards, owned))
        return shared


def touched_rows(group: TableGroup, part: Group, sums: Sequence[RowSums], frozen: Sequence[bool] = ()) -> list[Touched]:
    """The rows of each shard of a group, out of the sums of all.

    Rows stand in the order of their ids, which all shards share; where they lie is each shard's own.
    """
    touched = []
    for number, shard in enumerate(part.shards):
        first, last = group.first_ids[number], group.first_ids[number] + group.tables[number].rows
        for segment_sums in sums:
            if segment_sums.segment.dim == group.tables[number].dim:
                # host sync on CUDA: where the ids of each shard begin
                begin, end = torch.searchsorted(segment_sums.ids, segment_sums.ids.new_tensor([first, last])).tolist()
                rows = segment_sums.rows[begin:end] - group.first_rows[number]
                ids, gradient = segment_sums.ids[begin:end] - first, segment_sums.gradient[begin:end]
                touched.append(Touched(group, number, shard, rows, ids, gradient, any(frozen[number : number + 1])))
    return touched


def _copies(group: TableGroup) -> int:
    """Numbers of an element that travel: its gradient and, where the rule looks at them, its weight and states."""
    assert group.optimizer is not None
    rule = rule_named(group.optimizer.rule)
    # decay that is added to the gradient makes it one of the weights
    alone = rule.name in _OF_GRADIENT and group.optimizer.decay != "l2"
    return 1 if alone else 2 + rule.kinds.count("element")


def _given(touched: Touched) -> Tensor:
    """What a shard gives the others of its rows: [copies, U, w] fp32."""
    gradient = touched.gradient[None]
    return torch.cat([gradient, _elements(touched)]) if _copies(touched.group) > 1 else gradient


def _elements(touched: Touched) -> Tensor:
    """Weights and element states of a shard's rows, [1 + states, U, w] fp32."""
    assert touched.group.optimizer is not None
    kinds = rule_named(touched.group.optimizer.rule).kinds
    states = zip(_states(touched.group, touched.number), kinds, strict=True)
    kept = [state[touched.rows] for state, kind in states if kind == "element"]
    return torch.stack([touched.group.view(touched.number)[touched.rows].float(), *kept])


def _apply(whole: Tensor, owned: Sequence[Touched]) -> None:
    """Update whole rows, [copies, U, D], and keep the columns of the shards that this rank owns."""
    group, rows = owned[0].group, owned[0].rows
    spec = group.optimizer
    assert spec is not None
    kinds = rule_named(spec.rule).kinds
    _, count, dim = whole.shape
    # columns of others stay zeros where the rule does not look at them, and what it makes of them is not kept
    elements = whole[1:] if _copies(group) > 1 else whole.new_zeros(1 + kinds.count("element"), count, dim)
    if _copies(group) == 1:
        for touched in owned:
            elements[:, :, slice(*touched.shard.cols)] = _elements(touched)
    weights, *moments = elements.contiguous().unbind()
    weights, element_states = weights.to(group.flat.dtype), iter(moments)
    states = [
        state[rows] if kind == "row" else next(element_states)
        for kind, state in zip(kinds, _states(group, owned[0].number), strict=True)
    ]
    guard = group.check.guard
    if group.policy.gradient_check is GradientCheckMode.SKIP:
        guard = guard.clone()
        check_gradient(whole[0].contiguous(), guard)
    ends = torch.tensor([0, count], device="cpu").to(whole.device)
    # whole rows, from the first one of the shard
    features = pack_features([Feature(0, count, dim, 0, origin=origin_of(owned[0].shard.rows[0], 0))], whole.device)
    fused_update(
        weights.view(-1), [state.view(-1) for state in states], group.step.clone(), whole[0].contiguous(),
        torch.arange(count, device=whole.device), ends, None, features,
        [dim], flatten_segments([Segment(dim, 0, count, 0)]), spec.rule, group.hyper, guard, "sequence", spec.decay,
        None, group.seed, owned[0].ids,
    )  # fmt: skip
    for touched in owned:
        columns = slice(*touched.shard.cols)
        group.view(touched.number)[touched.rows] = weights[:, columns]
        for own_state, kind, state in zip(_states(group, touched.number), kinds, states, strict=True):
            own_state[touched.rows] = state if kind == "row" else state[:, columns]


def _states(group: TableGroup, number: int) -> list[Tensor]:
    """The states of one shard as views, without the count of steps."""
    return [state for name, state in group.state_views(number).items() if name != "step"]
