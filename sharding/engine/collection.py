"""Sharded collections: one engine for pooled and sequence lookups, whatever the plan.

`forward` is a step's six calls in order, and `ExchangedLookup.backward` is their transpose. Four collectives a step,
whatever the number of tables and strategies: sizes, ids, rows, gradients; one more each way where hosts add their rows
first, one more back for gradients of per-id weights, one on the way to an error. All ranks must run forward, and
backward, the same number of times.

A pipeline makes the first calls of a batch while an earlier one trains; the forward of that batch then takes its step
from `routed_ahead`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.embeddings import GradientCheckMode
from shardwise.embeddings.collections.collection import require_features
from shardwise.embeddings.tables.id_check import mark_bad_ids
from shardwise.embeddings.tables.lookup_autograd import warn_of_eval
from shardwise.embeddings.tables.variable_batch import pad_strides, require_full_batch
from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged.tracing import record_forward
from shardwise.kernels._op import in_graph, no_second_derivative, runs_kernel

from ...planner.layout import Shard, TableOptions, validate
from ..comms.agreement import Facts, agree, facts_of, facts_of_shards
from ..comms.awaitable import LazyAwaitable
from ..comms.consensus import raise_first, send_header
from ..comms.env import ShardingEnv, ShardingEnv2D, get_gradient_division
from ..comms.exchange import Exchange
from ..comms.failures import agreed, raise_after_backward
from ..comms.host_exchange import HostExchange
from ..comms.qcomms import codecs_of
from ..compiled.registry import name_for_graphs
from ..compiled.step import OneOp, step_in_graph
from .flags import LACKS_SLOTS, fault_error, fault_of, flag_of
from .fully_sharded import FullyShardedShards
from .fused_optimizer import ShardedFusedOptimizer
from .id_map import IdMap, id_ranges, pack_mapped
from .late_weights import finish_weights
from .reshard import reshard
from .route import Sending, dedup_ids, divide_ahead, raise_with_sizes, route
from .routes import Routes, Table, plan_routes
from .settings import output_dtypes
from .shards import LocalShards
from .stages import StepContext
from .state import States, publish_weights, take_over, take_weights, weight_holders
from .step import IDS_RECEIVED, IDS_SENT, LOOKED_UP, Step
from .tables import Collection, LocalTables, Mark, Stores, facts_of_replicas, tables_of
from .tiers import TieredTables, facts_of_tiers, require_tiers
from .wire import (
    PooledWire,
    Receiving,
    SequenceWire,
    pack_ids,
    pack_sizes,
    pack_weight_gradients,
    unpack_ids,
    unpack_sizes,
    unpack_weight_gradients,
)
from .writing import WritableTables, writable_names


class ExchangedLookup(torch.autograd.Function):
    """A batch's output, of the rows that all ranks looked up: [B, columns], or one lookup after another.

    Its backward is the exchange back and the fused update. Inputs are an anchor, so that there is a backward at all,
    and what else has a gradient: weights of ids that were sent, and of those that are looked up here; parameters of
    this rank's tables that train by it.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, collection: ShardedCollection, step: Step, *inputs: Any) -> Tensor:
        ctx.collection, ctx.step = collection, step
        wire, exchange = collection.wire, collection._exchange
        received = step.rows.wait()
        if any(step.rows.flags):
            collection.shards.release(step, changed=False)
            if any(lacks := [flag & LACKS_SLOTS for flag in step.rows.flags]):
                raise_first(exchange, lacks, step.lack, collection.device)
            fault = 1 + wire.overflowing_lookup(step) if step.rows.flags[exchange.rank] else 0
            raise fault_error(exchange, fault, wire.routes, wire.codec, collection.device)
        step.unsure_rows = {}
        replicated, step.replicated_rows = step.replicated_rows, None
        if replicated is None:
            replicated = collection.shards.look_up_replicated(step, dense=False) if wire.routes.replicas else {}
        output = wire.unpack_rows(step, received, replicated)
        exchange.buffers.recycle(received, output)
        # what was received is the output, or is needed no more
        del step.rows
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        """Gradients travel to the ranks that hold the rows, which update them; those of weights travel back."""
        if torch.is_grad_enabled():
            return no_second_derivative("lookup in sharded tables", ExchangedLookup.backward, ctx, grad_outputs)
        collection: ShardedCollection = ctx.collection
        step, wire, shards, exchange = ctx.step, collection.wire, collection.shards, collection._exchange
        (grad,), divisor, dense_cuts = grad_outputs, collection.divisor, wire.routes.dense_cuts
        # of the weights that were sent, and of those of each group of replicas
        of_weights: list[Tensor | None] = [None] * (1 + len(wire.routes.replicas))
        tables_at = 3 + len(of_weights)
        weight_gradients = any(ctx.needs_input_grad[3:tables_at])
        of_tables: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - tables_at)
        try:
            if not step.trains:
                if len(dense_cuts) < len(wire.routes.tables):
                    warn_of_eval()
                if not weight_gradients and not dense_cuts:
                    # all ranks know, and send nothing
                    shards.release(step, changed=False)
                    return None, None, None, *of_weights
            grad = grad.float()
            if wire.has_averages:
                grad = wire.gradient_of_sums(step, grad, divisor, checked=collection.checks_gradients)
            # what is rounded on its way is divided where it arrives: small numbers of fp16 have fewer bits
            divided, ahead = (divisor, 1) if wire.codec_back is None else (1, divisor)
            sent, sizes = wire.pack_gradients(step, grad, divided, exchange.buffers)
            checked, flag = collection._policy.gradient_check is GradientCheckMode.RAISE, None
            weights = step.sent_weights if checked and wire.routes.weighted else None
            if checked or wire.codec_back is not None:
                flag = flag_of(sent, wire.codec_back, weights, checked=checked)
            sizes_back = wire.gradient_sizes(step)
            pending = exchange.rows_transpose(sent, sizes, sizes_back, codec=wire.codec_back, flag=flag)
            received = pending.wait()
            if any(pending.flags):
                fault, lookups = 0, len(wire.routes.lookups)
                if pending.flags[exchange.rank]:
                    by_lookup = wire.by_lookup(step, grad)
                    fault = fault_of(by_lookup, weights, sent, wire.codec_back, lookups, checked=checked)
                shards.release(step, changed=False)
                error = fault_error(exchange, fault, wire.routes, wire.codec_back, collection.device)
                if isinstance(shards, FullyShardedShards):
                    # other replicas wait for this one's part, and no average of dense gradients will come to an end
                    shards.tell_replicas(error, "in backward")
                    raise error
                raise_after_backward(error)
                return None, None, None, *of_weights, *of_tables
            exchange.buffers.recycle(sent, received)
            # the update may have its memory
            del sent
            if weight_gradients and wire.routes.replicas:
                of_weights[1:] = shards.replicated_weight_gradients(step, wire.by_lookup(step, grad), divisor)
            if ahead > 1:
                received = received.float().div_(ahead)
            gradients = wire.unpack_gradients(step, received)
            if any(ctx.needs_input_grad[tables_at:]):
                of_tables = shards.table_gradients(step, gradients)
            of_rows = shards.update(step, gradients, weight_gradients=weight_gradients)
            del gradients
            exchange.buffers.recycle(received, grad)
            if weight_gradients:
                sent, sizes = pack_weight_gradients(step, of_rows)
                received = exchange.rows_transpose(sent, sizes, step.returned_to).wait()
                of_weights[0] = unpack_weight_gradients(step, received) * divisor
        except BaseException as error:
            if exchange.watch is not None:
                exchange.watch.report(error, "in backward")
            raise
        return None, None, None, *of_weights, *of_tables


def leave_backward_untraced() -> None:
    """Have compiled autograd call `ExchangedLookup.backward` between its graphs: nobody can trace what ranks exchange.

    From now on in this process. Not said where the class is made, as it imports torch's compiler.
    """
    if not getattr(ExchangedLookup.backward, "_torchdynamo_disable", False):
        disable: Any = torch.compiler.disable
        setattr(ExchangedLookup, "backward", staticmethod(disable(ExchangedLookup.backward)))  # noqa: B010


class ShardedCollection(TieredTables, OneOp, WritableTables):
    """The engine: holds this rank's tables, and answers a batch together with the other ranks.

    Parameters keep the names of the unsharded module; a table of another rank is an empty parameter.
    """

    # what a forward returns, made of the collection and a step
    _awaitable: type[Any]
    # whether it has the ids too
    _need_indices = False
    # whether ranks are told the rows that their ids found in tables with an id map; the same on all ranks
    returns_mapped = False

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
        super().__init__(codecs)
        self._pooled = hasattr(module, "embedding_bags")
        self._children_name = module._children_name
        self._weighted = bool(getattr(module, "is_weighted", bool)())
        self._policy = module._policy
        # whether a gradient that is not finite is looked for
        self.checks_gradients = self._policy.gradient_check is not GradientCheckMode.IGNORE
        self._names_by_table, self._configs = module._names_by_table, module._configs
        self._env, self._exchange = env, Exchange(env.require_group())
        # TorchRec's default: with DDP's mean over ranks, tables and dense layers then see the same loss. False of one
        # collection, or of all by comm_ops.set_gradient_division, leaves sums over ranks
        self.gradient_division = True
        self._replicas = (
            Exchange(env.replica_pg, self._exchange)
            if isinstance(env, ShardingEnv2D) and env.is_fully_sharded
            else None
        )
        self._id_maps = dict(id_maps or {})
        self.maps_ids = bool(self._id_maps)
        self._dedup = dedup and not self._pooled
        pair = codecs_of(codecs, pooled=self._pooled, device=device)
        self._codec, self._codec_back = (codec if codec.compresses else None for codec in pair)
        # the type that the exchange gives rows, if it does
        self._arrives_as = pair[0].output_dtype
        self._stores = stores

        def plan() -> tuple[tuple[Routes, list[Mark | None]], Facts]:
            chosen, mapped = options or {}, id_ranges(self._id_maps)
            tables, marks = tables_of(module, shards, default_optimizer, chosen, mapped)
            if stores is not None and (dense := [table.name for table in tables if table.options.dense]):
                raise ValueError(
                    f"tables {dense}: what trains by its gradient has all rows on the device, no row store"
                )
            params = module._own_parameters()
            pairs = zip(tables, marks, params, strict=True)
            outside = [table.name for table, mark, param in pairs if mark is None and param.requires_grad]
            require_tiers(tables, outside, device, fully_sharded=self._replicas is not None)
            if self._replicas is not None and (stores is not None or mapped):
                raise ValueError(
                    "sharding_strategy FULLY_SHARDED: tables whose rows are in a row store or found by an id map cannot"
                    " be kept in parts, as replicas have other rows in their slots: give their module DEFAULT by a"
                    " DMPCollectionConfig"
                )
            routes, facts = self._plan(tables, shards)
            of_tiers = facts_of_tiers(tables, module._configs, params)
            return (routes, marks), {**facts, **of_tiers, **facts_of_replicas(tables, shards, device)}

        (routes, marks), number = agree(self._exchange, device, plan)
        local_tables = LocalTables(routes, env.rank, device, self._policy, stores)
        local_tables.adopt(module, marks, self._exchange)
        self._settle(routes, number, local_tables)
        # steps that began ahead: a forward takes its own from here
        self.routed_ahead: deque[Step] = deque()
        self.graph_name = name_for_graphs(self)
        self.add_module(self._children_name, local_tables.children())
        self.train(module.training)
        if isinstance(self.shards, FullyShardedShards):
            # before anything else has views of whole tables
            self.shards.spread(first=True)
        # what this rank's tables run in their backward
        self.fused_optimizer = ShardedFusedOptimizer(self.shards, self.states, self._children_name)
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
            "names that are written": str(list(writable_names(self))),
        }  # fmt: skip
        for table in tables:
            facts |= facts_of(table, f"table {table.name!r}")
        return routes, facts | facts_of_shards(shards)

    def _settle(self, routes: Routes, number: int, local_tables: LocalTables) -> None:
        """Serve these routes, whose fingerprint is `number`, from now on."""
        rank = self._env.rank
        self._routes, self._fingerprint, self._tables = routes, number, local_tables
        self._local = Exchange(self._env.local_group(), self._exchange) if routes.has_host_sums else None
        host = None if self._local is None else HostExchange(self._local, rank)
        codecs = self._codec, self._codec_back
        self.wire = PooledWire(routes, rank, *codecs, host) if self._pooled else SequenceWire(routes, rank, *codecs)
        self.shards: LocalShards = (
            LocalShards(routes, rank, local_tables, self._exchange)
            if self._replicas is None
            else FullyShardedShards(routes, rank, local_tables, self._exchange, self._replicas)
        )
        # samples, ids, those whose results come back, and ids of each group; before them what says that a batch fits
        reserved = 0 if self.shards.reservations is None else self.shards.reservations.width
        self._header_width = 3 + max(len(serving.groups) for serving in routes.serving) + reserved
        # what the state dicts of this rank's tables are made of
        self.states = States(routes, local_tables, self._env)
        self._output_dtypes = output_dtypes(routes, self._policy.output_dtype, self._arrives_as)
        self._dense_parameters = local_tables.dense_parameters()
        kinds = set(self._output_dtypes) or {self._policy.output_dtype}
        # of all lookups, None where they have several
        self._output_dtype = kinds.pop() if len(kinds) == 1 else None
        self._forget()

    def _forget(self) -> None:
        """Begin anew what is made of the routes for a device, which is where this rank's tables are."""
        self.device: torch.device = self._tables.device
        self._receiving = [Receiving(self._routes, self._env.rank, update, self.device) for update in (False, True)]
        self._sending: dict[tuple[tuple[str, ...], bool], Sending] = {}
        self._anchor = torch.zeros(1, device=self.device, requires_grad=True)

    def reshard(
        self,
        shards: Sequence[Shard],
        options: Mapping[str, TableOptions] | None = None,
        *,
        resplit: str | None = None,
    ) -> None:
        """Go over to another plan, with weights and optimizer states. Arguments and errors as `reshard.reshard`."""
        reshard(self, shards, options, resplit=resplit)

    @property
    def divisor(self) -> int:
        """What gradients are divided by before they train."""
        return self._env.world_size if self.gradient_division and get_gradient_division() else 1

    @property
    def collectives(self) -> int:
        """Collectives called so far."""
        beside = [exchange for exchange in (self._local, self._replicas) if exchange is not None]
        return self._exchange.calls + sum(exchange.calls for exchange in beside)

    def name_exchanges(self, path: str) -> None:
        """Have a failure in an exchange name this collection by its path in the model."""
        for exchange in (self._exchange, self._local, self._replicas):
            if exchange is not None:
                exchange.label = f" of {path!r}" if path else ""

    def parameter_name(self, table: str) -> str:
        """A table's parameter, by its name below this module."""
        return f"{self._children_name}.{table}.weight"

    def parameter(self, table: str) -> nn.Parameter:
        """This rank's part of a table."""
        return self._tables.parameters[table]

    def fused_parameter_names(self) -> list[str]:
        """Parameters that the backward trains or that other ranks hold: no gradient of theirs is to be reduced."""
        dense = {shard.table for group in self._routes.dense for shard in group.shards}
        return [self.parameter_name(table.name) for table in self._routes.tables if table.name not in dense]

    def forward(self, features: KeyedJaggedTensor | Exception) -> Any:
        """The lazy result of this rank's batch, looked up together with the other ranks.

        An exception in the place of the batch, say of what prepares it on this rank, is raised on all ranks.

        Raises:
            KeyError, IndexError, ValueError, TypeError: a rank's batch is bad, as `EmbeddingBagCollection.forward`
                describes. All ranks raise in this step, with the message and number of the first failing rank.
            RuntimeError: a rank failed otherwise, or ranks disagree on the plan or on gradients being enabled.
        """
        if isinstance(features, Proxy):
            return record_forward(ShardedCollection.forward, self, features)
        if in_graph():
            return self.result_of(step_in_graph(self, features))
        step = self.take(features) if self.routed_ahead else None
        step = step or self.start(features)  # its ids are lined up, and all ranks are told their sizes
        self.send_ids(step)  # the sizes of all ranks are here, and ids leave
        self.receive_ids(step)  # the ids of all ranks are here, in order
        if step.awaits_weights:
            finish_weights(self, step, features)
        self.look_up(step)  # their rows leave
        # `finish`, when the result is used: the rows of all ranks are here, and become the output
        return self._awaitable(self, step)

    def begin(self, features: KeyedJaggedTensor | Exception) -> Step:
        """The first half of a forward: send the batch's ids to the ranks that serve them, and take theirs.

        `finish` is the second. Raises as `forward`.
        """
        step = (self.take(features) if self.routed_ahead else None) or self.start(features)
        self.send_ids(step)
        self.receive_ids(step)
        if step.awaits_weights:
            finish_weights(self, step, features)
        return step

    def start(self, features: KeyedJaggedTensor | Exception) -> Step:
        """Route the batch and tell all ranks what they will get, or what is wrong with it; waits for nobody."""
        children: Any = self._modules.get(self._children_name)
        # `weight_holders`, in a loop here, as every step asks this of every table
        for name, param in self._tables.parameters.items():
            holder = self if children is None else children._modules[name]
            if holder._parameters["weight"] is not param or param.is_meta:
                features = _ready(self, features)
                break
        update = torch.is_grad_enabled()
        step = Step(update, self._receiving[update])
        sizes: list[list[int]] | Exception
        try:
            if isinstance(features, Exception):
                raise features
            features = step.given = step.padded = require_features(features, "a sharded collection", self._weighted)
            if features.variable_stride_per_key():
                if self._pooled:
                    require_full_batch(features, "a sharded collection")
                features = step.padded = pad_strides(features)
            device = features.device()
            if device != self.device:
                raise ValueError(f"ids are on {device}, the tables on {self.device}")
            keys = tuple(features.keys())
            sending = self._sending.get((keys, update)) or self._sending_of(keys, update)
            weights = features.weights_or_none() if self._weighted else None
            if weights is not None and not update:
                weights = weights.detach()
            lenient = sending.lenient
            dedup = self._dedup and not lenient and not self._id_maps
            ahead, divided = device.type == "cuda" and runs_kernel(features.values()), None
            if ahead and not dedup:
                divided = divide_ahead(features, self._routes, sending, weights, lenient=lenient)
            picked = features if sending.all_used else features.permute(sending.used)
            for check in sending.checks:
                part = picked if check.keys is None else picked.permute(check.keys)
                guard = mark_bad_ids(
                    part.values(), part.offsets(), check.features, check.names, check.mode,
                    padded=part.capacity() is not None,
                )  # fmt: skip
                if guard is not None:
                    raise_with_sizes(guard, features, part, check, divided)
            if dedup:
                features, step.inverse = dedup_ids(features, sending)
                sending = self._sending_of(tuple(features.keys()), update)
                if ahead:
                    divided = divide_ahead(features, self._routes, sending, weights, lenient=lenient)
            step.routed, step.sending = features, sending
            step.divided_ahead = divided is not None
            route(step, self._routes, weights, lenient=lenient, divided=divided)
            sizes = pack_sizes(step)
            if self.shards.reservations is not None:
                sizes = self.shards.reservations.pack(step, sizes)
        except Exception as error:
            sizes = error
        number = self._fingerprint
        if self.shards.updates_together:
            # a table that is frozen on one rank alone would leave the others waiting for its part
            number = (number + self._tables.frozen_tables()) % 2**63
        weights = step.sent_weights
        # what ranks must agree on: the plan, the kind of backward that comes, and whether weights have gradients in it
        shared = [number, update + (update and self.training), int(weights is not None and weights.requires_grad)]
        step.header = send_header(self._exchange, self.device, sizes, shared=shared, width=self._header_width)
        if self.shards.reservations is not None:
            self.shards.reservations.begin(step)
        return step

    def _sending_of(self, keys: tuple[str, ...], update: bool) -> Sending:
        if (keys, update) not in self._sending:
            mode = self._policy.bounds_check
            self._sending[keys, update] = Sending(self._routes, keys, update, self.device, mode)
        return self._sending[keys, update]

    def send_ids(self, step: Step) -> None:
        """Wait for the sizes of all ranks and send the ids off. Raises as `forward`; does nothing the second time."""
        if step.phase >= IDS_SENT:
            return
        # where this rank's batch is bad every rank raises here
        unpack_sizes(step, step.header.receive() if step.reservation is None else step.reservation.among.receive(step))
        if not self._exchange.alone:
            step.ids = self._exchange.all_to_all(*pack_ids(step), step.id_sizes, what="ids")
        step.phase = IDS_SENT

    def receive_ids(self, step: Step) -> None:
        """Wait for the ids of all ranks: the batch is here, ready to be looked up. Nothing the second time."""
        if step.phase >= IDS_RECEIVED:
            return
        unpack_ids(step, None if step.ids is None else step.ids.wait())
        if self._id_maps:
            self.shards.translate(step, self._id_maps)
        if self.returns_mapped:
            rows = pack_mapped(step, self._routes, self._env.rank)
            step.mapped = self._exchange.numbers(rows, step.returned_from, step.returned_to)
        step.phase = IDS_RECEIVED

    def look_up(self, step: Step, *, all_tables: bool = False) -> None:
        """Find the rows that were asked for and send them off; `finish` takes them. Nothing the second time.

        With `all_tables` also those of tables that every rank holds, which `finish` looks up itself otherwise: it then
        sees no update that comes in between. A gradient of per-id weights is of the rows as they are in the backward.
        Nothing either for a batch that left under another plan: its forward routes it anew.
        """
        if step.receiving.routes is not self._routes:
            return
        if all_tables and step.dense_rows is None:
            if self._routes.replicas:
                self._look_up_replicas(step)
            step.dense_rows = self.dense_rows(step)
        if step.phase >= LOOKED_UP:
            return
        if step.reservation is not None:
            step.reservation.among.look_up(step)
        if self.shards.may_lack_slots and not step.update and self._routes.replicas and step.replicated_rows is None:
            # while the others can still be told
            self._look_up_replicas(step)
        step.trains, wire = self.training, self.wire
        # as `no_grad`, which is more calls
        with torch.set_grad_enabled(False):
            rows = self.shards.look_up(step)
            sent, sizes = wire.pack_rows(step, rows)
            flag = None
            if wire.codec is not None:
                flag, step.unsure_rows = flag_of(sent, wire.codec), rows
            if self.shards.may_lack_slots and not step.fits and not self._exchange.alone:
                lack = sent.new_full((1,), 0 if step.lack is None else LACKS_SLOTS, dtype=torch.int32)
                flag = lack if flag is None else flag | lack
            step.row_sizes = wire.row_sizes(step)
            step.rows = self._exchange.rows(sent, sizes, step.row_sizes, codec=wire.codec, flag=flag)
            if step.lack is not None and self._exchange.alone:
                # known without waiting for a device
                step.rows.flags = [LACKS_SLOTS]
        step.phase = LOOKED_UP

    def output_dist(self, ctx: StepContext, output: Step) -> LazyAwaitable[Any]:
        """The result of a batch, which waits for other ranks when it is used."""
        result: LazyAwaitable[Any] = self._awaitable(self, output)
        return result

    def take(self, features: KeyedJaggedTensor | Exception) -> Step | None:
        """The step that began ahead for a call with these features, None if there is none."""
        step, update = self.routed_ahead[0], torch.is_grad_enabled()
        if step.taken_by is not None and step.taken_by is not features:
            return None
        self.routed_ahead.popleft()
        if step.update != update or step.receiving is not self._receiving[update]:
            # it left for another kind of step, or under another plan
            self.drop(step)
            if step.is_freed:
                raise agreed(RuntimeError(
                    "the batch left ahead for another kind of step, or under another plan, and its features were freed:"
                    " leave free_features_storage_early=False, or reset() the pipeline before such a change"
                ))  # fmt: skip
            return None
        return step

    def drop(self, step: Step) -> None:
        """Let a batch go that no forward will take: what travels is waited for, its rows may leave their slots."""
        step.settle()
        if step.reservation is not None:
            step.reservation.among.leave(step)
        if step.is_stale(self._routes):
            # what held its rows went with that
            step.leases, step.announced, step.renewals = {}, {}, {}
        # its rows went to other ids, whether it is looked up or not
        self.shards.renew(step)
        self.shards.withdraw(step)
        self.shards.release(step, changed=False)

    def exchanged(self, step: Step) -> Tensor:
        """The second half of a forward, but for its form: `ExchangedLookup` of what was looked up."""
        if step.phase < LOOKED_UP:
            self.look_up(step)
        if step.mapped is not None:
            # it is here before the rows, also for those who do not ask for it
            step.mapped.wait()
        weights = [step.sent_weights]
        for batch in step.replicated[: len(self._routes.replicas)]:
            weights.append(batch.weights)
        # a batch that began without gradients gets none: replicated tables do not know the other ranks' ids
        with torch.set_grad_enabled(step.update and torch.is_grad_enabled()):
            return ExchangedLookup.apply(self._anchor, self, step, *weights, *self._dense_parameters)  # type: ignore[no-any-return, no-untyped-call]

    def dense_rows(self, step: Step) -> dict[int, Tensor]:
        """Rows of each lookup in a table that is trained by its gradient."""
        if step.dense_rows is not None:
            return step.dense_rows
        if not self._routes.dense:
            return {}
        with torch.set_grad_enabled(step.update and torch.is_grad_enabled()):
            return self.shards.look_up_replicated(step, dense=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShardedCollection:
        take_over(self)
        with self.shards.assembled(keep=True):
            self._tables.move(fn)
            for name, holder in weight_holders(self).items():
                holder._parameters["weight"] = self._tables.parameters[name]
            self._forget()
        return self


def _ready(collection: ShardedCollection, features: KeyedJaggedTensor | Exception) -> KeyedJaggedTensor | Exception:
    """The batch, once parameters from outside were taken over, or in its place why they cannot be.

    Raises:
        ValueError: the tables are on meta, where nothing is exchanged.
    """
    try:
        take_over(collection)
    except ValueError as error:
        features = error
    if collection.device.type == "meta":
        raise ValueError(
            "this sharded collection is on meta: call to_empty(device=...) of the model, load a state dict, then"
            " look batches up"
        )
    return features
