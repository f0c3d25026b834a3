"""FBGEMM's ops as we serve them beside its own: random calls of each, and the comparison."""

from . import (
    calls_calibrate as _calls_calibrate,
    calls_cumsum as _calls_cumsum,
    calls_quantize_floats as _calls_quantize_floats,
    calls_quantize_rows as _calls_quantize_rows,
)
from .draw import CALLS, Call, Draw, draw_call

__all__ = ["CALLS", "Call", "Draw", "draw_call"]

# imported for the calls that they draw
del _calls_calibrate, _calls_cumsum, _calls_quantize_floats, _calls_quantize_rows
