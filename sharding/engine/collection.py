"""Sharded collections: one engine for pooled and sequence lookups, whatever the plan.

forward: `begin` routes the ids and exchanges headers and ids; `look_up` finds the rows and sends them off; `finish`
takes what came and assembles it. backward: gradients of rows travel back, and every rank applies the fused update to
the tables that it holds. Four collectives a step, whatever the number of tables and strategies; one more each way where
hosts add their rows first, one more back for gradients of per-id weights, one on the way to an error. All ranks must
run forward, and backward, the same number of times.

`begin` is `depart`, `send_ids` and `arrive`. A pipeline calls these while an earlier batch trains; the forward of their
batch then takes what is `expected` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings import GradientCheckMode
from shardwise.embeddings.collections.collection import require_features
from shardwise.embeddings.tables.lookup_autograd import warn_of_eval
from shardwise.embeddings.tables.variable_batch import pad_strides, require_full_batch
from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import BoundsCheckMode
from shardwise.kernels._op import runs_kernel

from ...planner.layout import Shard, TableOptions, validate
from ..comms import header
from ..comms.agreement import (
    Facts,
    agree,
    facts_of,
    facts_of_shards,
)
from ..comms.async_collective import get_gradient_division
from ..comms.awaitable import LazyAwaitable
from ..comms.env import ShardingEnv
from ..comms.exchange import Exchange
from ..comms.failures import agreed
from ..comms.qcomms import codecs_of
from .batch_check import check_batch
from .dedup import dedup_ids
from .departure import Departure, Expected, Staged
from .flags import error_of, is_wrong, number_of, numbers_of_all, raise_after_backward
from .fused_optimizer import ShardedFusedOptimizer
from .held import Collection, Held, Mark, Stores, facts_of_replicas, tables_of
from .id_map import IdMap, id_ranges
from .lookup_autograd import Finish
from .owner import Batch, InFlight, Owner
from .reshard import reshard
from .results import Columns, Rows, pool_in_order
from .route import Home, Outbound, Receiving, Sending, divide_ahead, route
from .routes import REPLICA, ROWS, Routes, Table, plan_routes
from .state import States, publish_weights, take_weights


class ShardedCollection(nn.Module, Staged):
    """The engine: holds this rank's tables, and answers a batch together with the other ranks.

    Parameters keep the names of the unsharded module; a table of another rank is an empty parameter.
    """

    # what a forward returns, made of the collection and a batch
    _awaitable: type[Any]

    def __init__(
        self,
        module: Collection,
        shards: Sequence[Shard],
        env: ShardingEnv,
        device: torch.device,
        *,
        default_optimizer: Mark,
        options: dict[str, TableOptions] | None = None,
        codecs: Mapping[str, Any] | None = None,
        dedup: bool = False,
        stores: Stores | None = None,
        id_maps: Mapping[str, IdMap] | None = None,
    ) -> None:
        super().__init__()
        self._pooled = hasattr(module, "embedding_bags")
        self._children_name = module._children_name
        self._weighted = bool(getattr(module, "is_weighted", bool)())
        self._policy = module._policy
        self._names_by_table = module._names_by_table
        self._env, self._exchange = env, Exchange(env.require_group())
        # TorchRec's default: with DDP's mean over ranks, tables and dense layers then see the same loss. False of one
        # collection, or of all by comm_ops.set_gradient_division, leaves sums over ranks
        self.gradient_division = True
        self._id_maps = dict(id_maps or {})
        self.maps_ids = bool(self._id_maps)
        self._dedup = dedup and not self._pooled
        self._codec, self._codec_back = (
            codec if codec.compresses else None for codec in codecs_of(codecs, pooled=self._pooled, device=device)
        )
        self._stores = stores

        def plan() -> tuple[tuple[Routes, list[Mark | None]], Facts]:
            chosen, mapped = options or {}, id_ranges(self._id_maps)
            tables, marks = tables_of(module, shards, default_optimizer, chosen, mapped)
            routes, facts = self._plan(tables, shards)
            return (routes, marks), {**facts, **facts_of_replicas(tables, shards, device)}

        (routes, marks), number = agree(self._exchange, device, plan)
        held = Held(routes, env.rank, device, self._policy, stores)
        held.adopt(module, marks, self._exchange)
        self._settle(routes, number, held)
        # batches that left ahead: a forward takes its own from here
        self.expected = Expected()
        self.add_module(self._children_name, held.children())
        self.train(module.training)
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self._fused_optimizer = ShardedFusedOptimizer(self._owner, self.states, self._children_name)
        self.register_state_dict_post_hook(publish_weights)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(take_weights)  # type: ignore[no-untyped-call]

    def _plan(self, tables: Sequence[Table], shards: Sequence[Shard]) -> tuple[Routes, Facts]:
        """Routes of a plan, and what ranks must share of it."""
        validate(shards, {table.name: (table.rows, table.dim) for table in tables}, self._env.world_size)
        routes = plan_routes(
            tables, shards, self._env.world_size, pooled=self._pooled, weighted=self._weighted,
            local_size=self._env.local_world_size,
        )  # fmt: skip
        facts = {
            "tables": str([table.name for table in tables]), "pooled": str(self._pooled),
            "per-id weights": str(self._weighted), "dedup": str(self._dedup), "codec of rows": str(self._codec),
            "codec of gradients": str(self._codec_back), "ranks of a host": str(routes.local_size),
        }  # fmt: skip
        for table in tables:
            facts |= facts_of(table, f"table {table.name!r}")
        return routes, facts | facts_of_shards(shards)

    def _settle(self, routes: Routes, number: int, held: Held) -> None:
        """Serve these routes, whose fingerprint is `number`, from now on."""
        me = self._env.rank
        self._routes, self._fingerprint, self._held = routes, number, held
        self._most_groups = max(len(serving.groups) for serving in routes.serving)
        self._local = Exchange(self._env.local_group(), self._exchange) if routes.has_host_sums else None
        self._owner = Owner(routes, me, held, self._exchange, self._local, self._codec)
        self._columns = Columns(routes, me) if self._pooled else None
        self._rows = Rows(routes)
        # what the state dicts of this rank's tables are made of
        self.states = States(routes, held, self._env)
        self._forget()

    def reshard(
        self,
        shards: Sequence[Shard],
        options: Mapping[str, TableOptions] | None = None,
        *,
        resplit: str | None = None,
    ) -> None:
        """Go over to another plan, with weights and optimizer states. Arguments and errors as `reshard.reshard`."""
        reshard(self, shards, options, resplit=resplit)

    def _forget(self) -> None:
        """Begin anew what is made of the routes for a device."""
        self._receiving = [Receiving(self._routes, self._env.rank, update, self.device) for update in (False, True)]
        self._sending: dict[tuple[tuple[str, ...], bool], Sending] = {}

    @property
    def fused_optimizer(self) -> ShardedFusedOptimizer:
        """The optimizer that this rank's tables run in their backward."""
        return self._fused_optimizer

    @property
    def device(self) -> torch.device:
        """Where this rank's tables are."""
        return self._held.device

    def name_exchanges(self, path: str) -> None:
        """Have a failure in an exchange name this collection by its path in the model."""
        for exchange in (self._exchange, self._local):
            if exchange is not None:
                exchange.label = f" of {path!r}" if path else ""

    @property
    def collectives(self) -> int:
        """Collectives called so far."""
        return self._exchange.calls + (0 if self._local is None else self._local.calls)

    def parameter_name(self, table: str) -> str:
        """A table's parameter, by its name below this module."""
        return f"{self._children_name}.{table}.weight"

    def parameter(self, table: str) -> nn.Parameter:
        """This rank's part of a table."""
        return self._held.parameters[table]

    def fused_parameter_names(self) -> list[str]:
        """Parameters that the backward trains or that other ranks hold: no gradient of theirs is to be reduced."""
        dense = {shard.table for group in self._routes.dense for shard in group.shards}
        return [self.parameter_name(table.name) for table in self._routes.tables if table.name not in dense]

    def begin(self, features: KeyedJaggedTensor | Exception) -> InFlight:
        """Send the batch's ids to the ranks that serve them, and take theirs; or take what is expected for this call.

        An exception in the place of the batch, say of what prepares it on this rank, is raised on all ranks.

        Raises:
            KeyError, IndexError, ValueError, TypeError: a rank's batch is bad, as `EmbeddingBagCollection.forward`
                describes. All ranks raise in this step, with the message and number of the first failing rank.
            RuntimeError: a rank failed otherwise, or ranks disagree on the plan or on gradients being enabled.
        """
        departure = self._take(features) if len(self.expected) else None
        if departure is None:
            departure = self.depart(features)
            self.send_ids(departure)
        return self.arrive(departure)

    def depart(self, features: KeyedJaggedTensor | Exception) -> Departure:
        """Route the batch and tell all ranks what they will get, or what is wrong with it; waits for nobody."""
        update = torch.is_grad_enabled()
        number = self._fingerprint
        if self._owner.updates_together:
            # a table that is frozen on one rank alone would leave the others waiting for its part
            number = (number + self._held.frozen_tables()) % 2**63
        outbound: Outbound | None = None
        batch: Batch | None = None
        mine: Sequence[header.Sizes] | Exception
        try:
            batch, outbound = self._prepare(features, update)
            mine = self._sizes(outbound)
        except Exception as error:
            mine = error
        learned = outbound is not None and outbound.weights is not None and outbound.weights.requires_grad
        told = header.tell(
            self._exchange, self._held.device, mine, wants=header.Wants(update, learned, self.training),
            fingerprint=number,
            groups=self._most_groups,
        )  # fmt: skip
        return Departure(outbound, batch, update, self._receiving[update], told)

    def send_ids(self, departure: Departure) -> None:
        """Wait for the sizes of all ranks and send the ids off. Raises as `begin`; does nothing the second time."""
        if departure.heads:
            return
        heads, out, receiving = departure.told.hear(), departure.outbound, departure.receiving
        # where it is missing every rank has raised
        assert out is not None
        departure.heads = heads
        departure.sizes = [receiving.elements(head.sizes.batch, head.sizes.ids) for head in heads]
        if not self._exchange.alone:
            departure.ids = self._exchange.ids(out.blocks(), departure.sizes)

    def arrive(self, departure: Departure) -> InFlight:
        """Wait for the ids of all ranks: the batch is here, ready to be looked up. The same flight the second time."""
        if departure.flight is None:
            out, batch = departure.outbound, departure.batch
            assert out is not None and batch is not None
            flight = InFlight(out, departure.received(), departure.heads, departure.update, batch)
            self._owner.translate(flight, self._id_maps)
            departure.flight = flight
        return departure.flight

    def prefetch(self, flight: InFlight) -> bool:
        """Bring the rows that the batch asks for into the slots of their stores, before the lookup.

        The update of the batch before may still come: rows are read by the lookup. False where a store has no room as
        long as the leases of that batch last; the lookup then asks once more.
        """
        return self._owner.prefetch(flight)

    def drop(self, departure: Departure) -> None:
        """Let a batch go that no forward will take."""
        departure.drop(self._owner)

    def _take(self, features: KeyedJaggedTensor | Exception) -> Departure | None:
        """What is expected for a call with these features."""
        departure, update = self.expected.pop(features), torch.is_grad_enabled()
        if departure is None:
            return None
        if departure.update != update or departure.receiving is not self._receiving[update]:
            # it left for another kind of step, or under another plan
            self.drop(departure)
            return None
        return departure

    def forward(self, features: KeyedJaggedTensor | Exception) -> Any:
        """The lazy result of this rank's batch, looked up together with the other ranks. Raises as `begin`."""
        flight = self.begin(features)
        self.look_up(flight)
        return self._awaitable(self, flight)

    def lazily(self, flight: InFlight) -> LazyAwaitable[Any]:
        """The result of a batch, which waits for other ranks when it is used."""
        result: LazyAwaitable[Any] = self._awaitable(self, flight)
        return result

    def look_up(self, flight: InFlight) -> None:
        """Find the rows that were asked for and send them off; `finish` takes them. Does nothing the second time."""
        if flight.pending is None:
            flight.trains = self.training
            with torch.no_grad():
                self._owner.look_up(flight)

    def _exchanged(self, flight: InFlight) -> Tensor:
        """Rows of all lookups that are not trained by their gradient: [B, columns], or one lookup after another."""
        if flight.pending is None:
            self.look_up(flight)
        weights = [flight.outbound.weights]
        if self._routes.replicas:
            weights += [home.weights for home in self._home(flight, dense=False)]
        # a batch that began without gradients gets none: replicated tables do not know the other ranks' ids
        with torch.set_grad_enabled(flight.update and torch.is_grad_enabled()):
            return Finish.apply(self._anchor, self, flight, *weights)  # type: ignore[no-any-return, no-untyped-call]

    def _dense_pieces(self, flight: InFlight) -> dict[int, Tensor]:
        """Rows of each lookup in a table that is trained by its gradient."""
        with torch.set_grad_enabled(flight.update and torch.is_grad_enabled()):
            return self._at_home(flight, dense=True)

    def _home(self, flight: InFlight, *, dense: bool) -> list[Home]:
        replicas = len(self._routes.replicas)
        return flight.outbound.home[replicas:] if dense else flight.outbound.home[:replicas]

    def _at_home(self, flight: InFlight, *, dense: bool) -> dict[int, Tensor]:
        """Rows of this rank's own batch in tables that every rank holds, by lookup."""
        found: dict[int, Tensor] = {}
        parts, groups = (
            (self._routes.dense, self._held.dense) if dense else (self._routes.replicas, self._held.replicas)
        )
        for part, group, home in zip(parts, groups, self._home(flight, dense=dense), strict=True):
            if self._pooled:
                rows = group.pooled(home.ids, home.offsets, home.weights)
                pieces = torch.split(rows, [slot.width for slot in part.slots], dim=1)
            else:
                pieces = torch.split(group.sequence(home.ids, home.offsets), home.sizes)
            found.update(zip([slot.lookup for slot in part.slots], pieces, strict=True))
        return found

    def _assemble(self, flight: InFlight) -> Tensor:
        """What came from all ranks and from tables at home as the output of `_exchanged`."""
        assert flight.pending is not None
        received = flight.pending.wait()
        if any(flight.pending.flags):
            number = self._owner.overflow(flight) if flight.pending.flags[self._exchange.rank] else 0
            raise agreed(error_of(numbers_of_all(self._exchange, number, self.device), self._routes, self._codec))
        flight.found = {}
        home = self._at_home(flight, dense=False) if self._routes.replicas else {}
        if self._columns is None:
            found = self._rows.put_together(flight.outbound, received, flight.result_sizes, home)
            self._exchange.buffers.recycle(received, found)
            return found
        blocks = torch.split(received, flight.result_sizes)
        matrices, rest = self._columns.cut(blocks, flight.outbound.batch)
        if self._columns.ordered:
            for lookup, rows in self._rows.by_lookup(flight.outbound, rest).items():
                cut = self._columns.ordered[lookup]
                matrices[ROWS, lookup] = pool_in_order(flight.outbound, self._routes, cut, rows)
        for lookup, piece in home.items():
            matrices[REPLICA, lookup] = piece
        found = self._columns.put_together(matrices, flight.outbound)
        self._exchange.buffers.recycle(received, found)
        return found

    def _update(self, flight: InFlight, grad: Tensor, *, learned: bool) -> tuple[Tensor | None, list[Tensor | None]]:
        """The transpose of `_assemble`, and the fused update. Gradients of weights that were sent, and used at home."""
        out, divisor = flight.outbound, self.divisor
        at_home: list[Tensor | None] = [None] * len(self._routes.replicas)
        if not flight.trains:
            warn_of_eval()
            if not learned:
                # all ranks know, and send nothing
                self._owner.release(flight)
                return None, at_home
        grad = grad.float()
        if self._columns is None:
            blocks = self._rows.gradients(out, grad, [self._ids_of(flight, n) for n in self._rows.lookups])
            sent, sizes = torch.cat(blocks), [block.shape[0] for block in blocks]
        else:
            grad = self._columns.divided_gradient(grad, out, divisor, checked=self.checks_gradients)
            sent, sizes = self._columns.gradients(grad, self._exchange.buffers)
        if learned:
            at_home = self._home_weight_gradients(flight, grad, divisor)
        if divisor > 1:
            sent.div_(divisor)
        checked = self._policy.gradient_check is GradientCheckMode.RAISE
        weights = flight.outbound.weights if checked and self._weighted else None
        flag = None
        if checked or self._codec_back is not None:
            flag = is_wrong(weights, sent, self._codec_back, checked=checked)
        sizes_back = self._owner.gradient_sizes(flight)
        pending = self._exchange.rows_transpose(sent, sizes, sizes_back, codec=self._codec_back, flag=flag)
        received = pending.wait()
        if any(pending.flags):
            number = 0
            if pending.flags[self._exchange.rank]:
                pieces = self._gradients_of_lookups(flight, grad)
                number = number_of(pieces, weights, sent, divisor, self._codec_back, checked=checked)
            error = error_of(numbers_of_all(self._exchange, number, self.device), self._routes, self._codec_back)
            self._owner.release(flight)
            raise_after_backward(error)
            return None, [None] * len(at_home)
        self._exchange.buffers.recycle(sent, received)
        back = self._owner.update(flight, received, weight_gradients=learned)
        self._exchange.buffers.recycle(received, grad)
        return None if back is None else self._weight_gradients(flight, back, divisor), at_home

    def _weight_gradients(self, flight: InFlight, back: Sequence[Tensor], factor: int) -> Tensor:
        """Gradients of the weights that this rank sent, from what it found for those of others."""
        out = flight.outbound
        mine = self._sizes(out)
        sizes = [head.sizes.returned for head in flight.heads]
        received = self._exchange.rows_transpose(torch.cat(list(back)), sizes, [one.returned for one in mine]).wait()
        pieces = torch.split(received, [one.returned for one in mine])
        # weights of ids that went to replicas count where they were looked up
        padded = [
            torch.cat([piece, piece.new_zeros(one.ids - one.returned)]) for piece, one in zip(pieces, mine, strict=True)
        ]
        return torch.cat(padded) * factor

    def _home_weight_gradients(self, flight: InFlight, grad: Tensor, factor: int) -> list[Tensor | None]:
        assert self._columns is not None
        found: list[Tensor | None] = []
        for part, group, home in zip(
            self._routes.replicas, self._held.replicas, self._home(flight, dense=False), strict=True
        ):
            mine = torch.cat([self._columns.of_lookup(grad, slot.lookup) for slot in part.slots], dim=1)
            slots, lease = group.store.resolve(home.ids, home.offsets, group.step)
            # a gradient is cut as it is after the division, at home too
            found.append(group.weight_gradient(mine / factor, slots, home.offsets) * factor)
            group.store.release(lease)
        return found

    @property
    def divisor(self) -> int:
        """What gradients are divided by before they train."""
        return self._env.world_size if self.gradient_division and get_gradient_division() else 1

    @property
    def checks_gradients(self) -> bool:
        """Whether a gradient that is not finite is looked for."""
        return self._policy.gradient_check is not GradientCheckMode.IGNORE

    def _sizes(self, out: Outbound) -> list[header.Sizes]:
        first, found = out.sending.first_stream, []
        for rank, groups in enumerate(out.ids_to_groups):
            counts = out.counts[first[rank] : first[rank + 1]]
            returned = sum(counts[: self._routes.serving[rank].returned])
            found.append(header.Sizes(out.batch, sum(counts), returned, groups))
        return found

    def _prepare(self, features: KeyedJaggedTensor | Exception, update: bool) -> tuple[Batch, Outbound]:
        if isinstance(features, Exception):
            raise features
        given = features = require_features(features, "a sharded collection", self._weighted)
        if given.variable_stride_per_key():
            if self._pooled:
                require_full_batch(given, "a sharded collection")
            features = pad_strides(given)
        device = features.device()
        if device != self._held.device:
            raise ValueError(f"ids are on {device}, the tables on {self._held.device}")
        sending = self._sending_of(features, update)
        weights = features.weights_or_none() if self._weighted else None
        if weights is not None and not update:
            weights = weights.detach()
        # ids outside their tables may pass, and count as none
        lenient = self._policy.bounds_check is not BoundsCheckMode.FATAL and bool(sending.used)
        dedup = self._dedup and not lenient and not self._id_maps
        ahead = device.type == "cuda" and runs_kernel(features.values())
        batch, divided = Batch(given, features, features), None
        if ahead and not dedup:
            divided = divide_ahead(features, self._routes, sending, weights, lenient=lenient)
        check_batch(features, sending, self._policy.bounds_check, divided)
        if dedup:
            batch = dedup_ids(given, features, sending.used, sending.rows)
            sending = self._sending_of(batch.routed, update)
            if ahead:
                divided = divide_ahead(batch.routed, self._routes, sending, weights, lenient=lenient)
        return batch, route(batch.routed, self._routes, sending, weights, lenient=lenient, divided=divided)

    def _gradients_of_lookups(self, flight: InFlight, grad: Tensor) -> list[Tensor]:
        """The gradient of each lookup."""
        if self._columns is not None:
            return [self._columns.of_lookup(grad, n) for n in range(len(self._routes.lookups))]
        by_lookup = torch.split(grad, [self._ids_of(flight, n) for n in self._rows.lookups])
        return [piece for _, piece in sorted(zip(self._rows.lookups, by_lookup, strict=True), key=itemgetter(0))]

    def _sending_of(self, features: KeyedJaggedTensor, update: bool) -> Sending:
        keys = features.keys()
        found = self._sending.get((tuple(keys), update))
        if found is None:
            if missing := [name for name in dict.fromkeys(self._routes.features) if name not in keys]:
                raise KeyError(f"features {missing} are not in the batch, which has {keys}")
            found = self._sending[tuple(keys), update] = Sending(self._routes, keys, update, self.device)
        return found

    def _ids_of(self, flight: InFlight, lookup: int) -> int:
        """Ids of a lookup that this rank sent."""
        key = flight.outbound.sending.place[self._routes.lookups[lookup][0]]
        return flight.batch.routed.length_per_key()[key]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedCollection:
        self._held.move(fn)
        self._anchor = torch.zeros(1, device=self.device, requires_grad=True)
        self._forget()
        return self
