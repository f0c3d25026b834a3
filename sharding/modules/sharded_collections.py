"""`ShardedEmbeddingBagCollection` and `ShardedEmbeddingCollection`: the engine behind the two collections.

A forward sends the rows off and returns at once; its result waits for those of other ranks when it is first used, so
that layers which do not need it run meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shardwise.embeddings import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    pick_features,
)
from shardwise.embeddings.tables.table_layout import weights_bytes_in_emb_kernel
from shardwise.embeddings.tables.variable_batch import expand_bags, expand_pooled, inverse_of
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ..comms.awaitable import LazyAwaitable, W
from ..comms.env import ShardingEnv
from ..compiled.step import Batch
from ..engine.collection import ShardedCollection
from ..engine.reshard import reshard_by_plan
from ..engine.route import expand_rows
from ..engine.settings import cast_sums
from ..engine.step import Step
from ..engine.wire import CutGradient
from ..plan.plan import ParameterSharding

# says what each rank holds of a pooled collection, at level INFO
logger = logging.getLogger(__name__)


class StepAwaitable(LazyAwaitable[W]):
    """The result of a batch that is on its way: what its collection's `finish` makes of it."""

    def __init__(self, collection: Any, step: Step) -> None:
        super().__init__()
        self._collection, self._step = collection, step

    def _wait_impl(self) -> W:
        result: W = self._collection.finish(self._step)
        return result


class EmbeddingBagCollectionAwaitable(StepAwaitable[KeyedTensor]):
    """The `KeyedTensor` of a batch that is on its way."""

    awaited_type = KeyedTensor


class EmbeddingCollectionAwaitable(StepAwaitable[dict[str, JaggedTensor]]):
    """The rows of a batch that are on their way, by feature."""

    awaited_type = dict


class Resharded(ShardedCollection):
    """A collection whose tables may go over to another plan by TorchRec's call for it."""

    def update_shards(
        self,
        changed_sharding_params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
    ) -> None:
        """As `reshard`, by TorchRec's name: a plan of the tables that change; all ranks call it, no batch under way.

        Of a model in `DistributedModelParallel` its `reshard` keeps the plan of the model up to date too.

        Raises:
            ValueError: as `reshard.reshard`, or `env` and `device` are others than those of the tables.
        """
        if env.process_group is not self._env.process_group:
            raise ValueError("update_shards: env must have the process group over which the tables are sharded")
        if device is not None and torch.device(device).type != self.device.type:
            raise ValueError(f"update_shards: tables are on {self.device}, got {device}; move the module by .to()")
        reshard_by_plan(self, changed_sharding_params)


class ShardedEmbeddingBagCollection(Resharded):
    """An `EmbeddingBagCollection` over several ranks: same inputs, same `KeyedTensor`, same parameter names."""

    _awaitable: type[Any] = EmbeddingBagCollectionAwaitable
    _unsharded_type: type[nn.Module] = EmbeddingBagCollection

    if TYPE_CHECKING:

        def forward(self, features: KeyedJaggedTensor | Exception) -> LazyAwaitable[KeyedTensor]:
            """That of `ShardedCollection`, which does not know the type."""
            ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = [name for names in self._names_by_table for name in names]
        held = weights_bytes_in_emb_kernel(self)
        logger.info("sharded: rank %d holds %d bytes of %d tables", self._env.rank, held, len(self._names_by_table))
        # checked once; each output has its own values
        self._output = KeyedTensor(names, self._routes.dims, torch.empty(0, sum(self._routes.dims), device="cpu"))

    @property
    def _embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the tables, by the name of TorchRec's attribute."""
        return cast(list[EmbeddingBagConfig], self._configs)

    @staticmethod
    def extend_shard_name(shard_name: str) -> str:
        """The parameter of a table, by its name below this module."""
        return f"embedding_bags.{shard_name}.weight"

    def read_later(self, step: Step) -> tuple[str, ...]:
        """Which tensors of its batch a step that was started still reads: all others may be freed."""
        return ("values", "weights", "lengths", "offsets") if self.returns_mapped else ()

    def finish(self, step: Step) -> KeyedTensor:
        """The result of a batch, the second half of its forward.

        Raises:
            OverflowError: a number does not fit a compressed exchange; on all ranks.
        """
        values, dims = self.exchanged(step), self._routes.dims
        if self._routes.dense:
            pieces = {**self.wire.by_lookup(step, values), **self.dense_rows(step)}
            values = torch.cat([pieces[lookup] for lookup in range(len(dims))], dim=1)
        if step.given.inverse_indices_or_none() is not None:
            values = expand_pooled(values, dims, inverse_of(step.given, self._routes.features))
        if self._output_dtype is None:
            values = cast_sums(values, dims, self._output_dtypes)
        else:
            values = values.to(self._output_dtype)
        return self._output.with_values(values)

    def eager_outputs(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """[values]; see `ShardedCollection`."""
        return [self.finish(self.begin(features)).values()]

    def fake_outputs(self, batch: Batch) -> list[Tensor]:
        """[values [B, sum of dims]]."""
        size = batch.batch_sizes()[0] if batch.inverse is None else batch.inverse.shape[1]
        dtype = reduce(torch.promote_types, self._output_dtypes, self._output_dtypes[0])
        return [torch.empty(size, sum(self._routes.dims), dtype=dtype, device=self.device)]

    def result_of(self, outputs: list[Tensor]) -> Any:
        """A `KeyedTensor` of the values [B, D], the one output."""
        return self._output.with_values(outputs[0])


class ShardedFusedEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """A `FusedEmbeddingBagCollection` over several ranks: its tables train with the optimizer that it brought."""

    _unsharded_type = FusedEmbeddingBagCollection


class ShardedEmbeddingCollection(Resharded):
    """An `EmbeddingCollection` over several ranks: same inputs, same dict of `JaggedTensor`, same parameter names."""

    _awaitable = EmbeddingCollectionAwaitable
    _unsharded_type: type[nn.Module] = EmbeddingCollection

    if TYPE_CHECKING:

        def forward(self, features: KeyedJaggedTensor | Exception) -> LazyAwaitable[dict[str, JaggedTensor]]:
            """That of `ShardedCollection`, which does not know the type."""
            ...

    def __init__(self, module: EmbeddingCollection, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self._names = [name for names in self._names_by_table for name in names]
        self._need_indices = module.need_indices()

    @property
    def _embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of the tables, by the name of TorchRec's attribute."""
        return cast(list[EmbeddingConfig], self._configs)

    @staticmethod
    def extend_shard_name(shard_name: str) -> str:
        """The parameter of a table, by its name below this module."""
        return f"embeddings.{shard_name}.weight"

    def read_later(self, step: Step) -> tuple[str, ...]:
        """As `ShardedEmbeddingBagCollection.read_later`."""
        if self.returns_mapped:
            return ("values", "weights", "lengths", "offsets")
        reads_ids = self._need_indices or step.given.inverse_indices_or_none() is not None
        return ("values", "lengths", "offsets") if reads_ids else ("lengths", "offsets")

    def finish(self, step: Step) -> dict[str, JaggedTensor]:
        """The result of a batch. Raises as `ShardedEmbeddingBagCollection.finish`."""
        given, padded = step.given, step.padded
        by_lookup = {**self.wire.by_lookup(step, self.exchanged(step)), **self.dense_rows(step)}
        features, dtypes = self._routes.features, self._output_dtypes
        rows = [self._rows_of_ids(step, n, by_lookup[n]).to(dtypes[n]) for n in range(len(features))]
        if given.inverse_indices_or_none() is not None:
            return self._full_batch(given, padded, rows)
        strides, begin, place = given.stride_per_key(), given.lengths_offset_per_key(), given.index_per_key()
        output = {}
        for name, feature, of_feature in zip(self._names, features, rows, strict=True):
            key = place[feature]
            ids = padded[feature].values() if self._need_indices else None
            lengths = given.lengths()[begin[key] : begin[key] + strides[key]]
            output[name] = JaggedTensor(of_feature, weights=ids, lengths=lengths)
        return output

    def eager_outputs(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Rows [N, D] of each lookup, then lengths [B] of each, then ids [N] if asked for; see `ShardedCollection`."""
        found = list(self.finish(self.begin(features)).values())
        ids = [jt.weights() for jt in found] if self._need_indices else []
        return [jt.values() for jt in found] + [part.clone() for part in [*(jt.lengths() for jt in found), *ids]]

    def fake_outputs(self, batch: Batch) -> list[Tensor]:
        """Rows [N_l, D_l] of each lookup, lengths [B], ids [N_l]; how many ids there are nobody knows yet."""
        features, dims = self._routes.features, self._routes.dims
        context = torch.library.get_ctx()
        counts = [context.new_dynamic_size() for _ in features]
        kinds = zip(counts, dims, self._output_dtypes, strict=True)
        rows = [torch.empty(n, dim, dtype=dtype, device=self.device) for n, dim, dtype in kinds]
        if batch.inverse is None:
            of_key = dict(zip(batch.keys, batch.batch_sizes(), strict=True))
            sizes = [of_key[feature] for feature in features]
        else:
            sizes = [batch.inverse.shape[1]] * len(features)
        like = batch.offsets if batch.lengths is None else batch.lengths
        assert like is not None
        ids = [batch.values.new_empty(n) for n in counts] if self._need_indices else []
        return [*rows, *(like.new_empty(size) for size in sizes), *ids]

    def result_of(self, outputs: list[Tensor]) -> dict[str, JaggedTensor]:
        """The rows of each name, of the `outputs` that `eager_outputs` gives: rows [N, D], lengths [B], ids [N]."""
        n = len(self._names)
        ids: list[Tensor | None] = [*outputs[2 * n :]] or [None] * n
        parts = zip(self._names, outputs[:n], outputs[n : 2 * n], ids, strict=True)
        return {name: JaggedTensor(rows, weights=own, lengths=lengths) for name, rows, lengths, own in parts}

    def _rows_of_ids(self, step: Step, lookup: int, rows: Tensor) -> Tensor:
        """The row of each id of a lookup, from those of the ids that travelled."""
        expanded = expand_rows(step, self._routes.features[lookup], rows)
        spec = self._routes.table_of(lookup).optimizer
        if step.inverse is None or spec is None or spec.max_gradient is None:
            return expanded
        # each id's gradient is cut before those of one row are added, here to what it is after the division there
        most, checked = spec.max_gradient * self.divisor, self.checks_gradients
        return CutGradient.apply(expanded, most, checked)  # type: ignore[no-any-return, no-untyped-call]

    def _full_batch(
        self, given: KeyedJaggedTensor, padded: KeyedJaggedTensor, rows: Sequence[Tensor]
    ) -> dict[str, JaggedTensor]:
        """Rows of the samples that features kept, as those of the full batch."""
        picked = pick_features(padded, self._routes.features)
        per_id = [torch.cat(list(rows)), *([picked.values()] if self._need_indices else [])]
        per_id, lengths, sizes = expand_bags(picked, per_id, inverse_of(given, picked.keys()))
        pieces = [torch.split(tensor, sizes) for tensor in per_id]
        return {
            # side by side they had one type
            name: JaggedTensor(
                pieces[0][n].to(self._output_dtypes[n]),
                weights=pieces[1][n] if self._need_indices else None,
                lengths=lengths[n],
            )
            for n, name in enumerate(self._names)
        }


class ShardedFusedEmbeddingCollection(ShardedEmbeddingCollection):
    """A `FusedEmbeddingCollection` over several ranks: its tables train with the optimizer that it brought."""

    _unsharded_type = FusedEmbeddingCollection
