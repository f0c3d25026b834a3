"""What this rank has of the values of a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def local_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Each value's live part on this rank: of a cut one its rows, several column blocks side by side, or none [0]."""
    return {name: local_part(value) for name, value in state.items()}


def local_part(value: Any) -> Tensor:
    """One value of `local_tensors`."""
    if hasattr(value, "local_shards"):
        shards = [shard.tensor for shard in value.local_shards()]
        return torch.cat(shards, dim=shards[0].dim() - 1) if len(shards) > 1 else (*shards, torch.empty(0))[0]
    local: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local
