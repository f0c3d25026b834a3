"""Pooled embeddings of features with batch sizes of their own, as rows of the full batch.

Shapes: F features, B_f samples of each, B of the full batch; inverse indices [F, B] say which row of its feature a
sample has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..tables.variable_batch import select_rows


def reorder_inverse_indices(inverse_indices: tuple[list[str], Tensor] | None, feature_names: Sequence[str]) -> Tensor:
    """The rows [F, B] of the inverse indices, in the order of `feature_names`; an empty tensor where there are none.

    A name may be that of an embedding, `feature@table`.

    Raises:
        KeyError: a feature has no inverse indices.
    """
    if inverse_indices is None:
        return torch.empty(0)
    keys, rows = inverse_indices
    place = {key: number for number, key in enumerate(keys)}
    names = [name.split("@")[0] for name in feature_names]
    if missing := [name for name in names if name not in place]:
        raise KeyError(f"features {missing} have no inverse indices: those are of {list(keys)}")
    return rows.index_select(0, torch.tensor([place[name] for name in names], dtype=torch.int64, device=rows.device))


def process_pooled_embeddings(pooled_embeddings: Sequence[Tensor], inverse_indices: Tensor) -> Tensor:
    """Embeddings [B_f, D_f] of each feature side by side, as [B, sum of D_f].

    With inverse indices [F, B], each feature's rows are those of its samples first. Gradients of a row that several
    samples have are added in a fixed order.
    """
    if inverse_indices.numel() > 0:
        pooled_embeddings = [
            select_rows(rows, places) for rows, places in zip(pooled_embeddings, inverse_indices.unbind(0), strict=True)
        ]
    return torch.cat(list(pooled_embeddings), dim=1)
