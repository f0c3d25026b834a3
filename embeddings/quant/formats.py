"""Which row format (kernels/row_formats.py) a table is quantized to: asked for as a dtype, kept as its data type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from shardwise.embeddings.config import BaseEmbeddingConfig, DataType
from shardwise.kernels import RowFormat, row_format

_FORMATS = {
    DataType.INT8: "int8",
    DataType.UINT8: "int8",
    DataType.INT4: "int4",
    DataType.INT2: "int2",
    DataType.NFP8: "fp8",
    DataType.FP16: "fp16",
    DataType.BF16: "bf16",
    DataType.FP32: "fp32",
}
_DATA_TYPES = {
    torch.int8: DataType.INT8,
    torch.uint8: DataType.INT8,
    torch.qint8: DataType.INT8,
    torch.quint8: DataType.INT8,
    torch.quint4x2: DataType.INT4,
    torch.quint2x4: DataType.INT2,
    torch.float8_e4m3fn: DataType.NFP8,
    torch.float16: DataType.FP16,
    torch.bfloat16: DataType.BF16,
    torch.float32: DataType.FP32,
}


class QuantConfig(NamedTuple):
    """How a float module is quantized: read by `from_float` as the module's attribute `qconfig`.

    `activation` is the dtype of outputs, `weight` that of tables; both a torch dtype or, as in TorchRec, an observer
    class such as `torch.quantization.PlaceholderObserver.with_args(dtype=torch.int8)`. `per_table_weight_dtype` has the
    dtypes of tables that want another than `weight`. `scale_dtype`, which TorchRec does not have, is that of the
    quantized collections: float32 scales hold rows that float16 scales cannot.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None
    scale_dtype: torch.dtype | Mapping[str, torch.dtype] | None = None


def table_format(config: BaseEmbeddingConfig) -> RowFormat:
    """The row format of a table's data type.

    Raises:
        ValueError: the type has none; names the table.
    """
    if config.data_type not in _FORMATS:
        types = ", ".join(str(data_type) for data_type in _FORMATS)
        raise ValueError(f"table {config.name!r}: no rows are stored as {config.data_type}; choose one of {types}")
    return row_format(_FORMATS[config.data_type])


def quantized_data_type(dtype: torch.dtype) -> DataType:
    """The data type of a table that is to be quantized to `dtype`: int8, quint4x2, quint2x4, float8_e4m3fn, ...

    Raises:
        ValueError: no table is quantized to it; lists the dtypes.
    """
    if dtype not in _DATA_TYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DATA_TYPES)
        raise ValueError(f"tables are quantized to {names}, not to {dtype}")
    return _DATA_TYPES[dtype]


def observed_dtype(observer: Any) -> torch.dtype:
    """The dtype itself, or that of what an observer class makes.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(observer, torch.dtype):
        return observer
    made = observer() if callable(observer) else observer
    dtype = getattr(made, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a QuantConfig holds dtypes, or observers that have one, not {observer!r}")
    return dtype


ConfigT = TypeVar("ConfigT", bound=BaseEmbeddingConfig)


def quantized_configs(configs: Sequence[ConfigT], qconfig: Any) -> list[ConfigT]:
    """Copies of float tables' configs with the data types that `qconfig` (a `QuantConfig`, torch's QConfig) asks for.

    Names in `per_table_weight_dtype` that are no table here may be those of another collection.
    """
    own = getattr(qconfig, "per_table_weight_dtype", None) or {}
    default = observed_dtype(qconfig.weight)
    copies = []
    for config in configs:
        dtype = own.get(config.name, default)
        try:
            data_type = quantized_data_type(dtype)
        except ValueError as error:
            raise ValueError(f"table {config.name!r}: {error}") from None
        copies.append(replace(config, data_type=data_type, feature_names=list(config.feature_names)))
    return copies
