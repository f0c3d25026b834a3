"""Managed collision collections over ranks: each rank maps the ids of the table shards that it holds.

Ids travel as they are (hashed, if a module hashes them) to the ranks that hold their table, which profile and map them
there, so that a table that is whole or cut by columns has the slots and the bits of one process. Row shards divide the
ids [0, input_size) evenly, and each maps its part to its own rows, as if it were a table of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.embeddings import BaseEmbeddingConfig
from shardwise.embeddings.managed_collision import (
    BaseManagedCollisionEmbeddingCollection,
    BehindMaps,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    ManagedCollisionModule,
    change_ids,
    fresh_rows,
)
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

from ...planner.layout import CAPABILITIES, Shard, Span
from ..comms.agreement import agree
from ..comms.awaitable import LazyAwaitable
from ..comms.env import ShardingEnv
from ..engine.collection import ShardedCollection
from ..engine.id_map import IdMap, Renewal, unpack_mapped
from ..engine.stages import StagedModule, StepContext
from ..engine.state import (
    Piece,
    Value,
    publish,
    take,
)
from ..engine.step import Step
from ..plan.module_sharder import ModuleSharder
from ..plan.plan import ShardingType
from .behind_maps import BehindMapsSharder
from .nested import Nested
from .sharders import BaseEmbeddingSharder, EmbeddingBagCollectionSharder, EmbeddingCollectionSharder

# of a module's state, what is not a number per slot
_OF_MODULE = ("_output_segments_tensor", "_current_iter_tensor")


class SlotMap:
    """An id map: the rows of a table's shard by the managed collision module of this rank.

    Args:
        module: of this rank's row shard; None where it holds none.
        rows: of the table that the shard has.
        first_id: ids come counted from it.
        id_range: ids of the table are in [0, id_range), on all ranks.
    """

    def __init__(
        self,
        module: ManagedCollisionModule | None,
        config: BaseEmbeddingConfig,
        rows: Span,
        first_id: int,
        id_range: int,
    ) -> None:
        self._module, self._config, self._rows, self._first_id = module, config, rows, first_id
        self._id_range = id_range
        self._renewal: Renewal | None = None

    @property
    def id_range(self) -> int:
        """Ids of the table are in [0, id_range)."""
        return self._id_range

    @torch.no_grad()
    def translate(self, table: str, ids: Tensor, step: Tensor) -> Tensor:
        """The row of each id, once the batch was profiled; an id below 0, which a lenient policy let pass, keeps it."""
        assert self._module is not None
        inside = ids >= 0
        # host sync on CUDA: modules take the ids that there are
        known = ids[inside] + self._first_id
        lengths = torch.tensor([known.shape[0]], device="cpu").to(ids.device)
        features = self._module.profile({table: JaggedTensor(known, lengths=lengths)})
        slots = self._module.remap(features)[table].values()
        if slots.shape != known.shape:
            raise ValueError(
                f"table {table!r}: its managed collision module turned {known.shape[0]} ids into {slots.shape[0]}"
                " slots: where tables are sharded every id needs one"
            )
        rows = torch.full_like(ids, -1)
        rows[inside] = slots - self._rows[0]
        self._renewal = self._renewed()
        return rows

    def _renewed(self) -> Renewal | None:
        assert self._module is not None
        evicted = self._module.evict()
        if evicted is None or not evicted.numel():
            return None
        first, step = self._rows[0], self._module.batches_seen()
        return Renewal(evicted - first, fresh_rows(self._config, evicted.numel(), step, first_row=first))

    def renewal(self) -> Renewal | None:
        """Rows that the last batch gave to other ids."""
        return self._renewal


class ShardedManagedCollisionCollection(nn.Module):
    """The managed collision modules of the table shards on this rank, under the names of the unsharded collection.

    Its state dict has, on all ranks, each number per slot as a tensor in pieces over the ranks.

    Args:
        module: the unsharded collection. A module without ids is made anew for a row shard; one of a table that is
            whole on its rank, or cut by columns, goes on as it is.
        shards: of all tables and ranks.

    Raises:
        ValueError: a table is replicated, has several row shards on a rank, or is to be cut by rows though its module
            has ids.
    """

    _managed_collision_modules: nn.ModuleDict

    def __init__(
        self,
        module: ManagedCollisionCollection,
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.need_preprocess = module.need_preprocess
        self._embedding_configs, self._env, self._device = module.embedding_configs(), env, device
        self._maps: dict[str, SlotMap] = {}
        self._managed_collision_modules = nn.ModuleDict()
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        self._buffers_of: dict[str, dict[str, torch.dtype]] = {}
        modules = module.modules_by_table()
        for config in self._embedding_configs:
            self._place(config, modules[config.name], [shard for shard in shards if shard.table == config.name])
        # what hashes ids before they travel, without state
        self._hashing = {
            name: one.rebuild_with_output_id_range((0, 1), [0, 1])
            for name, one in modules.items()
            if module.need_preprocess and one.preprocesses
        }
        self.register_state_dict_post_hook(_publish)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take)  # type: ignore[no-untyped-call]

    def _place(self, config: BaseEmbeddingConfig, whole: ManagedCollisionModule, shards: Sequence[Shard]) -> None:
        name = config.name
        borders = sorted({shard.rows for shard in shards})
        strips = sorted({shard.cols for shard in shards})
        by_rank = {rank: {shard.rows for shard in shards if shard.rank == rank} for rank in range(self._env.world_size)}
        for rank, rows_of_rank in by_rank.items():
            if len(rows_of_rank) > 1:
                raise ValueError(f"table {name!r}: rank {rank} has row shards {sorted(rows_of_rank)}: give it one")
        mine = list(by_rank[self._env.rank])
        if len(borders) > 1 and whole.batches_seen():
            raise ValueError(
                f"table {name!r}: its managed collision module has learned ids, which row shards would divide among"
                " themselves: shard a new one, and load a state dict of row shards"
            )
        # column blocks of a row shard have the same map: each publishes its own
        self._pieces[name] = tuple(
            Piece(shard.rank, ((at + shard.rows[0], at + shard.rows[1]),))
            for shard in sorted(shards, key=lambda shard: (shard.cols, shard.rows))
            for at in (strips.index(shard.cols) * config.num_embeddings,)
        )
        transient = whole._non_persistent_buffers_set
        self._buffers_of[name] = {
            key: buffer.dtype for key, buffer in whole.named_buffers() if key not in transient and key not in _OF_MODULE
        }
        held: ManagedCollisionModule | None = None
        rows, part = (0, config.num_embeddings), -(-whole.input_size() // len(borders))
        if mine:
            rows = mine[0]
            held = whole
            if len(borders) > 1 or any(buffer.is_meta for buffer in whole.buffers()):
                ends = [low for low, _ in borders] + [config.num_embeddings]
                held = whole.rebuild_with_output_id_range(rows, ends, self._device).train(whole.training)
            self._managed_collision_modules[name] = held.to(self._device)
        first = borders.index(rows) * part if mine else 0
        self._maps[name] = SlotMap(held, config, rows, first, whole.input_size())

    def id_maps(self) -> dict[str, SlotMap]:
        """The map of each table."""
        return self._maps

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """Those of all tables."""
        return self._embedding_configs

    def preprocess(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Ids as they travel; `features` itself where nothing changes."""
        if not self._hashing:
            return features

        def hashed(table: str, ids: JaggedTensor) -> JaggedTensor:
            return self._hashing[table].preprocess({table: ids})[table] if table in self._hashing else ids

        return change_ids(features, self._embedding_configs, hashed)

    def open_slots(self) -> dict[str, Tensor]:
        """How many slots of this rank no id has yet, by table that has rows here."""
        return {name: one.open_slots() for name, one in self._managed_collision_modules.items()}  # type: ignore[operator]

    def value(self, table: str, name: str) -> Value:
        """A number per slot of a table: in pieces, one column block after another."""
        pieces, dtype = self._pieces[table], self._buffers_of[table][name]
        local = tuple(
            (piece, self._managed_collision_modules[table].get_buffer(name))
            for piece in pieces
            if piece.rank == self._env.rank
        )
        size = max(piece.box[0][1] for piece in pieces)
        slots = next(config.num_embeddings for config in self._embedding_configs if config.name == table)
        return Value((size,), pieces, local, dtype, self._device, rows=slots, alike=True)

    def values(self) -> Iterator[tuple[str, str, Value]]:
        """Table, name below this module, and value of all of them."""
        for table, names in self._buffers_of.items():
            for name in names:
                yield table, f"_managed_collision_modules.{table}.{name}", self.value(table, name)


class RemappedAwaitable(LazyAwaitable[KeyedJaggedTensor]):
    """The slots of a batch's ids, on their way back from the ranks that hold their tables."""

    awaited_type = KeyedJaggedTensor

    def __init__(self, collection: ShardedCollection, step: Step) -> None:
        super().__init__()
        self._collection, self._step = collection, step

    def _wait_impl(self) -> KeyedJaggedTensor:
        assert self._step.mapped is not None
        by_lookup = iter(unpack_mapped(self._step, self._collection._routes, self._step.mapped.wait()))
        features = {config.name: config.feature_names for config in self._collection._configs}

        def slots(table: str, ids: JaggedTensor) -> JaggedTensor:
            rows = torch.cat([next(by_lookup) for _ in features[table]])
            return JaggedTensor(rows.to(ids.values().dtype), lengths=ids.lengths())

        return change_ids(self._step.given, self._collection._configs, slots)


class ShardedManagedCollisionEmbeddings(
    BehindMaps[LazyAwaitable[Any], LazyAwaitable[KeyedJaggedTensor] | None], Nested
):
    """A managed collision embedding (bag) collection whose tables and maps are sharded: same inputs and names.

    Its output is a pair too: what is to come, and the remapped ids that are to come, or None. Ids leave as they are, or
    hashed, and find their slots where their table is; with `return_remapped_features` the slots travel back, numbered
    as rows of the whole table. An error takes the place of a batch, so that no rank waits for this one.
    """

    # those of the unsharded forward, which has them before its lookup
    _return_remapped_features = False

    def __init__(
        self,
        module: BaseManagedCollisionEmbeddingCollection,
        collection: ShardedCollection,
        maps: ShardedManagedCollisionCollection,
    ) -> None:
        super().__init__()
        self._managed_collision_collection = maps
        self._embedding_module = collection
        collection.returns_mapped = returns = module._return_remapped_features
        # slots travel back on all ranks or on none
        agree(collection._exchange, collection.device, lambda: (None, {"return_remapped_features": str(returns)}))
        self.train(module.training)

    def forward(
        self, features: Any, mutate_miss_lengths: bool = True
    ) -> tuple[LazyAwaitable[Any], LazyAwaitable[KeyedJaggedTensor] | None]:
        """Look the batch up, together with the other ranks. Raises as `ShardedCollection.forward`."""
        if isinstance(features, Proxy):
            return super().forward(features, mutate_miss_lengths)
        rows: Any
        rows, _ = super().forward(features, mutate_miss_lengths)
        # in a compiled graph rows are no promise of a step
        return rows, self._remapped(rows._step) if self._embedding_module.returns_mapped else None

    def _remapped(self, step: Step) -> LazyAwaitable[KeyedJaggedTensor] | None:
        collection = self._embedding_module
        return RemappedAwaitable(collection, step) if collection.returns_mapped else None

    def _rows_of(self, slots: KeyedJaggedTensor | Exception) -> LazyAwaitable[Any]:
        return self._embedding_module(slots)  # type: ignore[no-any-return]

    def _remap(
        self, features: KeyedJaggedTensor | Exception, mutate_miss_lengths: bool = True
    ) -> KeyedJaggedTensor | Exception:
        if isinstance(features, Exception):
            return features
        try:
            return self._managed_collision_collection.preprocess(features)  # type: ignore[no-any-return]
        except Exception as error:
            return error

    def _parts(self) -> list[StagedModule[Any]]:
        return [self._embedding_module]

    def start(self, features: KeyedJaggedTensor | Exception) -> list[Any]:
        """Route this rank's batch and tell all ranks its sizes; its ids find their slots where their table is."""
        return super().start(self._remap(features))

    def output_dist(
        self, ctx: StepContext, output: list[Any]
    ) -> tuple[LazyAwaitable[Any], LazyAwaitable[KeyedJaggedTensor] | None]:
        """What is to come, and the remapped ids, or None."""
        return super().output_dist(ctx, output), self._remapped(output[0])


class ShardedManagedCollisionEmbeddingBagCollection(ShardedManagedCollisionEmbeddings):
    """A `ManagedCollisionEmbeddingBagCollection` over several ranks."""

    _unsharded_type = ManagedCollisionEmbeddingBagCollection


class ShardedManagedCollisionEmbeddingCollection(ShardedManagedCollisionEmbeddings):
    """A `ManagedCollisionEmbeddingCollection` over several ranks."""

    _unsharded_type = ManagedCollisionEmbeddingCollection


def _publish(collection: ShardedManagedCollisionCollection, destination: dict[str, Any], prefix: str, _: Any) -> None:
    for _, name, value in collection.values():
        destination[prefix + name] = publish(value, collection._env)


def _take(collection: ShardedManagedCollisionCollection, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: fill this rank's modules, which then load what they have."""
    held = collection._managed_collision_modules
    filled = [
        (table, name, take(f"table {table!r} ({prefix + name})", value, state_dict[prefix + name], collection._env))
        for table, name, value in collection.values()
        if prefix + name in state_dict
    ]
    for table, name, fill in filled:
        if table in held:
            fill()
            state_dict[prefix + name] = collection.get_buffer(name)
    for config in collection._embedding_configs:
        below = f"{prefix}_managed_collision_modules.{config.name}."
        for name in list(state_dict) if config.name not in held else ():
            if name.startswith(below):
                del state_dict[name]


C = TypeVar("C", bound=BaseManagedCollisionEmbeddingCollection)

# replicas would each give slots to the ids of their own batches
_SERVED = (
    ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.ROW_WISE,
)  # fmt: skip


class ManagedCollisionCollectionSharder(ModuleSharder[ManagedCollisionCollection]):
    """What places the managed collision modules of a collection; part of the sharders of whole collections."""

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """`ManagedCollisionCollection`."""
        return ManagedCollisionCollection

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Table-wise, by columns and by rows; TorchRec has row-wise alone."""
        return [kind.value for kind in _SERVED if kind.value in CAPABILITIES[compute_device_type]]

    def shard(  # type: ignore[override]
        self,
        module: ManagedCollisionCollection,
        params: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedManagedCollisionCollection:
        """The modules of this rank, for the shards of all tables. Raises as `ShardedManagedCollisionCollection`."""
        return ShardedManagedCollisionCollection(module, params, env, torch.device(device or "cpu"))


class _ManagedCollisionSharder(BehindMapsSharder[C, ShardedManagedCollisionEmbeddings]):
    """What the two sharders have in common."""

    _apart = "give slots to ids of their own batches"

    def __init__(
        self,
        inner: BaseEmbeddingSharder[Any] | None,
        mc_sharder: ManagedCollisionCollectionSharder | None,
        fused_params: dict[str, Any] | None,
        qcomm_codecs_registry: Mapping[str, Any] | None,
        default: type[BaseEmbeddingSharder[Any]],
    ) -> None:
        if inner is not None and (fused_params is not None or qcomm_codecs_registry is not None):
            raise ValueError(
                "fused_params and qcomm_codecs_registry: the sharder that is given has its own; give it those"
            )
        self._mc_sharder = mc_sharder or ManagedCollisionCollectionSharder()
        super().__init__(inner or default(fused_params, qcomm_codecs_registry))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Those of both."""
        served = self._mc_sharder.sharding_types(compute_device_type)
        return [kind for kind in self._e_sharder.sharding_types(compute_device_type) if kind in served]

    def _collection_of(self, module: C) -> nn.Module:
        return module._embedding_module

    def _shard_maps(
        self, module: C, shards: Sequence[Shard], env: ShardingEnv, device: torch.device, module_fqn: str | None
    ) -> tuple[nn.Module, Mapping[str, IdMap]]:
        maps = self._mc_sharder.shard(module._managed_collision_collection, shards, env, device, module_fqn)
        return maps, maps.id_maps()


class ManagedCollisionEmbeddingBagCollectionSharder(_ManagedCollisionSharder[ManagedCollisionEmbeddingBagCollection]):
    """The sharder of `ManagedCollisionEmbeddingBagCollection`.

    Args:
        ebc_sharder: what shards the collection; by default one with these settings.
        mc_sharder: what places the managed collision modules.
        fused_params, qcomm_codecs_registry: as `BaseEmbeddingSharder`.
    """

    _module_type = ManagedCollisionEmbeddingBagCollection

    _sharded_type = ShardedManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(ebc_sharder, mc_sharder, fused_params, qcomm_codecs_registry, EmbeddingBagCollectionSharder)


class ManagedCollisionEmbeddingCollectionSharder(_ManagedCollisionSharder[ManagedCollisionEmbeddingCollection]):
    """The sharder of `ManagedCollisionEmbeddingCollection`; arguments as those of the sharder of bags."""

    _module_type = ManagedCollisionEmbeddingCollection

    _sharded_type = ShardedManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: EmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(ec_sharder, mc_sharder, fused_params, qcomm_codecs_registry, EmbeddingCollectionSharder)
