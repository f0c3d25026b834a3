"""Checkpoints that fit any plan: `save`, `load`, `latest`, `verify`, and `full_state_dict` for plain tensors.

`diff`, `reshard` and `export` work on what is saved; `from_dcp_trusted` and `to_dcp` turn it from and into what
torch.distributed.checkpoint and TorchRec read.
"""

from __future__ import annotations

from .sharding.checkpoint import (
    STRICT,
    CheckpointDamaged,
    CheckpointMismatch,
    Difference,
    Loaded,
    LoadPolicy,
    Manifest,
    Report,
    Saving,
    Stored,
    TableFacts,
    Values,
    diff,
    export,
    from_dcp_trusted,
    full_state_dict,
    latest,
    load,
    optimizer_state_from_torchrec,
    optimizer_state_to_torchrec,
    read_manifest,
    reshard,
    save,
    steps,
    to_dcp,
    verify,
)

__all__ = [
    "STRICT",
    "CheckpointDamaged",
    "CheckpointMismatch",
    "Difference",
    "LoadPolicy",
    "Loaded",
    "Manifest",
    "Report",
    "Saving",
    "Stored",
    "TableFacts",
    "Values",
    "diff",
    "export",
    "from_dcp_trusted",
    "full_state_dict",
    "latest",
    "load",
    "optimizer_state_from_torchrec",
    "optimizer_state_to_torchrec",
    "read_manifest",
    "reshard",
    "save",
    "steps",
    "to_dcp",
    "verify",
]
