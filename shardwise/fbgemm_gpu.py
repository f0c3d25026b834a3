"""FBGEMM's import paths, served by shardwise: `shardwise.fbgemm_gpu.<path>`, with its ops as `torch.ops.fbgemm.*`.

    import shardwise.fbgemm_gpu                                                       # for `import fbgemm_gpu`
    from shardwise.fbgemm_gpu.split_embedding_configs import EmbOptimType

Programs that say `import fbgemm_gpu` run under `shardwise.torchrec.install()` or `python -m shardwise.torchrec`. Where
FBGEMM is installed, the ops are its own.
"""

from __future__ import annotations

from . import fbgemm as _fbgemm
from .migration.mirror import (
    resolve,
    serve,
    served_names,
)

# this module is the root of the mirror under our own name
__path__: list[str] = []
serve(__name__, original="fbgemm_gpu")
# imported for the ops that it registers
del _fbgemm


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve("fbgemm_gpu", name, served_as=__name__)


def __dir__() -> list[str]:
    return served_names("fbgemm_gpu")
