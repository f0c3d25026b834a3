"""Inputs of several lookups behind one another as one input of one lookup: int32 indices and offsets, fp32 weights.

Shapes: of feature f indices [N_f], offsets [B_f] or [B_f + 1] or lengths [B_f], weights [N_f], or [0] for none.
Weights come out empty where no feature has any; a feature without counts with 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .registry import op

_INDEX = (torch.int32, torch.int64)
_Combined = tuple[Tensor, Tensor, Tensor]


def _combine_fake(
    indices_list: Sequence[Tensor],
    offsets_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    include_last_offsets: Tensor,
) -> _Combined:
    _check("offsets_list", indices_list, offsets_list, per_sample_weights)
    offsets = offsets_list[0].new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int32)
    return _joined(indices_list), offsets, _weights(indices_list, per_sample_weights)


@op(
    "tbe_input_combine(Tensor[] indices_list, Tensor[] offsets_list, Tensor[] per_sample_weights,"
    " Tensor include_last_offsets) -> (Tensor, Tensor, Tensor)",
    fake=_combine_fake,
)
def tbe_input_combine(
    indices_list: Sequence[Tensor],
    offsets_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    include_last_offsets: Tensor,
) -> _Combined:
    """Indices, offsets and weights of all features; `include_last_offsets` says whose offsets have an end.

    Where all have one, indices past it are padding, which goes to the end of all.
    """
    with_end = _ends_given(indices_list, offsets_list, per_sample_weights, include_last_offsets)
    sizes = [each.shape[0] for each in indices_list]
    used = sizes
    if all(with_end):
        if any(offsets.shape[0] == 0 for offsets in offsets_list):
            raise ValueError("offsets_list must hold offsets with their end, got none")
        # how much is padding is known to the device alone, and says where the next feature's indices go
        used = torch.stack([offsets[-1] for offsets in offsets_list]).tolist()
        for place, (end, size) in enumerate(zip(used, sizes, strict=True)):
            # fewer than there are indices is padding, more is a mistake
            if not 0 <= end <= size:
                raise ValueError(f"offsets_list[{place}] must end within its {size} indices, got {end}")
    starts = _starts(used)
    pieces: list[Tensor] = [offsets_list[0].new_zeros(1)]
    for offsets, last, start, end in zip(offsets_list, with_end, starts, starts[1:], strict=False):
        begins = offsets[1 : offsets.shape[0] - last]
        pieces.append(pad(begins + start, (0, 1), value=end))
    indices, weights = [*indices_list], [*per_sample_weights]
    if used != sizes:
        ones = [each if each.numel() else each.new_ones(size) for each, size in zip(weights, sizes, strict=True)]
        with_weights = any(each.numel() for each in weights)
        weights = [each[:end] for each, end in zip(ones, used, strict=True)] if with_weights else weights
        padding = [each[end:] for each, end in zip(indices, used, strict=True)]
        indices = [each[:end] for each, end in zip(indices, used, strict=True)] + padding
        if with_weights:
            weights += [torch.ones_like(each, dtype=torch.float32) for each in padding]
    return _joined(indices), _joined(pieces), _weights(indices, weights)


@op(
    "tbe_input_combine_with_length(Tensor[] indices_list, Tensor[] lengths_list, Tensor[] per_sample_weights)"
    " -> (Tensor, Tensor, Tensor)"
)
def tbe_input_combine_with_length(
    indices_list: Sequence[Tensor], lengths_list: Sequence[Tensor], per_sample_weights: Sequence[Tensor]
) -> _Combined:
    """Indices, lengths and weights of all features behind one another."""
    _check("lengths_list", indices_list, lengths_list, per_sample_weights)
    return _joined(indices_list), _joined(lengths_list), _weights(indices_list, per_sample_weights)


def _padding_fake(
    indices_list: Sequence[Tensor],
    offsets_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    include_last_offsets: Tensor,
    batch_size: int,
) -> _Combined:
    _check("offsets_list", indices_list, offsets_list, per_sample_weights)
    offsets = offsets_list[0].new_empty(len(offsets_list) * batch_size + 1, dtype=torch.int32)
    return _joined(indices_list), offsets, _weights(indices_list, per_sample_weights)


@op(
    "padding_fused_tbe_input_combine(Tensor[] indices_list, Tensor[] offsets_list, Tensor[] per_sample_weights,"
    " Tensor include_last_offsets, int batch_size) -> (Tensor, Tensor, Tensor)",
    fake=_padding_fake,
)
def padding_fused_tbe_input_combine(
    indices_list: Sequence[Tensor],
    offsets_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    include_last_offsets: Tensor,
    batch_size: int,
) -> _Combined:
    """Indices, offsets and weights of all features, each with empty bags after its own up to `batch_size`."""
    with_end = _ends_given(indices_list, offsets_list, per_sample_weights, include_last_offsets)
    starts = _starts([each.shape[0] for each in indices_list])
    pieces: list[Tensor] = [offsets_list[0].new_zeros(1)]
    for place, (offsets, last) in enumerate(zip(offsets_list, with_end, strict=True)):
        begins = offsets[1 : offsets.shape[0] - last]
        if begins.shape[0] > batch_size:
            raise ValueError(
                f"offsets_list[{place}] must be of at most batch_size, {batch_size}, bags, got {begins.shape[0]}"
            )
        pieces.append(pad(begins + starts[place], (0, batch_size - begins.shape[0]), value=starts[place + 1]))
    return _joined(indices_list), _joined(pieces), _weights(indices_list, per_sample_weights)


@op(
    "padding_fused_tbe_input_combine_with_length(Tensor[] indices_list, Tensor[] lengths_list,"
    " Tensor[] per_sample_weights, int batch_size) -> (Tensor, Tensor, Tensor)"
)
def padding_fused_tbe_input_combine_with_length(
    indices_list: Sequence[Tensor],
    lengths_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    batch_size: int,
) -> _Combined:
    """Indices, lengths and weights of all features, each with empty bags after its own up to `batch_size`."""
    _check("lengths_list", indices_list, lengths_list, per_sample_weights)
    for place, lengths in enumerate(lengths_list):
        if lengths.shape[0] > batch_size:
            raise ValueError(
                f"lengths_list[{place}] must be of at most batch_size, {batch_size}, bags, got {lengths.shape[0]}"
            )
    padded = [pad(each, (0, batch_size - each.shape[0])) for each in lengths_list]
    return _joined(indices_list), _joined(padded), _weights(indices_list, per_sample_weights)


def _check(
    name: str, indices_list: Sequence[Tensor], bags_list: Sequence[Tensor], per_sample_weights: Sequence[Tensor]
) -> None:
    features = len(indices_list)
    for what, given in ((name, bags_list), ("per_sample_weights", per_sample_weights)):
        if len(given) != features:
            raise ValueError(f"{what} must have a tensor for each of {features} features, got {len(given)}")
    for what, given in (("indices_list", indices_list), (name, bags_list)):
        for place, each in enumerate(given):
            if each.dtype not in _INDEX:
                raise TypeError(f"{what}[{place}] must be int32 or int64, got {each.dtype}")
            if each.dim() != 1:
                raise ValueError(f"{what}[{place}] must have 1 dimension, got shape {list(each.shape)}")
    for place, (weights, indices) in enumerate(zip(per_sample_weights, indices_list, strict=True)):
        if weights.numel() == 0:
            continue
        if weights.dtype != torch.float32:
            raise TypeError(f"per_sample_weights[{place}] must be float32, got {weights.dtype}")
        if weights.dim() != 1 or weights.shape[0] != indices.shape[0]:
            raise ValueError(
                f"per_sample_weights[{place}] must have a number for each of {indices.shape[0]} indices, or none, "
                f"got shape {list(weights.shape)}"
            )


def _ends_given(
    indices_list: Sequence[Tensor],
    offsets_list: Sequence[Tensor],
    per_sample_weights: Sequence[Tensor],
    include_last_offsets: Tensor,
) -> list[bool]:
    _check("offsets_list", indices_list, offsets_list, per_sample_weights)
    if include_last_offsets.dtype != torch.bool or include_last_offsets.numel() != len(indices_list):
        raise ValueError(
            f"include_last_offsets must have a bool for each of {len(indices_list)} features, "
            f"got {include_last_offsets.dtype} {list(include_last_offsets.shape)}"
        )
    # it says how many offsets there will be: the sizes of outputs are known on the host alone
    with_end: list[bool] = include_last_offsets.reshape(-1).tolist()
    return with_end


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.int() for each in tensors])


def _weights(indices_list: Sequence[Tensor], per_sample_weights: Sequence[Tensor]) -> Tensor:
    if not any(each.numel() for each in per_sample_weights):
        return torch.empty(0, dtype=torch.float32, device=indices_list[0].device)
    return torch.cat(
        [
            weights if weights.numel() else torch.ones_like(indices, dtype=torch.float32)
            for weights, indices in zip(per_sample_weights, indices_list, strict=True)
        ]
    )
