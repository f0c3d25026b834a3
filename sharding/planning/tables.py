"""The tables of a model as the planner reads them: sizes, types, features, optimizers, and what their sharders can do.

A module with a sharder counts once, at the first of its paths, as where it is sharded. Its tables are those of the
collections in it; a matrix that its sharder places and that lies in no collection counts as a pooled table with one
feature; whatever else a sharder places is replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.embeddings import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    dtype_to_data_type,
    optimizer_of,
)
from shardwise.embeddings.quant import QuantizedCollection
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.cache import MissCurve
from shardwise.planner.cost.model import CostModel
from shardwise.planner.cost.ways import Way
from shardwise.planner.plan.whatif import at
from shardwise.planner.search.problem import Choice
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import Topology

from ...planner.layout import CAPABILITIES, TIERED_KERNELS
from ..modules.placement import collections_in, find_modules
from ..modules.sharders import BaseEmbeddingSharder
from ..plan.module_sharder import ModuleSharder
from ..plan.plan import ShardingType, tables_of

DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


@dataclass(frozen=True)
class ModelTable(Table):
    """A table of a model.

    Args:
        ways: the sharding types that its sharder offers, each with a compute kernel.
        is_ours: our engine shards it; a sharder of somebody else's may do with a plan's settings what it likes.
    """

    ways: tuple[tuple[str, str], ...] = ()
    is_ours: bool = True


@dataclass(frozen=True)
class ModelTables:
    """The tables of a model that a plan places.

    Args:
        tables: those that the planner chooses a way for, in the order of the model.
        replicated: module path and name of what can only be on every rank.
        modules: those that have them, by path.
        parameters: the tables, by `Table.path`.
    """

    tables: tuple[ModelTable, ...]
    replicated: tuple[tuple[str, str], ...]
    modules: Mapping[str, nn.Module]
    parameters: Mapping[str, nn.Parameter]


def tables_of_model(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    compute_device: str,
    may_replicate: Sequence[str] = (),
) -> ModelTables:
    """The tables of a model's modules that have a sharder.

    Args:
        compute_device: "cpu", "cuda" or "mtia".
        may_replicate: names of tables that may be data_parallel though that changes how they train. All others are only
            if they have an optimizer in the backward, which every replica then applies, or do not train, or their
            sharder offers nothing else: a replica without one leaves its gradient to the optimizer of the dense layers,
            whatever its sharder's default is.
    """
    tables: list[ModelTable] = []
    replicated: list[tuple[str, str]] = []
    modules: dict[str, nn.Module] = {}
    parameters: dict[str, nn.Parameter] = {}
    for paths, child, sharder in find_modules(module, sharders):
        modules[paths[0]] = child
        known = {table.name: (table, pooled, weighted) for table, pooled, weighted in _configs(child)}
        for name, param in sharder.shardable_parameters(child).items():
            served = isinstance(child, QuantizedCollection)
            ways = _ways(sharder, param, compute_device, name in may_replicate, served=served)
            if param.dim() != 2:
                replicated.append((paths[0], name))
                continue
            rows, dim = param.shape
            pooled = weighted = True
            features: tuple[Feature, ...] = (Feature(name),)
            data_type = _data_type(param)
            if name in known:
                config, pooled, weighted = known[name]
                features = tuple(map(Feature, config.feature_names or [config.name]))
                data_type = config.data_type if served else data_type
            table = ModelTable(
                name, rows, dim, data_type, features, pooled, weighted, _optimizer(sharder, param), paths[0],
                served=served, ways=ways, is_ours=served or isinstance(sharder, BaseEmbeddingSharder),
            )  # fmt: skip
            tables.append(table)
            parameters[table.path] = param
    return ModelTables(tuple(tables), tuple(replicated), modules, parameters)


class OfModel:
    """A cost model that knows what the sharders of a model's tables can do; `cost` prices it."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost

    @property
    def name(self) -> str:
        """That of `cost`."""
        return self._cost.name

    @property
    def constants(self) -> object:
        """Those of `cost`, if it has any."""
        return getattr(self._cost, "constants", None)

    def ways(self, table: Table, constraint: ParameterConstraints | None = None) -> Sequence[Way]:
        """Those of `cost` that the table's sharder offers."""
        if not isinstance(table, ModelTable):
            return self._cost.ways(table, constraint)
        asked = constraint if "fused" in _cut_kernels(table) else _offered(table, constraint)
        ways = _known(table, self._cost.ways(table, asked), constraint)
        if ways or asked is not constraint:
            return ways
        # cuts into one part are left out beside plainer ways, which this sharder may not offer
        return _known(table, self._cost.ways(table, _offered(table, constraint)), constraint)

    def price(self, table: Table, way: Way) -> Choice:
        """As `cost`."""
        return self._cost.price(table, way)

    def base_ms(self, tables: Sequence[Table]) -> float:
        """As `cost`."""
        return self._cost.base_ms(tables)

    @property
    def caches(self) -> object:
        """What `cost` knows of caches, if it does."""
        return getattr(self._cost, "caches", None)

    def curve(self, table: Table) -> MissCurve:
        """The misses of a table's cache, as `cost` has them."""
        return self._cost.curve(table)  # type: ignore[attr-defined,no-any-return]

    def with_slots(self, slots: Mapping[str, int]) -> OfModel:
        """The same with further sizes of caches, where `cost` chooses slots."""
        with_slots = getattr(self._cost, "with_slots", None)
        return self if with_slots is None else OfModel(with_slots(slots))

    def at(self, topology: Topology, batch_size: int) -> OfModel:
        """The same for other machines."""
        return OfModel(at(self._cost, topology, batch_size))


def _known(table: ModelTable, ways: Iterable[Way], constraint: ParameterConstraints | None) -> list[Way]:
    """Those that the table's sharder has; with rows below the device only where they are asked for, or all there is."""
    known = [way for way in ways if (way.sharding_type, way.compute_kernel) in table.ways]
    named = (constraint.compute_kernels if constraint else None) or ()
    wanted = [way for way in known if way.compute_kernel not in TIERED_KERNELS or way.compute_kernel in named]
    return wanted or known


def _cut_kernels(table: ModelTable) -> set[str]:
    return {kernel for kind, kernel in table.ways if kind != DATA_PARALLEL}


def _offered(table: ModelTable, constraint: ParameterConstraints | None) -> ParameterConstraints | None:
    """A constraint, and what the table's sharder leaves of it."""
    if table.served or not table.ways:
        return constraint
    types = list(dict.fromkeys(kind for kind, _ in table.ways))
    kernels = list(dict.fromkeys(kernel for _, kernel in table.ways))
    asked = constraint or ParameterConstraints()
    if asked.sharding_types is not None:
        types = [kind for kind in asked.sharding_types if kind in types]
    if asked.compute_kernels is not None:
        kernels = [kernel for kernel in asked.compute_kernels if kernel in kernels]
    return replace(asked, sharding_types=types, compute_kernels=kernels)


def _configs(module: nn.Module) -> Iterator[tuple[BaseEmbeddingConfig, bool, bool]]:
    """The configs in a module, each with whether its bags are pooled and whether its ids have weights."""
    if isinstance(module, QuantizedCollection):
        pooled = isinstance(module, EmbeddingBagCollectionInterface)
        for config in module._configs:
            yield config, pooled, isinstance(module, EmbeddingBagCollectionInterface) and module.is_weighted()
    for collection in collections_in(module):
        pooled = isinstance(collection, EmbeddingBagCollection)
        weighted = isinstance(collection, EmbeddingBagCollection) and collection.is_weighted()
        assert pooled or isinstance(collection, EmbeddingCollection)
        for config in tables_of(collection):
            yield config, pooled, weighted


def _ways(
    sharder: ModuleSharder[Any], param: nn.Parameter, compute_device: str, may_replicate: bool, *, served: bool
) -> tuple[tuple[str, str], ...]:
    # a replica of a table that is served would be on one device alone: that of outputs, whatever its memory
    types = sharder.sharding_types(compute_device)
    keeps = may_replicate or not (served or param.requires_grad) or optimizer_of(param) is not None
    is_ours = isinstance(sharder, BaseEmbeddingSharder)
    return tuple(
        (kind, kernel)
        for kind in types
        if kind != DATA_PARALLEL or keeps or not (is_ours or served) or types == [DATA_PARALLEL]
        for kernel in _kernels(sharder, kind, compute_device)
    )


def _kernels(sharder: ModuleSharder[Any], kind: str, compute_device: str) -> Sequence[str]:
    """The kernels of a sharder; of ours all that the engine runs, unless it offers others of them than the usual."""
    offered, trains = sharder.compute_kernels(kind, compute_device), CAPABILITIES.get(compute_device, {}).get(kind, ())
    if not isinstance(sharder, BaseEmbeddingSharder):
        return offered
    chosen = [kernel for kernel in offered if kernel in trains]
    return trains if chosen in ([], list(trains[:1])) else chosen


def _optimizer(sharder: ModuleSharder[Any], param: nn.Parameter) -> str | None:
    """The class name of what trains a table in its backward."""
    if not param.requires_grad:
        return None
    mark = optimizer_of(param)
    if mark is None and isinstance(sharder, BaseEmbeddingSharder):
        mark = sharder.default_optimizer
    return None if mark is None else mark[0].__name__


def _data_type(param: nn.Parameter) -> DataType:
    # others are counted as the widest
    return dtype_to_data_type(param.dtype) if param.dtype in (torch.float16, torch.bfloat16) else DataType.FP32
