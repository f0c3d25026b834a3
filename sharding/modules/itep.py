"""Embedding pruning over ranks: each rank prunes the table shards that it holds.

Ids travel as they are to the ranks that hold their table, which count and map them there, so that a table that is whole
or cut by columns has the rows and the bits of one process. Row shards divide the ids [0, unpruned hash size) evenly,
and each prunes its part as if it were a table of its own: the first of its rows serves those of its ids that have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.embeddings import BaseEmbeddingConfig
from shardwise.embeddings.pruning import (
    GenericITEPModule,
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
    check_addresses,
    counts_at,
    first_addresses,
    id_counts,
    prune_rows,
    prunes_at,
)
from shardwise.embeddings.pruning.address_lookup import resets_at
from shardwise.embeddings.pruning.itep_embedding_modules import PrunedCollection
from shardwise.embeddings.pruning.itep_modules import ADDRESSES, UTILIZATION, pruned_tables

from ...planner.layout import CAPABILITIES, Shard, Span
from ..comms.env import ShardingEnv
from ..engine.collection import ShardedCollection
from ..engine.id_map import IdMap, Renewal
from ..engine.stages import StagedModule
from ..engine.state import Piece, Value, copied, publish, take
from ..plan.plan import ShardingType
from .behind_maps import BehindMapsSharder
from .nested import Nested
from .sharders import BaseEmbeddingSharder, EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

# replicas would each prune by the ids of their own batches
_SERVED = (
    ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
)  # fmt: skip


@dataclass(frozen=True)
class PrunedShard:
    """This rank's part of a pruned table: rows [low, high) for ids [first, last)."""

    config: BaseEmbeddingConfig
    rows: Span
    ids: Span


class AddressMap:
    """An id map: rows of a table's shard by the addresses of `module`; `shard` is None on ranks without one."""

    def __init__(self, module: ShardedITEPModule, table: str, shard: PrunedShard | None, id_range: int) -> None:
        self._module, self._table, self._shard, self._id_range = module, table, shard, id_range
        self.iteration = 0
        self._counts = False
        self._freed: Renewal | None = None

    @property
    def id_range(self) -> int:
        """Ids of the table are in [0, id_range)."""
        return self._id_range

    def begin_step(self) -> None:
        """Have rows change hands where it is time to."""
        self._counts, self._freed = False, None
        if not self._module.training:
            return
        iteration, interval = self.iteration, self._module.pruning_interval
        self.iteration += 1
        self._counts = counts_at(iteration)
        if self._shard is None or not prunes_at(iteration, interval):
            return
        (low, high), addresses = self._shard.rows, self._module.of(self._table, ADDRESSES)
        utilization = self._module.of(self._table, UTILIZATION)
        freed = prune_rows(addresses, utilization, high - low, iteration, interval, low)
        ratios = {self._table: freed.numel() / addresses.shape[0]} if freed.numel() else {}
        with self._module.pruning_logger.pruning_logger(event="ITEP_EVICTION") as details:
            details.table_to_pruned_ratio = ratios
        if freed.numel() and resets_at(iteration, interval):
            zeros = torch.zeros(freed.numel(), self._shard.config.embedding_dim, device=freed.device)
            self._freed = Renewal(freed - low, zeros)

    @torch.no_grad()
    def translate(self, table: str, ids: Tensor, step: Tensor) -> Tensor:
        """The row of each id; an id below 0, which a lenient policy let pass, keeps it."""
        assert self._shard is not None
        addresses = self._module.of(table, ADDRESSES)
        if self._counts:
            # host sync on CUDA, in batches that are counted
            known = ids[ids >= 0]
            self._module.of(table, UTILIZATION).add_(id_counts(known, addresses.shape[0]))
        rows = addresses[ids.clamp(min=0)] - self._shard.rows[0]
        return torch.where(ids >= 0, rows, ids)

    def renewal(self) -> Renewal | None:
        """Rows that changed hands before this step."""
        return self._freed


class ShardedITEPModule(nn.Module):
    """The addresses and utilizations of the table shards on this rank, under the names of the unsharded module.

    Its state dict has, on all ranks, those of each table as a tensor in pieces over the ranks. Addresses are rows of
    the whole table.

    Raises:
        ValueError: a pruned table is replicated, has several row shards on a rank, a shard with ids and without rows,
            or is cut by rows though it has been pruned; or as `pruned_tables`.
    """

    def __init__(
        self,
        module: GenericITEPModule,
        configs: Sequence[BaseEmbeddingConfig],
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.pruning_interval, self.pruning_logger = module.pruning_interval, module.pruning_logger
        self._env, self._device = env, device
        self.maps: dict[str, AddressMap] = {}
        self._shards: dict[str, PrunedShard] = {}
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        sizes = pruned_tables(configs, module.table_name_to_unpruned_hash_sizes) if module.enable_pruning else {}
        for config in configs:
            if config.name in sizes:
                of_table = [shard for shard in shards if shard.table == config.name]
                self._place(config, sizes[config.name], of_table, module)
        self.register_state_dict_post_hook(_publish)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take)  # type: ignore[no-untyped-call]

    def _place(self, config: BaseEmbeddingConfig, ids: int, shards: Sequence[Shard], module: GenericITEPModule) -> None:
        name = config.name
        borders, strips = sorted({shard.rows for shard in shards}), sorted({shard.cols for shard in shards})
        if any(shard.replica for shard in shards):
            raise ValueError(f"table {name!r}: replicas of it would be pruned apart: shard it table_wise or row_wise")
        block = -(-ids // len(borders))
        parts = {
            rows: (min(number * block, ids), min((number + 1) * block, ids)) for number, rows in enumerate(borders)
        }
        for (low, high), (first, last) in parts.items():
            if low == high and first < last:
                raise ValueError(
                    f"table {name!r}: a row shard has ids [{first}, {last}) and no rows: shard it over fewer ranks"
                )
        mine = sorted({shard.rows for shard in shards if shard.rank == self._env.rank})
        if len(mine) > 1:
            raise ValueError(f"table {name!r}: rank {self._env.rank} has row shards {mine}: give it one")
        # column blocks of a row shard have the same addresses: each publishes its own
        self._pieces[name] = tuple(
            Piece(shard.rank, ((at + parts[shard.rows][0], at + parts[shard.rows][1]),))
            for shard in sorted(shards, key=lambda shard: (shard.cols, shard.rows))
            for at in (strips.index(shard.cols) * ids,)
            if parts[shard.rows][0] < parts[shard.rows][1]
        )
        whole = dict(module.named_buffers()).get(f"{name}_{ADDRESSES}")
        held = None
        if mine:
            held = self._shards[name] = PrunedShard(config, mine[0], parts[mine[0]])
            (low, high), (first, last) = held.rows, held.ids
            addresses = first_addresses(last - first, high - low, self._device, low)
            utilization = torch.zeros(last - first, device=self._device)
            if whole is not None and len(borders) == 1:
                addresses.copy_(whole)
                utilization.copy_(module.get_buffer(f"{name}_{UTILIZATION}"))
            self.register_buffer(f"{name}_{ADDRESSES}", addresses)
            self.register_buffer(f"{name}_{UTILIZATION}", utilization)
        if whole is not None and len(borders) > 1:
            untouched = first_addresses(ids, config.num_embeddings, whole.device)
            if bool((whole != untouched).any() | module.get_buffer(f"{name}_{UTILIZATION}").any()):
                raise ValueError(
                    f"table {name!r}: it has been trained with pruning, and row shards prune by themselves: shard a"
                    " new one, and load a state dict of row shards"
                )
        self.maps[name] = AddressMap(self, name, held, ids)

    def of(self, table: str, what: str) -> Tensor:
        """This rank's part of a table's addresses or utilizations."""
        return self.get_buffer(f"{table}_{what}")

    def value(self, table: str, what: str) -> Value:
        """Addresses or utilizations of a table: in pieces, one column block after another."""
        pieces, ids = self._pieces[table], self.maps[table].id_range
        local = tuple((piece, self.of(table, what)) for piece in pieces if piece.rank == self._env.rank)
        dtype = torch.int64 if what == ADDRESSES else torch.float32
        size = max(piece.box[0][1] for piece in pieces)
        return Value((size,), pieces, local, dtype, self._device, rows=ids, alike=True)


def _publish(module: ShardedITEPModule, destination: dict[str, Any], prefix: str, _: Any) -> None:
    for table in module.maps:
        for what in (ADDRESSES, UTILIZATION):
            name = f"{prefix}{table}_{what}"
            # in one order on all ranks, whichever tables they hold
            destination.pop(name, None)
            destination[name] = publish(module.value(table, what), module._env)


def _take(module: ShardedITEPModule, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: fill this rank's parts, which then load what they have."""
    for table in module.maps:
        shard = module._shards.get(table)
        for what in (ADDRESSES, UTILIZATION):
            name = f"{prefix}{table}_{what}"
            if name not in state_dict:
                continue
            value = module.value(table, what)
            loaded = copied(value)
            take(f"table {table!r} ({name})", loaded, state_dict[name], module._env)()
            if shard is None:
                del state_dict[name]
                continue
            for _piece, part in loaded.tensors()[:1]:
                if what == ADDRESSES:
                    low, high = shard.rows
                    check_addresses(f"table {table!r} ({name})", part, low, high - low)
                module.of(table, what).copy_(part)
            state_dict[name] = module.of(table, what)


class ShardedPrunedCollection(Nested):
    """An ITEP collection whose tables and addresses are sharded: same inputs, outputs and names.

    `_iter` of its state dict is how many batches it was trained on.
    """

    _collection_name: str
    _iter: Tensor

    def __init__(self, module: PrunedCollection, collection: ShardedCollection, maps: ShardedITEPModule) -> None:
        super().__init__()
        self.add_module(self._collection_name, collection)
        self._itep_module = maps
        self.register_buffer("_iter", module._iter.detach().cpu().clone())
        self._follow(int(self._iter))
        self.train(module.training)
        self.register_state_dict_pre_hook(_count)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_recount)  # type: ignore[no-untyped-call]

    def forward(self, features: Any) -> Any:
        """Look this rank's batch up, together with the other ranks; its ids get their rows where their table is.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as the unsharded module, on all ranks.
        """
        return self.get_submodule(self._collection_name)(features)

    def _parts(self) -> list[StagedModule[Any]]:
        part = self.get_submodule(self._collection_name)
        assert isinstance(part, StagedModule)
        return [part]

    def _follow(self, iteration: int) -> None:
        for id_map in self._itep_module.maps.values():
            id_map.iteration = iteration


def _count(module: ShardedPrunedCollection, *_: Any) -> None:
    """Before `state_dict`: the iteration of the maps."""
    for id_map in module._itep_module.maps.values():
        module._iter.fill_(id_map.iteration)


def _recount(module: ShardedPrunedCollection, _: Any) -> None:
    """After `load_state_dict`: the maps go on from the iteration that was loaded."""
    module._follow(int(module._iter))


class ShardedITEPEmbeddingBagCollection(ShardedPrunedCollection):
    """An `ITEPEmbeddingBagCollection` over several ranks."""

    _unsharded_type = ITEPEmbeddingBagCollection
    _collection_name = "_embedding_bag_collection"


class ShardedITEPEmbeddingCollection(ShardedPrunedCollection):
    """An `ITEPEmbeddingCollection` over several ranks."""

    _unsharded_type = ITEPEmbeddingCollection
    _collection_name = "_embedding_collection"


C = TypeVar("C", bound=PrunedCollection)


class _PrunedSharder(BehindMapsSharder[C, ShardedPrunedCollection]):
    """What the two sharders have in common."""

    _apart = "prune by the ids of their own batches"

    def __init__(
        self,
        inner: BaseEmbeddingSharder[Any] | None,
        qcomm_codecs_registry: Mapping[str, Any] | None,
        default: type[BaseEmbeddingSharder[Any]],
    ) -> None:
        if inner is not None and qcomm_codecs_registry is not None:
            raise ValueError("qcomm_codecs_registry: the ebc_sharder that is given has its own; give it to that one")
        super().__init__(inner or default(qcomm_codecs_registry=qcomm_codecs_registry))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All but replicas and what cuts a table by rows and columns."""
        served = [kind.value for kind in _SERVED if kind.value in CAPABILITIES[compute_device_type]]
        return [kind for kind in self._e_sharder.sharding_types(compute_device_type) if kind in served]

    def _collection_of(self, module: C) -> nn.Module:
        return module.get_submodule(module._collection_name)

    def _shard_maps(
        self, module: C, shards: Sequence[Shard], env: ShardingEnv, device: torch.device, module_fqn: str | None
    ) -> tuple[nn.Module, Mapping[str, IdMap]]:
        configs: Sequence[BaseEmbeddingConfig] = self._collection_of(module)._configs  # type: ignore[assignment]
        maps = ShardedITEPModule(module._itep_module, configs, shards, env, device)
        return maps, maps.maps


class ITEPEmbeddingBagCollectionSharder(_PrunedSharder[ITEPEmbeddingBagCollection]):
    """The sharder of `ITEPEmbeddingBagCollection`.

    Args:
        ebc_sharder: what shards the collection; by default one with these codecs.
        qcomm_codecs_registry: as `ModuleSharder`.
    """

    _module_type = ITEPEmbeddingBagCollection
    _sharded_type = ShardedITEPEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(ebc_sharder, qcomm_codecs_registry, EmbeddingBagCollectionSharder)


class ITEPEmbeddingCollectionSharder(_PrunedSharder[ITEPEmbeddingCollection]):
    """The sharder of `ITEPEmbeddingCollection`; arguments as those of the sharder of bags."""

    _module_type = ITEPEmbeddingCollection
    _sharded_type = ShardedITEPEmbeddingCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingCollectionSharder | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(ebc_sharder, qcomm_codecs_registry, EmbeddingCollectionSharder)
