"""Keyed batches and tensors between ranks, by TorchRec's names (torchrec.distributed.dist_data).

For sharded modules of your own; the engine of the collections does not run them. The first `wait()` knows how much
comes from each rank and sends the tensors off, the second gives them. No gradient goes through: what carries one is in
`pooled_dist` and `comm_ops`. All ranks of the group call together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor
from shardwise.kernels import expand_into_jagged_permute, segment_sum

from ..comms.awaitable import Awaitable
from ..comms.env import is_alone
from ..comms.exchange import Exchange, Pending

# what a keyed batch may consist of; all ranks tell of each, so that one that has others is found out
_LABELS: tuple[str, ...] = ("lengths", "values", "strides", "weights")


class SplitsAllToAllAwaitable(Awaitable[list[list[int]]]):
    """For each of `input_tensors` [ranks], whose number r goes to rank r, the numbers that all ranks sent here.

    Args:
        input_tensors: integers, one dtype and device for all.
        pg: the ranks.
        collective_tag: a number that must be the same on all ranks.
        collective_tag_parts: what the tag stands for, for the message.

    Raises:
        ValueError: there are no tensors, or one has not a number for each rank.
        RuntimeError: on waiting, tags differ.
    """

    def __init__(
        self,
        input_tensors: Sequence[Tensor],
        pg: dist.ProcessGroup,
        collective_tag: int | None = None,
        collective_tag_parts: tuple[object, ...] | None = None,
    ) -> None:
        super().__init__()
        exchange = Exchange(pg)
        self.num_workers = exchange.world_size
        if not input_tensors:
            raise ValueError("input_tensors: there are no splits to exchange")
        for tensor in input_tensors:
            if tensor.shape != (self.num_workers,):
                raise ValueError(
                    f"splits must have a number for each of {self.num_workers} ranks, got shape {list(tensor.shape)}"
                )
        self._tag, self._tag_parts = collective_tag, collective_tag_parts
        columns = list(input_tensors)
        if collective_tag is not None:
            columns.append(torch.full_like(columns[0], collective_tag))
        self._pending = exchange.numbers(torch.stack(columns, dim=1).flatten())

    def _wait_impl(self) -> list[list[int]]:
        # host sync on CUDA: sizes of what comes next
        splits: list[list[int]] = self._pending.wait().view(self.num_workers, -1).T.tolist()
        if self._tag is not None:
            others = [rank for rank, tag in enumerate(splits.pop()) if tag != self._tag]
            if others:
                raise RuntimeError(
                    f"ranks {others} call another collective, or with other keys, splits or dtypes, than this rank,"
                    f" which has {self._tag_parts if self._tag_parts is not None else self._tag}"
                )
        return splits


class KJTAllToAllTensorsAwaitable(Awaitable[KeyedJaggedTensor]):
    """The batch of this rank's keys over all ranks, whose tensors are on their way; see `KJTAllToAll`.

    Args:
        pg: the ranks.
        input: this rank's batch, all keys.
        splits: how many keys go to each rank.
        input_splits, output_splits: of each of `input_tensors` how much goes to each rank, and comes from it.
        input_tensors, labels: what `input.dist_tensors()` and `input.dist_labels()` say.
        keys: those of this rank.
        device: where the batch is.
        stagger: as `KJTAllToAll`.
        stride_per_rank: batch size of each rank; None where keys have their own.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,
        splits: Sequence[int],
        input_splits: Sequence[Sequence[int]],
        output_splits: Sequence[Sequence[int]],
        input_tensors: Sequence[Tensor],
        labels: Sequence[str],
        keys: Sequence[str],
        device: torch.device,
        stagger: int,
        stride_per_rank: Sequence[int] | None,
    ) -> None:
        super().__init__()
        exchange = Exchange(pg)
        self._input, self._input_tensors = input, list(input_tensors)
        self._keys, self._stagger, self._ranks = list(keys), stagger, exchange.world_size
        self._alone = exchange.alone
        self._stride_per_rank = None if stride_per_rank is None else list(stride_per_rank)
        self._pending: list[Pending | _Rows] = []
        at = list(labels).index("values")
        self._ids_to, self._ids_from = list(input_splits[at]), list(output_splits[at])
        self._recat: Tensor | None = None
        if exchange.alone:
            return
        for tensor, send_sizes, sizes in zip(input_tensors, input_splits, output_splits, strict=True):
            self._pending.append(
                exchange.numbers(tensor.contiguous(), send_sizes, sizes)
                if tensor.dim() == 1
                else _numbers_of(exchange, tensor.detach(), send_sizes, sizes)
            )
        self._recat = recat(splits[exchange.rank], len(splits), stagger, device, stride_per_rank)

    def sizes(self) -> dict[str, Any]:
        """What is known before the tensors are here, by TorchRec's names in contexts of a step; None of what is not.

        `batch_size_per_rank`, `input_splits` and `output_splits` (ids to and from each rank), `sparse_features_recat`.
        """
        strides = self._stride_per_rank
        if strides is None and self._alone and not self._input.variable_stride_per_key():
            strides = [self._input.stride()]
        return {
            "batch_size_per_rank": strides, "input_splits": self._ids_to, "output_splits": self._ids_from,
            "sparse_features_recat": self._recat,
        }  # fmt: skip

    def clear_inputs(self) -> int:
        """Free the memory of this rank's batch, which nobody may use any more; returns how many bytes.

        Waits until it is sent. With one rank the batch is the result, and 0 is returned.
        """
        if self._alone:
            return 0
        for pending in self._pending:
            pending.wait()
        freed = 0
        for tensor in self._input_tensors:
            freed += tensor.numel() * tensor.element_size()
            tensor.untyped_storage().resize_(0)
        self._input_tensors.clear()
        return freed

    def _wait_impl(self) -> KeyedJaggedTensor:
        if self._alone:
            return self._input.sync()
        return KeyedJaggedTensor.dist_init(
            self._keys,
            [pending.wait() for pending in self._pending],
            self._input.variable_stride_per_key(),
            self._ranks,
            self._recat,
            self._stride_per_rank,
            self._stagger,
        )


class KJTAllToAllSplitsAwaitable(Awaitable[KJTAllToAllTensorsAwaitable]):
    """How much comes from each rank, which is on its way; see `KJTAllToAll`.

    Args:
        pg, input, splits, labels, input_tensors, keys, device, stagger: as `KJTAllToAllTensorsAwaitable`.
        tensor_splits: what `input.dist_splits(splits)` says.

    Raises:
        RuntimeError: on waiting, ranks have other keys, splits, dtypes, widths or kinds of batch; on all of them.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,
        splits: Sequence[int],
        labels: Sequence[str],
        tensor_splits: Sequence[Sequence[int]],
        input_tensors: Sequence[Tensor],
        keys: Sequence[str],
        device: torch.device,
        stagger: int,
    ) -> None:
        super().__init__()
        self._pg, self._input, self._splits, self._labels = pg, input, splits, list(labels)
        self._tensor_splits, self._input_tensors = tensor_splits, input_tensors
        self._keys, self._device, self._stagger = keys, device, stagger
        ranks = len(splits)
        self._splits_of_ranks: SplitsAllToAllAwaitable | None = None
        if is_alone(pg):
            return
        by_label = dict(zip(labels, tensor_splits, strict=True))
        columns = [by_label.get(label, [0] * ranks) for label in _LABELS]  # [labels, ranks]
        columns.append([0 if input.variable_stride_per_key() else input.stride()] * ranks)
        # rows of another width would be cut at other places
        kinds = tuple(
            f"{label}: {tensor.dtype} {list(tensor.shape[1:])}" if tensor.dim() > 1 else f"{label}: {tensor.dtype}"
            for label, tensor in zip(labels, input_tensors, strict=True)
        )
        parts = ("KJTAllToAll", tuple(input.keys()), tuple(splits), stagger, kinds)
        # one copy to the device
        sent = torch.tensor(columns, dtype=torch.int64, device="cpu").to(device, non_blocking=True)
        self._splits_of_ranks = SplitsAllToAllAwaitable(list(sent.unbind()), pg, _tag_of(parts), parts)

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        output_splits, stride_per_rank = self._tensor_splits, None
        if self._splits_of_ranks is not None:
            *by_label, strides = self._splits_of_ranks.wait()
            splits_of = dict(zip(_LABELS, by_label, strict=True))
            output_splits = [splits_of[label] for label in self._labels]
            stride_per_rank = None if self._input.variable_stride_per_key() else strides
        return KJTAllToAllTensorsAwaitable(
            self._pg, self._input, self._splits, self._tensor_splits, output_splits, self._input_tensors,
            self._labels, self._keys, self._device, self._stagger, stride_per_rank,
        )  # fmt: skip


class KJTAllToAll(nn.Module):
    """Gives each rank its keys of all ranks' batches, rank after rank: of 3 ranks' batches of 2, one of 6.

    Weights and batch sizes per key travel too, values and weights may be rows [L, ...], and ranks may have batches of
    different sizes; inverse indices stay behind. One rank gets its batch back as it is.

        batch = KJTAllToAll(pg, splits=[2, 1])(kjt).wait().wait()

    Args:
        pg: the ranks.
        splits: the first `splits[0]` keys go to rank 0, the next `splits[1]` to rank 1; the same on all ranks.
        stagger: batches of the result are ordered as if ranks were a matrix of `stagger` rows read column by column:
            with the number of hosts, the first ranks of all hosts come first.

    Raises:
        ValueError: splits are not one for each rank, or `stagger` does not divide the ranks.
    """

    def __init__(self, pg: dist.ProcessGroup, splits: Sequence[int], stagger: int = 1) -> None:
        super().__init__()
        ranks = dist.get_world_size(pg)
        if len(splits) != ranks:
            raise ValueError(f"splits must have one entry for each of {ranks} ranks, got {list(splits)}")
        if stagger < 1 or ranks % stagger:
            raise ValueError(f"stagger must divide the {ranks} ranks, got {stagger}")
        self._pg, self._splits, self._stagger = pg, list(splits), stagger

    def forward(self, input: KeyedJaggedTensor) -> Awaitable[KJTAllToAllTensorsAwaitable]:
        """Send this rank's batch off, keys in the order of the ranks they go to.

        Raises:
            ValueError: it has not as many keys as the splits.
        """
        keys = input.keys()
        if len(keys) != sum(self._splits):
            raise ValueError(f"splits {self._splits} are of {sum(self._splits)} keys, the batch has {keys}")
        ends, rank = list(accumulate(self._splits, initial=0)), dist.get_rank(self._pg)
        with torch.no_grad():
            return KJTAllToAllSplitsAwaitable(
                self._pg, input, self._splits, input.dist_labels(), input.dist_splits(self._splits),
                input.dist_tensors(), keys[ends[rank] : ends[rank + 1]], input.device(), self._stagger,
            )  # fmt: skip


class KJTOneToAll(nn.Module):
    """Cuts a batch by its keys for the devices of one process: `splits[d]` keys for device d.

    Args:
        splits: how many keys each device gets.
        world_size: number of devices.
        device: "cuda" puts part d on GPU d; any other device gets all parts. By default they stay where they are.

    Raises:
        ValueError: splits are not one for each device, or there are not so many GPUs.
    """

    def __init__(self, splits: Sequence[int], world_size: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if len(splits) != world_size:
            raise ValueError(f"splits must have one entry for each of {world_size} devices, got {list(splits)}")
        self._splits = list(splits)
        kind = None if device is None else torch.device(device).type
        if kind == "cuda" and torch.cuda.device_count() < world_size:
            raise ValueError(f"world_size {world_size}: there are {torch.cuda.device_count()} GPUs here")
        self._devices = [
            None if device is None else torch.device("cuda", d) if kind == "cuda" else torch.device(device)
            for d in range(world_size)
        ]

    def forward(self, kjt: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        """The parts, in the order of the devices."""
        parts = kjt.split(self._splits)
        return [
            part if device is None else part.to(device, non_blocking=True)
            for part, device in zip(parts, self._devices, strict=True)
        ]


class JaggedTensorAllToAll(Awaitable[JaggedTensor]):
    """Bags to other ranks, with their weights: what came, rank after rank.

    Args:
        jt: bags, the first `num_items_to_send[0]` of which go to rank 0, and so on.
        num_items_to_send, num_items_to_receive: bags that go to each rank and come from it, integers [ranks].
        pg: the ranks.

    Raises:
        ValueError: numbers are not one for each rank, or do not add up to the bags.
    """

    def __init__(
        self, jt: JaggedTensor, num_items_to_send: Tensor, num_items_to_receive: Tensor, pg: dist.ProcessGroup
    ) -> None:
        super().__init__()
        exchange, lengths = Exchange(pg), jt.lengths().detach()
        # host sync on CUDA: sizes of what is sent
        send, receive = num_items_to_send.tolist(), num_items_to_receive.tolist()
        for name, sizes in (("num_items_to_send", send), ("num_items_to_receive", receive)):
            if len(sizes) != exchange.world_size:
                raise ValueError(f"{name} must have one entry for each of {exchange.world_size} ranks, got {sizes}")
        if sum(send) != lengths.shape[0]:
            raise ValueError(f"num_items_to_send {send} do not add up to {lengths.shape[0]} bags")
        self._lengths = exchange.numbers(lengths, send, receive).wait()
        values_send, values_receive = _sums(lengths, send), _sums(self._lengths, receive)
        self._values = _numbers_of(exchange, jt.values().detach(), values_send, values_receive)
        weights = jt.weights_or_none()
        self._weights = (
            None if weights is None else _numbers_of(exchange, weights.detach(), values_send, values_receive)
        )

    def _wait_impl(self) -> JaggedTensor:
        weights = None if self._weights is None else self._weights.wait()
        return JaggedTensor(self._values.wait(), weights=weights, lengths=self._lengths)


class TensorAllToAllValuesAwaitable(Awaitable[Tensor]):
    """Rows that are on their way; see `TensorValuesAllToAll`."""

    def __init__(
        self, pg: dist.ProcessGroup, input: Tensor, input_splits: Tensor, output_splits: Tensor, device: torch.device
    ) -> None:
        super().__init__()
        if input.device != device:
            raise ValueError(f"device {str(device)!r}: the input is on {str(input.device)!r}, and so is the result")
        # host sync on CUDA: sizes of what is sent
        send_sizes, sizes = input_splits.tolist(), output_splits.tolist()
        self._rows = _numbers_of(Exchange(pg), input.detach(), send_sizes, sizes)

    def _wait_impl(self) -> Tensor:
        return self._rows.wait()


class TensorAllToAllSplitsAwaitable(Awaitable[TensorAllToAllValuesAwaitable]):
    """How many rows come from each rank, which is on its way; see `TensorAllToAll`."""

    def __init__(self, pg: dist.ProcessGroup, input: Tensor, splits: Tensor, device: torch.device) -> None:
        super().__init__()
        ranks = dist.get_world_size(pg)
        if splits.shape != (ranks,):
            raise ValueError(f"splits must have one entry for each of {ranks} ranks, got shape {list(splits.shape)}")
        self._pg, self._input, self._splits, self._device = pg, input, splits, device
        # of one type whatever each rank's splits are
        self._splits_of_ranks = Exchange(pg).numbers(splits.to(torch.int64))

    def _wait_impl(self) -> TensorAllToAllValuesAwaitable:
        return TensorAllToAllValuesAwaitable(
            self._pg, self._input, self._splits, self._splits_of_ranks.wait(), self._device
        )


class TensorValuesAllToAll(nn.Module):
    """Rows of a tensor to other ranks, where all know how many: what came, rank after rank. No gradient."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        super().__init__()
        self._pg = pg

    def forward(self, input: Tensor, input_splits: Tensor, output_splits: Tensor) -> TensorAllToAllValuesAwaitable:
        """Send rows of `input` [N, ...]: `input_splits[r]` to rank r, `output_splits[r]` from it, integers [ranks].

        Raises:
            ValueError: splits are not one for each rank, or do not add up to N.
        """
        return TensorAllToAllValuesAwaitable(self._pg, input, input_splits, output_splits, input.device)


class TensorAllToAll(nn.Module):
    """Rows of a tensor to other ranks: the first wait learns how many come, the second has them. No gradient."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        super().__init__()
        self._pg = pg

    def forward(self, input: Tensor, splits: Tensor) -> TensorAllToAllSplitsAwaitable:
        """Send rows of `input` [N, ...], `splits[r]` of them to rank r, integers [ranks].

        Raises:
            ValueError: splits are not one for each rank; on waiting, they do not add up to N.
        """
        return TensorAllToAllSplitsAwaitable(self._pg, input, splits, input.device)


def recat(
    keys: int,
    ranks: int,
    stagger: int = 1,
    device: torch.device | None = None,
    stride_per_rank: Sequence[int] | None = None,
) -> Tensor | None:
    """The order in which (rank, key) segments make up a batch key after key, int32; None without keys.

    Where batch sizes of ranks differ it is the order of single bags.
    """
    if keys == 0:
        return None
    in_row = ranks // stagger
    order_of_ranks = [column + in_row * row for column in range(in_row) for row in range(stagger)]
    order = [rank * keys + key for key in range(keys) for rank in order_of_ranks]  # [keys * ranks]
    order_tensor = torch.tensor(order, dtype=torch.int32, device="cpu")
    if stride_per_rank is not None and len(set(stride_per_rank)) > 1:
        sizes = [stride for stride in stride_per_rank for _ in range(keys)]  # [ranks * keys]
        begins, ends = (
            torch.tensor(list(accumulate(part, initial=0)), dtype=torch.int32, device="cpu")
            for part in (sizes, [sizes[segment] for segment in order])
        )
        order_tensor = expand_into_jagged_permute(order_tensor, begins, ends, sum(sizes))
    return order_tensor.to(device, non_blocking=True)


class _Rows:
    """Rows [n, ...] on their way."""

    def __init__(self, pending: Pending, shape: Sequence[int]) -> None:
        self._pending, self._shape = pending, shape

    def wait(self) -> Tensor:
        return self._pending.wait().view(*self._shape)


def _numbers_of(exchange: Exchange, rows: Tensor, send_sizes: Sequence[int], sizes: Sequence[int]) -> _Rows:
    """Send rows of any shape."""
    for name, splits in (("input_splits", send_sizes), ("output_splits", sizes)):
        if len(splits) != exchange.world_size:
            raise ValueError(f"{name} must have one entry for each of {exchange.world_size} ranks, got {list(splits)}")
    if sum(send_sizes) != rows.shape[0]:
        raise ValueError(f"input_splits {list(send_sizes)} do not add up to the {rows.shape[0]} rows of the input")
    each = rows.shape[1:].numel()
    pending = exchange.numbers(rows.reshape(-1), [n * each for n in send_sizes], [n * each for n in sizes])
    return _Rows(pending, [sum(sizes), *rows.shape[1:]])


def _sums(lengths: Tensor, bags: Sequence[int]) -> list[int]:
    """How many values the next `bags[r]` bags have."""
    offsets = torch.tensor(list(accumulate(bags, initial=0)), device="cpu").to(lengths.device)
    # host sync on CUDA: sizes of what is sent
    return segment_sum(offsets, lengths.to(torch.int64)).tolist()


def _tag_of(parts: tuple[object, ...]) -> int:
    """A number that says whether ranks mean the same, in 62 bits."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 2
