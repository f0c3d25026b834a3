"""Every collective of shardwise, each beside its transpose. Nothing else calls torch.distributed's collectives.

A step of a collection costs three exchanges forward (headers, ids, rows) and one back (row gradients), whatever the
number of tables. W ranks; every exchange is all-to-all, and with one process without a group it is the identity.
"""

from __future__ import annotations

import atexit
import time
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
            with _Lent(tensor) as (lent,):
                dist.broadcast(lent, dist.get_global_rank(self._pg, 0), group=self._pg)

    def _all_to_all(self, send: Tensor, send_sizes: list[int] | None, sizes: list[int] | None) -> Tensor:
        if self._pg is None:
            return send
        self.calls += 1
        received = send.new_empty(send.shape[0] if sizes is None else sum(sizes))
        with _Lent(received, send) as (lent_received, lent_send):
            dist.all_to_all_single(lent_received, lent_send, sizes, send_sizes, group=self._pg)
        return received


class _Lent:
    """Aliases of tensors for one collective, watched until the backend has let go of them.

    Gloo's threads drop a finished collective's tensors some time after the caller went on, and dropping a tensor that
    Python knows takes the GIL: in an interpreter that is shutting down that aborts the process. So a process that
    exits right after its last collective first waits until all lent tensors are back.
    """

    _out: list[Tensor] = []

    def __init__(self, *tensors: Tensor) -> None:
        self._mine = [
            t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride()) for t in tensors
        ]

    def __enter__(self) -> list[Tensor]:
        return self._mine

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:  # the transfer is over: what is left to wait for needs no memory
            for tensor in self._mine:
                tensor.set_(tensor.new_empty(0).untyped_storage())
        _Lent._out = _held([*_Lent._out, *self._mine])

    @staticmethod
    def settle(seconds: float = 10) -> bool:
        """Wait until no lent tensor is held any more; False if that takes longer."""
        end = time.monotonic() + seconds
        while _held(_Lent._out):
            if time.monotonic() > end:
                return False
            time.sleep(0.001)  # lets the GIL go
        return True


def _held(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that something besides Python refers to."""
    return [tensor for tensor in tensors if tensor._use_count() > 1]  # type: ignore[attr-defined]


atexit.register(_Lent.settle)


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
