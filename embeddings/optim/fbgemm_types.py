"""FBGEMM's enums, as TorchRec's programs write them into fused parameters and configs, and what turns ours into them.

Members and values are FBGEMM's. Optimizers are read by `optimizer_from`, caches by `planner` with `cost="torchrec"`;
`EmbeddingLocation` says where a fused collection is to keep its tables.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

import torch

from ..config import DataType, PoolingType


class EmbOptimType(Enum):
    """An optimizer by FBGEMM's name: `fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}`."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    SHAMPOO = "shampoo"
    SHAMPOO_V2 = "shampoo_v2"
    MADGRAD = "madgrad"
    EXACT_ROWWISE_WEIGHTED_ADAGRAD = "exact_row_wise_weighted_adagrad"
    ENSEMBLE_ROWWISE_ADAGRAD = "ensemble_row_wise_adagrad"
    EMAINPLACE_ROWWISE_ADAGRAD = "ema_in_place_row_wise_adagrad"
    NONE = "none"

    def __str__(self) -> str:
        return self.value


# upstream's name of it where tables are made
OptimType = EmbOptimType


class SparseType(Enum):
    """The type of a table's numbers by FBGEMM's name."""

    FP32 = "fp32"
    FP16 = "fp16"
    FP8 = "fp8"
    NFP8 = "nfp8"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    BF16 = "bf16"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value

    @staticmethod
    def from_dtype(dtype: torch.dtype) -> SparseType:
        """The type that torch calls `dtype`.

        Raises:
            ValueError: tables have no such numbers.
        """
        for sparse_type, dtypes in _DTYPES.items():
            if dtype in dtypes:
                return sparse_type
        raise ValueError(f"no table has numbers of type {dtype}: {', '.join(str(d[0]) for d in _DTYPES.values())} are")

    @staticmethod
    def from_int(ty: int) -> SparseType:
        """The type of a number that FBGEMM's ops take; MX4 and NFP8 have others there than `as_int` gives.

        Raises:
            ValueError: no type has it.
        """
        if ty not in _OF_INT:
            raise ValueError(f"no type of a table's numbers is {ty!r}: {', '.join(map(str, _OF_INT))} are")
        return _OF_INT[ty]

    def as_int(self) -> int:
        """FBGEMM's number of it."""
        return _AS_INT[self]

    def as_dtype(self) -> torch.dtype:
        """Torch's name of it; fp8 and mx4 of FBGEMM's own making are bytes to torch."""
        return _DTYPES[self][0] if self in _DTYPES else torch.uint8

    def bit_rate(self) -> int:
        """Bits of a number."""
        return int(self.value.lstrip("bfimnptx"))

    def align_size(self) -> int:
        """Of how many numbers the length of a row is a multiple."""
        return {4: 8, 2: 16, 8: 4, 16: 2, 32: 1}[self.bit_rate()]

    def is_float(self) -> bool:
        """Whether it is a floating type whose every number stands by itself."""
        return self.value.lstrip("bn").startswith("fp") or self is SparseType.BF16


# the first is what a type becomes, all of them become the type
_DTYPES = {
    SparseType.FP32: (torch.float32,),
    SparseType.FP16: (torch.float16,),
    SparseType.BF16: (torch.bfloat16,),
    SparseType.INT8: (torch.uint8, torch.int8, torch.qint8, torch.quint8),
    SparseType.INT4: (torch.quint4x2,),
    SparseType.INT2: (torch.quint2x4,),
    SparseType.NFP8: (torch.float8_e4m3fn,),
}
_AS_INT = {
    SparseType[name]: number
    for number, name in enumerate(("FP32", "FP16", "INT8", "INT4", "INT2", "BF16", "FP8", "MX4", "NFP8"))
}
_OF_INT = {number: each for each, number in _AS_INT.items() if number < 7} | {8: SparseType.MX4, 9: SparseType.NFP8}


def sparse_type_to_int(sparse_type: SparseType) -> int:
    """FBGEMM's number of a type."""
    return sparse_type.as_int()


def sparse_type_int_to_dtype(ty: int) -> torch.dtype:
    """Torch's name of the type of a number that FBGEMM's ops take.

    Raises:
        ValueError: no type has it.
    """
    return SparseType.from_int(ty).as_dtype()


class EmbeddingLocation(IntEnum):
    """Where a table lies."""

    DEVICE = 0
    MANAGED = 1
    MANAGED_CACHING = 2
    HOST = 3
    MTIA = 4

    @classmethod
    def str_values(cls) -> list[str]:
        """All names, in small letters."""
        return [each.name.lower() for each in cls]

    @classmethod
    def from_str(cls, key: str) -> EmbeddingLocation:
        """The place of that name, in small letters.

        Raises:
            ValueError: there is none.
        """
        if key not in cls.str_values():
            raise ValueError(f"no EmbeddingLocation is called {key!r}: {', '.join(cls.str_values())} are")
        return cls[key.upper()]

    @classmethod
    def from_device_and_clf(cls, device: torch.device, cache_load_factor: float) -> EmbeddingLocation:
        """Where FBGEMM puts a table of which this part of the rows (0 to 1) is to be on the device.

        Raises:
            ValueError: it is no part, or the device neither a CPU nor CUDA.
        """
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be a CPU or CUDA, got {device}")
        if not 0 <= cache_load_factor <= 1:
            raise ValueError(f"cache_load_factor must be from 0 to 1, got {cache_load_factor}")
        if device.type == "cpu":
            return cls.HOST
        return {0.0: cls.MANAGED, 1.0: cls.DEVICE}.get(cache_load_factor, cls.MANAGED_CACHING)


def get_new_embedding_location(device: torch.device, cache_load_factor: float) -> EmbeddingLocation:
    """As `EmbeddingLocation.from_device_and_clf`."""
    return EmbeddingLocation.from_device_and_clf(device, cache_load_factor)


class ComputeDevice(IntEnum):
    """What looks tables up."""

    CPU = 0
    CUDA = 1
    MTIA = 2

    @classmethod
    def get_available(cls) -> ComputeDevice:
        """CUDA where there is one, else the CPU."""
        return cls.CUDA if torch.cuda.is_available() else cls.CPU


def get_available_compute_device() -> ComputeDevice:
    """As `ComputeDevice.get_available`."""
    return ComputeDevice.get_available()


# names of locations whose rows are in the memory of the host, and with the second in part on the device
BELOW_DEVICE = ("MANAGED", "MANAGED_CACHING")


def require_location(location: EmbeddingLocation | None, device: torch.device | str | None) -> None:
    """Raise ValueError where rows on this device cannot lie there; FBGEMM's own enum is understood as well."""
    # by name, as the real FBGEMM may be installed
    name = "DEVICE" if location is None else location.name
    on_cpu = torch.device(device or "cpu").type in ("cpu", "meta")
    if name not in ("DEVICE", *BELOW_DEVICE) and not (name == "HOST" and on_cpu):
        raise ValueError(
            f"location={name}: rows lie on the collection's device, {device or 'cpu'}, or below it by MANAGED or"
            " MANAGED_CACHING: leave it None, or take one of these"
        )


class PoolingMode(IntEnum):
    """How the rows of a bag become one."""

    SUM = 0
    MEAN = 1
    NONE = 2

    def do_pooling(self) -> bool:
        """Whether they become one at all."""
        return self is not PoolingMode.NONE

    @classmethod
    def from_str(cls, key: str) -> PoolingMode:
        """The mode of that name, in small letters.

        Raises:
            ValueError: there is none.
        """
        names = [each.name.lower() for each in cls]
        if key not in names:
            raise ValueError(f"no PoolingMode is called {key!r}: {', '.join(names)} are")
        return cls[key.upper()]


class CacheAlgorithm(Enum):
    """Which row leaves a full cache: the least recently or the least frequently used."""

    LRU = 0
    LFU = 1


class MultiPassPrefetchConfig(NamedTuple):
    """In how many passes rows are brought into a cache, and from how many ids on; the planner counts their buffers."""

    num_passes: int = 12
    min_splitable_pass_size: int = 6 * 1024 * 1024


class EmbeddingSpecInfo(IntEnum):
    """Places in the tuple that describes a quantized table."""

    feature_names = 0
    rows = 1
    dims = 2
    sparse_type = 3
    embedding_location = 4


class RecordCacheMetrics(NamedTuple):
    """What is to be counted of caches, in all and by table."""

    record_cache_miss_counter: bool
    record_tablewise_cache_miss: bool


class SplitState(NamedTuple):
    """How tables, or a state of theirs, lie in one buffer for each place: its elements, and where each table begins."""

    dev_size: int
    host_size: int
    uvm_size: int
    placements: list[EmbeddingLocation]
    offsets: list[int]


def data_type_to_sparse_type(data_type: DataType) -> SparseType:
    """FBGEMM's type of a table of this type.

    Raises:
        ValueError: it has none: tables of 32 and 64 bit integers.
    """
    if data_type is DataType.UINT8:
        return SparseType.INT8
    if not isinstance(data_type, DataType) or data_type.name not in SparseType.__members__:
        raise ValueError(f"Invalid DataType {data_type}: no table of FBGEMM's has numbers of this type")
    return SparseType[data_type.name]


def pooling_type_to_pooling_mode(pooling_type: PoolingType, sharding_type: object = None) -> PoolingMode:
    """FBGEMM's mode of a table, as TorchRec runs it: a mean over row shards is a sum that is divided afterwards.

    Args:
        pooling_type: of the table.
        sharding_type: a `ShardingType`, or None of a whole table.
    """
    by_rows = getattr(sharding_type, "value", sharding_type) in ("row_wise", "table_row_wise")
    return PoolingMode.SUM if by_rows and pooling_type is PoolingType.MEAN else PoolingMode[pooling_type.name]


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """`torch.nn.EmbeddingBag`'s word for it.

    Raises:
        ValueError: it has none.
    """
    if pooling_type is PoolingType.NONE:
        raise ValueError(f"Unsupported pooling type {pooling_type}: torch.nn.EmbeddingBag has no mode for it")
    return str(pooling_type.value).lower()
