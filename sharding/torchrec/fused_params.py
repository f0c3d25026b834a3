"""Fused parameters as TorchRec gathers them: a sharder's, a table's, and those that a plan has of the table."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from shardwise.embeddings import (
    LAMB,
    DataType,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from shardwise.embeddings.optim.fbgemm_types import EmbOptimType, data_type_to_sparse_type

from ..plan.caches import KeyValueParams as KeyValueParams
from ..plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType

_ON_SSD = (
    EmbeddingComputeKernel.KEY_VALUE.value,
    EmbeddingComputeKernel.SSD_VIRTUAL_TABLE.value,
    EmbeddingComputeKernel.DRAM_VIRTUAL_TABLE.value,
    EmbeddingComputeKernel.DRAM_SSD_VIRTUAL_TABLE.value,
)
# fields of CacheParams -> FBGEMM's word
_CACHE_WORDS = {
    "algorithm": "cache_algorithm", "load_factor": "cache_load_factor", "reserved_memory": "cache_reserved_memory",
    "precision": "cache_precision", "prefetch_pipeline": "prefetch_pipeline",
    "multipass_prefetch_config": "multipass_prefetch_config",
}  # fmt: skip
_PLAN_WORDS = ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")
_PRECISIONS = ("cache_precision", "weights_precision", "output_dtype")


# classes of optimizers -> FBGEMM's name; the first class of a name is what the name becomes
_NAMES: dict[type[torch.optim.Optimizer], EmbOptimType] = {
    torch.optim.SGD: EmbOptimType.EXACT_SGD,
    torch.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    torch.optim.Adam: EmbOptimType.ADAM,
    LarsSGD: EmbOptimType.LARS_SGD,
    LAMB: EmbOptimType.LAMB,
    PartialRowWiseLAMB: EmbOptimType.PARTIAL_ROWWISE_LAMB,
    PartialRowWiseAdam: EmbOptimType.PARTIAL_ROWWISE_ADAM,
    RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def optimizer_type_to_emb_opt_type(optimizer_class: type[torch.optim.Optimizer]) -> EmbOptimType:
    """FBGEMM's name of an optimizer, as `fused_params={"optimizer": ...}` takes it.

    Raises:
        ValueError: it has none.
    """
    if optimizer_class not in _NAMES:
        known = ", ".join(each.__name__ for each in _NAMES)
        raise ValueError(f"Cannot cast {optimizer_class} to an EmbOptimType; these can: {known}")
    return _NAMES[optimizer_class]


def emb_opt_type_to_optimizer_class(emb_opt_type: EmbOptimType | None) -> type[torch.optim.Optimizer] | None:
    """The class of an optimizer by FBGEMM's name; None of None, and of a name that no class of ours stands for."""
    return next((kind for kind, name in _NAMES.items() if name is emb_opt_type), None)


def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None, param_fused_params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A sharder's fused parameters with those of one table, which win; `lr` of the table is `learning_rate`."""
    merged = copy.deepcopy(dict(fused_params or {}))
    for name, value in (param_fused_params or {}).items():
        merged["learning_rate" if name == "lr" else name] = value
    return merged


def add_params_from_parameter_sharding(
    fused_params: Mapping[str, Any] | None, parameter_sharding: ParameterSharding
) -> dict[str, Any]:
    """Fused parameters with what a plan says of the table: rounding, output, bounds, caches; the plan wins.

    A replicated table has no fused parameters in TorchRec: a warning says so.
    """
    params = dict(fused_params or {})
    cache = parameter_sharding.cache_params
    for field, word in _CACHE_WORDS.items() if cache is not None else ():
        if getattr(cache, field) is not None:
            params[word] = getattr(cache, field)
    for word in _PLAN_WORDS:
        if getattr(parameter_sharding, word) is not None:
            params[word] = getattr(parameter_sharding, word)
    stored = parameter_sharding.key_value_params
    if parameter_sharding.compute_kernel in _ON_SSD and isinstance(stored, KeyValueParams):
        params |= {f.name: getattr(stored, f.name) for f in fields(stored) if getattr(stored, f.name) is not None}
    if params and parameter_sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
        warnings.warn(f"fused parameters {sorted(params)} of a data_parallel table: TorchRec drops them", stacklevel=2)
    return params


def convert_to_fbgemm_types(fused_params: dict[str, Any]) -> dict[str, Any]:
    """The same dict, its precisions in FBGEMM's `SparseType` where they were a `DataType`."""
    for name in _PRECISIONS:
        if isinstance(fused_params.get(name), DataType):
            fused_params[name] = data_type_to_sparse_type(fused_params[name])
    return fused_params
