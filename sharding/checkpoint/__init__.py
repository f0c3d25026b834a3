"""Checkpoints that fit any plan: saved shard by shard, atomic, loaded under another plan and number of ranks."""

from __future__ import annotations

from .errors import CheckpointDamaged, RankDied
from .files import TensorFiles
from .folder import latest, steps, verify
from .loading import Loaded, load
from .manifest import Manifest, Stored, TableFacts, read_manifest
from .report import STRICT, CheckpointMismatch, LoadPolicy, Report
from .saving import Saving, save, write_step
from .whole import full_state_dict

__all__ = [
    "STRICT",
    "CheckpointDamaged",
    "CheckpointMismatch",
    "LoadPolicy",
    "Loaded",
    "Manifest",
    "RankDied",
    "Report",
    "Saving",
    "Stored",
    "TableFacts",
    "TensorFiles",
    "full_state_dict",
    "latest",
    "load",
    "read_manifest",
    "save",
    "steps",
    "verify",
    "write_step",
]
