"""The optimizer that fused tables present to the outside.

Its `step` changes no weight: the backward did. It passes each group's learning rate on to the tables, which is how a
schedule reaches them. Where gradients are accumulated they wait for `step`, which applies each row's sum once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shardwise.kernels import rule_named

from ..tables.row_sums import Accumulation, power_of, root_of
from ..tables.table_group import TableGroup
from .keyed_optimizer import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer):
    """The optimizer that some tables run in their backward, seen from outside: learning rates and states by name.

    Collections make it; its parameters are named `<prefix>.<table>.weight`.
    """

    def __init__(self, groups: Sequence[TableGroup], prefix: str) -> None:
        fused = [group for group in groups if group.optimizer is not None]
        self._prefix = prefix
        self.accumulation = fused[0].accumulation if fused else Accumulation()
        self._begin([([table.name for table in group.tables], [group], group.lr) for group in fused])

    def _begin(self, steered: Sequence[tuple[list[str], list[TableGroup], float]]) -> None:
        """Have one `param_group` for each: names of tables, the table groups that its `lr` reaches, and that."""
        self._home = {
            table.name: (group, n)
            for _, groups, _ in steered
            for group in groups
            for n, table in enumerate(group.tables)
        }
        self._tables, self._steered = [names for names, _, _ in steered], [groups for _, groups, _ in steered]
        super().__init__({}, {}, [{"params": [], "lr": lr} for _, _, lr in steered])
        self._follow()

    @property
    def groups(self) -> list[TableGroup]:
        """Groups of tables that have an optimizer."""
        return [group for groups in self._steered for group in groups]

    def _name(self, table: str) -> str:
        return f"{self._prefix}.{table}.weight"

    def _trains_in_backward(self) -> bool:
        # where they wait, a program sees to their sums by itself
        return bool(self.groups) and not self.accumulation.on

    def state_dict(self) -> dict[str, Any]:
        """As `KeyedOptimizer.state_dict`, of the tables where they are now."""
        self._follow()
        return super().state_dict()

    def published_groups(self) -> list[dict[str, Any]]:
        """The `param_groups` of `state_dict`, without its states; none after `save_param_groups(False)`."""
        self._follow()
        return self._groups_by_name() if self._saves_param_groups else []

    def _prepare_states(self, theirs: Mapping[str, Any]) -> Callable[[], None]:
        return super()._prepare_states(self._with_counts(theirs))

    def _with_counts(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        """Loaded states with a count of steps where the tables have one that only rounds rows, and without elsewhere.

        Other dtypes, and those who do not count, have none; counting then goes on from here.
        """
        loaded = {name: dict(states) if isinstance(states, Mapping) else states for name, states in theirs.items()}
        counted = {table for group in self.groups if _reads_steps(group) for table in (t.name for t in group.tables)}
        for table in [table for tables in self._tables for table in tables]:
            states, values, key = loaded.get(self._name(table)), self._states(table), f"{table}.step"
            if not isinstance(states, dict) or values is None or table in counted:
                continue
            if "step" in values:
                states.setdefault(key, values["step"])
            else:
                states.pop(key, None)
        return loaded

    def post_load_state_dict(self) -> None:
        """Loaded learning rates reach the tables at once."""
        self._put_rates_in_effect()

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Tables have their states from the start: nothing to do, and no gradient as large as a table is made."""

    def set_optimizer_step(self, step: int) -> None:
        """Go on counting updates from `step`; rules that correct by it, Adam's say, read it."""
        for group in self.groups:
            group.step.fill_(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Change hyper-parameters of all tables, at once: `lr`.

        Raises:
            ValueError: another one; those are fixed when the optimizer is applied.
        """
        fixed = sorted(set(params_dict) - {"lr"})
        if fixed:
            raise ValueError(f"fused tables: only lr can be changed later, got {fixed}")
        if "lr" in params_dict:
            for param_group in self.param_groups:
                param_group["lr"] = params_dict["lr"]
            self._put_rates_in_effect()

    def accumulate_gradients(self, on: bool = True) -> None:
        """Whether gradients wait from now on, added up row by row, until `step` applies them or `zero_grad` drops them.

        Those that wait are to the tables what `.grad` is to other parameters: lookups see unchanged rows, and state
        dicts leave them out. Switched off, those that wait still do, and so do those that come before the next `step`.
        """
        self.accumulation.on = on

    def gradient_sums(self) -> list[Tensor]:
        """The gradients that wait on this rank, [rows, columns] each: writing to them changes what `step` applies."""
        return [part.gradient for group in self.groups for part in group.sums or ()]

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """The p-norm of all gradients that wait, as one vector (0-dim, fp32); all ranks ask for it together."""
        groups = self.groups
        device = groups[0].flat.device if groups else torch.device("cpu")
        return root_of(power_of(self.gradient_sums(), norm_type, device), norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait; passes the learning rates on, as `step` does."""
        self._put_rates_in_effect()
        for group in self.groups:
            group.drop_sums()
        self.accumulation.end()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Pass each group's `lr` to its tables, from the next backward on; apply the gradients that wait by it."""
        self._put_rates_in_effect()
        if self.accumulation.begun:
            self._apply_sums()
            self.accumulation.end()

    def _apply_sums(self) -> None:
        for group in self.groups:
            group.apply_sums()

    def _put_rates_in_effect(self) -> None:
        for tables, groups, param_group in zip(self._tables, self._steered, self.param_groups, strict=True):
            lr = float(param_group["lr"])
            if not 0 <= lr < math.inf:
                raise ValueError(f"tables {tables}: lr must be finite and not negative, got {lr}")
            for group in groups:
                group.set_lr(lr)

    def _follow(self) -> None:
        """Look the tables' parameters and states up again: `.to()` and `to_empty()` make others."""
        params: dict[str, Tensor] = {}
        state: dict[Tensor, dict[str, Any]] = {}
        for tables, param_group in zip(self._tables, self.param_groups, strict=True):
            param_group["params"] = []
            for table in tables:
                params[self._name(table)] = param = self._parameter(table)
                param_group["params"].append(param)
                values = self._states(table)
                if values is not None:
                    state[param] = {f"{table}.{key}": value for key, value in values.items()}
        self.params = params
        self.state.clear()
        self.state.update(state)

    def _parameter(self, table: str) -> Tensor:
        group, number = self._home[table]
        return group.parameters[number]

    def _states(self, table: str) -> dict[str, Any] | None:
        """A table's states by name; None if it has none here."""
        group, number = self._home[table]
        return dict(group.state_views(number))

    def __getstate__(self) -> dict[str, Any]:
        # tables and states belong to the groups, and the copy finds them there again
        groups = [{**group, "params": []} for group in self.param_groups]
        return {**super().__getstate__(), "params": {}, "state": {}, "param_groups": groups}


def _reads_steps(group: TableGroup) -> bool:
    return group.optimizer is not None and rule_named(group.optimizer.rule).counts_steps


class EmptyFusedOptimizer(FusedOptimizer):
    """The fused optimizer of a module without fused tables: no parameters, and steps that do nothing."""

    def __init__(self) -> None:
        super().__init__([], "")


@runtime_checkable
class FusedOptimizerModule(Protocol):
    """A module whose backward trains some of its weights: `fused_optimizer` is their optimizer seen from outside."""

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Learning rates and states of what the backward trains."""
        ...
