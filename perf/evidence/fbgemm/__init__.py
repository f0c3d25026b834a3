"""FBGEMM's ops as we serve them beside its own: random calls of each, and the comparison."""

from . import (
    calls_bucketize as _calls_bucketize,
    calls_calibrate as _calls_calibrate,
    calls_collective as _calls_collective,
    calls_combine as _calls_combine,
    calls_cumsum as _calls_cumsum,
    calls_ids as _calls_ids,
    calls_jagged as _calls_jagged,
    calls_jagged_dense as _calls_jagged_dense,
    calls_lookup as _calls_lookup,
    calls_nbit_lookup as _calls_nbit_lookup,
    calls_permute as _calls_permute,
    calls_quantize_floats as _calls_quantize_floats,
    calls_quantize_rows as _calls_quantize_rows,
    calls_regroup as _calls_regroup,
    calls_reorder as _calls_reorder,
    calls_select as _calls_select,
)
from .draw import CALLS, Call, Draw, draw_call

__all__ = ["CALLS", "Call", "Draw", "draw_call"]

# imported for the calls that they draw
del (
    _calls_bucketize,
    _calls_calibrate,
    _calls_collective,
    _calls_combine,
    _calls_cumsum,
    _calls_ids,
    _calls_jagged,
    _calls_jagged_dense,
    _calls_lookup,
    _calls_nbit_lookup,
    _calls_permute,
    _calls_quantize_floats,
    _calls_quantize_rows,
    _calls_regroup,
    _calls_reorder,
    _calls_select,
)
