"""What the processes of ranks find imported: the fork server imports this once, and its children begin with it.

Torch imports half of itself where it is first used, and numba makes its compiler ready at the first loop: 1.6 s of a
core in each new process otherwise, most of what a test of failing ranks takes.
"""

from __future__ import annotations

import contextlib
import gc

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.tensor  # noqa: F401
from loops_cache import keep_loops

import shardwise.sharding.dmp.dmp
import shardwise.sharding.modules.managed_collision
import shardwise.sharding.pipeline
import shardwise.sharding.quant  # noqa: F401

with contextlib.suppress(ImportError):
    import triton  # noqa: F401

keep_loops()
with contextlib.suppress(ImportError):
    import numba

    # nothing of ours: what is loaded from numba's cache needs the same registries
    numba.njit(lambda: 0)()

# what is here stays: children need not look through it for garbage
gc.freeze()
