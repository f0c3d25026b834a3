"""The optimizer of a sharded collection, seen from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from shardwise.embeddings import FusedOptimizer, OptimizerSpec, TableGroup
from shardwise.embeddings.optim.keyed_optimizer import unlike_parameters, unlike_states
from shardwise.embeddings.tables.row_sums import add_powers, root_of

from ..comms.env import ShardingEnv2D
from ..comms.exchange import Exchange
from .shards import LocalShards
from .state import States, Value, copied, hidden, publish, take


class ShardedFusedOptimizer(FusedOptimizer):
    """The optimizer that the tables of a sharded collection run in their backward.

    Parameters, their names and `param_groups` are the same on all ranks, whatever the plan: one group for all tables of
    equal settings. `state` has the tables with rows on this rank. Loading takes what this optimizer gave under the same
    plan, or whole tensors, which those of an unsharded collection are; states of tables on other ranks are passed over.

    Attributes:
        resplit: "mean" lets a state per row of a whole table be loaded where columns are cut and each block of them has
            numbers of its own: each gets that of the row. None, the default, refuses.
    """

    def __init__(self, shards: LocalShards, states: States, prefix: str) -> None:
        self._prefix, self._shards, self._local, self._values = prefix, shards, shards.tables, states
        self.accumulation = shards.tables.accumulation
        self.resplit: str | None = None
        # tables whose states are published in memory of their own
        self._away: set[str] = set()
        tables = states.tables.values()
        self._specs = [spec for spec in dict.fromkeys(table.optimizer for table in tables) if spec is not None]
        # the rates that tables train by, until a step passes others on
        self._rates = [spec.lr for spec in self._specs]
        self._begin(
            [
                ([table.name for table in tables if table.optimizer == spec], self._groups(spec), spec.lr)
                for spec in self._specs
            ]
        )

    def follow_plan(self, shards: LocalShards, states: States) -> None:
        """Go on with these groups of the same tables; learning rates stay."""
        self._shards, self._local, self._values = shards, shards.tables, states
        self._local.accumulate_as(self.accumulation)
        self._steered = list(map(self._groups, self._specs))
        for groups, rate in zip(self._steered, self._rates, strict=True):
            for group in groups:
                group.set_lr(rate)
        self._follow()

    def _groups(self, spec: OptimizerSpec) -> list[TableGroup]:
        """This rank's groups of tables with an optimizer."""
        return [group for group in self._local.groups if group.optimizer == spec]

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """The p-norm of all gradients that wait, of all ranks, as one vector (0-dim, fp32), the same bits on all ranks.

        One exchange, which all ranks ask for together. Replicated tables count once. Of replicas that are averaged now
        and then (`DMPCollection`) it is the mean, one more exchange.
        """
        power, env = self._shards.power_of_sums(norm_type), self._values.env
        if isinstance(env, ShardingEnv2D):
            replicas = Exchange(env.replica_pg)
            powers = replicas.numbers(power.repeat(replicas.world_size)).wait()
            power = add_powers(powers, norm_type) / (1 if norm_type == math.inf else replicas.world_size)
        return root_of(power, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """As `FusedOptimizer.state_dict`: live, but copies of FULLY_SHARDED tables, and of those with a tier (CPU)."""
        if not any(map(self._shards.is_away, self._values.tables)):
            return super().state_dict()
        self._away = {name for name in self._values.tables if self._shards.is_away(name)}
        with self._shards.assembled():
            try:
                published = super().state_dict()
            finally:
                self._away = set()
        # what others hold of the copies is all that is left of them
        self._follow()
        return published

    def _apply_sums(self) -> None:
        self._shards.apply_sums()

    def _put_rates_in_effect(self) -> None:
        super()._put_rates_in_effect()
        self._rates = [float(group["lr"]) for group in self.param_groups]

    def _parameter(self, table: str) -> Tensor:
        return self._local.parameters[table]

    def _states(self, table: str) -> dict[str, Any] | None:
        states = {key: self._published(table, value) for key, value in self._values.states(table).items()}
        return states if self._values.homes(table) else None

    def _published(self, table: str, value: Value) -> Tensor:
        if table in self._away:
            value = copied(value)
        elif self._shards.is_away(table) and value.dtype.is_floating_point:
            # the numbers are away, and no more than their shape can be seen
            return hidden(value)
        return publish(value, self._values.env)

    def _prepare_states(self, theirs: Mapping[str, Any]) -> Callable[[], None]:
        here = [table for tables in self._tables for table in tables if self._values.homes(table)]
        unknown, missing = set(theirs) - set(self.params), {self._name(table) for table in here} - set(theirs)
        if unknown or missing:
            raise unlike_parameters(len(here), len(theirs), missing, unknown)
        theirs = self._with_counts(theirs)

        def check() -> list[Callable[[], None]]:
            return [fill for table in here for fill in self._fills(table, theirs)]

        fills = check()

        def fill() -> None:
            with self._shards.assembled(keep=True):
                # tables that were in parts are others now
                for fill in check() if self._shards.fully_sharded else fills:
                    fill()

        return fill

    def _fills(self, table: str, theirs: Mapping[str, Any]) -> list[Callable[[], None]]:
        """What fills a table's states from those of all tables; raises as `take`."""
        name, values = self._name(table), self._values.states(table)
        wanted, given = {f"{table}.{key}": value for key, value in values.items()}, theirs[name]
        lost, strange = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
        if lost or strange:
            raise unlike_states(name, len(wanted), len(given), lost, strange)
        return [
            take(f"{name}: state {key}", value, given[key], self._values.env, resplit=self.resplit)
            for key, value in wanted.items()
        ]
