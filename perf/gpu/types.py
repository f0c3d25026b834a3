"""Types of PTX as numpy has them, and an operation: a function of arrays with the types of its operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Function = Callable[..., Any]
# how values of a type are given to a function; bf16, tf32 and packed types as their bits
DTYPES: dict[str, type[Any]] = {
    "pred": np.bool_, "s8": np.int8, "u8": np.uint8, "b8": np.uint8, "s16": np.int16, "u16": np.uint16,
    "b16": np.uint16, "f16": np.float16, "bf16": np.uint16, "s32": np.int32, "u32": np.uint32, "b32": np.uint32,
    "f32": np.float32, "tf32": np.float32, "f16x2": np.uint32, "bf16x2": np.uint32, "s16x2": np.uint32,
    "u16x2": np.uint32, "s64": np.int64, "u64": np.uint64, "b64": np.uint64, "f64": np.float64, "f32x2": np.uint64,
    "e4m3x2": np.uint16, "e5m2x2": np.uint16,
}  # fmt: skip
UNSIGNED: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True)
class Operation:
    """A function of arrays: the types of what it takes, and of what it gives, a tuple where there are several."""

    function: Function
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
