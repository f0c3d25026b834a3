"""Checkpoints that fit any plan: `save`, `load`, `latest`, `verify`, and `full_state_dict` for plain tensors.

`diff`, `reshard` and `export` work on what is saved; `from_dcp_trusted` and `to_dcp` turn it from and into what
torch.distributed.checkpoint and TorchRec read. Wherever a folder is taken, "s3://bucket/runs/7" is one too.
"""

from __future__ import annotations

from .sharding.checkpoint.dcp import from_dcp_trusted, to_dcp
from .sharding.checkpoint.difference import Difference, Values, diff
from .sharding.checkpoint.errors import STRICT, CheckpointDamaged, CheckpointMismatch, LoadPolicy, Report
from .sharding.checkpoint.folder import latest, remove, steps, verify
from .sharding.checkpoint.loading import Loaded, load
from .sharding.checkpoint.manifest import Manifest, Stored, TableFacts, read_manifest
from .sharding.checkpoint.offline import export
from .sharding.checkpoint.places import locate
from .sharding.checkpoint.recut import reshard
from .sharding.checkpoint.saving import Saving, save
from .sharding.checkpoint.torchrec_names import optimizer_state_from_torchrec, optimizer_state_to_torchrec
from .sharding.checkpoint.whole import full_state_dict

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
    "locate",
    "optimizer_state_from_torchrec",
    "optimizer_state_to_torchrec",
    "read_manifest",
    "remove",
    "reshard",
    "save",
    "steps",
    "to_dcp",
    "verify",
]
