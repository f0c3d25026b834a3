"""Settings of quant sharders by TorchRec's names: what `fused_params` of a sharder may say, and how it is read.

One changes results: the bounds check mode. The others choose between ways in which FBGEMM stores and reads tables;
here buffers are always registered, scale and bias always apart, rows never padded, and lookups take offsets.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from shardwise.kernels import BoundsCheckMode

FUSED_PARAM_REGISTER_TBE_BOOL = "__register_tbes_in_named_modules"
"""Whether lookups of tables are registered as modules. Tables here are buffers, always registered."""
FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS = "__register_quant_state_dict_split_scale_bias"
"""Whether state dicts have scales and biases apart from the rows. Here they always have."""
FUSED_PARAM_TBE_ROW_ALIGNMENT = "__register_tbe_row_alignment"
"""To how many bytes FBGEMM pads a row. Rows here are never padded."""
FUSED_PARAM_BOUNDS_CHECK_MODE = "__register_tbe_bounds_check_mode"
"""What happens to an id outside its table, a `BoundsCheckMode`."""
FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP = "__register_lengths_to_offsets_lookup"
"""Whether lookups take lengths. Here they take offsets."""

_KNOWN = (
    FUSED_PARAM_REGISTER_TBE_BOOL,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_BOUNDS_CHECK_MODE,
    FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP,
)


def check_fused_params(fused_params: Mapping[str, Any] | None, who: str) -> None:
    """Check what a sharder was given; a setting of no effect is named in a warning.

    Raises:
        ValueError: the bounds check mode is none.
    """
    bounds_check_of(fused_params)
    without = sorted(set(fused_params or ()) - set(_KNOWN))
    if without:
        warnings.warn(f"{who}: fused_params {without} have no effect on quantized tables", stacklevel=3)


def bounds_check_of(fused_params: Mapping[str, Any] | None) -> BoundsCheckMode | None:
    """What an id outside its table does, or None if nothing is said; FBGEMM's modes count by their names.

    Raises:
        ValueError: there is no such mode.
    """
    asked = (fused_params or {}).get(FUSED_PARAM_BOUNDS_CHECK_MODE)
    return None if asked is None else bounds_check_mode(asked)


def bounds_check_mode(asked: object) -> BoundsCheckMode:
    """A mode of ours, or the one that has the name of FBGEMM's.

    Raises:
        ValueError: there is no such mode.
    """
    name = str(getattr(asked, "name", asked))
    if name not in BoundsCheckMode.__members__:
        raise ValueError(f"bounds check mode {asked!r} is not one of {', '.join(BoundsCheckMode.__members__)}")
    return BoundsCheckMode[name].effect


def fused_param_bounds_check_mode(fused_params: Mapping[str, Any] | None) -> BoundsCheckMode | None:
    """As `bounds_check_of`."""
    return bounds_check_of(fused_params)


def fused_param_lengths_to_offsets_lookup(fused_params: Mapping[str, Any] | None) -> bool:
    """What is said of lookups by offsets; False if nothing is."""
    return bool((fused_params or {}).get(FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP, False))


def is_fused_param_register_tbe(fused_params: Mapping[str, Any] | None) -> bool:
    """What is said of lookups as modules; False if nothing is."""
    return bool((fused_params or {}).get(FUSED_PARAM_REGISTER_TBE_BOOL, False))


def is_fused_param_quant_state_dict_split_scale_bias(fused_params: Mapping[str, Any] | None) -> bool:
    """What is said of scale and bias apart; False if nothing is."""
    return bool((fused_params or {}).get(FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS, False))


def get_fused_param_tbe_row_alignment(fused_params: Mapping[str, Any] | None) -> int | None:
    """What is said of the bytes to which rows are padded, or None."""
    asked = (fused_params or {}).get(FUSED_PARAM_TBE_ROW_ALIGNMENT)
    return None if asked is None else int(asked)
