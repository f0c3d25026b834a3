"""TorchRec's import paths, served by shardwise: `shardwise.torchrec.<path>`, `install()`, and a way to run scripts.

    from shardwise.torchrec.modules.embedding_modules import EmbeddingBagCollection   # one name, nothing else changes

    import shardwise.torchrec
    shardwise.torchrec.install()                                                      # once, before the first import
    from torchrec.distributed.model_parallel import DistributedModelParallel

    python -m shardwise.torchrec train.py --epochs 2                                  # no change at all; -m module too

A name that we lack raises ImportError or AttributeError that says it and what is near.
"""

from __future__ import annotations

from .migration.mirror import (
    SERVED_VERSION,
    install,
    resolve,
    serve,
    served_names,
    uninstall,
)
from .migration.torchrec_names import TABLE

__all__ = ["TABLE", "install", "uninstall"]

# this module is the root of the mirror under our own name
__path__: list[str] = []
__version__ = SERVED_VERSION
if __name__ != "__main__":
    serve("shardwise.torchrec", original="torchrec")


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve("torchrec", name, served_as=__name__)


def __dir__() -> list[str]:
    return sorted({*__all__, *served_names("torchrec")})


if __name__ == "__main__":
    from importlib import import_module

    from .migration.run import main

    # the program may import this module too, which is none that `serve` makes
    import_module("shardwise.torchrec")
    main()
