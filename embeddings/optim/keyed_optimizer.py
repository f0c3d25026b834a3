"""Optimizers whose state is keyed by parameter name: one over named parameters, and several as one.

Values of a state are numbers, tensors, sharded tensors, and dicts of them: compared first, then copied in place. A
sharded value is told by what it can do: `to_local` (DTensor) or `local_shards` (ShardedTensor, and the wrapper that a
DTensor of several pieces per rank holds). Nothing here talks to another rank: a rank fills the pieces that it has.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class KeyedOptimizer(torch.optim.Optimizer):
    """An optimizer over named `params` of any shape; `state_dict` is keyed by those names instead of by numbers.

    Groups are dicts whose "params" may be in any spelling that torch.optim takes: tensors in a list or a tuple, or one
    after another, pairs (name, tensor), or one tensor.

    Raises:
        ValueError: `state` has a key that is none of the parameters.
        TypeError: a group is no dict with "params".
    """

    params: Mapping[str, Tensor]
    _saves_param_groups: bool = True

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        # not Optimizer.__init__: the state is already there, and an optimizer of no parameter is an ordinary one here
        known = {id(param) for param in params.values()}
        strange = [key if isinstance(key, str) else type(key).__name__ for key in state if id(key) not in known]
        if strange:
            raise ValueError(f"All state keys must be params. The following keys are not: {strange}.")
        self.params = params
        self.defaults = {}
        groups = list(param_groups)
        for group in groups:
            _spell_out(group)
        self.__setstate__({"state": state, "param_groups": groups})

    def state_dict(self) -> dict[str, Any]:
        """`{"state": {name: {state name: value}}, "param_groups": [...]}`; tensors are the live ones.

        After `save_param_groups(False)` there are no `param_groups`.
        """
        by_tensor = {id(param): name for name, param in self.params.items()}
        state = {by_tensor[id(p)]: plain_values(values) for p, values in self.state.items() if id(p) in by_tensor}
        if not self._saves_param_groups:
            return {"state": state}
        # a tuple, which torch.distributed.checkpoint keeps as one value: on a rank without a shard of some
        # ShardedTensor it mistakes what it makes of a list of dicts for the keys of an older format
        return {"state": state, "param_groups": tuple(self._groups_by_name())}

    def _groups_by_name(self) -> list[dict[str, Any]]:
        """`param_groups` with names in the place of parameters."""
        by_tensor = {id(param): name for name, param in self.params.items()}
        return [
            {"params": sorted(by_tensor[id(param)] for param in group["params"] if id(param) in by_tensor),
             **{k: deepcopy(v) for k, v in group.items() if k != "params"}}
            for group in self.param_groups
        ]  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy states in place and take the groups' hyper-parameters, if the dict has groups.

        A parameter that has no state yet (its optimizer never stepped) takes the loaded one. A DTensor or
        ShardedTensor takes the pieces of one that is cut alike, or its part of a whole tensor where it knows which
        that is. After `save_param_groups(False)` groups of the dict are passed over.

        Raises:
            ValueError: parameters, state names, shapes or cuts differ, in either direction, or saved groups disagree
                on a hyper-parameter of one group here. Nothing is changed then.
        """
        self._prepare_load(state_dict)()
        self.post_load_state_dict()

    def _prepare_load(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state dict; what is returned loads it, and cannot fail for its content."""
        fill = self._prepare_states(state_dict["state"])
        saved = state_dict.get("param_groups", []) if self._saves_param_groups else []
        names = {id(param): name for name, param in self.params.items()}
        hyper = [_hyper_of([names.get(id(p), "") for p in group["params"]], saved) for group in self.param_groups]

        def load() -> None:
            fill()
            for group, values in zip(self.param_groups, hyper, strict=True):
                group.update(values)

        return load

    def _prepare_states(self, theirs: Mapping[str, Any]) -> Callable[[], None]:
        """`_prepare_load` for the states alone."""
        own = self.state_dict()["state"]
        unknown, missing = set(theirs) - set(self.params), set(own) - set(theirs)
        if unknown or missing:
            raise unlike_parameters(len(own), len(theirs), missing, unknown)
        for name, values in own.items():
            require_same_states(name, values, theirs[name])

        def fill() -> None:
            for name, loaded in theirs.items():
                param = self.params[name]
                if name in own:
                    load_values(self.state[param], loaded)
                else:
                    self.state[param] = {key: fresh_value(key, value, param.device) for key, value in loaded.items()}

        return fill

    def post_load_state_dict(self) -> None:
        """Called after a state dict was loaded; for derived classes."""

    def save_param_groups(self, save: bool) -> None:
        """Whether `state_dict` has `param_groups` and `load_state_dict` reads them; they do unless told otherwise."""
        self._saves_param_groups = save

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Have every state made that a first step makes, by a step with gradients of zeros.

        The parameters keep their values, weight decay or not; they are left with those gradients, sparse ones for
        `sparse_grad_parameter_names`. Loading needs no such call: a fresh optimizer takes the loaded state.
        """
        sparse = sparse_grad_parameter_names or set()
        trained = {name: param for name, param in self.params.items() if param.requires_grad}
        before = {name: param.detach().clone() for name, param in trained.items()}
        for name, param in trained.items():
            zeros = torch.zeros_like(param)
            param.grad = zeros.to_sparse() if name in sparse else zeros
        self.step(closure=None)
        with torch.no_grad():
            for name, param in trained.items():
                param.copy_(before[name])

    def inner_optimizers(self) -> Sequence[KeyedOptimizer]:
        """The keyed optimizers that this one is made of."""
        return ()

    def add_param_group(self, param_group: Any) -> None:
        """Not offered: parameters are fixed at construction.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a keyed optimizer's parameters are fixed when it is made")

    def _put_rates_in_effect(self) -> None:
        """Learning rates were written to the groups; an ordinary optimizer reads them at its next step."""

    def _trains_in_backward(self) -> bool:
        """Whether the backward trains some of its parameters, as far as it says so."""
        return any(optimizer._trains_in_backward() for optimizer in self.inner_optimizers())

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Asked by `torch.amp.GradScaler.step` before it takes its scale out of `.grad`, which tables do not have."""
        if self._trains_in_backward():
            warnings.warn(
                "a GradScaler takes its scale out of dense gradients only: tables that the backward trains were updated"
                " by gradients times the scale, and a step that it skips was not skipped for them. Use bf16, which"
                " needs no scale, or have the tables wait: docs/howto/autocast.md",
                stacklevel=3,
            )
        return False

    def __getstate__(self) -> dict[str, Any]:
        # hooks stay behind, as in torch.optim, and so does the `step` that a scheduler puts in place of the method
        return {k: v for k, v in self.__dict__.items() if k != "step" and not k.endswith("_hooks")}


class KeyedOptimizerWrapper(KeyedOptimizer):
    """An ordinary optimizer over named `params` of any shape: `optim_factory` gets the list of them.

    With `pass_params_dict` it gets the dict itself.

    Raises:
        TypeError: `params` is no mapping.

    Example: `KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.1))`.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[Any], torch.optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        if not isinstance(params, Mapping):
            raise TypeError(
                f"a dict of named parameters is wanted, dict(model.named_parameters()) say, got {type(params).__name__}"
            )
        given: Any = params if pass_params_dict else list(params.values())
        self._optimizer = optim_factory(given) if params else None
        inner = self._optimizer
        super().__init__(params, inner.state if inner else {}, inner.param_groups if inner else [])
        if inner is not None:
            # the very objects: a schedule that writes to these groups steers the inner optimizer
            self.state, self.param_groups = inner.state, inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters as the wrapped optimizer does by default, whatever `set_to_none` says.

        So TorchRec does it, through every optimizer around this one.
        """
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def step(self, closure: Any = None) -> Any:
        """One step of the wrapped optimizer."""
        return self._optimizer.step(closure) if self._optimizer is not None else None

    def set_optimizer_step(self, step: int) -> None:
        """Ask the wrapped optimizer to; warns if it has no such method."""
        _ask(self._optimizer, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Ask the wrapped optimizer to; warns if it has no such method."""
        _ask(self._optimizer, "update_hyper_parameters", params_dict)


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as one; a pair (prefix, optimizer) puts `prefix.` before its names.

    Parameters, states and groups are those of the optimizers, live: what a schedule writes is what each of them reads.

    Raises:
        ValueError: two parameters would get the same name, or some optimizers save their `param_groups` and some not.
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [optim if isinstance(optim, tuple) else ("", optim) for optim in optims]
        seen: set[str] = set()
        for prefix, optimizer in self._optims:
            _require_keyed(optimizer)
            for name in optimizer.params:
                full = self.prepend_opt_key(name, prefix)
                if full in seen:
                    raise ValueError(
                        f"Duplicate param key {full}: two combined optimizers hold a parameter of this name"
                    )
                seen.add(full)
        saves = [optimizer._saves_param_groups for _, optimizer in self._optims]
        if len(set(saves)) > 1:
            raise ValueError(
                f"combined optimizers must agree on save_param_groups, got {saves}: call it on the combined one"
            )
        self._saves_param_groups = all(saves)
        self.__setstate__({"defaults": {}})

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """Pairs (prefix, optimizer)."""
        return self._optims

    def inner_optimizers(self) -> Sequence[KeyedOptimizer]:
        """All of them."""
        return [optimizer for _, optimizer in self._optims]

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """`opt_key.name`, or the one of both that is not empty."""
        return f"{opt_key}.{name}" if opt_key and name else opt_key or name

    @property
    def params(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """Parameters of all optimizers, of any shape, by prefixed names."""
        return {
            self.prepend_opt_key(name, prefix): param
            for prefix, optimizer in self._optims
            for name, param in optimizer.params.items()
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of all optimizers."""
        return [group for _, optimizer in self._optims for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """States of all optimizers by parameter."""
        return ChainedState([optimizer.state for _, optimizer in self._optims])

    def state_dict(self) -> dict[str, Any]:
        """States and groups of all optimizers, by prefixed names."""
        state_dict: dict[str, Any] = {"state": {}, "param_groups": []}
        for prefix, optimizer in self._optims:
            part = optimizer.state_dict()
            state_dict["state"].update(
                {self.prepend_opt_key(name, prefix): states for name, states in part["state"].items()}
            )
            for group in part.get("param_groups", []):
                names = [self.prepend_opt_key(name, prefix) for name in group["params"]]
                state_dict["param_groups"].append({**group, "params": names})
        state_dict["param_groups"] = tuple(state_dict["param_groups"])
        return state_dict if self._saves_param_groups else {"state": state_dict["state"]}

    def _prepare_load(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        theirs = state_dict["state"]
        unknown = set(theirs) - set(self.params)
        if unknown:
            raise unlike_parameters(len(self.params), len(theirs), set(self.params) - set(theirs), unknown)
        loads = []
        for prefix, optimizer in self._optims:
            names = {self.prepend_opt_key(name, prefix): name for name in optimizer.params}
            part: dict[str, Any] = {"state": {names[full]: theirs[full] for full in theirs if full in names}}
            if "param_groups" in state_dict:
                part["param_groups"] = [
                    {**group, "params": [names[full] for full in group["params"] if full in names]}
                    for group in state_dict["param_groups"]
                ]
            loads.append(optimizer._prepare_load(part))

        def load() -> None:
            # only once every part was found to fit
            for load_part in loads:
                load_part()

        return load

    def post_load_state_dict(self) -> None:
        """Of each optimizer."""
        for _, optimizer in self._optims:
            optimizer.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        """Of each optimizer."""
        super().save_param_groups(save)
        for _, optimizer in self._optims:
            optimizer.save_param_groups(save)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Of each optimizer; names come with their prefixes."""
        wanted = sparse_grad_parameter_names or set()
        for prefix, optimizer in self._optims:
            optimizer.init_state({name for name in optimizer.params if self.prepend_opt_key(name, prefix) in wanted})

    def set_optimizer_step(self, step: int) -> None:
        """Of each optimizer; warns of those that have no such method."""
        for _, optimizer in self._optims:
            _ask(optimizer, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Of each optimizer; warns of those that have no such method."""
        for _, optimizer in self._optims:
            _ask(optimizer, "update_hyper_parameters", params_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of each optimizer."""
        for _, optimizer in self._optims:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Of each optimizer."""
        for _, optimizer in self._optims:
            optimizer.step(closure)

    def _put_rates_in_effect(self) -> None:
        for _, optimizer in self._optims:
            optimizer._put_rates_in_effect()

    def __repr__(self) -> str:
        return ", ".join(f"{prefix}: {optimizer!r}" for prefix, optimizer in self._optims)


class OptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer around another: parameters, states, groups and every call are those of the inner one.

    The base of `WarmupOptimizer` and `GradientClippingOptimizer`.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        _require_keyed(optimizer)
        self._optimizer = optimizer
        self.__setstate__({"defaults": {}})

    def inner_optimizers(self) -> Sequence[KeyedOptimizer]:
        """The wrapped one."""
        return [self._optimizer]

    @property
    def params(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """Parameters, of any shape, by name."""
        return self._optimizer.params

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups."""
        return self._optimizer.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """States by parameter."""
        return self._optimizer.state

    @property
    def _saves_param_groups(self) -> bool:  # type: ignore[override]
        return self._optimizer._saves_param_groups

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's."""
        return self._optimizer.state_dict()

    def _prepare_load(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        return self._optimizer._prepare_load(state_dict)

    def post_load_state_dict(self) -> None:
        """The inner optimizer's."""
        self._optimizer.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        """The inner optimizer's."""
        self._optimizer.save_param_groups(save)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """The inner optimizer's."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def set_optimizer_step(self, step: int) -> None:
        """The inner optimizer's; warns if it has no such method."""
        _ask(self._optimizer, "set_optimizer_step", step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """The inner optimizer's; warns if it has no such method."""
        _ask(self._optimizer, "update_hyper_parameters", params_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The inner optimizer's."""
        self._optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """The inner optimizer's."""
        return self._optimizer.step(closure)

    def _put_rates_in_effect(self) -> None:
        self._optimizer._put_rates_in_effect()

    def __repr__(self) -> str:
        return repr(self._optimizer)


class ChainedState(Mapping[Any, Any]):
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


def _spell_out(group: Any) -> None:
    """Have a group's parameters in a list, in place."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(f"a parameter group is a dict with 'params', got {type(group).__name__}: {{'params': [...]}}")
    params = group["params"]
    every = [params] if isinstance(params, Tensor) else list(params)
    tensors = [param[1] if isinstance(param, tuple) and len(param) == 2 else param for param in every]
    is_list = type(params) is list and not any(map(operator.is_not, tensors, params))
    # a mapping that is not written to stays as it is
    if not is_list and isinstance(group, dict):
        group["params"] = tensors


def _require_keyed(optimizer: Any) -> None:
    if not isinstance(optimizer, KeyedOptimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"{kind} has no named parameters: wrap it in KeyedOptimizerWrapper(named_parameters, factory)")


def _ask(optimizer: Any, method: str, value: Any) -> None:
    if optimizer is None:
        return
    if hasattr(optimizer, method):
        getattr(optimizer, method)(value)
    else:
        warnings.warn(f"{type(optimizer).__name__} has no {method}: it stays as it is", stacklevel=3)


def _hyper_of(names: Sequence[str], saved: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Hyper-parameters that the saved groups of these parameters agree on."""
    hyper: dict[str, Any] = {}
    for group in saved:
        if not set(names) & set(group["params"]):
            continue
        for key, value in group.items():
            if key == "params":
                continue
            if key in hyper and hyper[key] != value:
                raise ValueError(f"saved groups of {list(names)} disagree on {key}: {hyper[key]} and {value}")
            hyper[key] = value
    return deepcopy(hyper)


@dataclass(frozen=True)
class _Pieces:
    """A rank's pieces of a sharded value: `regions` says where each lies in the whole, if the value does."""

    layout: tuple[Any, ...]
    tensors: list[Tensor]
    regions: list[tuple[slice, ...]] | None


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the dicts, not of the tensors; an object with a `state_dict` gives that."""
    copied = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            copied[key] = plain_values(value)
        else:
            copied[key] = value.state_dict() if _is_stateful(value) else value
    return copied


def unlike_parameters(own: int, given: int, missing: Iterable[str], unexpected: Iterable[str]) -> ValueError:
    """The error for a state of other parameters, in TorchRec's words: their numbers, or the first that is not there."""
    missing, unexpected = sorted(missing), sorted(unexpected)
    words = (
        f"Parameter {missing[0]} not found"
        if own == given and missing
        else f"Different parameter count: {own} vs {given}"
    )
    return ValueError(f"{words}; parameters of the optimizer state differ: missing {missing}, unexpected {unexpected}")


def unlike_states(path: str, own: int, given: int, missing: Sequence[str], unexpected: Sequence[str]) -> ValueError:
    """The error for a parameter that has other states, in TorchRec's words where their numbers differ."""
    words = f"Different state size: {own} vs {given}; " if own != given else ""
    return ValueError(f"{words}optimizer states of {path} differ: missing {missing}, unexpected {unexpected}")


def require_same_states(path: str, own: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise ValueError unless every value of `own` can take the one of `theirs` in place.

    Tensors need equal shapes, sharded ones equal pieces; a whole tensor fits a sharded one whose regions are known.
    """
    missing, unexpected = sorted(set(own) - set(theirs)), sorted(set(theirs) - set(own))
    if missing or unexpected:
        raise unlike_states(path, len(own), len(theirs), missing, unexpected)
    for key, value in own.items():
        loaded = theirs[key]
        if isinstance(value, Mapping):
            if not isinstance(loaded, Mapping):
                raise ValueError(f"{path}: state {key} is a dict, loaded {type(loaded).__name__}")
            require_same_states(f"{path}.{key}", value, loaded)
        elif isinstance(value, Tensor) and not _is_stateful(value):
            _require_fits(f"{path}: state {key}", value, loaded)


def load_values(own: Any, theirs: Mapping[str, Any]) -> None:
    """Copy `theirs` into `own`, which `require_same_states` found to fit: tensors in place, others as copies."""
    for key, value in own.items():
        loaded = theirs[key]
        if isinstance(value, Mapping):
            load_values(value, loaded)
        elif _is_stateful(value):
            value.load_state_dict(loaded)
        elif isinstance(value, Tensor):
            _fill(value, loaded)
        else:
            own[key] = deepcopy(loaded)


def fresh_value(key: str, value: Any, device: torch.device) -> Any:
    """A loaded value for a parameter that had none; counts of steps stay where they are, as in torch.optim."""
    if isinstance(value, Mapping):
        return {inner: fresh_value(inner, inner_value, device) for inner, inner_value in value.items()}
    if not isinstance(value, Tensor) or hasattr(value, "local_shards"):
        return deepcopy(value)
    if key == "step" or hasattr(value, "to_local"):
        return value.detach().clone()
    return value.detach().to(device, copy=True)


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _pieces_of(value: Any) -> _Pieces | None:
    local = value.to_local() if hasattr(value, "to_local") else value
    if hasattr(local, "local_shards"):
        shards = local.local_shards()
        if hasattr(local, "local_offsets"):
            tensors, offsets = list(shards), local.local_offsets()
        else:
            tensors, offsets = [shard.tensor for shard in shards], [shard.metadata.shard_offsets for shard in shards]
        corners = [(tuple(offset), tuple(tensor.shape)) for offset, tensor in zip(offsets, tensors, strict=True)]
        regions = [tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True)) for offset, size in corners]
        return _Pieces((tuple(value.size()), corners), tensors, regions)
    if local is value:
        return None
    layout = (tuple(value.shape), tuple(value.placements), tuple(value.device_mesh.shape), tuple(local.shape))
    return _Pieces(layout, [local], None)


def _require_fits(what: str, own_value: Tensor, loaded: Any) -> None:
    own, given = _pieces_of(own_value), _pieces_of(loaded)
    if own is not None and given is not None:
        if own.layout != given.layout:
            raise ValueError(f"{what} is sharded as {own.layout}, loaded {given.layout}: reshard one of them first")
        return
    if given is not None:
        raise ValueError(f"{what} is whole, loaded one is sharded: gather it first, by full_tensor() say")
    # a ShardedTensor has no other way to tell its size
    size = tuple(own_value.size())
    if not isinstance(loaded, Tensor):
        if own is not None or math.prod(size) != 1 or not isinstance(loaded, (int, float)):
            raise ValueError(f"{what} is a tensor of shape {size}, loaded {loaded!r}")
    elif size != tuple(loaded.shape):
        raise ValueError(f"{what} has shape {size}, loaded {tuple(loaded.shape)}")
    elif own is not None and own.regions is None:
        raise ValueError(f"{what} is a DTensor, loaded a plain tensor: distribute it first, by distribute_tensor() say")


@torch.no_grad()
def _fill(own_value: Tensor, loaded: Any) -> None:
    own, given = _pieces_of(own_value), _pieces_of(loaded)
    if own is None:
        own_value.detach().copy_(loaded) if isinstance(loaded, Tensor) else own_value.detach().fill_(loaded)
    elif given is not None:
        for piece, source in zip(own.tensors, given.tensors, strict=True):
            piece.detach().copy_(source)
    else:
        for piece, region in zip(own.tensors, own.regions or [], strict=True):
            piece.detach().copy_(loaded[region])
