"""Random calls of every op that we serve by FBGEMM's name; a file draws those of a family."""

from . import (
    bucketize as _bucketize,
    calibrate as _calibrate,
    collective as _collective,
    combine as _combine,
    cumsum as _cumsum,
    ids as _ids,
    jagged as _jagged,
    jagged_dense as _jagged_dense,
    lookup as _lookup,
    nbit_lookup as _nbit_lookup,
    permute as _permute,
    quantize_floats as _quantize_floats,
    quantize_rows as _quantize_rows,
    regroup as _regroup,
    reorder as _reorder,
    select as _select,
)
from .draw import CALLS, Call, Draw, draw_call

__all__ = ["CALLS", "Call", "Draw", "draw_call"]

# imported for the calls that they draw
del (
    _bucketize,
    _calibrate,
    _collective,
    _combine,
    _cumsum,
    _ids,
    _jagged,
    _jagged_dense,
    _lookup,
    _nbit_lookup,
    _permute,
    _quantize_floats,
    _quantize_rows,
    _regroup,
    _reorder,
    _select,
)
