"""How FBGEMM's inference tables lie in memory: the bytes of a row, and where each table begins.

Types and places may be FBGEMM's own enums as well as ours: they are read by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from shardwise.embeddings.optim.fbgemm_types import EmbeddingLocation, SplitState

__all__ = [
    "DEFAULT_SCALE_BIAS_SIZE_IN_BYTES",
    "TYPES",
    "Spec",
    "align_to_cacheline",
    "nbit_construct_split_state",
    "require_locations",
    "rounded_row_size_in_bytes",
    "unpadded_row_size_in_bytes",
]

# (feature names, rows, dim, SparseType, EmbeddingLocation) of a table
Spec: TypeAlias = tuple[str, int, int, Any, Any]

# scale and bias of a row of integers, both fp16
DEFAULT_SCALE_BIAS_SIZE_IN_BYTES = 4
# bytes on which tables begin
_CACHE_LINE = 128
# SparseType -> its number in `weights_tys`, and bits of a number
TYPES = {
    "FP32": (0, 32),
    "FP16": (1, 16),
    "INT8": (2, 8),
    "INT4": (3, 4),
    "INT2": (4, 2),
    "FP8": (6, 8),
}


def type_name(weight_ty: Any) -> str:
    """The name of a table's `SparseType`.

    Raises:
        ValueError: inference tables have no such numbers.
    """
    name = str(getattr(weight_ty, "name", weight_ty))
    if name not in TYPES:
        raise ValueError(f"inference tables are of {', '.join(TYPES)}, not {name}")
    return name


def require_locations(locations: Sequence[str], on_cpu: bool, enforce_hbm: bool) -> None:
    """Refuse tables that do not lie where they are looked up.

    Raises:
        ValueError: a table's `EmbeddingLocation`, by its name, is another; says which.
    """
    place = "HOST" if on_cpu else "DEVICE"
    for t, location in enumerate(locations):
        if location != place and not (location == "MANAGED" and enforce_hbm and not on_cpu):
            raise ValueError(
                f"table {t} is placed at {location}: tables of a {'CPU' if on_cpu else 'GPU'} lie at {place}; unified"
                " memory, caches over host memory (MANAGED, MANAGED_CACHING) and MTIA are not served"
            )


def unpadded_row_size_in_bytes(
    dim: int, weight_ty: Any, scale_bias_size_in_bytes: int = DEFAULT_SCALE_BIAS_SIZE_IN_BYTES
) -> int:
    """Bytes of a row of `dim` numbers of this `SparseType`, with its scale and bias if they are integers."""
    name = type_name(weight_ty)
    return dim * TYPES[name][1] // 8 + (scale_bias_size_in_bytes if name.startswith("INT") else 0)


def rounded_row_size_in_bytes(
    dim: int,
    weight_ty: Any,
    row_alignment: int,
    scale_bias_size_in_bytes: int = DEFAULT_SCALE_BIAS_SIZE_IN_BYTES,
) -> int:
    """Bytes from row to row: those of a row, rounded up to a multiple of `row_alignment`."""
    return _round_up(unpadded_row_size_in_bytes(dim, weight_ty, scale_bias_size_in_bytes), row_alignment)


def align_to_cacheline(a: int) -> int:
    """Bytes of a table, rounded up to a multiple of 128."""
    return _round_up(a, _CACHE_LINE)


def nbit_construct_split_state(
    embedding_specs: Sequence[Spec],
    cacheable: bool,
    row_alignment: int,
    scale_bias_size_in_bytes: int = DEFAULT_SCALE_BIAS_SIZE_IN_BYTES,
    cacheline_alignment: bool = True,
) -> SplitState:
    """Where tables begin in the buffer of their place, and the bytes of each buffer.

    Args:
        embedding_specs: of the tables.
        cacheable: whether MANAGED_CACHING stays what it is, and does not become MANAGED.
        row_alignment: bytes of which a row has a multiple.
        scale_bias_size_in_bytes: of a row of integers.
        cacheline_alignment: whether tables begin on multiples of 128 bytes.
    """
    sizes = {"HOST": 0, "DEVICE": 0, "MANAGED": 0}
    placements, offsets = [], []
    for _, rows, dim, weight_ty, location in embedding_specs:
        size = rows * rounded_row_size_in_bytes(dim, weight_ty, row_alignment, scale_bias_size_in_bytes)
        placement = EmbeddingLocation[location.name]
        if placement == EmbeddingLocation.MANAGED_CACHING and not cacheable:
            placement = EmbeddingLocation.MANAGED
        place = {"MTIA": "DEVICE", "MANAGED_CACHING": "MANAGED"}.get(placement.name, placement.name)
        placements.append(placement)
        offsets.append(sizes[place])
        sizes[place] += align_to_cacheline(size) if cacheline_alignment else size
    return SplitState(sizes["DEVICE"], sizes["HOST"], sizes["MANAGED"], placements, offsets)


def _round_up(a: int, b: int) -> int:
    return (a + b - 1) // b * b
