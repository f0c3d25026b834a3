"""One training batch: what every reader of this folder yields and what `DLRMTrain` takes.

Shapes: dense_features [B, F_d] float32, sparse_features F_s bags of ids for each of the B samples, labels [B].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.jagged import KeyedJaggedTensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Dense features [B, F_d], sparse features and labels [B] of B samples.

    Raises:
        ValueError: features and labels are not of the same number of samples.

    Example:
        >>> ids = KeyedJaggedTensor(["clicked"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
        >>> batch = Batch(torch.zeros(2, 3), ids, torch.tensor([0.0, 1.0]))
        >>> batch.to(torch.device("cpu")).labels
        tensor([0., 1.])
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def __post_init__(self) -> None:
        sizes = (self.dense_features.size(0), self.sparse_features.stride(), self.labels.size(0))
        # features without keys, as models of dense features alone get them, may not know how many samples there are
        unknown = not self.sparse_features.keys() and not sizes[1]
        # sizes that torch.export does not know yet have no hash
        if sizes[0] != sizes[2] or (sizes[0] != sizes[1] and not unknown):
            raise ValueError(
                "Batch: dense_features, sparse_features and labels must hold the same number of samples, "
                f"got {sizes[0]}, {sizes[1]} and {sizes[2]}"
            )

    @property
    def batch_size(self) -> int:
        """B, the number of samples."""
        return self.labels.size(0)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch on `device`."""
        device = torch.device(device)
        return Batch(
            self.dense_features.to(device=device, non_blocking=non_blocking),
            self.sparse_features.to(device, non_blocking=non_blocking),
            self.labels.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps the memory of the batch until the work queued on `stream` is done."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in page-locked host memory, from which copies to a GPU can overlap computation."""
        return Batch(self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory())
