"""FBGEMM's ops by name: `torch.ops.fbgemm.*` with upstream's schemas, each a few lines over `shardwise.kernels`.

Importing this package registers them where FBGEMM is not installed, as importing `fbgemm_gpu` would; where it is, its
own are loaded. `shardwise.torchrec.install()` sees to that when a program needs one. `OPS` is the table of names. A
file of this folder holds a family of ops; registry.py says what an op is.
"""

if __name__ == "fbgemm":
    raise ImportError("import shardwise.fbgemm: 'fbgemm' alone would be a second copy of it")

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
from .registry import OPS, Op, load_ops, register_ops, registered_ops

__all__ = ["OPS", "Op", "load_ops", "register_ops", "registered_ops"]

# imported for the ops that they define
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

load_ops()
