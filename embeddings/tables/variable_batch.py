"""Batches whose features have batch sizes of their own, and the way back to the full batch by inverse indices.

A sample that looks to a feature like an earlier one may be left out of that feature's batch; inverse indices say for
every sample of the full batch where it is now. Such a batch is looked up as one batch size with empty bags at the end,
and its output is expanded to the full batch.

Shapes: F features, B_k samples of feature k, B the largest of them, B_full samples of the full batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import jagged_index_select, jagged_to_padded_dense, sequence_lookup
from shardwise.kernels._op import runs_kernel


def pad_strides(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids and weights as a batch of one batch size B: each key's last samples are followed by empty ones.

    Only lengths are made anew, [F * B], where batch sizes differ; inverse indices and the capacity stay what they are.
    A batch of one batch size is returned as it is.

    Raises:
        ValueError: a key repeats, as `permute` may make it do: pad before that.
    """
    if not kjt.variable_stride_per_key():
        return kjt
    strides, lengths = kjt.stride_per_key(), kjt.lengths()
    longest = max(strides, default=0)
    if len(set(strides)) > 1:
        starts = on_device(kjt.lengths_offset_per_key(), lengths.device)  # [F + 1]
        lengths = jagged_to_padded_dense(lengths, starts, longest).view(-1)  # [F, B] -> [F * B]
    return KeyedJaggedTensor(
        kjt.keys(), kjt.values(), kjt.weights_or_none(), lengths, stride=longest,
        length_per_key=known_sizes(kjt), inverse_indices=kjt.inverse_indices_or_none(),
        capacity=kjt.capacity(),
    )  # fmt: skip


def inverse_of(kjt: KeyedJaggedTensor, keys: Sequence[str]) -> Tensor:
    """For each of `keys` the sample of its own batch that every sample of the full batch is, [len(keys), B_full].

    A key may be listed more than once.

    Raises:
        ValueError: the batch has no inverse indices.
        KeyError: a key is not in the batch; names it.
        IndexError: on the CPU, an index outside its key's batch; names key, sample, value and batch size. On CUDA,
            where a look would be a host sync, a device-side assertion, as torch's own indexing has it.
    """
    rows, indices = kjt.inverse_indices()
    stride_of = dict(zip(kjt.keys(), kjt.stride_per_key(), strict=True))
    if missing := [key for key in dict.fromkeys(keys) if key not in stride_of]:
        raise KeyError(f"features {missing} are not in the batch, which has {kjt.keys()}")
    strides = [stride_of[key] for key in keys]
    if list(keys) != rows:
        row_of = {key: row for row, key in enumerate(rows)}
        indices = torch.stack([indices[row_of[key]] for key in keys]) if keys else indices[:0]
    inside = (indices >= 0) & (indices < _column(strides, indices))  # [len(keys), B_full]
    if is_readable(indices):
        if not bool(inside.all()):
            row, sample = (~inside).nonzero()[0].tolist()
            raise IndexError(
                f"inverse_indices of feature {keys[row]!r}, sample {sample}: {int(indices[row, sample])} is outside"
                f" [0, {strides[row]}), the batch of that feature"
            )
    elif not indices.is_meta:
        torch._assert_async(inside.all(), "inverse_indices are outside of their feature's batch")
    return indices


def inverse_or_none(kjt: KeyedJaggedTensor, keys: Sequence[str]) -> Tensor | None:
    """`inverse_of`, or None where the batch has no inverse indices."""
    return None if kjt.inverse_indices_or_none() is None else inverse_of(kjt, keys)


def require_full_batch(kjt: KeyedJaggedTensor, who: str) -> None:
    """Refuse a batch whose samples cannot be told to belong together; `who` is for the message.

    Raises:
        ValueError: batch sizes differ and there are no inverse indices.
    """
    if kjt.variable_stride_per_key() and kjt.inverse_indices_or_none() is None and len(set(kjt.stride_per_key())) > 1:
        raise ValueError(
            f"{who} takes one batch size for all features, got {kjt.stride_per_key()} for {kjt.keys()}: give the batch"
            " inverse_indices, which say where each sample of the full batch is"
        )


def expand_pooled(pooled: Tensor, dims: Sequence[int], inverse: Tensor) -> Tensor:
    """The samples of the full batch, [B_full, sum of D_k], from those that features kept, [B, sum of D_k].

    Feature k has the next `dims[k]` columns; `inverse` [F, B_full] is that of `inverse_of`. Differentiable; gradients
    of a row are added in a fixed order.
    """
    if not dims:
        return pooled.new_empty(inverse.shape[1], 0)
    # one gather of pieces of columns, of the widest width that divides every feature's
    width = math.gcd(*dims)
    pieces = sum(dims) // width
    counts = torch.tensor(dims, device="cpu") // width
    feature = torch.arange(len(dims), device="cpu").repeat_interleave(counts, output_size=pieces)
    piece = torch.arange(pieces, device=inverse.device)
    # `feature` and `piece` are [pieces], `at` [B_full, pieces]: rows of `pooled` as [B * pieces, width]
    at = inverse.t()[:, feature.to(inverse.device, non_blocking=True)] * pieces + piece
    return select_rows(pooled.reshape(-1, width), at.flatten()).view(inverse.shape[1], sum(dims))


def expand_bags(
    batch: KeyedJaggedTensor, per_id: Sequence[Tensor], inverse: Tensor
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Values of each id, as the full batch has them: tensors [M, ...], lengths [B_full] and how many values a key has.

    Each of `per_id`, [N, D] or [N], follows the ids of `batch`, which has one batch size; `inverse` [F, B_full] is that
    of `inverse_of`. Differentiable in floating values, in a fixed order. One host sync: how many values each key has.
    """
    count, lengths = len(batch.keys()), batch.lengths()
    first = torch.arange(count, device=inverse.device)[:, None] * batch.stride()  # [F, 1]
    bags = (inverse + first).flatten()  # [F * B_full]
    expanded = lengths.index_select(0, bags).view(inverse.shape)  # [F, B_full]
    # host sync: the sizes of the outputs
    sizes: list[int] = expanded.sum(dim=1).tolist()
    # what is past the last bag is padding
    used = sum(batch.length_per_key())
    selected = [
        jagged_index_select(tensor[:used], lengths, bags, selected_lengths_sum=sum(sizes))[0] for tensor in per_id
    ]
    return selected, list(expanded.unbind()), sizes


def own_lengths(batch: KeyedJaggedTensor, picked: KeyedJaggedTensor) -> list[Tensor]:
    """Lengths [B_k] of each key of `picked`, which was picked from `batch` after `pad_strides`: without the padding."""
    keys = picked.keys()
    lengths = picked.lengths().view(len(keys), -1).unbind()  # F of [B]
    if not batch.variable_stride_per_key():
        return list(lengths)
    stride_of = dict(zip(batch.keys(), batch.stride_per_key(), strict=True))
    return [row[: stride_of[key]] for key, row in zip(keys, lengths, strict=True)]


def select_rows(values: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` [N] of `values` [R, D] or [R], as [N, D] or [N]: fp32, fp16, bf16 or (on the CPU) float64.

    Gradients of one row are added in a fixed order, in fp32 at least. `indices` are inside [0, R).
    """
    if values.is_cpu and not runs_kernel(values) and values.dtype in (torch.float32, torch.float64):
        # torch's own gradient adds in the order of `indices` on the CPU
        return values.index_select(0, indices)
    rows, dim = values.shape if values.dim() == 2 else (values.shape[0], 1)
    # the columns that `pack_features` fills, without its wait for the copy
    feature = on_device([[0, rows, dim, 0, 0, 0, 0, 0]], values.device)
    ends = on_device([0, indices.shape[0]], values.device)
    selected = sequence_lookup(values.reshape(-1), indices, ends, feature, dim, [dim, 0, rows, 0], values.dtype)
    return selected.view(indices.shape[0], *values.shape[1:])


def known_sizes(kjt: KeyedJaggedTensor) -> list[int] | None:
    """The numbers of values of each key, if a batch with other lengths or weights can be told them."""
    # a traced batch's are no numbers, and its constructor cannot check them
    return None if torch.compiler.is_compiling() else kjt.length_per_key_or_none()


def is_readable(tensor: Tensor) -> bool:
    """Whether its numbers can be looked at here and now: it is on the CPU and nothing traces."""
    return tensor.is_cpu and type(tensor) is Tensor and not torch.compiler.is_compiling()


def _column(numbers: Sequence[int], like: Tensor) -> int | Tensor:
    """The numbers [n, 1] where `like` is, or the one that all of them are."""
    if len(set(numbers)) == 1:
        return numbers[0]
    return on_device(numbers, like.device)[:, None]


def on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """int64 numbers on a device, without a wait for the copy."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
