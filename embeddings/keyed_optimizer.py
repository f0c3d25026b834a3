"""Optimizers whose state is keyed by parameter name, and the optimizer that fused tables present to the outside.

A fused optimizer's `step` changes no weight: the backward did. It passes each group's learning rate on to the tables,
which is how a schedule reaches them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
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
        """Copy states in place and take the groups' hyper-parameters, if the dict has groups.

        A parameter that has no state yet (its optimizer never stepped) takes the loaded one.

        Raises:
            ValueError: parameters, state names or shapes differ, in either direction, or saved groups disagree on a
                hyper-parameter of one group here. Nothing is changed then.
        """
        mine, theirs = self.state_dict(), state_dict["state"]
        unknown, missing = set(theirs) - set(self.params), set(mine["state"]) - set(theirs)
        if unknown or missing:
            raise ValueError(
                f"parameters of the optimizer state differ: missing {sorted(missing)}, unexpected {sorted(unknown)}"
            )
        for name, values in mine["state"].items():
            _require_same_states(name, values, theirs[name])
        hyper = [_hyper_of(group["params"], state_dict.get("param_groups", [])) for group in mine["param_groups"]]
        for name, loaded in theirs.items():
            param = self.params[name]
            if name not in mine["state"]:
                self.state[param] = {key: _fresh_state(key, value, param) for key, value in loaded.items()}
                continue
            for key, value in mine["state"][name].items():
                if isinstance(value, Tensor):
                    value.detach().copy_(loaded[key])
                else:
                    self.state[param][key] = deepcopy(loaded[key])
        for group, values in zip(self.param_groups, hyper, strict=True):
            group.update(values)

    def add_param_group(self, param_group: Any) -> None:
        """Not offered: parameters are fixed at construction.

        Raises:
            TypeError: always.
        """
        raise TypeError("a keyed optimizer's parameters are fixed when it is made")


class FusedOptimizer(KeyedOptimizer):
    """The optimizer that some tables run in their backward, seen from outside: learning rates and states by name.

    Collections make it; its parameters are named `<prefix>.<table>.weight`.
    """

    def __init__(self, groups: Sequence[TableGroup], prefix: str) -> None:
        self.groups = [group for group in groups if group.optimizer is not None]
        self._names = [[f"{prefix}.{table.name}.weight" for table in group.tables] for group in self.groups]
        super().__init__({}, {}, [{"params": [], "lr": group.lr} for group in self.groups])
        self._follow()

    def state_dict(self) -> dict[str, Any]:
        """As `KeyedOptimizer.state_dict`, of the tables where they are now."""
        self._follow()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As `KeyedOptimizer.load_state_dict`; learning rates reach the tables at once."""
        super().load_state_dict(state_dict)
        self.step()

    def _follow(self) -> None:
        """Look the tables' parameters and states up again: `.to()` and `to_empty()` make others."""
        params: dict[str, Tensor] = {}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for group, names, param_group in zip(self.groups, self._names, self.param_groups, strict=True):
            for t, (name, param) in enumerate(zip(names, group.parameters, strict=True)):
                params[name] = param
                views = group.state_views(t)
                state[param] = {f"{group.tables[t].name}.{key}": view for key, view in views.items()}
            param_group["params"] = list(group.parameters)
        self.params = params
        # the same dict, which a combined optimizer reads too
        self.state.clear()
        self.state.update(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Tables have no gradients; passes the learning rates on, as `step` does."""
        self.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Pass each group's `lr` to its tables, from the next backward on."""
        for group, param_group in zip(self.groups, self.param_groups, strict=True):
            lr = float(param_group["lr"])
            if not 0 <= lr < math.inf:
                raise ValueError(
                    f"tables {[t.name for t in group.tables]}: lr must be finite and not negative, got {lr}"
                )
            group.set_lr(lr)


class KeyedOptimizerWrapper(KeyedOptimizer):
    """An ordinary optimizer over named parameters: `optim_factory` gets the list of them.

    Example: `KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.1))`.
    """

    def __init__(
        self, params: Mapping[str, Tensor], optim_factory: Callable[[list[Tensor]], torch.optim.Optimizer]
    ) -> None:
        if not isinstance(params, Mapping):
            raise TypeError(
                f"a dict of named parameters is wanted, dict(model.named_parameters()) say, got {type(params).__name__}"
            )
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
            if not isinstance(optimizer, KeyedOptimizer):
                kind = type(optimizer).__name__
                raise TypeError(
                    f"{kind} has no named parameters: wrap it in KeyedOptimizerWrapper(named_parameters, factory)"
                )
            for name, param in optimizer.params.items():
                full = _join(prefix, name)
                if full in params:
                    raise ValueError(f"two combined optimizers hold a parameter named {full!r}")
                params[full] = param
        super().__init__(params, {}, [])
        # shared, not copied: what a schedule writes is what each optimizer reads
        self.param_groups = [group for _, optimizer in self.optimizers for group in optimizer.param_groups]
        self.state = _ChainedState([optimizer.state for _, optimizer in self.optimizers])  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        """States and groups of all optimizers, by prefixed names."""
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for prefix, optimizer in self.optimizers:
            part = optimizer.state_dict()
            state.update({_join(prefix, name): values for name, values in part["state"].items()})
            for group in part["param_groups"]:
                groups.append({**group, "params": [_join(prefix, name) for name in group["params"]]})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give each optimizer its part.

        Raises:
            ValueError: as `KeyedOptimizer.load_state_dict`, or a name belongs to none of the optimizers.
        """
        theirs = state_dict["state"]
        unknown = set(theirs) - set(self.params)
        if unknown:
            raise ValueError(f"parameters of the optimizer state differ: missing [], unexpected {sorted(unknown)}")
        for prefix, optimizer in self.optimizers:
            names = {_join(prefix, name): name for name in optimizer.params}
            part: dict[str, Any] = {"state": {names[full]: theirs[full] for full in theirs if full in names}}
            if "param_groups" in state_dict:
                part["param_groups"] = [
                    {**group, "params": [names[full] for full in group["params"] if full in names]}
                    for group in state_dict["param_groups"]
                ]
            optimizer.load_state_dict(part)

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


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _require_same_states(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
    if missing or unexpected:
        raise ValueError(f"optimizer states of {name} differ: missing {missing}, unexpected {unexpected}")
    for key, value in mine.items():
        if isinstance(value, Tensor) and value.shape != theirs[key].shape:
            raise ValueError(f"{name}: state {key} has shape {tuple(value.shape)}, loaded {tuple(theirs[key].shape)}")


def _hyper_of(names: Sequence[str], saved: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Hyper-parameters that the saved groups of these parameters agree on."""
    found: dict[str, Any] = {}
    for group in saved:
        if not set(names) & set(group["params"]):
            continue
        for key, value in group.items():
            if key == "params":
                continue
            if key in found and found[key] != value:
                raise ValueError(f"saved groups of {list(names)} disagree on {key}: {found[key]} and {value}")
            found[key] = value
    return deepcopy(found)


def _fresh_state(key: str, value: Any, param: Tensor) -> Any:
    """A loaded state of a parameter that had none; counts of steps stay where they are, as in torch.optim."""
    if not isinstance(value, Tensor):
        return deepcopy(value)
    return value.detach().clone() if key == "step" else value.detach().to(param.device, copy=True)
