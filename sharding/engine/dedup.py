"""Each id of a batch travels once: the rows that come back are repeated here, their gradients added here first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings.tables.variable_batch import select_rows
from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import jagged_unique

from .route import Sending
from .step import Step
from .wire import cut_gradient


def dedup_ids(padded: KeyedJaggedTensor, sending: Sending) -> tuple[KeyedJaggedTensor, Tensor]:
    """The keys of a batch that are looked up, with each id once a key, as one bag; and where each id lies there."""
    picked = padded if sending.all_used else padded.permute(list(sending.used))
    ids = picked.values()[: sum(picked.length_per_key())]
    ends = torch.tensor(picked.offset_per_key(), device="cpu").to(ids.device)
    unique = jagged_unique(ids, ends, list(sending.rows))
    return KeyedJaggedTensor(picked.keys(), unique.ids, lengths=unique.lengths), unique.inverse


def expand_rows(step: Step, key: str, rows: Tensor) -> Tensor:
    """The row of each id of `key`, from the rows [u, dim] of its distinct ids. Differentiable, in a fixed order."""
    if step.inverse is None:
        return rows
    keys = step.routed.keys()
    sizes, number = dict(zip(step.padded.keys(), step.padded.length_per_key(), strict=True)), keys.index(key)
    begin = sum(sizes[name] for name in keys[:number])
    return select_rows(rows, step.inverse[begin : begin + sizes[key]] - step.routed.offset_per_key()[number])


class CutGradient(torch.autograd.Function):
    """A tensor as it is, whose gradient is cut to +-`most`; `checked` as for `cut_gradient`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, most: float, checked: bool) -> Tensor:
        ctx.most, ctx.checked = most, checked
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        return cut_gradient(grad.float(), ctx.most, checked=ctx.checked).to(grad.dtype), None, None
