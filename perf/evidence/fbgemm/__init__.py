"""FBGEMM's ops as we serve them beside its own: random calls of each, and the comparison."""

from . import calls_cumsum as _calls_cumsum, calls_nbit_lookup as _calls_nbit_lookup
from .draw import CALLS, Call, Draw, draw_call

__all__ = ["CALLS", "Call", "Draw", "draw_call"]

# imported for the calls that they draw
del _calls_cumsum, _calls_nbit_lookup
