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

from ...planner.layout import Shard, Span
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
        self.blocks: dict[tuple[str, Span], list[Shard]] = {}
        # tables that want one state for all columns, whose rule looks at whole rows
        dims = {
            table.name: table.dim
            for table in routes.tables
            if table.options.row_state == "table"
            and table.optimizer is not None
            and rule_named(table.optimizer.rule).takes_row
        }
        for shard in (shard for serving in routes.serving for part in serving.groups for shard in part.shards):
            if shard.table in dims and not shard.replica and shard.rows[0] < shard.rows[1]:
                self.blocks.setdefault((shard.table, shard.rows), []).append(shard)
        for (name, rows), shards in self.blocks.items():
            shards.sort(key=lambda shard: shard.cols)
            if sum(map(_width, shards)) != dims[name]:
                raise ValueError(
                    f'table {name!r}: row_state="table" needs all columns cut into the same rows, rows {rows} are only'
                    f" held for columns {[shard.cols for shard in shards]}"
                )
        self.blocks = {key: shards for key, shards in self.blocks.items() if len(shards) > 1}

    def has(self, shard: Shard) -> bool:
        """Whether other shards have columns of its rows."""
        return (shard.table, shard.rows) in self.blocks

    def update(self, touched: Sequence[Touched], exchange: Exchange, device: torch.device) -> None:
        """Give each other the gradients and update; every rank takes part, one with nothing to give too."""
        of_shard = {t.shard: t for t in touched}
        blocks: list[tuple[list[Shard], list[Touched], torch.Size]] = []
        pieces: list[list[Tensor]] = [[] for _ in range(exchange.world_size)]
        sizes: list[list[int]] = [[] for _ in range(exchange.world_size)]
        # in an order that all ranks share
        for shards in self.blocks.values():
            owned = [of_shard[shard] for shard in shards if shard.rank == exchange.rank]
            if owned:
                given = list(map(_given, owned))
                # copies and rows, which those of the other shards have too
                shape = given[0].shape[:2]
                for rank in {shard.rank for shard in shards}:
                    pieces[rank] += given
                    sizes[rank] += [shape.numel() * _width(shard) for shard in shards if shard.rank == rank]
                blocks.append((shards, owned, shape))
        came = exchange.pieces(pieces, sizes, device, what="row gradients")
        for shards, owned, shape in blocks:
            columns = [next(came[shard.rank]).view(*shape, _width(shard)) for shard in shards]
            if not owned[0].frozen:
                _apply(torch.cat(columns, dim=2), owned)
        for group in {t.group for t in touched}:
            group.step += 1


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
                own = slice(*torch.searchsorted(segment_sums.ids, segment_sums.ids.new_tensor([first, last])).tolist())
                rows, ids = segment_sums.rows[own] - group.first_rows[number], segment_sums.ids[own] - first
                touched.append(
                    Touched(
                        group, number, shard, rows, ids, segment_sums.gradient[own], any(frozen[number : number + 1])
                    )
                )
    return touched


def _given(touched: Touched) -> Tensor:
    """What a shard gives the others of its rows, [copies, U, w] fp32: gradients alone, or weights and states too."""
    spec, gradient = touched.group.optimizer, touched.gradient[None]
    assert spec is not None
    # decay that is added to the gradient makes it one of the weights
    if spec.rule in _OF_GRADIENT and spec.decay != "l2":
        return gradient
    return torch.cat([gradient, _elements(touched)])


def _elements(touched: Touched) -> Tensor:
    """Weights and element states of a shard's rows, [1 + states, U, w] fp32."""
    weights, states = touched.group.view(touched.number), states_of(touched.group, touched.number)
    return torch.stack([weights[touched.rows].float(), *(state[touched.rows] for state in states if state.dim() == 2)])


def _apply(whole: Tensor, owned: Sequence[Touched]) -> None:
    """Update whole rows, [copies, U, D], and keep the columns of the shards that this rank owns."""
    group, rows, spec = owned[0].group, owned[0].rows, owned[0].group.optimizer
    assert spec is not None
    gradient, elements, (copies, count, dim) = whole[0].contiguous(), whole[1:], whole.shape
    if copies == 1:
        # columns of others stay zeros where the rule does not look at them, and what it makes of them is not kept
        elements = whole.new_zeros(1 + rule_named(spec.rule).kinds.count("element"), count, dim)
        for touched in owned:
            elements[:, :, slice(*touched.shard.cols)] = _elements(touched)
    weights, *moments = elements.contiguous().unbind()
    weights = weights.to(group.flat.dtype)
    states = [state[rows] if state.dim() == 1 else moments.pop(0) for state in states_of(group, owned[0].number)]
    guard = group.check.guard
    if group.policy.gradient_check is GradientCheckMode.SKIP:
        guard = guard.clone()
        check_gradient(gradient, guard)
    # whole rows, from the first one of the shard
    features = pack_features([Feature(0, count, dim, 0, origin=origin_of(owned[0].shard.rows[0], 0))], whole.device)
    fused_update(
        weights.view(-1), [state.view(-1) for state in states], group.step.clone(), gradient,
        torch.arange(count, device=whole.device), torch.tensor([0, count], device="cpu").to(whole.device), None,
        features, [dim], flatten_segments([Segment(dim, 0, count, 0)]), spec.rule, group.hyper, guard, "sequence",
        spec.decay, None, group.seed, owned[0].ids,
    )  # fmt: skip
    for touched in owned:
        columns = slice(*touched.shard.cols)
        group.view(touched.number)[touched.rows] = weights[:, columns]
        for own_state, state in zip(states_of(group, touched.number), states, strict=True):
            own_state[touched.rows] = state if state.dim() == 1 else state[:, columns]


def states_of(group: TableGroup, number: int) -> list[Tensor]:
    """The states of one shard as views, without the count of steps."""
    return [state for name, state in group.state_views(number).items() if name != "step"]


def _width(shard: Shard) -> int:
    return shard.cols[1] - shard.cols[0]
