"""`GenericITEPModule`: what turns ids of pruned tables into rows, and prunes as training goes on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.config import BaseEmbeddingConfig
from shardwise.errors import RefusedIndexError
from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged._combine import like

from .address_lookup import (
    check_addresses,
    counts_at,
    first_addresses,
    id_counts,
    prune_rows,
    prunes_at,
    resets_at,
)
from .pruning_logger import PruningLogger, PruningLoggerDefault

ADDRESSES, UTILIZATION = "itp_address_lookup", "itp_row_util"


class GenericITEPModule(nn.Module):
    """Ids of a large range in, rows of smaller tables out: the ids that are used most have rows of their own.

    Its state dict has, of each table that is pruned, "<table>_itp_address_lookup" [ids] int64 and
    "<table>_itp_row_util" [ids] fp32. In eval() ids are mapped and nothing else changes.

    Rows that change hands after the first interval begin anew: zeros, and the states of a fused optimizer as at the
    start. (States of an optimizer that steps outside of the backward stay.)

    Args:
        table_name_to_unpruned_hash_sizes: how many ids a table has; one that is not named, or has as many rows, is not
            pruned.
        lookups: collections of the tables. A module without any is given to an ITEP collection, which attaches its own.
        enable_pruning: False hands batches on as they are.
        pruning_interval: rows change hands at iterations 2, 5, 8, 29, 59, 89, every 300th up to 1,000, and at every
            `pruning_interval`-th.
        pg, table_name_to_sharding_type: have no effect but a warning: sharders know them.
        pruning_logger_type: is told of prunings.

    Raises:
        ValueError: `pruning_interval` is below 1; or as `attach`.
    """

    def __init__(
        self,
        table_name_to_unpruned_hash_sizes: Mapping[str, int],
        lookups: Sequence[nn.Module] | None = None,
        enable_pruning: bool = True,
        pruning_interval: int = 1001,
        pg: Any = None,
        table_name_to_sharding_type: Mapping[str, str] | None = None,
        pruning_logger_type: type[PruningLogger] = PruningLoggerDefault,
    ) -> None:
        super().__init__()
        if pruning_interval < 1:
            raise ValueError(f"pruning_interval must be positive, got {pruning_interval}")
        for name, given in (("pg", pg), ("table_name_to_sharding_type", table_name_to_sharding_type)):
            if given:
                warnings.warn(f"GenericITEPModule: {name} has no effect: sharders know it", stacklevel=2)
        self.table_name_to_unpruned_hash_sizes = dict(table_name_to_unpruned_hash_sizes)
        self.enable_pruning, self.pruning_interval = enable_pruning, pruning_interval
        self.pruning_logger = pruning_logger_type
        # not registered: they are their collections' children
        self._attached: list[TableCollection] = []
        self._rows: dict[str, int] = {}
        self._table_of: dict[str, str] = {}
        with pruning_logger_type.pruning_logger(event="ITEP_MODULE_INIT") as details:
            details.enable_pruning, details.pruning_interval = enable_pruning, pruning_interval
        for lookup in lookups or ():
            self.attach(lookup)
        self.register_load_state_dict_pre_hook(_check)  # type: ignore[no-untyped-call]

    @property
    def lookups(self) -> list[nn.Module]:
        """The collections whose rows it gives out."""
        return list(self._attached)

    def attach(self, collection: nn.Module) -> None:
        """Map the ids of a collection's tables too.

        Raises:
            TypeError: it is no collection, or was sharded or quantized.
            ValueError: as `pruned_tables`; or another collection has a table of that name.
        """
        if not isinstance(collection, TableCollection):
            raise TypeError(
                f"lookups are EmbeddingBagCollections or EmbeddingCollections, got {type(collection).__name__}: shard"
                " the ITEP collection around it by its own sharder"
            )
        sizes = pruned_tables(collection._configs, self.table_name_to_unpruned_hash_sizes)
        device = next(collection.parameters()).device
        for config in collection._configs:
            if config.name not in sizes:
                continue
            if config.name in self._rows:
                raise ValueError(f"table {config.name!r}: two collections have a table of this name: rename one")
            ids, self._rows[config.name] = sizes[config.name], config.num_embeddings
            where = torch.device("cpu") if device.type == "meta" else device
            addresses = first_addresses(ids, config.num_embeddings, where)
            self.register_buffer(f"{config.name}_{ADDRESSES}", addresses)
            self.register_buffer(f"{config.name}_{UTILIZATION}", torch.zeros(ids, device=where))
            self._table_of |= dict.fromkeys(config.feature_names, config.name)
        self._attached.append(collection)

    def forward(self, sparse_features: KeyedJaggedTensor, cur_iter: int) -> KeyedJaggedTensor:
        """Rows in the place of the ids of pruned tables; other features as they are. `cur_iter` counts from 0.

        Raises:
            RefusedIndexError: an id is outside of its table's range.
        """
        if not self.enable_pruning or not self._rows:
            return sparse_features
        values = sparse_features.values().clone()
        offsets = sparse_features.offset_per_key()
        mapped = [
            (number, self._table_of[key], part)
            for number, key in enumerate(sparse_features.keys())
            if key in self._table_of and (part := values[offsets[number] : offsets[number + 1]]).numel()
        ]
        # before anything changes
        for _, table, part in mapped:
            require_ids_below(table, part, self._of(table)[0].shape[0])
        if self.training and prunes_at(cur_iter, self.pruning_interval):
            self._prune(cur_iter)
        counted = self.training and counts_at(cur_iter)
        for number, table, part in mapped:
            addresses, utilization = self._of(table)
            if counted:
                utilization += id_counts(part, addresses.shape[0], times_used(sparse_features, number))
            part.copy_(addresses[part.long()])
        return like(
            sparse_features, sparse_features._strides, values, sparse_features.weights_or_none(),
            sparse_features.lengths(), sparse_features.length_per_key(), False,
            sparse_features.inverse_indices_or_none(),
        )  # fmt: skip

    def _of(self, table: str) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"{table}_{ADDRESSES}"), self.get_buffer(f"{table}_{UTILIZATION}")

    def _prune(self, cur_iter: int) -> None:
        """Have rows change hands in all tables."""
        ratios = {}
        for collection in self._attached:
            for config in collection._configs:
                if config.name not in self._rows:
                    continue
                addresses, utilization = self._of(config.name)
                freed = prune_rows(addresses, utilization, config.num_embeddings, cur_iter, self.pruning_interval)
                if freed.numel():
                    ratios[config.name] = freed.numel() / addresses.shape[0]
                    if resets_at(cur_iter, self.pruning_interval):
                        zeros = torch.zeros(freed.numel(), config.embedding_dim, device=freed.device)
                        collection.renew_rows(config.name, freed, zeros)
        with self.pruning_logger.pruning_logger(event="ITEP_EVICTION") as details:
            details.table_to_pruned_ratio = ratios


def pruned_tables(configs: Sequence[BaseEmbeddingConfig], sizes: Mapping[str, int]) -> dict[str, int]:
    """How many ids each table has that is to be pruned.

    Raises:
        ValueError: a table has fewer ids than rows, or shares a feature with another one.
    """
    pruned = {}
    for config in configs:
        ids = sizes.get(config.name, config.num_embeddings)
        if ids < config.num_embeddings:
            raise ValueError(
                f"table {config.name!r}: its unpruned hash size {ids} is below its {config.num_embeddings} rows"
            )
        if ids > config.num_embeddings:
            pruned[config.name] = ids
    for config in configs:
        for other in configs:
            shared = set(config.feature_names) & set(other.feature_names)
            if config is not other and shared and config.name in pruned:
                raise ValueError(
                    f"table {config.name!r} is pruned and shares {sorted(shared)} with table {other.name!r}: a feature"
                    " has one row in a batch; give each table a feature of its own"
                )
    return pruned


def require_ids_below(table: str, ids: Tensor, total: int) -> None:
    """Raise RefusedIndexError unless all ids are in [0, total)."""
    # host sync on CUDA: an id outside would read another table's address
    bad = (ids < 0) | (ids >= total)
    if bool(bad.any()):
        raise RefusedIndexError(
            f"table {table!r}: id {int(ids[bad][0])} is not in [0, {total}), its unpruned hash size"
        )


def times_used(features: KeyedJaggedTensor, number: int) -> Tensor | None:
    """How many samples of the full batch use each id of key `number` [n]; None where each stands for itself."""
    inverse = features.inverse_indices_or_none()
    if inverse is None or not features.variable_stride_per_key():
        return None
    keys, samples = inverse
    key = features.keys()[number]
    strides = features.stride_per_key()
    first = sum(strides[:number])
    lengths = features.lengths()[first : first + strides[number]]
    uses = torch.bincount(samples[keys.index(key)], minlength=strides[number])
    return torch.repeat_interleave(uses, lengths.long())


def _check(module: GenericITEPModule, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: refuse addresses that are not this table's."""
    for table, rows in module._rows.items():
        name = f"{prefix}{table}_{ADDRESSES}"
        given = state_dict.get(name)
        # of another shape torch says so itself
        if isinstance(given, Tensor) and given.shape == module._of(table)[0].shape:
            check_addresses(f"table {table!r} ({name})", given, 0, rows)
