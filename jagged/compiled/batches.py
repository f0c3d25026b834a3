"""Batches for torch.compile, whose number of ids is nobody's business: one graph serves them all.

Names and behaviour are of `torchrec.pt2.utils`. Shapes: values [N], lengths [F * B], inverse indices [F, B].
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ..keyed_jagged_tensor import KeyedJaggedTensor

T = TypeVar("T")


def kjt_for_pt2_tracing(kjt: KeyedJaggedTensor, convert_to_vb: bool = False) -> KeyedJaggedTensor:
    """The batch, made anew of values, weights and lengths, for a compiled function: int64, ids in any number.

    Ids, and weights, are marked as of an unknown size: batches with more, fewer, one or none compile nothing anew. Of
    a batch of several batch sizes the inverse indices are static. Marks stay on the tensors.

    Args:
        convert_to_vb: a batch of one batch size becomes one of several, all of them equal, with inverse indices that
            lead each sample to itself; its batch size is then static.
    """
    mark: Any = torch._dynamo.decorators
    keys, variable = kjt.keys(), kjt.variable_stride_per_key()
    lengths, values, weights = kjt.lengths().long(), kjt.values().long(), kjt.weights_or_none()
    inverse = kjt.inverse_indices_or_none() if variable else None
    stride, ranks = kjt.stride(), kjt.stride_per_key_per_rank() if variable else None
    if convert_to_vb and not variable:
        ranks = [[stride]] * len(keys)
        itself = torch.arange(stride, device=lengths.device).expand(len(keys), stride).contiguous()
        inverse = (keys, itself)
        mark.mark_static(lengths, 0)
    if inverse is not None:
        mark.mark_static(inverse[1], 0)
        mark.mark_static(inverse[1], 1)
    mark.mark_unbacked(values, 0)
    if weights is not None:
        mark.mark_unbacked(weights, 0)
    return KeyedJaggedTensor(
        keys, values, weights, lengths,
        stride=None if ranks else stride, stride_per_key_per_rank=ranks, inverse_indices=inverse,
    )  # fmt: skip


def default_pipeline_input_transformer(inp: T) -> T:
    """The batch of a pipeline, in which `id_list_features` and `id_score_list_features` are made ready in place.

    Attributes of these names that it has not, or that are no `KeyedJaggedTensor`, are let be.
    """
    for name in ("id_list_features", "id_score_list_features"):
        features = getattr(inp, name, None)
        if isinstance(features, KeyedJaggedTensor):
            setattr(inp, name, kjt_for_pt2_tracing(features))
    return inp
