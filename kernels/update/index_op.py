"""The index of an update (row_chunks.py) as an op of its own, for who makes it before there is a gradient.

Shapes: as `fused_update`; an index is a few tensors of its batch, about 70 bytes an id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._op import register, runs_kernel
from ..features import Lookup, unflatten_segments
from .row_chunks import levels, room_of, row_chunks


def update_index(
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    segments: Sequence[int],
    pooling: str,
    *,
    hashed: bool,
    ids: Tensor | None = None,
) -> list[Tensor]:
    """The `index` that `fused_update` of a batch takes, made before there is a gradient; arguments as there.

    Shapes: indices, per_id_weights and ids [N], offsets [F*B + 1], features [F, 8]. `hashed` where rows will be rounded
    stochastically. Nothing where the update makes none: on a CPU.
    """
    columns = dims[0] if pooling == "sequence" else sum(dims)
    return torch.ops.shardwise.update_index(  # type: ignore[no-any-return]
        indices, offsets, per_id_weights, features, list(segments), columns, pooling, hashed, ids
    )


def _update_index(
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    segments: list[int],
    columns: int,
    pooling: str,
    hashed: bool,
    ids: Tensor | None = None,
) -> list[Tensor]:
    if not runs_kernel(indices) or not indices.shape[0] or not segments:
        return []
    lookup = Lookup(indices, offsets, per_id_weights, features, unflatten_segments(segments), pooling, ids=ids)
    return row_chunks(lookup, columns, None, None, hashed=hashed).tensors()


def _fake_index(
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    segments: list[int],
    columns: int,
    pooling: str,
    hashed: bool,
    ids: Tensor | None = None,
) -> list[Tensor]:
    if not runs_kernel(indices) or not indices.shape[0] or not segments:
        return []
    n = indices.shape[0]
    made = [indices.new_empty(size, dtype=torch.int64) for size in (room_of(n), levels(n), n)]
    scaled = per_id_weights is not None or pooling == "mean"
    return made + [indices.new_empty(n, dtype=torch.float32)] * scaled


register(
    "update_index(Tensor indices, Tensor offsets, Tensor? per_id_weights, Tensor features, int[] segments, int columns,"
    " str pooling, bool hashed, Tensor? ids=None) -> Tensor[]",
    _update_index,
    _fake_index,
)
