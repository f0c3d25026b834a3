"""FBGEMM's ops as we serve them beside its own: random calls of each, and the comparison."""

from . import (
    calls_bucketize as _calls_bucketize,
    calls_cumsum as _calls_cumsum,
    calls_permute as _calls_permute,
    calls_regroup as _calls_regroup,
)
from .draw import CALLS, Call, Draw, draw_call

__all__ = ["CALLS", "Call", "Draw", "draw_call"]

# imported for the calls that they draw
del _calls_bucketize, _calls_cumsum, _calls_permute, _calls_regroup
