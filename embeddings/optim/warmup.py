"""A learning rate that follows stages: `WarmupOptimizer` writes it to every group of the optimizer it wraps.

In stage s at iteration i the rate is `lr * m(i) * lr_scale`, where iterations are counted from the very first step, not
from the beginning of the stage:

    NONE 1 | CONSTANT value | LINEAR value + (1 - value) i / max_iters | POLY (1 - i / decay_iters)^value
    STEP value^floor(i / decay_iters) | INVSQRT 1 / sqrt(i)
    COSINE_ANNEALING_WARM_RESTARTS value + (1 - value) (1 + cos(pi t / sgdr_period)) / 2, t = i mod sgdr_period
    INTERPOLATE value + (end_value - value) (i - start_interpolating_iters) / (max_iters - start_interpolating_iters)

The cosine is that of Loshchilov and Hutter 2017 (arXiv:1608.03983) with periods of one length.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import RefusedValueError

from .keyed_optimizer import ChainedState, KeyedOptimizer, OptimizerWrapper


class WarmupPolicy(Enum):
    """How the rate moves within a stage; the module's text has the formulas."""

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@dataclass(frozen=True)
class WarmupStage:
    """A stage of the schedule, which lasts through iteration `max_iters`, counted from the first step of all.

    `decay_iters` belongs to POLY (`max_iters` unless positive) and STEP (1 unless positive), `sgdr_period`, which is in
    iterations too, to the cosine, `start_interpolating_iters` and `end_value` to INTERPOLATE.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None


class WarmupOptimizer(OptimizerWrapper):
    """Sets the learning rate of every group, from construction on and after every step.

    A group without `lr_param` gets one, as in TorchRec; a warning says so. Tables that are trained in the backward get
    the rate at once. When the last stage is over it is `lr`. Rates that
    anybody else writes to the groups last until the next step. The schedule's place is saved beside the states, as
    `{param_name: {"warmup": int64 tensor [iteration, stage]}}`, and loading goes on from there.

    Args:
        optimizer: the optimizer to steer.
        stages: in order, with growing `max_iters`.
        lr: what the stages' factors multiply.
        lr_param: the name of the rate in the groups.
        param_name: the name under which the schedule's place is saved.

    Raises:
        ValueError: a stage ends before it begins, lacks what its policy needs or would make the rate negative, or a
            parameter is called `param_name` already.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        if param_name in optimizer.params:
            raise ValueError(f"the optimizer holds a parameter {param_name!r} already: choose another param_name")
        lacking = [group for group in optimizer.param_groups if lr_param not in group]
        if lacking:
            known = sorted(set(lacking[0]) - {"params"})
            warnings.warn(
                f"{len(lacking)} of {len(optimizer.param_groups)} parameter groups have no rate of the name"
                f" lr_param={lr_param!r}, one of them has {known}: they get one, which their optimizer may not read",
                stacklevel=2,
            )
        self._stages = _checked(stages)
        self._lr, self._lr_param, self._param_name = lr, lr_param, param_name
        # stands for the schedule where states go by parameter
        self._marker = nn.Parameter(torch.empty(0, device="cpu"), requires_grad=False)
        self._place = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._set_rate()

    @property
    def params(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        """The inner optimizer's parameters and one that stands for the schedule."""
        return {**self._optimizer.params, self._param_name: self._marker}

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """The inner optimizer's states and the schedule's place."""
        return ChainedState([self._optimizer.state, {self._marker: {"warmup": self._place}}])

    def step(self, closure: Any = None) -> Any:
        """A step at the present rate, then the rate of the next iteration."""
        loss = super().step(closure)
        # on the CPU always
        iteration, stage = self._place.tolist()
        iteration += 1
        if iteration > self._stages[stage].max_iters and stage + 1 < len(self._stages):
            stage += 1
        self._move_to(iteration, stage)
        self._set_rate()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's and the schedule's place."""
        inner = super().state_dict()
        return {**inner, "state": {**inner["state"], self._param_name: {"warmup": self._place}}}

    def _prepare_load(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        states = dict(state_dict["state"])
        place = states.pop(self._param_name, None)
        if place is None:
            raise ValueError(
                f"parameters of the optimizer state differ: missing [{self._param_name!r}]; to begin at some iteration"
                f" of some stage add {{'warmup': torch.tensor([iteration, stage])}} by that name"
            )
        iteration, stage = _read_place(place, self._param_name)
        if not (0 <= stage < len(self._stages) and iteration >= 0):
            raise ValueError(
                f"{self._param_name}: the saved schedule is at iteration {iteration} of stage {stage},"
                f" this one has stages 0 to {len(self._stages) - 1}"
            )
        load = super()._prepare_load({**state_dict, "state": states})

        def load_and_place() -> None:
            load()
            self._move_to(iteration, stage)

        return load_and_place

    def post_load_state_dict(self) -> None:
        """The rate of the loaded iteration, whatever the groups were saved with."""
        super().post_load_state_dict()
        self._set_rate()

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """The inner optimizer's; the schedule stays where it is."""
        super().init_state(sparse_grad_parameter_names)

    def _move_to(self, iteration: int, stage: int) -> None:
        # in place: a checkpoint reader may hold the tensor
        self._place[0], self._place[1] = iteration, stage

    def _set_rate(self) -> None:
        iteration, stage = self._place.tolist()
        for group in self.param_groups:
            group[self._lr_param] = self._lr * _factor(self._stages[stage], iteration)
        self._put_rates_in_effect()


def _checked(stages: Sequence[WarmupStage]) -> list[WarmupStage]:
    """The stages with their defaults filled in, and one without an end after them."""
    checked, end = [], 0
    for number, stage in enumerate(stages):
        what = f"warm-up stage {number} ({stage.policy.name})"
        if stage.max_iters <= end:
            raise RefusedValueError(
                f"Max iter of the stage {stage} must be greater than the previous max iter {end}: max_iters of {what}"
                f" counts from the first step of all, got {stage.max_iters}"
            )
        end = stage.max_iters
        if stage.policy is WarmupPolicy.INTERPOLATE:
            start = stage.start_interpolating_iters
            if start is None or stage.end_value is None or start >= stage.max_iters:
                raise ValueError(
                    f"{what} needs end_value, got {stage.end_value}, and start_interpolating_iters below its max_iters"
                    f" {stage.max_iters}, got {start}"
                )
        if stage.policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS and stage.sgdr_period < 1:
            raise ValueError(f"{what}: sgdr_period must be positive, got {stage.sgdr_period}")
        if stage.decay_iters <= 0:
            stage = replace(stage, decay_iters=1 if stage.policy is WarmupPolicy.STEP else stage.max_iters)
        if stage.policy is WarmupPolicy.POLY and stage.decay_iters < stage.max_iters:
            raise ValueError(
                f"{what}: the rate is down to zero at decay_iters={stage.decay_iters} and would be negative until"
                f" max_iters={stage.max_iters}: end the stage there"
            )
        checked.append(stage)
    return [*checked, WarmupStage(WarmupPolicy.NONE, max_iters=1 << 63)]


def _factor(stage: WarmupStage, i: int) -> float:
    """The factor of the base rate at iteration i."""
    policy, value, factor = stage.policy, stage.value, 1.0
    if policy is WarmupPolicy.CONSTANT:
        factor = value
    elif policy is WarmupPolicy.LINEAR:
        factor = value + (1.0 - value) * i / stage.max_iters
    elif policy is WarmupPolicy.POLY:
        factor = math.pow(1 - i / stage.decay_iters, value)
    elif policy is WarmupPolicy.STEP:
        factor = math.pow(value, i // stage.decay_iters)
    elif policy is WarmupPolicy.INVSQRT:
        # before the first step as after it
        factor = 1.0 / math.sqrt(max(i, 1))
    elif policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
        t = i % stage.sgdr_period
        factor = value + (1.0 - value) * 0.5 * (1 + math.cos(math.pi * t / stage.sgdr_period))
    elif policy is WarmupPolicy.INTERPOLATE:
        assert stage.start_interpolating_iters is not None and stage.end_value is not None
        length = stage.max_iters - stage.start_interpolating_iters
        factor = value + (stage.end_value - value) * (i - stage.start_interpolating_iters) / length
    return factor * stage.lr_scale


def _read_place(saved: Any, name: str) -> tuple[int, int]:
    place = saved.get("warmup") if isinstance(saved, Mapping) else None
    if not isinstance(place, Tensor) or place.numel() != 2:
        raise ValueError(f"{name}: expected {{'warmup': tensor [iteration, stage]}}, got {saved!r}")
    # once per load
    iteration, stage = place.tolist()
    return int(iteration), int(stage)
