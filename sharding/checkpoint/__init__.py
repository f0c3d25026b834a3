"""Checkpoints that fit any plan: saved shard by shard, atomic, loaded under another plan and number of ranks."""

from __future__ import annotations

from .dcp import from_dcp_trusted, to_dcp
from .difference import Difference, Values, diff
from .errors import CheckpointDamaged
from .exporting import export
from .folder import latest, steps, verify
from .loading import Loaded, load
from .manifest import Manifest, Stored, TableFacts, read_manifest
from .recut import reshard
from .report import STRICT, CheckpointMismatch, LoadPolicy, Report
from .saving import Saving, save
from .torchrec_names import optimizer_state_from_torchrec, optimizer_state_to_torchrec
from .whole import full_state_dict

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
