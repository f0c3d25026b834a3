"""From a float collection to its quantized form: what to make is read first, then table after table is quantized."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.config import BaseEmbeddingConfig

from .collection import QuantizedCollection
from .formats import observed_dtype, quantized_configs
from .pruning import Kept, kept_rows, pruning_data
from .table_weights import quantized_rows

ConfigT = TypeVar("ConfigT", bound=BaseEmbeddingConfig)
MadeT = TypeVar("MadeT", bound=QuantizedCollection)


@dataclass(frozen=True)
class Conversion(Generic[ConfigT]):
    """What becomes of a float collection: configs of the quantized tables, and the rows that pruned ones keep."""

    configs: list[ConfigT]
    kept: dict[str, Kept]
    output_dtype: torch.dtype
    scale_dtype: torch.dtype | dict[str, torch.dtype] | None


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


def conversion_of(
    module: nn.Module, configs: Sequence[ConfigT], *, use_precomputed_fake_quant: bool
) -> Conversion[ConfigT]:
    """What `module.qconfig` and its pruning data make of the tables of `configs`."""
    if use_precomputed_fake_quant:
        warnings.warn("use_precomputed_fake_quant has no effect: rows are quantized as they are", stacklevel=3)
    qconfig: Any = module.qconfig
    pruned = pruning_data(module)
    kept = {config.name: kept_rows(config, pruned.get(config.name)) for config in configs}
    quantized = [
        replace(config, num_embeddings_post_pruning=None if (own := kept[config.name]) is None else own.ids.shape[0])
        for config in quantized_configs(configs, qconfig)
    ]
    scales = getattr(qconfig, "scale_dtype", None)
    if isinstance(scales, Mapping):
        scales = {name: dtype for name, dtype in scales.items() if name in kept}
    return Conversion(
        quantized,
        {name: own for name, own in kept.items() if own is not None},
        observed_dtype(qconfig.activation),
        scales,
    )


@torch.no_grad()
def fill_from(made: MadeT, source: TableCollection, conversion: Conversion[Any]) -> MadeT:
    """Quantize the tables of a float collection into place; returns `made`, in the mode that the source is in.

    Raises:
        ValueError: a table has values that are not finite, or too large for its format; names it.
    """
    parameters = source._table_parameters()
    for t, (group, number) in made._homes().items():
        name = group.tables[number].name
        rows: Tensor = parameters[t]
        if name in conversion.kept:
            kept = conversion.kept[name]
            rows = rows[kept.ids.to(rows.device)]
            group.remapping_of(number).copy_(kept.remapping)
        payload, scales = quantized_rows(name, rows, group.format.name, group.scales.dtype)
        group.payload_of(number).copy_(payload)
        group.scales_of(number).copy_(scales)
    return made.train(source.training)
