"""What TorchRec's programs measure DLRM's compiled dense layers with: a model, batches, and outputs that stay.

On a CPU all of it runs, without CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwise.embeddings import EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.jagged import KeyedJaggedTensor

from .dlrm import DLRM


def build_ebc(
    device: torch.device, *, embedding_dim: int, num_sparse_features: int, num_embeddings: int
) -> EmbeddingBagCollection:
    """Equal tables t0, t1, ... of features f0, f1, ..., one each."""
    tables = [
        EmbeddingBagConfig(
            name=f"t{n}", embedding_dim=embedding_dim, num_embeddings=num_embeddings, feature_names=[f"f{n}"]
        )
        for n in range(num_sparse_features)
    ]
    return EmbeddingBagCollection(tables=tables, device=device)


def build_dlrm(
    device: torch.device,
    *,
    embedding_dim: int,
    num_sparse_features: int,
    num_embeddings: int,
    dense_in_features: int,
    over_arch_layer_sizes: tuple[int, ...] = (512, 256, 1),
) -> DLRM:
    """A DLRM over `build_ebc`, with dense layers of 2 D and D, for evaluation."""
    tables = build_ebc(
        device,
        embedding_dim=embedding_dim,
        num_sparse_features=num_sparse_features,
        num_embeddings=num_embeddings,
    )
    model = DLRM(tables, dense_in_features, [2 * embedding_dim, embedding_dim], over_arch_layer_sizes, device)
    return model.to(device).eval()


def generate_batch(
    device: torch.device,
    *,
    batch_size: int,
    num_sparse_features: int,
    num_embeddings: int,
    dense_in_features: int,
    pooling_factor: int,
) -> tuple[Tensor, KeyedJaggedTensor]:
    """Random dense features [B, dense_in] in [0, 1), and `pooling_factor` random ids of each feature and sample."""
    bags = num_sparse_features * batch_size
    dense = torch.rand(batch_size, dense_in_features, device=device)
    values = torch.randint(num_embeddings, (bags * pooling_factor,), device=device)
    lengths = torch.full((bags,), pooling_factor, device=device)
    keys = [f"f{n}" for n in range(num_sparse_features)]
    return dense, KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)


def collect_outputs(model: DLRM, batches: Iterable[tuple[Tensor, KeyedJaggedTensor]]) -> list[Tensor]:
    """The logits of each batch, in memory of their own: a graph writes into the same buffers every time."""
    outputs = []
    for dense, sparse in batches:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        outputs.append(model(dense_features=dense, sparse_features=sparse).detach().clone())
    return outputs
