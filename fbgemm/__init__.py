"""FBGEMM's ops by name: `torch.ops.fbgemm.*` with upstream's schemas, each a few lines over `shardwise.kernels`.

`register_ops()` registers them where FBGEMM is not installed; `shardwise.torchrec.install()` sees to that. `OPS` is the
table of names. A file of this folder holds a family of ops; registry.py says what an op is.
"""

if __name__ == "fbgemm":
    raise ImportError("import shardwise.fbgemm: 'fbgemm' alone would be a second copy of it")

from . import (
    calibrate as _calibrate,
    cumsum as _cumsum,
    quantize_floats as _quantize_floats,
    quantize_rows as _quantize_rows,
)
from .registry import OPS, Op, register_ops, registered_ops

__all__ = ["OPS", "Op", "register_ops", "registered_ops"]

# imported for the ops that they define
del _calibrate, _cumsum, _quantize_floats, _quantize_rows
