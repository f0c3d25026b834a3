"""Configs of tables: size, dtype, the features that look a table up, how it begins. Plain data, no tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class DataType(Enum):
    """Element type of a table, by TorchRec's names."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    NFP8 = "NFP8"

    def __str__(self) -> str:
        return self.value


# bits of an element of each type that tables have, quantized ones too
DATA_TYPE_NUM_BITS: dict[DataType, int] = {
    DataType.FP32: 32,
    **dict.fromkeys((DataType.FP16, DataType.BF16), 16),
    **dict.fromkeys((DataType.INT8, DataType.UINT8, DataType.NFP8), 8),
    DataType.INT4: 4,
    DataType.INT2: 2,
}


class PoolingType(Enum):
    """How the rows of a bag become one: added, averaged, or (sequence collections) not at all."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


_TRAINED = (DataType.FP32, DataType.FP16, DataType.BF16)
_DTYPES = {
    DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16,
    DataType.INT64: torch.int64, DataType.INT32: torch.int32, DataType.INT8: torch.int8, DataType.UINT8: torch.uint8,
    DataType.INT4: torch.quint4x2, DataType.INT2: torch.quint2x4, DataType.NFP8: torch.float8_e4m3fn,
}  # fmt: skip
_DATA_TYPES = {dtype: data_type for data_type, dtype in _DTYPES.items()} | {
    torch.qint8: DataType.INT8, torch.quint8: DataType.INT8}  # fmt: skip


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """The torch dtype of a data type; tables train in the first three alone."""
    return _DTYPES[data_type]


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """The inverse of `data_type_to_dtype`; torch's quantized dtypes of 8 bits are INT8 too.

    Raises:
        ValueError: no data type is of this dtype.
    """
    if dtype not in _DATA_TYPES:
        raise ValueError(f"Invalid data type {dtype}: DataType has none of it")
    return _DATA_TYPES[dtype]


# TorchRec's fields that we take in their places and that nothing reads
_NOT_SERVED = {
    "input_dim": None,
    "total_num_buckets": None,
    "use_virtual_table": False,
    "virtual_table_eviction_policy": None,
    "stash_weights": False,
}


@dataclass
class BaseEmbeddingConfig:
    """One table: `num_embeddings` rows of `embedding_dim`, looked up by the ids of `feature_names`.

    `feature_names` defaults to the table's name. Without `init_fn` rows begin uniform in
    [`weight_init_min`, `weight_init_max`], by default +-sqrt(1 / num_embeddings) as in TorchRec. `need_pos`, which
    TorchRec wants for rows split over ranks beneath position weights, changes nothing: weights travel with their ids.
    `enable_embedding_update` lets `DistributedModelParallel.write` write rows of the sharded table.

    Raises:
        ValueError: a size is not positive, the bounds cross, a feature is listed twice, or a field is set that nothing
            serves: `input_dim` and those after it but for `enable_embedding_update`.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[Tensor], Tensor | None] | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Any = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        for what in ("num_embeddings", "embedding_dim"):
            value: Any = getattr(self, what)
            # numpy's integers are fine: sizes often come from data
            if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) <= 0:
                raise ValueError(f"table {self.name!r}: {what} must be a positive int, got {value!r}")
            setattr(self, what, operator.index(value))
        names: Any = self.feature_names
        # ints are keys too, of batches as TorchRec's users make them
        if isinstance(names, str) or not all(isinstance(name, (str, int)) for name in names):
            raise ValueError(f"table {self.name!r}: feature_names must be a list of strings, got {names!r}")
        if not isinstance(self.data_type, DataType):
            raise ValueError(
                f"table {self.name!r}: data_type must be a DataType, DataType.FP16 say, got {self.data_type!r}"
            )
        for what, default in _NOT_SERVED.items():
            if (given := getattr(self, what)) != default:
                raise ValueError(f"table {self.name!r}: {what}={given!r} is not supported, leave it {default}")
        if len(set(self.feature_names)) != len(self.feature_names):
            raise ValueError(f"table {self.name!r}: feature_names repeat: {self.feature_names}")
        low, high = self.get_weight_init_min(), self.get_weight_init_max()
        if low > high:
            raise ValueError(f"table {self.name!r}: weight_init_min {low} is above weight_init_max {high}")
        if self.init_fn is None:
            self.init_fn = partial(nn.init.uniform_, a=low, b=high)

    def get_weight_init_max(self) -> float:
        """Upper end of the initial values."""
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Lower end of the initial values."""
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """How many features look this table up."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A pooled table: each sample's ids of a feature become one row by `pooling` (SUM or MEAN).

    Raises:
        ValueError: another pooling, or as `BaseEmbeddingConfig`.

    Example:
        >>> table = EmbeddingBagConfig(num_embeddings=100, embedding_dim=8, name="item", feature_names=["clicked"])
        >>> table.pooling
        <PoolingType.SUM: 'SUM'>
        >>> EmbeddingBagConfig(num_embeddings=100, embedding_dim=0, name="item", feature_names=["clicked"])
        Traceback (most recent call last):
            ...
        ValueError: table 'item': embedding_dim must be a positive int, got 0
    """

    pooling: PoolingType = PoolingType.SUM

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(
                f"table {self.name!r}: pooling must be PoolingType.SUM or PoolingType.MEAN, got {self.pooling!r}"
            )


@dataclass
class EmbeddingTableConfig(EmbeddingBagConfig):
    """A table and what its module knows of it besides: weighted lookups, a feature processor, output keys.

    Its pooling may be NONE, where every id keeps a row of its own; no `EmbeddingBagCollection` takes it then.
    """

    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.pooling is PoolingType.NONE:
            BaseEmbeddingConfig.__post_init__(self)
        else:
            super().__post_init__()


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A sequence table: every id keeps a row of its own.

    Example:
        >>> table = EmbeddingConfig(num_embeddings=100, embedding_dim=8, name="item", feature_names=["seen", "bought"])
        >>> table.num_features()
        2
    """


# a child may not be named like something that every ModuleDict has: "items", "type", ...
_NO_TABLES = nn.ModuleDict()


def named_tables(configs: list[Any], what: str, kind: type[BaseEmbeddingConfig]) -> list[Any]:
    """The configs themselves, with default feature names filled in (as in TorchRec, the caller sees those).

    Raises:
        TypeError: a config is not of `kind`.
        ValueError: a table has no name, shares it with another, or has one that a child module cannot have.
    """
    seen: set[str] = set()
    tables = []
    for config in configs:
        if not isinstance(config, kind):
            raise TypeError(f"{what} takes {kind.__name__}, got {type(config).__name__}")
        if getattr(config, "pooling", None) is PoolingType.NONE:
            raise ValueError(f"table {config.name!r}: {what} pools, and its pooling is PoolingType.NONE")
        if not config.name:
            raise ValueError(f"{what}: every table needs a name (rows {config.num_embeddings})")
        if config.name in seen:
            raise ValueError(f"Duplicate table name {config.name}: two tables of {what} have it")
        if "." in config.name or hasattr(_NO_TABLES, config.name):
            raise ValueError(
                f"table {config.name!r}: a child module cannot have this name (it holds a dot, or nn.ModuleDict has"
                f" an attribute of that name), choose another"
            )
        seen.add(config.name)
        if not config.feature_names:
            config.feature_names = [config.name]
        tables.append(config)
    return tables


def table_dtype(config: BaseEmbeddingConfig) -> torch.dtype:
    """The torch dtype in which the table is trained.

    Raises:
        ValueError: its data type has no trainable form; names the table.
    """
    if config.data_type not in _TRAINED:
        trained = ", ".join(data_type.name for data_type in _TRAINED)
        raise ValueError(f"table {config.name!r}: tables train in {trained}, not in {config.data_type}")
    return data_type_to_dtype(config.data_type)


def embedding_names_by_table(configs: list[Any]) -> list[list[str]]:
    """Output names of each table's features: the feature, or `feature@table` where several tables share it."""
    users: dict[str, int] = {}
    for config in configs:
        for feature in config.feature_names:
            users[feature] = users.get(feature, 0) + 1
    return [
        [feature if users[feature] == 1 else f"{feature}@{config.name}" for feature in config.feature_names]
        for config in configs
    ]
