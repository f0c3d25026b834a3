"""Checkpoints that fit any plan: `save`, `load`, `latest`, `verify`, and `full_state_dict` for plain tensors."""

from __future__ import annotations

from .sharding.checkpoint import (
    STRICT,
    CheckpointDamaged,
    CheckpointMismatch,
    Loaded,
    LoadPolicy,
    Manifest,
    RankDied,
    Report,
    Saving,
    Stored,
    TableFacts,
    full_state_dict,
    latest,
    load,
    read_manifest,
    save,
    steps,
    verify,
)

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
    "full_state_dict",
    "latest",
    "load",
    "read_manifest",
    "save",
    "steps",
    "verify",
]
