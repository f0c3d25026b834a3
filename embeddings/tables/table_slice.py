"""A table as a parameter that is a part of a flat buffer, values and gradient both.

Shapes: flat [elements]; the slice [rows, dim] is elements [start, end) of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class TableBatchedEmbeddingSlice(nn.Parameter):
    """A part of a flat buffer of several tables, as a parameter; its gradient is that part of the buffer's gradient.

    It needs a gradient if the buffer does. What is written into it, or into its gradient, is in the buffer.

    Args:
        data: the buffer.
        start_offset, end_offset: the part.
        num_embeddings, embedding_dim: its shape.

    Raises:
        RuntimeError: the part has not so many elements.

    Example:
        >>> flat = torch.zeros(6, requires_grad=True)
        >>> TableBatchedEmbeddingSlice(flat, 2, 6, 2, 2).shape
        torch.Size([2, 2])
    """

    def __new__(
        cls, data: Tensor, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int
    ) -> TableBatchedEmbeddingSlice:
        part = data[start_offset:end_offset].view(num_embeddings, embedding_dim)
        return part.as_subclass(cls)

    def __init__(
        self, data: Tensor, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int
    ) -> None:
        super().__init__()
        self._buffer, self._bounds = data, (start_offset, end_offset)
        # a gradient that was given before the buffer has one
        self._given: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TableBatchedEmbeddingSlice:
        if id(self) not in memo:
            buffer = self._buffer.detach().clone().requires_grad_(self._buffer.requires_grad)
            memo[id(self)] = TableBatchedEmbeddingSlice(buffer, *self._bounds, *self.shape)
        copied: TableBatchedEmbeddingSlice = memo[id(self)]
        return copied

    def _part_of_gradient(self) -> Tensor | None:
        whole = self._buffer.grad
        return self._given if whole is None else whole[slice(*self._bounds)].view(self.shape)

    def _set_gradient(self, value: Tensor | None) -> None:
        self._given = value
        if value is None:
            self._buffer.grad = None
        elif self._buffer.grad is not None:
            self._buffer.grad[slice(*self._bounds)] = value.reshape(-1)

    # torch declares them as attributes
    grad: Any = property(_part_of_gradient, _set_gradient, doc="The part of the buffer's gradient.")
    grad_fn: Any = property(lambda self: None, doc="None: to a module it is a parameter.")
