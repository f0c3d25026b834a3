"""Training that synchronises now and then: a local optimizer at every step, a global one after every so many.

As in DiLoCo (Douillard et al. 2023, arXiv:2311.08105) the global optimizer takes what the local steps have moved since
its last step for a gradient. How it exchanges that between workers is its own affair.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .keyed_optimizer import CombinedOptimizer, KeyedOptimizer

_LOCAL, _GLOBAL = "semi_sync_local_", "semi_sync_global_"
_GLOBAL_COUNT, _LOCAL_COUNT = "__semisync_global_step_counter__", "__semisync_local_step_counter__"


class SemisyncOptimizer(KeyedOptimizer):
    """Steps `optimizer` every time, and after every `num_local_steps` of them calls the global optimizer.

    The global optimizer, or the one that its `KeyedOptimizerWrapper` holds, has a method `global_step(count, closure)`:
    `count` is the number of local steps so far, an int64 tensor. States are saved by parameter name, with a prefix
    `semi_sync_local_` or `semi_sync_global_` to each state's name; the counts are with every global parameter.

    Args:
        global_params: the parameters, or groups of them, that the global optimizer synchronises.
        optimizer: the local optimizer.
        global_optimizer: the global optimizer.
        num_local_steps: local steps to one global step.
        semi_sync_worker_shard_group: not used; warns.
        offload_global_model, non_blocking: not offered.

    Raises:
        ValueError: `num_local_steps` is not positive, the global optimizer does not hold just `global_params`, both
            optimizers hold different tensors by one name, or what is not offered is asked for.
        TypeError: the global optimizer has no `global_step`.
    """

    def __init__(
        self,
        global_params: Iterable[Any],
        optimizer: KeyedOptimizer,
        global_optimizer: KeyedOptimizer,
        num_local_steps: int = 16,
        semi_sync_worker_shard_group: Any = None,
        offload_global_model: bool = False,
        non_blocking: bool = False,
    ) -> None:
        if num_local_steps < 1:
            raise ValueError(f"num_local_steps must be positive, got {num_local_steps}")
        if offload_global_model or non_blocking:
            raise ValueError(
                "offload_global_model and non_blocking are not offered: the global optimizer keeps the copy"
            )
        if semi_sync_worker_shard_group is not None:
            warnings.warn("semi_sync_worker_shard_group is not used: it serves TorchRec's own logs", stacklevel=2)
        # one set of rules for both: named parameters, agreement on save_param_groups
        self._both = CombinedOptimizer([("local", optimizer), ("global", global_optimizer)])
        self._optimizer, self._global_optimizer, self._num_local_steps = optimizer, global_optimizer, num_local_steps
        inner = getattr(global_optimizer, "_optimizer", None)
        self._global_step = getattr(global_optimizer, "global_step", None) or getattr(inner, "global_step", None)
        if self._global_step is None:
            kind = type(inner if inner is not None else global_optimizer).__name__
            raise TypeError(f"{kind} has no global_step(count, closure): a semi-synchronous optimizer calls that")
        flat = [p for params in global_params for p in (params["params"] if isinstance(params, Mapping) else [params])]
        held = {id(param) for param in global_optimizer.params.values()}
        if {id(param) for param in flat} != held:
            raise ValueError(f"global_params are {len(flat)} tensors, not the {len(held)} of the global optimizer")
        for name, param in global_optimizer.params.items():
            if optimizer.params.get(name, param) is not param:
                raise ValueError(f"both optimizers hold a parameter {name!r}, but not the same one")
        # [local steps, global steps]; on the CPU, so that no step waits for a device
        self._counts = {name: torch.tensor(0, device="cpu") for name in (_LOCAL_COUNT, _GLOBAL_COUNT)}
        self.__setstate__({"defaults": {}})

    def inner_optimizers(self) -> Sequence[KeyedOptimizer]:
        """The local and the global one."""
        return self._both.inner_optimizers()

    @property
    def params(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """Parameters of both optimizers, of any shape, by name, and the counts of steps by theirs."""
        return {**self._optimizer.params, **self._global_optimizer.params, **self._counts}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Groups of the local, then of the global optimizer."""
        return self._both.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """States of both optimizers by parameter, with their prefixes."""
        states: dict[Any, dict[str, Any]] = {}
        for prefix, optimizer in ((_LOCAL, self._optimizer), (_GLOBAL, self._global_optimizer)):
            for param, values in optimizer.state.items():
                states.setdefault(param, {}).update({prefix + key: value for key, value in values.items()})
        for param in self._global_optimizer.params.values():
            states.setdefault(param, {}).update(self._counts)
        return states

    @property
    def _saves_param_groups(self) -> bool:  # type: ignore[override]
        return self._both._saves_param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A local step and, if it was the last of its round, a global one. Gradients are dropped before that."""
        loss = self._optimizer.step(closure)
        local, rounds = self._counts[_LOCAL_COUNT], self._counts[_GLOBAL_COUNT]
        local += 1
        if int(local) % self._num_local_steps == 0:
            rounds += 1
            self._global_optimizer.zero_grad()
            assert self._global_step is not None
            self._global_step(local, closure)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of both optimizers."""
        self._both.zero_grad(set_to_none)

    def _prepare_load(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        theirs = state_dict["state"]
        unknown = sorted(set(theirs) - set(self.params))
        counts = [values for values in theirs.values() if _LOCAL_COUNT in values and _GLOBAL_COUNT in values]
        if unknown or not counts:
            raise ValueError(
                f"semi-synchronous state: unexpected parameters {unknown}, counts of steps "
                + ("are there" if counts else f"{_LOCAL_COUNT} and {_GLOBAL_COUNT} are missing")
            )
        groups, first = state_dict.get("param_groups"), len(self._optimizer.param_groups)
        if self._saves_param_groups and groups is not None and len(groups) != len(self.param_groups):
            raise ValueError(f"saved are {len(groups)} param_groups, here are {len(self.param_groups)}")
        loads = []
        for prefix, optimizer, cut in (
            (_LOCAL, self._optimizer, slice(0, first)),
            (_GLOBAL, self._global_optimizer, slice(first, None)),
        ):
            part: dict[str, Any] = {"state": {}}
            for name, param in optimizer.params.items():
                values = {k.removeprefix(prefix): v for k, v in theirs.get(name, {}).items() if k.startswith(prefix)}
                if values or (name in theirs and param in optimizer.state):
                    part["state"][name] = values
            if groups is not None:
                part["param_groups"] = groups[cut]
            loads.append(optimizer._prepare_load(part))

        def load() -> None:
            for load_part in loads:
                load_part()
            for name, count in self._counts.items():
                count.fill_(int(counts[0][name]))

        return load

    def post_load_state_dict(self) -> None:
        """Of both optimizers."""
        self._both.post_load_state_dict()

    def save_param_groups(self, save: bool) -> None:
        """Of both optimizers."""
        self._both.save_param_groups(save)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """The local optimizer's; no step is counted."""
        self._optimizer.init_state(sparse_grad_parameter_names)

    def set_optimizer_step(self, step: int) -> None:
        """Of both optimizers; warns of those that have no such method."""
        self._both.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Of both optimizers; warns of those that have no such method."""
        self._both.update_hyper_parameters(params_dict)

    def _put_rates_in_effect(self) -> None:
        self._both._put_rates_in_effect()

    def __repr__(self) -> str:
        return repr(self._both)
