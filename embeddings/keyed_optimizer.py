"""Optimizers whose state is keyed by parameter name, and the optimizer that fused tables present to the outside.

A fused optimizer's `step` changes no weight: the backward did. It passes each group's learning rate on to the tables,
which is how a schedule reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .table_group import TableGroup


class KeyedOptimizer(torch.optim.Optimizer):
    """An optimizer over named parameters; `state_dict` is keyed by those names instead of by numbers."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        # not Optimizer.__init__: the state is already there, and an optimizer of no parameter is an ordinary one here
        self.params = params
        self.defaults = {}
        self.__setstate__({"state": state, "param_groups": list(param_groups)})

    def state_dict(self) -> dict[str, Any]:
        """`{"state": {name: {state name: tensor}}, "param_groups": [...]}`; tensors are the live ones."""
        by_tensor = {id(param): name for name, param in self.params.items()}
        state = {by_tensor[id(param)]: dict(values) for param, values in self.state.items() if id(param) in by_tensor}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"},
             "params": sorted(by_tensor[id(param)] for param in group["params"] if id(param) in by_tensor)}
            for group in self.param_groups
        ]  # fmt: skip
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy states in place and take the groups' hyper-parameters.

        Raises:
            ValueError: names or state names differ, in either direction.
        """
        mine, theirs = self.state_dict(), state_dict
        _require_equal("parameters of the optimizer state", set(mine["state"]), set(theirs["state"]))
        for name, values in mine["state"].items():
            loaded = theirs["state"][name]
            _require_equal(f"optimizer states of {name}", set(values), set(loaded))
            for key, value in values.items():
                if isinstance(value, Tensor):
                    if value.shape != loaded[key].shape:
                        raise ValueError(
                            f"{name}: state {key} has shape {tuple(value.shape)}, loaded {tuple(loaded[key].shape)}"
                        )
                    value.detach().copy_(loaded[key])
        by_names = {tuple(group["params"]): group for group in theirs.get("param_groups", [])}
        for group, saved in zip(self.param_groups, mine["param_groups"], strict=True):
            group.update({k: v for k, v in by_names.get(tuple(saved["params"]), {}).items() if k != "params"})

    def add_param_group(self, param_group: Any) -> None:
        """Not offered: parameters are fixed at construction.

        Raises:
            TypeError: always.
        """
        raise TypeError("a keyed optimizer's parameters are fixed when it is made")


class FusedOptimizer(KeyedOptimizer):
    """The optimizer that some tables run in their backward, seen from outside: learning rates and states by name."""

    def __init__(self, groups: Sequence[TableGroup], names: Sequence[Sequence[str]]) -> None:
        self.groups = [group for group in groups if group.optimizer is not None]
        kept = [n for group, n in zip(groups, names, strict=True) if group.optimizer is not None]
        params: dict[str, Tensor] = {}
        state: dict[Tensor, dict[str, Tensor]] = {}
        param_groups = []
        for group, group_names in zip(self.groups, kept, strict=True):
            for t, (name, param) in enumerate(zip(group_names, group.parameters, strict=True)):
                params[name] = param
                views = group.state_views(t)
                state[param] = {f"{group.tables[t].name}.{key}": view for key, view in views.items()}
            param_groups.append({"params": list(group.parameters), "lr": group.lr})
        super().__init__(params, state, param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Tables have no gradients; passes the learning rates on, as `step` does."""
        self.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Pass each group's `lr` to its tables, from the next backward on."""
        for group, param_group in zip(self.groups, self.param_groups, strict=True):
            group.set_lr(float(param_group["lr"]))


class KeyedOptimizerWrapper(KeyedOptimizer):
    """An ordinary optimizer over named parameters: `optim_factory` gets the list of them.

    Example: `KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.1))`.
    """

    def __init__(
        self, params: Mapping[str, Tensor], optim_factory: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> None:
        self._optimizer = optim_factory(list(params.values())) if params else None
        inner = self._optimizer
        super().__init__(params, inner.state if inner else {}, inner.param_groups if inner else [])
        if inner is not None:
            # the very objects: a schedule that writes to these groups steers the inner optimizer
            self.state, self.param_groups = inner.state, inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure) if self._optimizer is not None else None


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as one; a pair (prefix, optimizer) puts `prefix.` before its names.

    Raises:
        ValueError: two parameters would get the same name.
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self.optimizers = [optim if isinstance(optim, tuple) else ("", optim) for optim in optims]
        params: dict[str, Tensor] = {}
        for prefix, optimizer in self.optimizers:
            for name, param in optimizer.params.items():
                full = f"{prefix}.{name}" if prefix else name
                if full in params:
                    raise ValueError(f"two combined optimizers hold a parameter named {full!r}")
                params[full] = param
        super().__init__(params, {}, [])
        # shared, not copied: what a schedule writes is what each optimizer reads
        self.param_groups = [group for _, optimizer in self.optimizers for group in optimizer.param_groups]
        self.state = _ChainedState([optimizer.state for _, optimizer in self.optimizers])  # type: ignore[assignment]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each optimizer."""
        for _, optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Of each optimizer."""
        for _, optimizer in self.optimizers:
            optimizer.step(closure)


class _ChainedState(Mapping[Any, Any]):
    """The states of several optimizers, live: an optimizer may create a parameter's state at its first step."""

    def __init__(self, parts: Sequence[Mapping[Any, Any]]) -> None:
        self._parts = parts

    def __getitem__(self, key: Any) -> Any:
        for part in self._parts:
            if key in part:
                return part[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[Any]:
        return (key for part in self._parts for key in part)

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters without (or, with `include`, with) an optimizer in the backward."""
    for name, param in named_parameters:
        if ("_in_backward_optimizers" in param.__dict__) == include:
            yield name, param


def _require_equal(what: str, mine: set[str], theirs: set[str]) -> None:
    if mine != theirs:
        raise ValueError(f"{what} differ: missing {sorted(mine - theirs)}, unexpected {sorted(theirs - mine)}")
