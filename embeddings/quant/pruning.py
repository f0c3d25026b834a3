"""Pruned tables: rows that are left out of the quantized table, and the remapping of ids to the rows that stay.

Shapes: remapping int [num_embeddings], the row of each id in the quantized table, -1 for an id whose row is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.embeddings.collections.bag_collection import EmbeddingBagCollection
from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.collections.feature_processors import FeatureProcessedEmbeddingBagCollection
from shardwise.embeddings.config import BaseEmbeddingConfig

_ATTRIBUTE = "_rows_post_pruning"


class Kept(NamedTuple):
    """What stays of a table: `ids` [count] int64 in the order of the quantized rows, and the remapping of all ids."""

    ids: Tensor
    remapping: Tensor


def set_pruning_data(
    model: nn.Module,
    tables_to_rows_post_pruning: Mapping[str, int | Tensor],
    module_types: Sequence[type[nn.Module]] | None = None,
) -> nn.Module:
    """Say which rows of which tables stay when the model is quantized; returns the model.

    A number keeps so many first rows, as in TorchRec. A tensor is the table's remapping, int [num_embeddings]: the
    new row of each id, -1 for one that is left out; new rows are 0, 1, ... each once. Looked up, an id that was left
    out gives a row of zeros; it still counts in a mean.

    Args:
        module_types: whose tables; by default `EmbeddingBagCollection` and `FeatureProcessedEmbeddingBagCollection`.
            Sequence collections are pruned where they are listed.

    Raises:
        ValueError: no such module has the table, a number is outside [0, num_embeddings], or a remapping is none.
    """
    types = tuple(module_types or (EmbeddingBagCollection, FeatureProcessedEmbeddingBagCollection))
    configs: dict[str, BaseEmbeddingConfig] = {}
    modules = [module for module in model.modules() if isinstance(module, types)]
    for module in modules:
        inner = module.split()[1] if isinstance(module, FeatureProcessedEmbeddingBagCollection) else module
        if isinstance(inner, TableCollection):
            configs.update({config.name: config for config in inner._configs})
    if unknown := sorted(set(tables_to_rows_post_pruning) - set(configs)):
        raise ValueError(f"set_pruning_data: no tables {unknown}, there are {sorted(configs)}")
    for name, rows in tables_to_rows_post_pruning.items():
        kept_rows(configs[name], rows)
    for module in modules:
        setattr(module, _ATTRIBUTE, dict(tables_to_rows_post_pruning))
    return model


def pruning_data(module: nn.Module) -> Mapping[str, int | Tensor]:
    """What `set_pruning_data` said of a module's tables."""
    found: Mapping[str, int | Tensor] = getattr(module, _ATTRIBUTE, {})
    return found


def kept_rows(config: BaseEmbeddingConfig, rows: int | Tensor | None) -> Kept | None:
    """What stays of a table by its pruning data, else by its config's `num_embeddings_post_pruning`; None for all.

    Raises:
        ValueError: as `set_pruning_data`.
    """
    asked: Any = config.num_embeddings_post_pruning if rows is None else rows
    if asked is None:
        return None
    every = torch.arange(config.num_embeddings, device="cpu")
    if not isinstance(asked, Tensor):
        count = operator.index(asked)
        if not 0 <= count <= config.num_embeddings:
            raise ValueError(
                f"table {config.name!r}: {count} rows after pruning is outside [0, {config.num_embeddings}]"
            )
        return Kept(every[:count], torch.where(every < count, every, -1))
    remapping = asked.detach().to("cpu", torch.int64)
    if remapping.shape != every.shape:
        raise ValueError(
            f"table {config.name!r}: a remapping is [{config.num_embeddings}], one row for each id, got"
            f" {list(remapping.shape)}"
        )
    ids = every[remapping >= 0]
    order = remapping[ids].argsort()
    if not torch.equal(remapping[ids][order], every[: ids.shape[0]]) or bool((remapping < -1).any()):
        raise ValueError(
            f"table {config.name!r}: a remapping has -1 for ids left out and the rows 0 to {ids.shape[0] - 1} once each"
        )
    return Kept(ids[order], remapping)
