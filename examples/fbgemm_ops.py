"""A program written for FBGEMM: its ops by name, its tables trained in their backward and served in 8 bits.

`import shardwise.fbgemm_gpu` stands for `import fbgemm_gpu`; under `python -m shardwise.torchrec` nothing changes.
docs/reference/fbgemm.md has every op. python examples/fbgemm_ops.py
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import torch
from torch import Tensor

import shardwise.fbgemm
from shardwise.fbgemm_gpu.split_embedding_configs import SparseType
from shardwise.fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from shardwise.fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
    IntNBitTableBatchedEmbeddingBagsCodegen,
)
from shardwise.fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)

ROWS, DIM, SAMPLES, STEPS = 50, 8, 16, 40
ops = torch.ops.fbgemm


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ids of one feature and their offsets [SAMPLES + 1]."""
    lengths = torch.randint(1, 5, (SAMPLES,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return ids, ops.asynchronous_complete_cumsum(lengths)


def train() -> SplitTableBatchedEmbeddingBagsCodegen:
    """A table that learns the mean of its ids, and is updated in the backward."""
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.5,
    )
    table.init_embedding_weights_uniform(-0.1, 0.1)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        ids, offsets = batch(generator)
        target = ops.segment_sum_csr(1, offsets, ids / ROWS)
        loss = (table(ids, offsets).sum(1) - target).square().mean()
        # rows are updated here: there is no optimizer to step
        loss.backward()
        losses.append(loss.item())
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f}; states: {sorted(table.get_optimizer_state()[0])}")
    return table


def serve(table: SplitTableBatchedEmbeddingBagsCodegen) -> IntNBitTableBatchedEmbeddingBagsCodegen:
    """The same rows in 8 bits."""
    served = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("item", ROWS, DIM, SparseType.INT8, EmbeddingLocation.HOST)],
        device="cpu",
        output_dtype=SparseType.FP32,
    )
    served.fill_random_weights()
    rows = table.split_embedding_weights()[0].detach()
    fused = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 8)
    # payload first there, scale and bias first in a table
    payload, scale_and_bias = fused[:, :DIM], fused[:, DIM:]
    weights, scales = served.split_embedding_weights()[0]
    weights.copy_(payload)
    assert scales is not None
    scales.copy_(scale_and_bias)
    return served


def main() -> None:
    torch.manual_seed(0)
    print(f"{len(shardwise.fbgemm.registered_ops())} ops of {len(shardwise.fbgemm.OPS)} are registered")
    table = train()
    served = serve(table)
    ids, offsets = batch(torch.Generator().manual_seed(1))
    apart = (table(ids, offsets) - served(ids.int(), offsets.int())).abs().max().item()
    print(f"8 bits are at most {apart:.3f} away")

    # histories of items as sequence models read them: bags side by side, padded, and back
    values = table.split_embedding_weights()[0].detach()[ids]
    padded = ops.jagged_to_padded_dense(values, [offsets], [4], 0.0)
    back, _ = ops.dense_to_jagged(padded, [offsets], len(ids))
    print(f"padded {tuple(padded.shape)}, and back the same: {torch.equal(back, values)}")


if __name__ == "__main__":
    main()
