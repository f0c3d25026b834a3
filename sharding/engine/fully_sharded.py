"""FULLY_SHARDED: between steps each replica keeps a part of its rank's shards, weights and optimizer states alike.

The ranks that hold the same shards, one of each replica, gather the weights for a lookup and let them go after it; they
gather weights and states for an update, and each then keeps its part of their mean: what `DMPCollection.sync` after
every step would make of them. In between parameters keep their names and shapes, and show NaNs.

Shapes: a flat buffer [n] of a table group, or a state of it, is W pieces [ceil(n / W)] over W replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings import TableGroup
from shardwise.embeddings.tables.table_layout import blank
from shardwise.kernels.huge_pages import in_huge_pages

from ..comms.exchange import Exchange, Pending
from ..comms.failures import format_error, is_agreed
from .routes import Routes
from .shards import LocalShards
from .step import Step
from .tables import LocalTables


class _Part:
    """A flat tensor of a group that comes and goes: the buffer, or state number `state`. `piece` is what is kept.

    While the tensor is away the group has NaNs of its shape in its place, which take no memory and cannot be written.
    """

    def __init__(self, group: TableGroup, state: int | None, replicas: Exchange) -> None:
        self.group, self._state, self._replicas = group, state, replicas
        tensor = group.flat if state is None else group.states[state]
        size = -(-tensor.numel() // replicas.world_size)
        mine = tensor[replicas.rank * size : (replicas.rank + 1) * size]
        # what is past the end of the tensor stays zeros
        self.piece = tensor.new_zeros(size)
        self.piece[: mine.numel()] = mine
        self._away = blank_like(tensor)
        # [W size], and the tensor the beginning of it, while it is here
        self._padded: Tensor | None = None
        self._mean: Pending | None = None
        self.release()

    @property
    def is_here(self) -> bool:
        """Whether the whole tensor is on this rank now, with the values that all replicas know."""
        return self._padded is not None

    def _put(self, tensor: Tensor) -> None:
        if self._state is None:
            self.group.flat = tensor
        else:
            self.group.states[self._state] = tensor

    def gather(self) -> tuple[Tensor, Pending]:
        """Memory for the tensor, and the values of all replicas on their way into it: for `take`."""
        padded = in_huge_pages(self.piece.new_empty(self._replicas.world_size * self.piece.numel()))
        return padded, self._replicas.gather_pieces(self.piece, padded)

    def take(self, padded: Tensor) -> None:
        """Give the group the gathered tensor."""
        self._padded = padded
        self._put(padded[: self._away.numel()])

    def start_mean(self) -> None:
        """Begin to make this replica's piece that of the mean over replicas."""
        assert self._padded is not None
        self._mean = self._replicas.mean_pieces(self._padded)

    def finish_mean(self) -> None:
        """Wait for the mean, and let the whole tensor go."""
        if self._mean is not None:
            pending, self._mean = self._mean, None
            # also where the wait fails: others know nothing of what is here
            self.release()
            self.piece = pending.wait()

    def release(self) -> None:
        """Let the whole tensor go; the piece stays."""
        self._padded = None
        self._put(self._away)

    def held_bytes(self) -> int:
        """Bytes of the tensor and its piece now."""
        whole = 0 if self._padded is None else self._padded.numel()
        return (whole + self.piece.numel()) * self.piece.itemsize


class FullyShardedShards(LocalShards):
    """`LocalShards` of which each replica keeps a part between steps.

    Replicas run lookups, backwards and all that looks at the tables together, in one order. Tables that train by their
    gradient stay whole on each replica, as an optimizer outside steps on them.

    Attributes:
        defers: whether `complete` comes from outside or with the next use of the tables; by default it comes at the end
            of the backward that updated them.
    """

    fully_sharded = True

    def __init__(
        self, routes: Routes, rank: int, local_tables: LocalTables, exchange: Exchange, replicas: Exchange
    ) -> None:
        super().__init__(routes, rank, local_tables, exchange)
        self.replicas, self.defers = replicas, False
        self._weights: list[_Part] = []
        self._states: list[_Part] = []
        # parameters that show NaNs, and what their versions and memory were then
        self._shown: dict[str, nn.Parameter] = {}
        self._versions: list[tuple[int, int]] = []
        # blocks of `whole` that this rank is in, and whether one of them keeps what it changed
        self._blocks, self._keeps = 0, False

    def is_away(self, table: str) -> bool:
        """As `LocalShards.is_away`."""
        return True

    def averaged_groups(self) -> list[TableGroup]:
        """The groups that stay whole: of tables that train by their gradient."""
        return [group for group, is_shared in self._groups() if not is_shared]

    def _groups(self) -> Iterator[tuple[TableGroup, bool]]:
        """Each group, and whether replicas keep a part of it each."""
        for group, part in zip(self.tables.groups, self.parts, strict=True):
            trained_outside = any(shard.table in self._dense for shard in part.shards)
            yield group, not (trained_outside or group.flat.is_meta)

    @torch.no_grad()
    def spread(self, *, first: bool = False) -> None:
        """Keep this replica's part of the tables as they are, and let the rest go; on meta nothing happens.

        The `first` time replicas become the first one's before.
        """
        shared = [group for group, is_shared in self._groups() if is_shared and group.flat.numel()]
        for group in shared if first else ():
            for tensor in (group.flat, *group.states):
                self.replicas.broadcast(tensor)
        # those that were there hold the tables as they were
        self._weights = [_Part(group, None, self.replicas) for group in shared]
        self._states = [_Part(group, number, self.replicas) for group in shared for number in range(len(group.states))]
        self._blank()

    def _blank(self) -> None:
        """Have the parameters of tables that replicas share show that they are away."""
        names = {table.name for group, is_shared in self._groups() if is_shared for table in group.tables}
        self._shown = {name: param for name, param in self.tables.parameters.items() if name in names}
        for param in self._shown.values():
            param.data = blank_like(param.data)
        self._versions = self._versions_now()

    def _versions_now(self) -> list[tuple[int, int]]:
        """What changes with most writes to parameters, `param.data = ...` among them."""
        return [(param._version, param.data_ptr()) for param in self._shown.values()]

    def _require_unwritten(self) -> None:
        """Refuse what was written to parameters while their rows were away: torch does not refuse all of it."""
        if self._blocks:
            # inside of `whole` they are here
            return
        versions = self._versions_now()
        # nothing shows `param.data.fill_(...)` but the number itself, which the CPU can look at for nothing
        if versions == self._versions and all(param.device.type != "cpu" for param in self._shown.values()):
            return
        self._versions = versions
        for name, param in self._shown.items():
            # host sync on CUDA: a load bumps versions too, and writes nothing
            if param.numel() and not bool(param.flatten()[:1].isnan()):
                # what was written goes, so that the next call may go on
                self._blank()
                raise RuntimeError(
                    f"table {name!r}: its parameter was written while its rows were away (FULLY_SHARDED), which changes"
                    " none of them: write inside `with model.whole_tables(keep=True)`, or load a state dict"
                )

    def tell_replicas(self, error: Exception, where: str) -> None:
        """Tell the other replicas of an error that only this rank's sharding group has agreed on: they wait for it."""
        if self.replicas.watch is not None and is_agreed(error):
            told = RuntimeError(f"its sharding group raised {format_error(error)}")
            self.replicas.watch.report(told, where)

    def complete(self) -> None:
        """Wait for the means of an update that are under way, and let the memory of whole tables go."""
        for part in (*self._weights, *self._states):
            part.finish_mean()

    def held_bytes(self) -> int:
        """Bytes that weights and optimizer states take on this rank now."""
        return sum(part.held_bytes() for part in (*self._weights, *self._states))

    def _gather(self, parts: Sequence[_Part]) -> list[_Part]:
        """Have these tensors here; returns those that were not."""
        self.complete()
        absent = [part for part in parts if not part.is_here]
        for part, (padded, pending) in [(part, part.gather()) for part in absent]:
            pending.wait()
            part.take(padded)
        return absent

    @contextmanager
    def _gathered(self, parts: Sequence[_Part]) -> Iterator[None]:
        """A block in which these tensors are here to be read."""
        gathered = self._gather(parts)
        try:
            yield
        finally:
            for part in gathered:
                part.release()

    @contextmanager
    def _updated(self) -> Iterator[None]:
        """A block that updates the tables; replicas keep the means after it. If it fails they stay as they were."""
        parts = [*self._weights, *self._states]
        with torch.no_grad():
            self._gather(parts)
        try:
            yield
        except BaseException:
            for part in parts:
                part.release()
            raise
        for part in parts:
            part.start_mean()
        if self._blocks:
            # inside of `whole` they are here again
            self._gather(parts)
            self.tables._place_parameters()
        elif not self.defers:
            # the rest of a backward need not wait for it
            if torch._C._current_graph_task_id() != -1:
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(self.complete)
            else:
                self.complete()

    @contextmanager
    def whole(self, *, keep: bool = False) -> Iterator[None]:
        """As `LocalShards.whole`: gathers weights and states, of which each replica keeps its part afterwards."""
        self._require_unwritten()
        self._blocks, self._keeps = self._blocks + 1, self._keeps or keep
        gathered: list[_Part] = []
        try:
            if self._blocks == 1:
                gathered = self._gather([*self._weights, *self._states])
                self.tables._place_parameters()
            yield
        except BaseException:
            self._keeps = False
            raise
        finally:
            self._blocks -= 1
            if not self._blocks:
                keeps, self._keeps = self._keeps, False
                if keeps:
                    self.spread()
                else:
                    for part in gathered:
                        part.release()
                    self._blank()

    def assembled(self, *, keep: bool = False) -> AbstractContextManager[None]:
        """As `whole`."""
        return self.whole(keep=keep)

    def _rows(self, *, replicated: bool) -> list[_Part]:
        """The weights of cut tables, or of those that each rank of a sharding group has whole."""
        return [part for part in self._weights if (part.group in self.tables.replicas) == replicated]

    def look_up(self, step: Step) -> dict[int, Tensor]:
        """As `LocalShards.look_up`."""
        self._require_unwritten()
        with self._gathered(self._rows(replicated=False)):
            return super().look_up(step)

    def look_up_replicated(self, step: Step, *, dense: bool) -> dict[int, Tensor]:
        """As `LocalShards.look_up_replicated`."""
        if dense:
            return super().look_up_replicated(step, dense=True)
        with self._gathered(self._rows(replicated=True)):
            return super().look_up_replicated(step, dense=False)

    def replicated_weight_gradients(self, step: Step, gradients: Mapping[int, Tensor], divisor: int) -> list[Tensor]:
        """As `LocalShards.replicated_weight_gradients`."""
        with self._gathered(self._rows(replicated=True)):
            return super().replicated_weight_gradients(step, gradients, divisor)

    def update(self, step: Step, gradients: Sequence[Tensor], *, weight_gradients: bool) -> list[Tensor]:
        """As `LocalShards.update`; the mean over replicas follows. Gradients that wait for a step need no table."""
        if step.trains and not self.tables.accumulation.waits:
            with self._updated():
                return super().update(step, gradients, weight_gradients=weight_gradients)
        with self._gathered(self._rows(replicated=False) if weight_gradients else ()):
            return super().update(step, gradients, weight_gradients=weight_gradients)

    def apply_sums(self) -> None:
        """As `LocalShards.apply_sums`; the mean over replicas follows."""
        with self._updated():
            super().apply_sums()

    def __getstate__(self) -> dict[str, Any]:
        # what travels cannot be copied
        self.complete()
        return super().__getstate__()


def blank_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """NaNs in the shape of a tensor, or another, all of them one number in memory: reading is no error, writing is."""
    return blank(tensor, tensor.shape if shape is None else shape)


@contextmanager
def whole_tables(module: nn.Module, *, keep: bool = False) -> Iterator[None]:
    """`LocalShards.whole` for all collections in a model."""
    with ExitStack() as stack:
        for part in module.modules():
            shards = getattr(part, "shards", None)
            if isinstance(shards, FullyShardedShards):
                stack.enter_context(shards.whole(keep=keep))
        yield
