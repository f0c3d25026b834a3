"""Select the same samples of every key of a keyed ragged batch, with the weights of its values.

Shapes: V [N] values, P [N] weights, lengths [K*B], O [K*B + 1] offsets, I [S] samples. Kernels, their bytes and the
order of gradients: index_select.py and index_add.py, which see keys as blocks of B bags.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .index_select import check_integers, check_offsets, check_values, is_plain, pick, positions


def keyed_jagged_index_select_ref(
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Key by key, bags `indices` of that key one after another."""
    bags = [k + i for k in range(0, lengths.shape[0], max(batch_size, 1)) for i in indices.tolist()]
    spans = [(int(offsets[bag]), int(offsets[bag + 1])) for bag in bags]
    out = torch.cat([values[:0], *(values[begin:end] for begin, end in spans)])
    out_lengths = torch.tensor([end - begin for begin, end in spans], dtype=lengths.dtype, device=lengths.device)
    if weights is None:
        return out, out_lengths, None
    return out, out_lengths, torch.cat([weights[:0], *(weights[begin:end] for begin, end in spans)])


def keyed_jagged_index_select(
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    weights: Tensor | None = None,
    *,
    selected_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples `indices` of every key, in that order and repeats allowed; differentiable in float values and weights.

    Shapes: values [N], lengths [K*B] key by key, offsets [K*B + 1] (those of the lengths), indices [S], batch_size B,
    weights [N]. Values past the last offset are ignored. `selected_lengths_sum`, how many values are selected, spares a
    CUDA device the wait for that number.

    Returns:
        (values [M], lengths [K*S] in the dtype of `lengths`, weights [M] or None). The gradients of a sample that was
        selected more than once are added in the order of selection.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit; on the CPU also offsets that decrease, pass the
            values or contradict the lengths of a selected bag, and a wrong `selected_lengths_sum`.
        IndexError: on the CPU, an index outside [0, B). On CUDA such an index selects empty bags.
    """
    _check(values, lengths, offsets, indices, batch_size, weights)
    if not is_plain(values, lengths, offsets, indices) or not (weights is None or is_plain(weights)):
        out, chosen, picked, _ = torch.ops.shardwise.jagged_index_select(
            values, weights, offsets, indices, batch_size, lengths.dtype, selected_lengths_sum
        )
        return out, chosen, None if weights is None else picked
    with torch.no_grad():
        check_offsets(offsets, values.shape[0])
        chosen, starts = pick(lengths, indices, batch_size), pick(offsets[:-1], indices, batch_size)
        if not torch.equal(pick(offsets[1:], indices, batch_size) - starts, chosen):
            raise ValueError(_contradiction(lengths, offsets))
        at = positions(starts, chosen, selected_lengths_sum)  # [M]
    return values.index_select(0, at), chosen, None if weights is None else weights.index_select(0, at)


def _check(
    values: Tensor, lengths: Tensor, offsets: Tensor, indices: Tensor, batch_size: int, weights: Tensor | None
) -> None:
    check_values("values", values)
    if values.dim() != 1:
        raise ValueError(f"values must have one dim, got shape {list(values.shape)}")
    for name, numbers in (("lengths", lengths), ("offsets", offsets), ("indices", indices)):
        check_integers(name, numbers, values)
    bags = lengths.shape[0]
    if offsets.shape[0] != bags + 1:
        raise ValueError(f"{bags} lengths need {bags + 1} offsets, got {offsets.shape[0]}")
    if batch_size < 0 or (bags % batch_size if batch_size else bags):
        raise ValueError(f"{bags} lengths do not divide among keys of batch_size {batch_size}")
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"weights must have the shape of values, {list(values.shape)}, got {list(weights.shape)}")
    if weights is not None and weights.device != values.device:
        raise ValueError(f"weights must be on the device of values, {values.device}, got {weights.device}")


def _contradiction(lengths: Tensor, offsets: Tensor) -> str:
    implied = offsets.diff()
    bag = int((implied != lengths).nonzero()[0])
    begin, end = int(offsets[bag]), int(offsets[bag + 1])
    return f"bag {bag} has length {int(lengths[bag])}, but its offsets go from {begin} to {end}"
