"""`ShardedObjectPool`: pools whose rows lie in blocks over ranks, which ask each other for them.

A lookup is three exchanges: headers (how many ids go where, and whether all ranks are well), ids, rows. An update is
two: headers, then ids with their rows. All ranks call them together, in the same order, each with ids of its own, maybe
none. What one rank refuses is raised on all of them, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.embeddings.pools import ObjectPool
from shardwise.errors import RefusedValueError

from ..comms.agreement import exchange_device
from ..comms.awaitable import LazyAwaitable
from ..comms.consensus import send_header
from ..comms.env import ShardingEnv
from ..comms.exchange import Exchange, Pending
from ..engine.state import Piece, Value, publish, take
from .plan import Blocks, ObjectPoolShardingPlan, ObjectPoolShardingType, even_blocks, spans

T = TypeVar("T")


@dataclass(frozen=True)
class Route:
    """Where the ids of one call go: `order` [n] puts those for one rank behind another; `sent` and `came` by rank."""

    order: Tensor
    sent: list[int]
    came: list[int]


@dataclass(frozen=True)
class PendingRows:
    """Rows [m, *shape] on their way, which travel as bytes: backends differ in the dtypes that they take."""

    pending: Pending
    dtype: torch.dtype
    shape: torch.Size

    def wait(self) -> Tensor:
        """The rows, once they are here."""
        return self.pending.wait().view(self.dtype).view(-1, *self.shape)


def send_rows(exchange: Exchange, rows: Tensor, sent: list[int], came: list[int]) -> PendingRows:
    """Send `sent[d]` of `rows` [n, ...] to each rank d; `came[r]` come from rank r."""
    width = rows.element_size() * rows.shape[1:].numel()
    flat = rows.contiguous().view(-1).view(torch.uint8)
    pending = exchange.numbers(flat, [n * width for n in sent], [n * width for n in came])
    return PendingRows(pending, rows.dtype, rows.shape[1:])


class ShardedObjectPool(ObjectPool[T]):
    """A pool whose rows lie in blocks over the ranks of `env`; `lookup` gives what is to come.

    Of an id that several ranks update at once the last one of the highest rank stays. Its state dict has the names of
    the unsharded pool, with ShardedTensors.

    Raises:
        RefusedValueError: the plan is one of inference, or ranks have no process group between them.
    """

    def __init__(
        self, env: ShardingEnv, pool_size: int, plan: ObjectPoolShardingPlan, device: torch.device | str | None
    ) -> None:
        super().__init__()
        if plan.inference:
            raise RefusedValueError("the plan is for inference: shard it by the pool's sharder, over devices")
        if plan.memory_capacity_per_rank is not None:
            raise RefusedValueError("memory_capacity_per_rank is for inference: over ranks, blocks of rows are even")
        env.require_group()
        self._pool_size, self._sharding_env, self._sharding_plan = pool_size, env, plan
        self._device = torch.device(device or "cpu")
        self._everywhere = Exchange(env.process_group)
        self._holders, self._lookups = env, self._everywhere
        if plan.sharding_type is ObjectPoolShardingType.REPLICATED_ROW_WISE:
            group = env.local_group()
            if group is not None:
                self._holders = ShardingEnv(dist.get_world_size(group), dist.get_rank(group), group)
                self._lookups = Exchange(group, beside=self._everywhere)
        self._blocks: Blocks = even_blocks(pool_size, self._holders.world_size)
        self.register_state_dict_post_hook(_publish)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take)  # type: ignore[no-untyped-call]

    @property
    def pool_size(self) -> int:
        """How many rows there are on all ranks together."""
        return self._pool_size

    @property
    def device(self) -> torch.device:
        """Where this rank's rows are."""
        return self._device

    @property
    def is_cut(self) -> bool:
        """Whether other ranks hold rows that this one does not."""
        return self._holders.world_size > 1

    def lookup(self, ids: Tensor) -> LazyAwaitable[T]:  # type: ignore[override]
        """What is to come: the objects of `ids` [n], in their order.

        Raises:
            IndexError, ValueError: ids of a rank are wrong; on all ranks.
        """
        raise NotImplementedError

    def _hold(self, whole: Iterable[tuple[str, Tensor]], filled: bool) -> None:
        """Register this rank's rows of each buffer, which a pool that is not on meta already `filled`."""
        low, high = spans(self._blocks)[self._holders.rank]
        for name, buffer in whole:
            shape = high - low, *buffer.shape[1:]
            rows = torch.zeros(shape, dtype=buffer.dtype, device=self._device)
            if filled:
                rows.copy_(buffer.detach()[low:high])
            self.register_buffer(name, rows)

    def _route(
        self, exchange: Exchange, check: Callable[[], tuple[Tensor, list[list[int]]]]
    ) -> tuple[Tensor, list[list[int]]]:
        """What `check` returns, the order of ids and numbers for each rank, with those that the ranks have for this."""
        made: tuple[Tensor, list[list[int]]] | None = None
        numbers: list[list[int]] | Exception
        try:
            made = check()
            numbers = made[1]
        except Exception as error:
            numbers = error
        device = exchange_device(exchange.group, self._device)
        came = send_header(exchange, device, numbers, width=2).receive()
        assert made is not None
        return made[0], came

    def _ask(self, check: Callable[[], Tensor]) -> tuple[Route, Tensor]:
        """Ask the ranks for rows: the route, and the rows of this rank, counted from its first, that ranks ask for.

        `check` returns the ids of this rank, or raises what is wrong with them.
        """
        kept: list[Tensor] = []
        counts: list[int] = []

        def checked() -> tuple[Tensor, list[list[int]]]:
            ids = check()
            order, split = self._blocks.split(ids)
            kept.append(ids.long()[order])
            counts.extend(split)
            return order, [[count, 0] for count in split]

        order, came = self._route(self._lookups, checked)
        route = Route(order, counts, [count for count, _ in came])
        asked = send_rows(self._lookups, kept[0], route.sent, route.came).wait()
        return route, asked - self._blocks.borders[self._holders.rank]

    def _value(self, name: str) -> Value:
        """A buffer as all ranks see it."""
        buffer = self.get_buffer(name)
        rest = tuple((0, n) for n in buffer.shape[1:])
        pieces = [Piece(rank, (span, *rest)) for rank, span in enumerate(spans(self._blocks)) if span[0] < span[1]]
        local = tuple((piece, buffer) for piece in pieces if piece.rank == self._holders.rank)
        size = self._pool_size, *buffer.shape[1:]
        return Value(size, tuple(pieces), local, buffer.dtype, self._device)


def _publish(pool: ShardedObjectPool[Any], destination: dict[str, Any], prefix: str, _: Any) -> None:
    for name in pool._buffers:
        destination[prefix + name] = publish(pool._value(name), pool._holders)


def _take(pool: ShardedObjectPool[Any], state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: fill this rank's rows, which then load what they have."""
    given = {name: state_dict[prefix + name] for name in pool._buffers if prefix + name in state_dict}
    fills = [take(f"rows of a pool ({prefix + n})", pool._value(n), g, pool._holders) for n, g in given.items()]
    for fill in fills:
        fill()
    for name in given:
        state_dict[prefix + name] = pool.get_buffer(name)
