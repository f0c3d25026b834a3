"""Sharded collections: one engine for pooled and sequence lookups, whatever the plan.

forward: `begin` routes the ids and exchanges headers and ids; `finish` looks up, exchanges rows and assembles them.
backward: row gradients travel back, and every rank applies the fused update to the tables that it holds. Four
collectives a step, whatever the number of tables. All ranks must run forward, and backward, the same number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.embeddings import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedOptimizer,
    GradientCheckMode,
    LookupFeature,
    OptimizerSpec,
    TableGroup,
    TableShape,
)
from shardwise.embeddings.collection import move_tables, require_batch
from shardwise.embeddings.optimizers import mark_optimizer, optimizer_of, optimizer_spec
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.kernels import BoundsCheckMode, Feature, check_ids, new_guard, pack_features, raise_from_guard
from shardwise.kernels.cpu_lookup import offsets_are_good

from . import header
from .env import ShardingEnv
from .exchange import Exchange, unpack
from .layout import Shard, fingerprint, validate
from .route import Group, Inbound, Outbound, Routes, Table, arrange, block_layout, plan_routes, route

# an optimizer class and its keyword arguments
Mark: TypeAlias = tuple[type[torch.optim.Optimizer], dict[str, Any]]


@dataclass
class InFlight:
    """A batch between `begin` and `finish`."""

    outbound: Outbound
    inbound: Inbound
    # [W] ids from each rank, and of those the ids whose rows go back
    ids_from: list[int]
    rows_to: list[int]
    # whether a backward may follow: replicated tables then know every rank's ids
    update: bool


class ShardedCollection(nn.Module):
    """The engine: holds this rank's tables, and answers a batch together with the other ranks.

    Parameters keep the names of the unsharded module; a table of another rank is an empty parameter.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
        *,
        default_optimizer: Mark,
    ) -> None:
        super().__init__()
        self._pooled = isinstance(module, EmbeddingBagCollection)
        self._children_name = "embedding_bags" if self._pooled else "embeddings"
        self._weighted = isinstance(module, EmbeddingBagCollection) and module.is_weighted()
        self._policy = module._policy
        if self._policy.gradient_check is GradientCheckMode.RAISE:
            # one rank alone would raise, while the others wait for it
            raise ValueError("GradientCheckMode.RAISE does not work sharded yet: use GradientCheckMode.SKIP")
        self._names_by_table = module._names_by_table
        self._env, self._exchange = env, Exchange(env.process_group)
        # TorchRec's default: with DDP's mean over ranks, tables and dense layers then see the same loss
        self.gradient_division = True
        (self._routes, marks), self._fingerprint = header.agree(
            self._exchange, device, lambda: _routes_of(module, shards, env.world_size, default_optimizer)
        )
        self._dense_lookups = {n for group in self._routes.dense for n in group.lookups}
        tables = self._routes.tables
        self._groups = [self._table_group(group, device) for group in self._routes.groups[env.rank]]
        self._dense_groups = [self._table_group(group, device) for group in self._routes.dense]
        self._adopt_weights(module, marks, device)
        spec = [Feature(0, tables[t].rows, tables[t].dim, 0) for _, t in self._routes.lookups]
        self._features = pack_features(spec, device)
        self._feature_names = [f"feature {f!r} (table {tables[t].name!r})" for f, t in self._routes.lookups]
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self._fused_optimizer = FusedOptimizer(self._groups, self._children_name)

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that this rank's tables run in their backward."""
        return self._fused_optimizer

    @property
    def device(self) -> torch.device:
        """Where this rank's tables are."""
        return self._features.device

    @property
    def collectives(self) -> int:
        """Collectives called so far."""
        return self._exchange.calls

    def fused_parameter_names(self) -> list[str]:
        """Parameters that the backward trains or that other ranks hold: no gradient of theirs is to be reduced."""
        dense = {table.name for group in self._dense_groups for table in group.tables}
        return [
            f"{self._children_name}.{table.name}.weight" for table in self._routes.tables if table.name not in dense
        ]

    def begin(self, features: KeyedJaggedTensor) -> InFlight:
        """Send the batch's ids to the ranks that serve them, and take theirs.

        Raises:
            KeyError, IndexError, ValueError, TypeError: a rank's batch is bad, as `EmbeddingBagCollection.forward`
                describes. All ranks raise in this step, with the message and number of the first failing rank.
            RuntimeError: a rank failed otherwise, or ranks disagree on the plan or on gradients being enabled.
        """
        update = torch.is_grad_enabled()
        for group in self._groups:
            group.freeze([not param.requires_grad for param in group.parameters])
        outbound: Outbound | None = None
        told: Any
        try:
            outbound = self._prepare(features, update)
            told = (outbound.batch, outbound.ids_to_groups)
        except Exception as error:
            told = error
        most_groups = max(len(groups) for groups in self._routes.groups)
        heads = header.tell(
            self._exchange, self.device, told, update=update, fingerprint=self._fingerprint, groups=most_groups
        )
        # where it is missing every rank has raised
        assert outbound is not None

        served = len(self._routes.served(self._env.rank, update))
        sizes = [
            block_layout(served, head.batch, sum(head.ids_to_groups), self._routes.id_dtype, self._weighted)
            for head in heads
        ]
        received = self._exchange.ids(outbound.blocks, [size for *_, size in sizes])
        blocks = [unpack(block, *layout[:2]) for block, layout in zip(received, sizes, strict=True)]
        groups = len(self._groups)
        per_group = [sum(head.ids_to_groups[g] for head in heads) for g in range(groups)]
        batches = [head.batch for head in heads]
        inbound = arrange(blocks, batches, served, per_group, keep_arrival=not self._pooled)
        owned = [g for g, group in enumerate(self._routes.groups[self._env.rank]) if not group.replica]
        return InFlight(
            outbound,
            inbound,
            ids_from=[sum(head.ids_to_groups) for head in heads],
            rows_to=[sum(head.ids_to_groups[g] for g in owned) for head in heads],
            update=update,
        )

    def finish_values(self, flight: InFlight) -> list[Tensor]:
        """Rows of each lookup in output order: [B, dim] pooled, [ids of the lookup, dim] otherwise."""
        exchanged = [n for n in range(len(self._routes.lookups)) if n not in self._dense_lookups]
        pieces: dict[int, Tensor] = {}
        # a batch that began without gradients gets none: replicated tables do not know the other ranks' ids
        with torch.set_grad_enabled(flight.update and torch.is_grad_enabled()):
            if exchanged:
                values = _Finish.apply(self._anchor, self, flight, exchanged)  # type: ignore[no-untyped-call]
                pieces.update(zip(exchanged, self._split(values, flight, exchanged), strict=True))
            for group, tables in zip(self._routes.dense, self._dense_groups, strict=True):
                pieces.update(self._look_up_at_home(flight, group, tables))
        return [pieces[n] for n in range(len(self._routes.lookups))]

    def _prepare(self, features: KeyedJaggedTensor, update: bool) -> Outbound:
        require_batch(features, "a sharded collection", self._weighted)
        if features.device() != self.device:
            raise ValueError(f"ids are on {features.device()}, the tables on {self.device}")
        weights = features.weights_or_none() if self._weighted else None
        if weights is not None and weights.requires_grad:
            raise ValueError(
                "gradients of per-id weights are not exchanged: detach the weights before a sharded lookup"
            )
        outbound = route(features, self._routes, weighted=self._weighted, update=update)
        if self._routes.lookups:
            mode = self._policy.bounds_check
            ids, offsets = outbound.kjt.values(), outbound.kjt.offsets()
            padded = outbound.kjt.capacity() is not None
            if mode is BoundsCheckMode.IGNORE and (ids.is_cuda or offsets_are_good(offsets, ids.shape[0], padded)):
                # it speaks of ids: bags that do not fit are an error on the CPU, before they leave
                return outbound
            fatal = mode is BoundsCheckMode.FATAL
            guard = new_guard(self.device)
            check_ids(ids, offsets, self._features, guard, names=self._feature_names, fatal=fatal, padded=padded)
            if ids.is_cuda:
                # before the ids leave: begin waits for the device anyway
                raise_from_guard(guard, ids, offsets, self._features, self._feature_names, fatal=fatal)
        return outbound

    def _serve(self, flight: InFlight) -> list[Tensor]:
        """Look up what other ranks asked for and exchange the rows: flat fp32 from each rank."""
        owned = [(g, group) for g, group in enumerate(self._groups) if not self._my_groups()[g].replica]
        rows = [self._look_up(group, *self._inputs(flight, g)) for g, group in owned]
        batches = flight.inbound.batches
        if self._pooled:
            table = torch.cat(rows, dim=1) if rows else torch.empty(sum(batches), 0, device=self.device)
            blocks = [block.flatten() for block in torch.split(table, batches)]
            dims = [sum(self._routes.dims(self._routes.served(rank, False))) for rank in range(self._env.world_size)]
            sizes = [flight.outbound.batch * dim for dim in dims]
        else:
            blocks = self._rows_by_arrival(flight, rows)
            sizes = [count * self._sequence_dim() for count in flight.outbound.rows_from]
        return self._exchange.rows(blocks, sizes)

    def _rows_by_arrival(self, flight: InFlight, rows: list[Tensor]) -> list[Tensor]:
        """Rows in global order, back in the order in which their ids came, per rank and flat."""
        dim = self._sequence_dim()
        mine = torch.cat(rows) if rows else torch.empty(0, dim, device=self.device)
        arrival = flight.inbound.arrival
        if arrival is None:
            return [mine.flatten()]
        came = torch.empty(arrival.shape[0], dim, device=self.device)
        came[arrival[: mine.shape[0]]] = mine
        blocks = torch.split(came, flight.ids_from)
        return [block[:count].flatten() for block, count in zip(blocks, flight.rows_to, strict=True)]

    def _assemble(self, flight: InFlight, received: list[Tensor], lookups: Sequence[int]) -> Tensor:
        """The rows of all ranks and of replicated tables, side by side (or one after another) in output order."""
        pieces: dict[int, Tensor] = {}
        for rank, rows in enumerate(received):
            served = self._routes.served(rank, False)
            width = sum(self._routes.dims(served)) if self._pooled else self._sequence_dim()
            if served:
                pieces.update(zip(served, self._split(rows.view(-1, width), flight, served), strict=True))
        for g, group in enumerate(self._my_groups()):
            if group.replica:
                pieces.update(self._look_up_at_home(flight, group, self._groups[g]))
        return torch.cat([pieces[n] for n in lookups], dim=1 if self._pooled else 0)

    def _update(self, flight: InFlight, grad: Tensor, lookups: Sequence[int]) -> None:
        """The transpose of `_serve` and `_assemble`, and the fused update of what this rank holds."""
        if self.gradient_division:
            grad = grad / self._env.world_size
        pieces = dict(zip(lookups, self._split(grad, flight, lookups), strict=True))
        blocks, me, world = [], self._env.rank, range(self._env.world_size)
        for rank in world:
            served = [pieces[n] for n in self._routes.served(rank, True)]
            block = torch.cat(served, dim=1 if self._pooled else 0) if served else grad.new_empty(0)
            blocks.append(block.flatten())
        columns = sum(self._routes.dims(self._routes.served(me, True)))
        if self._pooled:
            received = self._exchange.rows_transpose(blocks, [batch * columns for batch in flight.inbound.batches])
            if columns == 0:
                return
            mine = torch.cat([g.view(-1, columns) for g in received])
            widths = [sum(self._routes.dims(group.lookups)) for group in self._my_groups()]
            gradients = torch.split(mine, widths, dim=1)
        else:
            dim = self._sequence_dim()
            received = self._exchange.rows_transpose(blocks, [count * dim for count in flight.ids_from])
            mine = torch.cat(received).view(-1, dim)
            if flight.inbound.arrival is not None:
                mine = mine[flight.inbound.arrival]
            gradients = torch.split(mine, flight.inbound.group_ids)
        for g, group in enumerate(self._groups):
            if group.optimizer is None:
                continue
            pooling = group.pooling if self._pooled else "sequence"
            group.update(gradients[g], *self._inputs(flight, g), pooling=pooling)

    def _inputs(self, flight: InFlight, g: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and weights that group `g` of this rank serves in this step."""
        inbound, groups = flight.inbound, self._my_groups()
        first = sum(len(group.lookups) for group in groups[:g])
        samples = sum(inbound.batches)
        offsets = inbound.offsets[first * samples : (first + len(groups[g].lookups)) * samples + 1]
        begin = sum(inbound.group_ids[:g])
        ids = slice(begin, begin + inbound.group_ids[g])
        return inbound.ids[ids], offsets - offsets[0], None if inbound.weights is None else inbound.weights[ids]

    def _look_up(self, group: TableGroup, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        return group.pooled(ids, offsets, weights) if self._pooled else group.sequence(ids, offsets)

    def _look_up_at_home(self, flight: InFlight, group: Group, tables: TableGroup) -> Iterator[tuple[int, Tensor]]:
        """Rows of this rank's own batch in tables that every rank holds."""
        kjt = flight.outbound.kjt.permute(list(group.lookups))
        rows = self._look_up(tables, kjt.values(), kjt.offsets(), kjt.weights().float() if self._weighted else None)
        return zip(group.lookups, self._split(rows, flight, group.lookups), strict=True)

    def _split(self, values: Tensor, flight: InFlight, lookups: Sequence[int]) -> tuple[Tensor, ...]:
        if self._pooled:
            return tuple(torch.split(values, self._routes.dims(lookups), dim=1))
        return tuple(torch.split(values, self._counts(flight, lookups)))

    def _counts(self, flight: InFlight, lookups: Sequence[int]) -> list[int]:
        counts = flight.outbound.kjt.length_per_key()
        return [counts[n] for n in lookups]

    def _sequence_dim(self) -> int:
        return self._routes.tables[0].dim if self._routes.tables else 0

    def _my_groups(self) -> tuple[Group, ...]:
        return self._routes.groups[self._env.rank]

    def _table_group(self, group: Group, device: torch.device) -> TableGroup:
        tables = [self._routes.tables[t] for t in group.tables]
        number = {t: k for k, t in enumerate(group.tables)}
        lookups = [self._routes.lookups[n] for n in group.lookups]
        return TableGroup(
            [TableShape(table.name, table.rows, table.dim) for table in tables],
            [LookupFeature(feature, number[t], self._routes.tables[t].mean) for feature, t in lookups],
            dtype=tables[0].dtype,
            device=device,
            optimizer=tables[0].optimizer,
            # rows travel as fp32; what arrives is cast
            policy=replace(self._policy, output_dtype=torch.float32),
        )

    @torch.no_grad()
    def _adopt_weights(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        marks: Sequence[Mark | None],
        device: torch.device,
    ) -> None:
        """Take over the module's weights (or initialise what was on meta); replicas become rank 0's."""
        configs = {config.name: config for config in module._configs}
        old = dict(zip(configs, module._table_parameters(), strict=True))
        params = {
            name: nn.Parameter(torch.empty(0, device=device), before.requires_grad) for name, before in old.items()
        }
        for group in (*self._groups, *self._dense_groups):
            for number, shape in enumerate(group.tables):
                view, before, init_fn = group.view(number), old[shape.name], configs[shape.name].init_fn
                if not before.is_meta:
                    view.copy_(before)
                elif init_fn is not None:
                    init_fn(view)
                params[shape.name].data = view
                group.parameters.append(params[shape.name])
        replicated = {t for group in (*self._my_groups(), *self._routes.dense) if group.replica for t in group.tables}
        for number in sorted(replicated):
            self._exchange.broadcast(params[self._routes.tables[number].name].data)
        children = nn.ModuleDict()
        for table, mark in zip(self._routes.tables, marks, strict=True):
            if mark is not None:
                mark_optimizer(params[table.name], *mark)
            children[table.name] = nn.Module()
            children[table.name].register_parameter("weight", params[table.name])
        self.add_module(self._children_name, children)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedCollection:
        children = self._modules[self._children_name]
        assert isinstance(children, nn.ModuleDict)
        move_tables([*self._groups, *self._dense_groups], children, fn)
        self._features = self._features.to(fn(torch.empty(0, device=self._features.device)).device)
        self._anchor = torch.zeros(1, device=self.device, requires_grad=True)
        return self


class ShardedEmbeddingBagCollection(ShardedCollection):
    """An `EmbeddingBagCollection` over several ranks: same inputs, same `KeyedTensor`, same parameter names."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look this rank's batch up, together with the other ranks. Raises as `begin`."""
        return self.finish(self.begin(features))

    def finish(self, flight: InFlight) -> KeyedTensor:
        """The second half of a forward."""
        names = [name for names in self._names_by_table for name in names]
        dims = self._routes.dims(range(len(names)))
        values = self.finish_values(flight)
        empty = torch.empty(flight.outbound.batch, 0, device=self.device)
        return KeyedTensor(names, dims, (torch.cat(values, dim=1) if values else empty).to(self._policy.output_dtype))


class ShardedEmbeddingCollection(ShardedCollection):
    """An `EmbeddingCollection` over several ranks: same inputs, same dict of `JaggedTensor`, same parameter names."""

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._need_indices = module.need_indices()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look this rank's batch up, together with the other ranks. Raises as `begin`."""
        return self.finish(self.begin(features))

    def finish(self, flight: InFlight) -> dict[str, JaggedTensor]:
        """The second half of a forward."""
        names = [name for names in self._names_by_table for name in names]
        kjt, found = flight.outbound.kjt, {}
        lengths = kjt.lengths().view(len(names), flight.outbound.batch) if names else kjt.lengths()
        begin = kjt.offset_per_key()
        for n, (name, rows) in enumerate(zip(names, self.finish_values(flight), strict=True)):
            ids = kjt.values()[begin[n] : begin[n + 1]] if self._need_indices else None
            found[name] = JaggedTensor(rows.to(self._policy.output_dtype), weights=ids, lengths=lengths[n])
        return found


class _Finish(torch.autograd.Function):
    """Rows of the exchanged lookups; its backward is the exchange back and the fused update."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, collection: ShardedCollection, flight: InFlight, lookups: list[int]
    ) -> Tensor:
        ctx.collection, ctx.flight, ctx.lookups = collection, flight, lookups
        return collection._assemble(flight, collection._serve(flight), lookups)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        ctx.collection._update(ctx.flight, *grad_outputs, ctx.lookups)
        return None, None, None, None


def _routes_of(
    module: EmbeddingBagCollection | EmbeddingCollection,
    shards: Sequence[Shard],
    world_size: int,
    default_optimizer: Mark,
) -> tuple[tuple[Routes, list[Mark | None]], int]:
    """Routes and the optimizer marks of the tables, and a fingerprint of what ranks must share."""
    tables, marks = _tables_of(module, shards, default_optimizer)
    validate(shards, {table.name: (table.rows, table.dim) for table in tables}, world_size)
    pooled = isinstance(module, EmbeddingBagCollection)
    weighted = isinstance(module, EmbeddingBagCollection) and module.is_weighted()
    return (plan_routes(tables, shards, world_size), marks), fingerprint(shards, (*tables, weighted, pooled))


def _tables_of(
    module: EmbeddingBagCollection | EmbeddingCollection, shards: Sequence[Shard], default_optimizer: Mark
) -> tuple[list[Table], list[Mark | None]]:
    """Tables and the optimizer marks they will carry; a frozen table has none, a cut one always has one otherwise."""
    replicated = {shard.table for shard in shards if shard.replica}
    tables, marks = [], []
    for config, param in zip(module._configs, module._table_parameters(), strict=True):
        mark = optimizer_of(param) if param.requires_grad else None
        if mark is None and param.requires_grad and config.name not in replicated:
            mark = default_optimizer
        spec: OptimizerSpec | None = None if mark is None else optimizer_spec(*mark, table=config.name)
        tables.append(
            Table(
                config.name, config.num_embeddings, config.embedding_dim, param.dtype, spec,
                tuple(config.feature_names), module._is_averaged(config),
            )
        )  # fmt: skip
        marks.append(mark)
    return tables, marks
