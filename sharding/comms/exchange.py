"""Every collective of shardwise, each beside its transpose. Nothing else calls torch.distributed's collectives.

A step of a collection costs three exchanges forward (headers, ids, rows) and one back (row gradients), whatever the
number of tables. W ranks; every exchange is all-to-all, and for a rank that is alone it is the identity.
What travels lies in memory that `Buffers` keeps: fresh memory is faulted in page by page, which takes as long as
filling it, and a step needs as much as its output several times over. A GPU's allocator keeps memory by itself.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.kernels.huge_pages import in_huge_pages

from .codecs import FP32, Codec, FormatCodec
from .env import is_alone, number_in_environment
from .streams import record_stream
from .watch import SLICE, Watch, watch_of

# numbers up to which fresh memory is as good, and buffers that are kept
_SMALL, _MOST = 1 << 15, 4
# a tag that no message has
_NEVER_SENT = 0x5EED


class Buffers:
    """Flat fp32 buffers of one collection on one rank."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []

    def take(self, size: int, device: torch.device) -> Tensor:
        """[size] fp32, not initialised."""
        if device.type != "cpu" or size < _SMALL:
            return torch.empty(size, device=device)
        for number, storage in enumerate(self._free):
            if storage.nbytes() >= 4 * size:
                del self._free[number]
                return torch.empty(0, device="cpu").set_(storage, 0, (size,), (1,))
        return in_huge_pages(torch.empty(size, device="cpu"))

    def recycle(self, tensor: Tensor, used: Tensor) -> None:
        """Take the memory of `tensor` back, of which nobody else has a view, unless `used` may be one."""
        if tensor.device.type != "cpu" or tensor.numel() < _SMALL:
            return
        storage = tensor.untyped_storage()
        for other in (used.untyped_storage(), *self._free):
            if storage.data_ptr() == other.data_ptr():
                return
        self._free.append(storage)
        # the smallest that fits comes first
        self._free.sort(key=torch.UntypedStorage.nbytes)
        del self._free[:-_MOST]


class Exchange:
    """The collectives between the ranks of a process group; `calls` counts them, `sent` the bytes that left this rank.

    A rank that `is_alone` exchanges nothing: everything comes back as it was. Where a watch is over the group, or over
    that of the exchange `beside`, a rank that fails or does not come is a RankFailure; `label` says whose exchanges
    these are.
    """

    def __init__(self, pg: dist.ProcessGroup | None, beside: Exchange | None = None) -> None:
        self.group = pg
        self.label: str = "" if beside is None else beside.label
        self.watch: Watch | None = watch_of(pg)
        if beside is not None and beside.watch is not None and pg is not None:
            self.watch = beside.watch
            self.watch.cover(pg)
        self.world_size = 1 if pg is None else dist.get_world_size(pg)
        self.rank = 0 if pg is None else dist.get_rank(pg)
        # one rank, for which nothing is exchanged
        self.alone = is_alone(pg)
        self.calls = self.sent = 0
        self.buffers = Buffers()

    def all_to_all(
        self, send: Tensor, send_sizes: list[int] | None = None, sizes: list[int] | None = None, *, what: str
    ) -> Pending:
        """Send `send_sizes[d]` rows of the tensor to each rank d; `sizes[r]` come from rank r.

        Without sizes all ranks get equally many. `what` they are is said where a rank fails to come.
        """
        if self.alone:
            return Pending(send)
        self.sent += send.numel() * send.element_size()
        size = send.shape[0] if sizes is None else sum(sizes)
        rows = send.dtype is torch.float32
        received = self.buffers.take(size, send.device) if rows else send.new_empty(size, *send.shape[1:])
        all_to_all = partial(dist.all_to_all_single, output_split_sizes=sizes, input_split_sizes=send_sizes)
        return Pending(received, self, all_to_all, send, what=what)

    def gather(self, mine: Sequence[int], device: torch.device) -> list[list[int]]:
        """As many numbers of every rank as `mine` has, rank after rank. Waits, which is a host sync on CUDA."""
        rows = torch.tensor([list(mine)] * self.world_size, dtype=torch.int64, device="cpu")
        return cast(list[list[int]], self.all_to_all(rows.to(device), what="headers").wait().tolist())

    def rows(
        self,
        send: Tensor,
        send_sizes: Sequence[int],
        sizes: Sequence[int],
        *,
        codec: Codec | None = None,
        flag: Tensor | None = None,
        what: str = "rows",
    ) -> Pending:
        """Send `send_sizes[d]` numbers of the flat fp32 tensor to each rank d; `sizes[r]` come from rank r.

        The result of `wait` has what came, rank after rank, compressed on its way by `codec`. With a `flag`, int32
        [1] on their device, every rank is told it, and `flags` of the result has those of all: 0 says that all is well.
        """
        if codec is None and flag is None:
            return self.all_to_all(send, list(send_sizes), list(sizes), what=what)
        if self.alone:
            # host sync on CUDA: what others would wait for
            return Pending(send, flags=[] if flag is None else flag.tolist())
        coding = codec or FormatCodec(FP32)
        data, data_sizes = coding.encode_blocks(send, list(send_sizes))
        came = [coding.encoded_bytes(size) for size in sizes]
        if flag is not None:
            flag_bytes = flag.view(torch.uint8)
            data = torch.cat([part for block in torch.split(data, data_sizes) for part in (block, flag_bytes)])
            data_sizes, came = [size + 4 for size in data_sizes], [size + 4 for size in came]

        def read(data: Tensor) -> tuple[Tensor, list[int]]:
            if flag is None:
                return coding.decode_blocks(data, sizes), []
            blocks = torch.split(data, came)
            # host sync on CUDA: whether all ranks are well
            flags = torch.cat([block[-4:] for block in blocks]).view(torch.int32).tolist()
            return coding.decode_blocks(torch.cat([block[:-4] for block in blocks]), sizes), flags

        pending = self.all_to_all(data, data_sizes, came, what=what)
        pending.read = read
        return pending

    # the transpose of `rows`: gradients travel against the rows, from who received to who sent
    rows_transpose = partialmethod(rows, what="row gradients")

    def pieces(
        self,
        pieces: Sequence[Sequence[Tensor]],
        sizes: Sequence[list[int]],
        device: torch.device,
        *,
        what: str = "rows",
    ) -> list[Iterator[Tensor]]:
        """Send each rank its `pieces` as fp32; from each rank come flat pieces of `sizes` numbers. Waits.

        What a rank has for itself does not travel, and comes back as it is.
        """
        others = [[] if rank == self.rank else of_rank for rank, of_rank in enumerate(pieces)]
        send_sizes = [sum(map(Tensor.numel, of_rank)) for of_rank in others]
        numbers = [0 if rank == self.rank else sum(of_rank) for rank, of_rank in enumerate(sizes)]
        flat = [torch.empty(0, device=device)] + [piece.float().flatten() for of_rank in others for piece in of_rank]
        received = self.rows(torch.cat(flat), send_sizes, numbers, what=what).wait()
        return [
            iter(pieces[rank] if rank == self.rank else torch.split(block, sizes[rank]))
            for rank, block in enumerate(torch.split(received, numbers))
        ]

    def numbers(
        self, send: Tensor, send_sizes: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Pending:
        """Send `send_sizes[d]` numbers of the flat tensor, of any dtype, to each rank d; `sizes[r]` come from rank r.

        Without sizes all are equal. What no gradient belongs to: ids, lengths, counts.
        """
        return self.all_to_all(
            send,
            None if send_sizes is None else list(send_sizes),
            None if sizes is None else list(sizes),
            what="numbers",
        )

    def broadcast(self, tensor: Tensor, rank: int = 0, *, what: str = "first values") -> None:
        """Overwrite `tensor` by that of `rank`: so replicas begin equal."""
        if not self.alone:
            assert self.group is not None
            broadcast = partial(dist.broadcast, src=dist.get_global_rank(self.group, rank))
            Pending(tensor, self, broadcast, what=what).wait()

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite each tensor by its mean over the ranks: one all-reduce for each dtype, equal bits on all ranks.

        fp16 and bf16 are added in fp32, and rounded once.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in () if self.alone else [t for t in tensors if t.numel()]:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, alike in by_dtype.items():
            wide = torch.float32 if dtype.itemsize < 4 else dtype
            # what is one piece of memory already needs no second one
            packed = (
                alike[0] if len(alike) == 1 and alike[0].is_contiguous() else torch.cat([t.flatten() for t in alike])
            )
            total = packed.detach().to(wide)
            self.sent += total.numel() * total.element_size()
            Pending(total, self, dist.all_reduce, what="means").wait()
            total.div_(self.world_size)
            for tensor, part in zip(alike, torch.split(total.flatten(), [t.numel() for t in alike]), strict=True):
                if tensor.data_ptr() != part.data_ptr():
                    tensor.copy_(part.view_as(tensor))

    def sum(self, numbers: Tensor, *, what: str = "sums") -> Tensor:
        """Overwrite int64 `numbers` by their sum over the ranks, which no order changes, and return it."""
        if not self.alone:
            self.sent += numbers.numel() * numbers.element_size()
            Pending(numbers, self, dist.all_reduce, what=what).wait()
        return numbers

    def gather_pieces(self, piece: Tensor, whole: Tensor, *, what: str = "pieces of tables") -> Pending:
        """Fill the flat `whole` [W n] by the pieces [n] of all ranks, rank after rank."""
        self.sent += piece.numel() * piece.element_size() * (self.world_size - 1)
        # torch's name for it since 2.13; the other one warns there
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return Pending(_as_sent(whole), self, gather, _as_sent(piece), what=what)

    def mean_pieces(self, whole: Tensor, *, what: str = "means of tables") -> Pending:
        """The transpose: this rank's piece [n] of the mean of what all ranks have in their flat `whole` [W n].

        Added in the order of ranks, so no backend and no size changes a bit; fp16 and bf16 in fp32, and rounded once.
        `whole` must stay as it is until then.
        """
        pending = self.all_to_all(_as_sent(whole), what=what)

        def read(received: Tensor) -> tuple[Tensor, list[int]]:
            pieces = received.view(whole.dtype).view(self.world_size, -1)
            total = pieces[0].to(torch.float32 if whole.itemsize < 4 else whole.dtype, copy=True)
            for piece in pieces[1:]:
                total += piece
            return total.div_(self.world_size).to(whole.dtype), []

        pending.read = read
        return pending

    def value(self, mine: bytes, rank: int, device: torch.device | None = None) -> bytes:
        """Rank `rank`'s bytes, on every rank; where only NCCL is there they travel by this rank's `device`."""
        if self.alone:
            return mine
        assert self.group is not None
        carrier = _device_of_objects(self.group, device)
        size = torch.tensor([len(mine)], device="cpu").to(carrier)
        self.broadcast(size, rank, what="bytes")
        data = np.frombuffer(mine, np.uint8).copy() if rank == self.rank else np.empty(int(size), np.uint8)
        of_rank = torch.from_numpy(data).to(carrier)
        self.broadcast(of_rank, rank, what="bytes")
        return of_rank.cpu().numpy().tobytes()


def _as_sent(tensor: Tensor) -> Tensor:
    """A flat tensor as backends carry it that do not know half precision: as bytes, on the same memory."""
    return tensor.view(torch.uint8) if tensor.itemsize < 4 else tensor


def part(group: dist.ProcessGroup | None) -> None:
    """Return once every rank of the group has called this, or has left the group without."""
    with suppress(RuntimeError):
        dist.barrier(group)


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this rank's connections in a group: its collectives end with an error, here and on their other ends."""
    # the main thread may destroy the group meanwhile, and versions of torch say so in three ways
    with suppress(RuntimeError, TypeError, ValueError, AssertionError):
        if "gloo" in str(dist.get_backend_config(group)):
            # gloo's abort closes nothing, but a receive that is late closes all pairs of its group
            nobody = (dist.get_rank(group) + 1) % dist.get_world_size(group)
            group.recv([torch.empty(1, device="cpu")], nobody, _NEVER_SENT).wait(timedelta(milliseconds=1))
        if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group)):
            group._get_backend(torch.device("cuda")).abort()


def _device_of_objects(group: dist.ProcessGroup, device: torch.device | None) -> torch.device:
    """Where bytes lie while they travel: on the CPU, where a backend of its carries them.

    torch would take the current device: the first GPU on all ranks, unless each made its own the current one.
    """
    backends = str(dist.get_backend_config(group))
    if "nccl" not in backends or "gloo" in backends:
        return torch.device("cpu")
    if device is not None and device.type == "cuda" and device.index is not None:
        return device
    if group.bound_device_id is not None:
        return group.bound_device_id
    current, local = torch.cuda.current_device(), number_in_environment(("LOCAL_RANK",))
    if current == 0 and local is not None and local < torch.cuda.device_count():
        current = local
    return torch.device("cuda", current)


class Pending:
    """Numbers on their way to this rank; `flags` of all ranks once they are here.

    A `collective` of an exchange is started on aliases of the tensors: the one that receives and those that are sent.

    Gloo's threads drop a finished collective's tensors some time after the caller went on, and dropping a tensor that
    Python knows takes the GIL: in an interpreter that is shutting down that aborts the process. So a process that
    exits right after its last collective first waits until all aliases are back (`settle`).
    """

    def __init__(
        self,
        received: Tensor,
        exchange: Exchange | None = None,
        collective: Callable[..., Any] | None = None,
        *sent: Tensor,
        what: str = "",
        flags: Sequence[int] = (),
    ) -> None:
        self._received, self.flags = received, list(flags)
        self.read: Callable[[Tensor], tuple[Tensor, list[int]]] | None = None
        self._aliases: list[Tensor] = []
        if exchange is not None and collective is not None:
            exchange.calls += 1
            self._watch, self._what = exchange.watch, what + exchange.label
            # asked here, as it costs every step
            if self._watch is not None and self._watch.is_closed:
                self._watch.require_open()
            for t in (received, *sent):
                alias = t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
                self._aliases.append(alias)
            _aliases.extend(self._aliases)
            self._work: Any = collective(*self._aliases, group=exchange.group, async_op=True)
            _unwaited.add(self)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of what comes until `stream` is done with it."""
        record_stream(self._received, stream)

    def wait(self) -> Tensor:
        """What came, once it is here.

        Raises:
            RankFailure: a rank failed, ended or did not come in time.
        """
        aliases, self._aliases = self._aliases, []
        if aliases:
            watch = self._watch
            if watch is not None:
                watch.at, watch.waits = self._what, watch.waits + 1
                try:
                    # NCCL's wait is for the stream, and with a limit it would be for the host
                    self._work.wait(SLICE) if self._received.is_cpu else self._work.wait()
                except RuntimeError:
                    watch.wait_or_fail(self._work)
                watch.at, watch.last = None, self._what
            elif self._work is not None:
                self._work.wait()
            # the transfer is over: what is left to wait for needs no memory
            for tensor in aliases:
                tensor.set_(tensor.new_empty(0).untyped_storage())
            # which would keep its aliases
            self._work = None
            if len(_aliases) > _MOST_ALIASES:
                _aliases[:] = in_use()
            if self.read is not None:
                self._received, self.flags = self.read(self._received)
        return self._received


# aliases that the backend may still hold, and how many are kept until they are looked through
_aliases: list[Tensor] = []
_MOST_ALIASES = 64
# exchanges whose result may still be on its way
_unwaited: weakref.WeakSet[Pending] = weakref.WeakSet()


def in_use() -> list[Tensor]:
    """Aliases that something besides Python refers to."""
    return [tensor for tensor in _aliases if tensor._use_count() > 1]  # type: ignore[attr-defined]


@atexit.register
def settle(seconds: float = 10) -> bool:
    """Wait until no alias is held any more; False if that takes longer."""
    end = time.monotonic() + seconds
    while in_use():
        if time.monotonic() > end:
            return False
        for pending in list(_unwaited):
            # what nobody will wait for, because a loop was left with batches under way
            if pending._work is not None and pending._work.is_completed():
                pending._work = None
        time.sleep(0.001)  # lets the GIL go
    # those of a wait that failed still have memory
    _aliases.clear()
    return True
