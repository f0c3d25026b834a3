"""Batches that come as a TensorDict of nested tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ._convert import from_nested
from .keyed_jagged_tensor import KeyedJaggedTensor


def maybe_td_to_kjt(features: Any, keys: Sequence[str] | None = None) -> Any:
    """A KeyedJaggedTensor of the `keys` (all by default) of a TensorDict; anything else as it is.

    Entries are nested tensors [batch, ids] of layout torch.jagged. tensordict need not be installed.
    """
    module = sys.modules.get("tensordict")
    if isinstance(features, KeyedJaggedTensor) or module is None or not isinstance(features, module.TensorDictBase):
        return features
    return from_nested({key: features[key] for key in (features.keys() if keys is None else keys)})
