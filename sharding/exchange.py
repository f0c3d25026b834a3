"""Every collective of shardwise, each beside its transpose. Nothing else calls torch.distributed's collectives.

A step of a collection costs three exchanges forward (headers, ids, rows) and one back (row gradients), whatever the
number of tables. W ranks; every exchange is all-to-all, and with one process without a group it is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# blocks of a packed buffer begin on this boundary, so that a view as int64 is aligned
_PAD = 8


class Exchange:
    """The collectives between the ranks of a process group; `calls` counts them."""

    def __init__(self, pg: dist.ProcessGroup | None) -> None:
        self._pg = pg
        self.world_size = 1 if pg is None else dist.get_world_size(pg)
        self.calls = 0

    def headers(self, mine: Tensor) -> Tensor:
        """Row d of `mine` [W, H] int64 goes to rank d; row r of the result came from rank r."""
        return self._all_to_all(mine.flatten(), None, None).view_as(mine)

    def ids(self, blocks: Sequence[Sequence[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
        """Send the tensors `blocks[d]` to rank d as one run of bytes; `sizes[r]` bytes come from rank r.

        Returns the received bytes per rank; `packed_size` tells their number and `unpack` cuts them.
        """
        send = [_pack(block) for block in blocks]
        received = self._all_to_all(torch.cat(send), [len(s) for s in send], list(sizes))
        return list(torch.split(received, list(sizes)))

    def rows(self, blocks: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send the flat fp32 tensor `blocks[d]` to rank d; `sizes[r]` elements come from rank r."""
        send = torch.cat(list(blocks))
        received = self._all_to_all(send, [b.shape[0] for b in blocks], list(sizes))
        return list(torch.split(received, list(sizes)))

    def rows_transpose(self, blocks: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """The transpose of `rows`: gradients travel against the rows, from who received to who sent."""
        return self.rows(blocks, sizes)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` by rank 0's, so that replicas begin equal."""
        if self._pg is not None:
            self.calls += 1
            dist.broadcast(tensor, dist.get_global_rank(self._pg, 0), group=self._pg)

    def _all_to_all(self, send: Tensor, send_sizes: list[int] | None, sizes: list[int] | None) -> Tensor:
        if self._pg is None:
            return send
        self.calls += 1
        received = send.new_empty(send.shape[0] if sizes is None else sum(sizes))
        dist.all_to_all_single(received, send, sizes, send_sizes, group=self._pg)
        return received


def packed_size(elements: Sequence[int], dtypes: Sequence[torch.dtype]) -> int:
    """Bytes that tensors of these lengths and dtypes take in a packed block."""
    return sum(_padded(n * dtype.itemsize) for n, dtype in zip(elements, dtypes, strict=True))


def unpack(block: Tensor, elements: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """The 1-D tensors that were packed into `block`, as views of it."""
    # the block begins at a multiple of 8 bytes inside its buffer: every packed block is a multiple of 8
    tensors, at = [], 0
    for n, dtype in zip(elements, dtypes, strict=True):
        tensors.append(block[at : at + n * dtype.itemsize].view(dtype))
        at += _padded(n * dtype.itemsize)
    return tensors


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    pieces = []
    for tensor in tensors:
        data = tensor.contiguous().view(torch.uint8)
        pieces += [data, torch.zeros(_padded(len(data)) - len(data), dtype=torch.uint8, device=device)]
    return torch.cat(pieces)


def _padded(size: int) -> int:
    return -(-size // _PAD) * _PAD
