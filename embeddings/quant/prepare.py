"""What TorchRec's programs do to float modules before they quantize them, and to quantized ones after, by its names.

Most of it switches on what is always on here: lookups need no registering, scale and bias are tensors of their own in
every state dict, features may come in any order. Those functions check what they are given and change nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence

import torch
from torch import Tensor, nn

from shardwise.embeddings.config import BaseEmbeddingConfig, DataType

from .collection import DEFAULT_ROW_ALIGNMENT, QuantizedCollection
from .formats import table_format
from .from_float import kept_rows
from .tables import TableWeights, quantized_rows


def for_each_module_of_type_do(
    module: nn.Module, module_types: Sequence[type[nn.Module]], op: Callable[[nn.Module], None]
) -> None:
    """Call `op` with the module, and with every module in it, that is of one of the types.

    Raises:
        TypeError: one of `module_types` is no class of modules.
    """
    for kind in module_types:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"module_types must be classes of modules, got {kind!r}")
    for one in module.modules():
        if isinstance(one, tuple(module_types)):
            op(one)


def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """Scale and bias as entries of their own in the quantized module's state dict: always so, nothing changes.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a module is prepared, got {type(module).__name__}")


def quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """`quant_prep_enable_quant_state_dict_split_scale_bias` of the modules of some types; nothing changes.

    Raises:
        TypeError: one of `module_types` is no class of modules.
    """
    for_each_module_of_type_do(module, module_types, quant_prep_enable_quant_state_dict_split_scale_bias)


def quant_prep_enable_register_tbes(module: nn.Module, module_types: Sequence[type[nn.Module]]) -> None:
    """Rows that `get_table_to_weights_from_tbe` finds and `assign_weights_to_tbe` fills: always so, nothing changes.

    Raises:
        TypeError: one of `module_types` is no class of modules.
    """
    for_each_module_of_type_do(module, module_types, lambda one: None)


def quant_prep_enable_cache_features_order(module: nn.Module, module_types: Sequence[type[nn.Module]]) -> None:
    """Features are found by name in each batch, in one look at its keys: always so, nothing changes.

    Raises:
        TypeError: one of `module_types` is no class of modules.
    """
    for_each_module_of_type_do(module, module_types, lambda one: None)


def quant_prep_customize_row_alignment(
    module: nn.Module, module_types: Sequence[type[nn.Module]], row_alignment: int
) -> None:
    """Rows padded to `row_alignment` bytes: rows here hold no padding, so another than 16 warns.

    `torchrec_state_dict(row_alignment=...)` writes rows that are padded.

    Raises:
        TypeError: one of `module_types` is no class of modules.
        ValueError: `row_alignment` is no power of two.
    """
    if row_alignment <= 0 or row_alignment & (row_alignment - 1):
        raise ValueError(f"row_alignment must be a power of two, got {row_alignment}")
    found: list[nn.Module] = []
    for_each_module_of_type_do(module, module_types, found.append)
    if found and row_alignment != DEFAULT_ROW_ALIGNMENT:
        warnings.warn(f"row_alignment={row_alignment} has no effect: rows are not padded", stacklevel=2)


def quantize_state_dict(
    module: nn.Module,
    table_name_to_quantized_weights: MutableMapping[str, TableWeights],
    table_name_to_data_type: Mapping[str, DataType],
    table_name_to_num_embeddings_post_pruning: Mapping[str, int] | None = None,
) -> torch.device:
    """Quantize the tables of a float collection's state dict into `table_name_to_quantized_weights`.

    An entry `<path>.<table>.weight` becomes payload uint8 [rows, row_bytes] and scales [rows, parts] (None where the
    data type has none), of the table's first rows only where it is pruned. Returns the device of the tables.

    Raises:
        KeyError: a table has no data type.
        ValueError: an entry is no table's weight, a table cannot be quantized, or keeps more rows than it has.
    """
    pruned = table_name_to_num_embeddings_post_pruning or {}
    device = torch.device("cpu")
    for name, rows in module.state_dict().items():
        *_, table, last = ["", *name.split(".")]
        if last != "weight" or rows.dim() != 2:
            raise ValueError(f"{name!r} is no table's weight: only the state dict of a float collection is quantized")
        if table not in table_name_to_data_type:
            raise KeyError(f"no data type for table {table!r}")
        config = BaseEmbeddingConfig(rows.shape[0], rows.shape[1], table, table_name_to_data_type[table])
        kept = kept_rows(config, pruned.get(table))
        if kept is not None:
            rows = rows[: kept.ids.shape[0]]
        format = table_format(config)
        payload, scales = quantized_rows(table, rows, format.name)
        table_name_to_quantized_weights[table] = payload, scales if format.parts else None
        device = rows.device
    return device


def meta_to_cpu_placement(module: nn.Module) -> None:
    """Bring quantized collections that are on meta to life on the CPU, rows of zeros, in place.

    The modules stay the same objects; `load_state_dict` or `assign_weights_to_tbe` fills them. A pruned table keeps its
    first rows until `load_state_dict` gives it another remapping.
    """
    for one in module.modules():
        if isinstance(one, QuantizedCollection) and one.device.type == "meta":
            one._apply(_zeros_for_meta)


def _zeros_for_meta(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor
