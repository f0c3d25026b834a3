"""Tables of one column, looked up for several tasks at once: FBGEMM's module, by its name.

Shapes: N tasks, T tables of hash_sizes [T] rows; weight [N, sum of hash_sizes, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import sqrt

import torch
from torch import Tensor, nn


class BatchedUnaryEmbeddingBag(nn.Module):
    """Sums of one number an id, of T tables for N tasks: what wide parts of models add up.

    Args:
        num_tasks: N.
        hash_sizes: [T] rows of each table.
        long_index: whether `table_offsets_tensor` is int64 (int32), as offsets and ids of lookups are then.

    Raises:
        ValueError: there is no row in a table, or a negative number of tasks.

    Example:
        >>> module = BatchedUnaryEmbeddingBag(num_tasks=1, hash_sizes=[3, 3], long_index=True)
        >>> _ = module.weight.data.copy_(torch.arange(6.0).view(1, 6, 1))
        >>> # tables' bags of one sample: ids 2 and 0 of the first, 1 of the second
        >>> module(torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]))
        tensor([[[2., 4.]]], grad_fn=<...>)
    """

    table_offsets_tensor: Tensor

    def __init__(self, num_tasks: int, hash_sizes: Sequence[int], long_index: bool = False) -> None:
        super().__init__()
        if num_tasks < 0 or min(hash_sizes, default=1) < 1:
            raise ValueError(
                f"num_tasks must not be negative and hash_sizes be positive, got {num_tasks} and {[*hash_sizes]}"
            )
        self.num_tasks, self.hash_sizes = num_tasks, [*hash_sizes]
        self.weight = nn.Parameter(torch.randn(num_tasks, sum(hash_sizes), 1))
        index_dtype = torch.int64 if long_index else torch.int32
        self.register_buffer(
            "table_offsets_tensor", torch.tensor([*accumulate(hash_sizes, initial=0)], dtype=index_dtype)
        )
        self.init_parameters()

    def forward(self, offsets: Tensor, input: Tensor) -> Tensor:
        """[N, B, T] sums for each task of the rows of ids `input`, in bags of offsets [T * B + 1], table by table."""
        output: Tensor = torch.ops.fbgemm.batched_unary_embeddings(
            self.weight, self.table_offsets_tensor, offsets, input
        )
        return output

    def split_embedding_weights(self) -> list[Tensor]:
        """Views [rows, 1] of all tables of the first task, of those of the next, and so on."""
        return [table for task in self.weight.detach() for table in task.split(self.hash_sizes)]

    @torch.no_grad()
    def init_parameters(self) -> None:
        """Fill each table of R rows with random numbers from -1 / sqrt(R) to 1 / sqrt(R)."""
        for table in self.split_embedding_weights():
            bound = sqrt(1 / table.shape[0])
            table.uniform_(-bound, bound)


def wrap_weight_to_parameter(weights: list[Tensor]) -> list[Tensor]:
    """The same list, with each tensor, of any shape, as a parameter."""
    weights[:] = [each if isinstance(each, nn.Parameter) else nn.Parameter(each) for each in weights]
    return weights
