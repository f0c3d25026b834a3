"""FBGEMM's ops as we serve them beside its own: random calls of each, and the comparison."""

from . import (
    calls_cumsum as _calls_cumsum,
    calls_jagged as _calls_jagged,
    calls_jagged_dense as _calls_jagged_dense,
    calls_select as _calls_select,
)
from .draw import CALLS, Call, Draw, draw_call

__all__ = ["CALLS", "Call", "Draw", "draw_call"]

# imported for the calls that they draw
del _calls_cumsum, _calls_jagged, _calls_jagged_dense, _calls_select
