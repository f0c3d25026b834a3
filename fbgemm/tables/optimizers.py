"""FBGEMM's fused optimizers as rules of a `TableGroup`, and its names for their states."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch

from shardwise.embeddings.optim.fbgemm_types import OptimType
from shardwise.embeddings.optim.optimizers import RowWiseAdagrad, WeightDecayMode, optimizer_spec
from shardwise.embeddings.optim.rule_optimizer import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB
from shardwise.embeddings.tables.table_layout import OptimizerSpec
from shardwise.kernels import rule_named


class OptimizerArgs(NamedTuple):
    """The settings of a fused optimizer by FBGEMM's names, but for the learning rate."""

    stochastic_rounding: bool
    gradient_clipping: bool
    max_gradient: float
    max_norm: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    weight_decay_mode: int
    eta: float
    momentum: float


class _Fused(NamedTuple):
    """The class that a rule belongs to, whether weight decay is taken from the row by itself, and names of states."""

    optimizer: type[torch.optim.Optimizer]
    decouples: bool
    states: tuple[str, ...]


_SGD = _Fused(torch.optim.SGD, False, ())
_ROWWISE_ADAGRAD = _Fused(RowWiseAdagrad, False, ("sum",))
_MOMENTS = ("exp_avg", "exp_avg_sq")
_OPTIMIZERS = {
    OptimType.SGD: _SGD,
    OptimType.EXACT_SGD: _SGD,
    OptimType.EXACT_ADAGRAD: _Fused(torch.optim.Adagrad, False, ("sum",)),
    OptimType.ROWWISE_ADAGRAD: _ROWWISE_ADAGRAD,
    OptimType.EXACT_ROWWISE_ADAGRAD: _ROWWISE_ADAGRAD,
    OptimType.ADAM: _Fused(torch.optim.Adam, True, _MOMENTS),
    OptimType.PARTIAL_ROWWISE_ADAM: _Fused(PartialRowWiseAdam, True, _MOMENTS),
    OptimType.LAMB: _Fused(LAMB, False, _MOMENTS),
    OptimType.PARTIAL_ROWWISE_LAMB: _Fused(PartialRowWiseLAMB, False, _MOMENTS),
    OptimType.LARS_SGD: _Fused(LarsSGD, False, ("momentum_buffer",)),
}


def require_optimizer(optimizer: OptimType) -> None:
    """Refuse an optimizer that has no rule.

    Raises:
        ValueError: names it, and those that have one.
    """
    if optimizer is not OptimType.NONE and optimizer not in _OPTIMIZERS:
        known = ", ".join(each.name for each in (*_OPTIMIZERS, OptimType.NONE))
        name = optimizer.name if isinstance(optimizer, OptimType) else repr(optimizer)
        raise ValueError(f"optimizer={name} is not served: {known} of OptimType are")


def state_names(optimizer: OptimType) -> tuple[str, ...]:
    """What FBGEMM calls the states of a table, in the order of momentum1, momentum2."""
    return () if optimizer is OptimType.NONE else _OPTIMIZERS[optimizer].states


def fused_spec(optimizer: OptimType, learning_rate: float, args: OptimizerArgs, *, who: str) -> OptimizerSpec:
    """The rule and settings of an optimizer; `who` is the tables, for messages.

    Raises:
        ValueError: a number is negative or not finite.
    """
    if optimizer is OptimType.NONE:
        return OptimizerSpec("gradient")
    fused = _OPTIMIZERS[optimizer]
    takes = rule_named(optimizer_spec(fused.optimizer, {}, table=who).rule).hyper
    given = {name: value for name, value in args._asdict().items() if name in takes}
    settings: dict[str, Any] = {**given, "lr": learning_rate}
    mode = _decay_mode(optimizer, args)
    if "weight_decay" not in takes and mode is not WeightDecayMode.NONE:
        settings |= {"weight_decay": args.weight_decay, "weight_decay_mode": mode}
    for name in ("stochastic_rounding", "gradient_clipping", "max_gradient"):
        settings[name] = getattr(args, name)
    return optimizer_spec(fused.optimizer, settings, table=who)


def _decay_mode(optimizer: OptimType, args: OptimizerArgs) -> WeightDecayMode:
    """How weight decay enters a step besides what the rule itself makes of it."""
    if _OPTIMIZERS[optimizer].decouples:
        return WeightDecayMode.DECOUPLE
    if _OPTIMIZERS[optimizer] is _ROWWISE_ADAGRAD:
        return WeightDecayMode(args.weight_decay_mode)
    return WeightDecayMode.NONE


def warn_of_decay(optimizer: OptimType, args: OptimizerArgs) -> None:
    """Say that a weight decay has no effect, as it has none in FBGEMM."""
    if args.weight_decay and optimizer in (OptimType.SGD, OptimType.EXACT_SGD, OptimType.EXACT_ADAGRAD):
        warnings.warn(f"weight_decay={args.weight_decay} has no effect with {optimizer}, as in FBGEMM", stacklevel=3)
    elif args.weight_decay and not args.weight_decay_mode and _OPTIMIZERS.get(optimizer) is _ROWWISE_ADAGRAD:
        warnings.warn(
            f"weight_decay={args.weight_decay} has no effect with {optimizer} while weight_decay_mode is NONE, as in"
            " FBGEMM",
            stacklevel=3,
        )
