"""From a float collection to its quantized form: what to make is read first, then table after table is quantized."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardwise.embeddings.collections.bag_collection import EmbeddingBagCollection
from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.collections.feature_processors import FeatureProcessedEmbeddingBagCollection
from shardwise.embeddings.config import BaseEmbeddingConfig

from .collection import QuantizedCollection
from .formats import observed_dtype, quantized_configs
from .tables import quantized_rows

MadeT = TypeVar("MadeT", bound=QuantizedCollection)


def check_float_module(quantized: type[nn.Module], module: nn.Module, wanted: type[nn.Module]) -> None:
    """Refuse a module that `quantized.from_float` cannot stand for.

    Raises:
        TypeError: it is no `wanted`, or has a forward of its own, which its quantized form would lose.
        ValueError: it has no qconfig.
    """
    who = f"{quantized.__name__}.from_float"
    if not isinstance(module, wanted):
        raise TypeError(
            f"{who} takes a float {wanted.__name__}, got {type(module).__name__}; of a sharded model, load"
            " shardwise.checkpoint.full_state_dict(model) into the unsharded model and quantize that"
        )
    if type(module).forward is not wanted.forward and quantized.__module__.startswith(__package__ or ""):
        raise TypeError(
            f"{type(module).__name__} has a forward of its own, which {who} would lose: derive a quantized class"
            " with that forward too, and name it in quantization_mapping"
        )
    if getattr(module, "qconfig", None) is None:
        raise ValueError(f"{who}: set module.qconfig = QuantConfig(activation=..., weight=...) first")


def converted(
    cls: type[MadeT],
    module: nn.Module,
    source: TableCollection,
    arguments: Sequence[Any],
    *,
    use_precomputed_fake_quant: bool = False,
    **settings: Any,
) -> MadeT:
    """The quantized form of `source`, the collection of a float `module`, by what the module's qconfig asks for.

    Args:
        cls: what is made: of the quantized configs, these `arguments`, the output's dtype, and `settings` by name.
        module: has the qconfig, and the pruning data.
        source: has the tables; what is made is in its mode.
        use_precomputed_fake_quant: of no effect.

    Raises:
        ValueError: a table has values that are not finite, or too large for its format; names it.
    """
    if use_precomputed_fake_quant:
        warnings.warn("use_precomputed_fake_quant has no effect: rows are quantized as they are", stacklevel=3)
    qconfig: Any = module.qconfig
    pruned, configs = pruning_data(module), source._configs
    kept = {config.name: kept_rows(config, pruned.get(config.name)) for config in configs}
    quantized = [
        replace(config, num_embeddings_post_pruning=None if (own := kept[config.name]) is None else own.ids.shape[0])
        for config in quantized_configs(configs, qconfig)
    ]
    scales = getattr(qconfig, "scale_dtype", None)
    if isinstance(scales, Mapping):
        scales = {name: dtype for name, dtype in scales.items() if name in kept}
    make: Any = cls
    made: MadeT = make(
        quantized, *arguments, observed_dtype(qconfig.activation), scale_dtype=scales, policy=source._policy, **settings
    )
    _fill(made, source, kept)
    return made.train(source.training)


@torch.no_grad()
def _fill(made: QuantizedCollection, source: TableCollection, kept: Mapping[str, Kept | None]) -> None:
    """Quantize the tables of a float collection into place."""
    parameters = source._table_parameters()
    for t, (group, number) in made._homes().items():
        name = group.tables[number].name
        rows: Tensor = parameters[t]
        own = kept[name]
        if own is not None:
            rows = rows[own.ids.to(rows.device)]
            group.remapping_of(number).copy_(own.remapping)
        payload, scales = quantized_rows(name, rows, group.format.name, group.scales.dtype)
        group.payload_of(number).copy_(payload)
        group.scales_of(number).copy_(scales)


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
