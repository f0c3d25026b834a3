"""Embeddings of sequences as a JaggedTensor of each feature, and the selections of rows that go with it.

Shapes: embeddings [N, D] feature by feature, lengths [F, B]; a feature of a table that is cut by columns comes once for
each piece, and the pieces are put side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, Multistreamable
from shardwise.jagged.modules import CacheMixin
from shardwise.kernels import jagged_index_select, permute_1d

from ..tables.variable_batch import select_rows


@dataclass
class SequenceVBEContext(Multistreamable):
    """How sequences of features with batch sizes of their own become those of the full batch.

    `recat` names the bags, of `unpadded_lengths`, in their new order; they have `reindexed_lengths` [F, B] then,
    `reindexed_length_per_key` in all, and ids `reindexed_values`.
    """

    recat: Tensor
    unpadded_lengths: Tensor
    reindexed_lengths: Tensor
    reindexed_length_per_key: list[int]
    reindexed_values: Tensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory of the tensors until the work queued on `stream` is done."""
        for tensor in (self.recat, self.unpadded_lengths, self.reindexed_lengths, self.reindexed_values):
            if tensor is not None:
                tensor.record_stream(stream)


def construct_jagged_tensors(
    embeddings: Tensor,
    features: KeyedJaggedTensor,
    embedding_names: Sequence[str],
    need_indices: bool = False,
    features_to_permute_indices: Mapping[str, list[int]] | None = None,
    original_features: KeyedJaggedTensor | None = None,
    reverse_indices: Tensor | None = None,
    seq_vbe_ctx: SequenceVBEContext | None = None,
    use_gather_select: bool = False,
) -> dict[str, JaggedTensor]:
    """A JaggedTensor of the embeddings of each name, the n-th name being that of the n-th feature.

    Embeddings of a name that comes several times are put side by side, in the order that
    `features_to_permute_indices` has for it. `need_indices` has the ids as weights. With `reverse_indices`, embeddings
    are those of unique ids: the rows are selected first, and `original_features` has the bags. With `seq_vbe_ctx`, bags
    are put in its order. Both ways to select that `use_gather_select` chooses among are one here, with gradients added
    in a fixed order.

    Raises:
        ValueError: as many names as features there are not, or as many embeddings as ids.
    """
    del use_gather_select
    features = features if original_features is None else original_features
    if reverse_indices is not None:
        embeddings = select_rows(embeddings, reverse_indices)
    ids: Tensor | None
    if seq_vbe_ctx is not None:
        ctx = seq_vbe_ctx
        _, embeddings, _ = permute_1d(
            ctx.recat, ctx.unpadded_lengths, embeddings, permuted_lengths_sum=sum(ctx.reindexed_length_per_key)
        )
        lengths = list(ctx.reindexed_lengths.unbind(0))
        sizes, ids = ctx.reindexed_length_per_key, ctx.reindexed_values
    else:
        lengths = list(torch.split(features.lengths(), features.stride_per_key()))
        sizes, ids = features.length_per_key(), features.values()
    return _by_name(
        embeddings, lengths, sizes, ids if need_indices else None, embedding_names, features_to_permute_indices
    )


def construct_jagged_tensors_inference(
    embeddings: Tensor,
    lengths: Tensor,
    values: Tensor,
    embedding_names: Sequence[str],
    need_indices: bool = False,
    features_to_permute_indices: Mapping[str, list[int]] | None = None,
    reverse_indices: Tensor | None = None,
    remove_padding: bool = False,
) -> dict[str, JaggedTensor]:
    """`construct_jagged_tensors` of lengths [F, B] and ids; `remove_padding` drops embeddings after the last bag's.

    One host sync, for the number of ids of each feature.
    """
    # how to split is the host's to know
    sizes: list[int] = lengths.sum(1).tolist()
    if reverse_indices is not None:
        embeddings = embeddings.index_select(0, reverse_indices)
    elif remove_padding:
        embeddings = embeddings[: sum(sizes)]
    return _by_name(
        embeddings,
        list(lengths.unbind(0)),
        sizes,
        values if need_indices else None,
        embedding_names,
        features_to_permute_indices,
    )


def jagged_index_select_with_empty(values: Tensor, ids: Tensor, offsets: Tensor, output_offsets: Tensor) -> Tensor:
    """Bags `ids` [S] of `values` as a column [M, 1]; of no ids, [0].

    `offsets` [B] are where bags end, and `output_offsets` [S] where those of the result do, of which M is the last.
    """
    if not ids.shape[0]:
        return torch.empty(0, device=values.device, dtype=values.dtype)
    del output_offsets
    lengths = offsets.long().diff(prepend=offsets.new_zeros(1, dtype=torch.int64))
    selected, _ = jagged_index_select(values.reshape(-1, 1), lengths, ids.long())
    return selected


def reset_module_states_post_sharding(module: nn.Module) -> None:
    """Have the modules below forget what they worked out from an unsharded module's outputs: `clear_cache` of each."""
    for each in module.modules():
        if isinstance(each, CacheMixin):
            each.clear_cache()


def _by_name(
    embeddings: Tensor,
    lengths: list[Tensor],
    sizes: list[int],
    ids: Tensor | None,
    names: Sequence[str],
    orders: Mapping[str, list[int]] | None,
) -> dict[str, JaggedTensor]:
    if len(names) != len(sizes):
        raise ValueError(f"embedding_names must have one for each of {len(sizes)} features, got {len(names)}")
    if sum(sizes) != embeddings.shape[0]:
        raise ValueError(f"embeddings have {embeddings.shape[0]} rows, but the features {sum(sizes)} ids")
    rows = torch.split(embeddings, sizes)
    rows_of_ids = None if ids is None else torch.split(ids, sizes)
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    jagged = {}
    for name, own in places.items():
        if orders and name in orders:
            own = [own[number] for number in orders[name]]
        first = own[0]
        jagged[name] = JaggedTensor(
            rows[first] if len(own) == 1 else torch.cat([rows[place] for place in own], dim=1),
            lengths=lengths[first],
            weights=None if rows_of_ids is None else rows_of_ids[first],
        )
    return jagged
