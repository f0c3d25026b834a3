"""Managed collision modules of several tables as one: `ManagedCollisionCollection`, KJT of ids in, KJT of slots out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.embeddings.config import BaseEmbeddingConfig
from shardwise.embeddings.tables.grouped import pick_features
from shardwise.errors import RefusedValueError
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor
from shardwise.jagged._combine import like
from shardwise.jagged.scripting import NotScriptable
from shardwise.jagged.tracing import OneNode, record_forward

from .modules import ManagedCollisionModule


def apply_mc_method_to_jt_dict(
    mc_module: nn.Module, method: str, features_dict: dict[str, JaggedTensor]
) -> dict[str, JaggedTensor]:
    """`mc_module.<method>(features_dict)`: "preprocess", "profile" or "remap"."""
    found: dict[str, JaggedTensor] = getattr(mc_module, method)(features_dict)
    return found


class ManagedCollisionCollection(OneNode, NotScriptable, nn.Module):
    """A managed collision module for every table; the ids of all features of a table are mapped together.

    A feature of several tables has slots of its own in each: it comes out once for each of them, in their order, as a
    KeyedJaggedTensor that has its key so often.

    Args:
        managed_collision_modules: by table.
        embedding_configs: those of the collection that looks the slots up.
        need_preprocess: False where ids come preprocessed: a sharded collection then sends them as they are.

    Raises:
        ValueError: a table has no module, a module no table, or a module has more or fewer slots than its table rows.
    """

    _managed_collision_modules: nn.ModuleDict

    def __init__(
        self,
        managed_collision_modules: Mapping[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._embedding_configs = embedding_configs
        self.need_preprocess = need_preprocess
        tables = [config.name for config in embedding_configs]
        lacking = [name for name in tables if name not in managed_collision_modules]
        unused = [name for name in managed_collision_modules if name not in tables]
        if lacking or unused:
            words = (
                f"Table {lacking[0]} is not present in managed_collision_modules, which"
                if lacking
                else "managed_collision_modules"
            )
            raise ValueError(f"{words} must be those of the tables: none given for {lacking}, no such table {unused}")
        for config in embedding_configs:
            slots = managed_collision_modules[config.name].output_size()
            if slots != config.num_embeddings:
                raise RefusedValueError(
                    f"max_output_id in managed collision module for {config.name} must match {config.num_embeddings},"
                    f" the rows of the table: the module has {slots} slots"
                )
        self._feature_names = [name for config in embedding_configs for name in config.feature_names]
        self._managed_collision_modules = nn.ModuleDict(managed_collision_modules)

    # what programs read of TorchRec's collection
    @property
    def _feature_to_table(self) -> dict[str, str]:
        """The table of each feature; of one of several tables the last."""
        return {name: config.name for config in self._embedding_configs for name in config.feature_names}

    @property
    def _table_to_features(self) -> dict[str, list[str]]:
        """The features of each table."""
        return {config.name: config.feature_names for config in self._embedding_configs}

    @property
    def _table_feature_splits(self) -> list[int]:
        """How many features each table has."""
        return [len(config.feature_names) for config in self._embedding_configs]

    @property
    def _table_name_to_config(self) -> dict[str, BaseEmbeddingConfig]:
        """The config of each table."""
        return {config.name: config for config in self._embedding_configs}

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """As given."""
        return self._embedding_configs

    def modules_by_table(self) -> dict[str, ManagedCollisionModule]:
        """The modules in the order of the tables."""
        found = {}
        for config in self._embedding_configs:
            module = self._managed_collision_modules[config.name]
            assert isinstance(module, ManagedCollisionModule)
            found[config.name] = module
        return found

    def table_to_number_buckets(self) -> dict[str, int]:
        """How many equal ranges of ids have slots of their own, by table."""
        return {table: module.buckets() for table, module in self.modules_by_table().items()}

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Slots in the place of ids, of the tables' features in their order; others are left out.

        Raises:
            KeyError: a feature is missing.
        """
        if isinstance(features, Proxy):
            forward = ManagedCollisionCollection.forward
            return record_forward(forward, self, features, mutate_miss_lengths)
        modules = self.modules_by_table()
        return change_ids(
            features,
            self._embedding_configs,
            lambda table, ids: modules[table]({table: ids}, mutate_miss_lengths=mutate_miss_lengths)[table],
        )

    def evict(self) -> dict[str, Tensor | None]:
        """Slots [n] whose rows are to begin anew, by table; None where there can be none."""
        return {table: module.evict() for table, module in self.modules_by_table().items()}

    def open_slots(self) -> dict[str, Tensor]:
        """How many slots no id has yet, [1], by table."""
        return {table: module.open_slots() for table, module in self.modules_by_table().items()}


def change_ids(
    features: KeyedJaggedTensor,
    configs: Sequence[BaseEmbeddingConfig],
    change: Callable[[str, JaggedTensor], JaggedTensor],
) -> KeyedJaggedTensor:
    """The features of some tables, in their order, with what `change(table, ids)` makes of the ids of each table.

    Raises:
        KeyError: a feature is missing.
    """
    picked = pick_features(features, [name for config in configs for name in config.feature_names])
    pieces = picked.split([len(config.feature_names) for config in configs])
    changed = [
        change(config.name, JaggedTensor(piece.values(), lengths=piece.lengths()))
        for config, piece in zip(configs, pieces, strict=True)
    ]
    variable = picked.variable_stride_per_key()
    values, lengths = (torch.cat([getattr(ids, part)() for ids in changed]) for part in ("values", "lengths"))
    if len(set(picked.keys())) < len(picked.keys()):
        # a feature of several tables: no batch of a user's has a key twice
        return like(
            picked, picked._strides, values, picked.weights_or_none(), lengths, None, False,
            picked.inverse_indices_or_none(),
        )  # fmt: skip
    return KeyedJaggedTensor(
        picked.keys(),
        values,
        picked.weights_or_none(),
        lengths,
        stride=None if variable else picked.stride(),
        stride_per_key_per_rank=picked.stride_per_key_per_rank() if variable else None,
        # on meta nobody can read them again
        length_per_key=picked.length_per_key() if values.is_meta else None,
        inverse_indices=picked.inverse_indices_or_none(),
    )
