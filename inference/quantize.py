"""Quantization of a trained model: its collections are replaced by quantized ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.embeddings import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection,
    quant,
)
from shardwise.embeddings.collections.collection import TableCollection
from shardwise.embeddings.managed_collision import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from shardwise.embeddings.quant import QuantConfig, set_pruning_data

__all__ = [
    "DEFAULT_QUANTIZATION_DTYPE",
    "DEFAULT_QUANT_MAPPING",
    "quantize_embeddings",
    "quantize_feature",
    "quantize_inference_model",
    "set_pruning_data",
    "trim_torch_package_prefix_from_typename",
]


def trim_torch_package_prefix_from_typename(typename: str) -> str:
    """The name of a type without the `<torch_package_0>.` that torch.package puts before it."""
    return typename.partition(".")[2] if typename.startswith("<torch_package_") else typename


def _typename(module_type: type[nn.Module]) -> str:
    return trim_torch_package_prefix_from_typename(f"{module_type.__module__}.{module_type.__qualname__}")


DEFAULT_QUANTIZATION_DTYPE = torch.int8
# keys are names of float classes, `module.Class`; TorchRec's names for them are understood too
DEFAULT_QUANT_MAPPING: dict[str, type[nn.Module]] = {
    _typename(EmbeddingBagCollection): quant.EmbeddingBagCollection,
    _typename(EmbeddingCollection): quant.EmbeddingCollection,
}
_TORCHREC_NAMES = {
    "torchrec.modules.embedding_modules.EmbeddingBagCollection": _typename(EmbeddingBagCollection),
    "torchrec.modules.embedding_modules.EmbeddingCollection": _typename(EmbeddingCollection),
    "torchrec.modules.mc_embedding_modules.ManagedCollisionEmbeddingBagCollection": _typename(
        ManagedCollisionEmbeddingBagCollection
    ),
    "torchrec.modules.mc_embedding_modules.ManagedCollisionEmbeddingCollection": _typename(
        ManagedCollisionEmbeddingCollection
    ),
}


class _Rule(NamedTuple):
    """A rule for a class of modules: the class whose `from_float` takes them, and the qconfig that it reads."""

    quantized: type[nn.Module]
    qconfig: QuantConfig


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = DEFAULT_QUANTIZATION_DTYPE,
    quantization_dtype: torch.dtype = DEFAULT_QUANTIZATION_DTYPE,
    output_dtype: torch.dtype = torch.float32,
    *,
    scale_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """The model for inference: every float collection replaced by its quantized form, in place, in eval mode.

    A model that is a collection itself is left as it is, and its quantized form returned. Classes derived from a
    collection (fused ones) become what the collection becomes; a collection used in several places stays one.

    Args:
        quantization_mapping: names of float classes (`shardwise...EmbeddingBagCollection`, or TorchRec's name for it)
            to the classes whose `from_float` makes their quantized form; by default both collections.
        per_table_weight_dtype: dtypes of tables that want another than the rest, by table name.
        fp_weight_dtype: of the tables of `FeatureProcessedEmbeddingBagCollection`.
        quantization_dtype: of all other tables: int8, quint4x2, quint2x4, float8_e4m3fn, float16, bfloat16, float32.
        output_dtype: of the outputs of collections.
        scale_dtype: of the scales of int8, int4 and int2 rows, for all tables or by name: float16, or float32.

    Raises:
        TypeError: part of the model is sharded, or a collection has a forward of its own.
        ValueError: `per_table_weight_dtype` or `scale_dtype` name no table of these collections; or a table cannot be
            quantized.

    Example:
        >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["clicked"])])
        >>> quantized = quantize_inference_model(tables, quantization_dtype=torch.qint8)
        >>> batch = KeyedJaggedTensor(["clicked"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        >>> torch.allclose(quantized(batch).values(), tables(batch).values(), atol=0.01)
        True
    """
    mapping = DEFAULT_QUANT_MAPPING if quantization_mapping is None else quantization_mapping
    processed = _typename(FeatureProcessedEmbeddingBagCollection)
    classes: dict[str, type[nn.Module]] = {
        processed: quant.FeatureProcessedEmbeddingBagCollection,
        _typename(ManagedCollisionEmbeddingBagCollection): quant.QuantManagedCollisionEmbeddingBagCollection,
        _typename(ManagedCollisionEmbeddingCollection): quant.QuantManagedCollisionEmbeddingCollection,
        **mapping,
    }
    rules = {}
    for name, quantized in classes.items():
        ours = _TORCHREC_NAMES.get(name, name)
        dtype = fp_weight_dtype if ours == processed else quantization_dtype
        rules[ours] = _Rule(quantized, QuantConfig(output_dtype, dtype, per_table_weight_dtype, scale_dtype))
    return _replace(model, rules).eval()


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype,
    inplace: bool,
    additional_qconfig_spec_keys: Sequence[type[nn.Module]] | None = None,
    additional_mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
    output_dtype: torch.dtype = torch.float32,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """The module with every `EmbeddingBagCollection` replaced by its quantized form, its tables of `dtype`.

    Args:
        inplace: whether the module itself is changed, or a copy; one that is a collection itself is never changed.
        additional_qconfig_spec_keys: more classes to replace.
        additional_mapping: the quantized classes of those that are no collections of ours.

    Raises:
        ValueError: a class to replace has no quantized class.
        TypeError, ValueError: as `quantize_inference_model`.
    """
    known: dict[type[nn.Module], type[nn.Module]] = {
        EmbeddingBagCollection: quant.EmbeddingBagCollection,
        EmbeddingCollection: quant.EmbeddingCollection,
        FeatureProcessedEmbeddingBagCollection: quant.FeatureProcessedEmbeddingBagCollection,
        **(additional_mapping or {}),
    }
    wanted = [EmbeddingBagCollection, *(additional_qconfig_spec_keys or ()), *(additional_mapping or ())]
    if unmapped := [kind.__name__ for kind in wanted if kind not in known]:
        raise ValueError(f"additional_mapping has no quantized class for {', '.join(unmapped)}")
    qconfig = QuantConfig(output_dtype, dtype, per_table_weight_dtype)
    rules = {_typename(kind): _Rule(known[kind], qconfig) for kind in wanted}
    return _replace(module if inplace else copy.deepcopy(module), rules)


def quantize_feature(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Inputs with fp32 and fp64 tensors as fp16: a forward pre-hook for a module that was made `.half()`."""
    return tuple(
        value.half() if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64) else value
        for value in inputs
    )


def _replace(model: nn.Module, rules: Mapping[str, _Rule]) -> nn.Module:
    """The model with the modules of `rules`, by typename, replaced, outermost first; checked before it begins."""
    for path, module in model.named_modules():
        # what holds parts of tables names them by this method
        if callable(getattr(module, "sharded_parameter_names", None)):
            raise TypeError(
                f"module {path!r} is a sharded {type(module).__name__}: load"
                " shardwise.checkpoint.full_state_dict(model) into the unsharded model and quantize that"
            )
    outermost = list(_outermost(model, rules))
    if not outermost:
        warnings.warn("nothing was quantized: the model has no float collection", stacklevel=3)
    inside = (part for module in outermost for part in module.modules() if isinstance(part, TableCollection))
    tables = {config.name for part in inside for config in part._configs}
    for rule in rules.values():
        for what in ("per_table_weight_dtype", "scale_dtype"):
            asked = getattr(rule.qconfig, what)
            if isinstance(asked, Mapping) and (unknown := sorted(set(asked) - tables)):
                raise ValueError(f"{what} names tables that are not quantized: {unknown}; there are {sorted(tables)}")
    return _replaced(model, rules, {})


def _rule_of(module: nn.Module, rules: Mapping[str, _Rule]) -> _Rule | None:
    """The rule of a module's class, or of the nearest class that it is derived from."""
    names = (_typename(ancestor) for ancestor in type(module).__mro__)
    return next((rules[name] for name in names if name in rules), None)


def _outermost(model: nn.Module, rules: Mapping[str, _Rule]) -> Iterator[nn.Module]:
    if _rule_of(model, rules) is not None:
        yield model
    else:
        for child in model.children():
            yield from _outermost(child, rules)


def _replaced(module: nn.Module, rules: Mapping[str, _Rule], done: dict[nn.Module, nn.Module]) -> nn.Module:
    if module not in done:
        rule = _rule_of(module, rules)
        done[module] = module if rule is None else _quantized(module, rule)
        if rule is None:
            # not named_children, which leaves out a module that it has met before
            for name, child in module._modules.items():
                if child is not None:
                    module._modules[name] = _replaced(child, rules, done)
    return done[module]


def _quantized(module: nn.Module, rule: _Rule) -> nn.Module:
    """The quantized module that `from_float` makes of one, whose own qconfig comes back after."""
    own = {"qconfig": module.qconfig} if hasattr(module, "qconfig") else {}
    quantized: Any = rule.quantized
    module.__dict__["qconfig"] = rule.qconfig
    try:
        return _with_hooks_of(module, quantized.from_float(module))
    finally:
        module.__dict__.pop("qconfig")
        module.__dict__.update(own)


def _with_hooks_of(source: nn.Module, made: nn.Module) -> nn.Module:
    """Forward hooks stay with the place in the model that the module had."""
    for hooks in (
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    ):
        getattr(made, hooks).update(getattr(source, hooks))
    return made
