"""Optimizers made of a rule: fused on tables, ordinary `torch.optim.Optimizer`s on any other parameter.

One function (`shardwise.kernels.rule`) is traced into the update kernel and is its own torch twin, so an optimizer of
your own takes ten lines:

    @define_optimizer(momentum="element")
    def Lion(w, g, momentum, lr=1e-4, beta1=0.9, beta2=0.99):
        w = w - lr * sign(beta1 * momentum + (1 - beta1) * g)
        return w, beta2 * momentum + (1 - beta2) * g
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from shardwise.kernels import Rule, define_rule, rule_named

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT


def step_each(
    optimizer: torch.optim.Optimizer, closure: Any, step: Callable[[Tensor, Tensor, dict[str, Any]], None]
) -> Any:
    """`Optimizer.step` for one that takes dense gradients: `step(parameter, gradient, its group)` for each of them.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                raise RuntimeError(f"{type(optimizer).__name__} takes dense gradients, got a sparse one")
            step(p, p.grad, group)
    return loss


class RuleOptimizer(torch.optim.Optimizer):
    """An optimizer that follows a rule; a row of a parameter is a slice along dim 0.

    `apply_optimizer_in_backward` runs the rule inside the backward of tables. As an ordinary optimizer it steps every
    row of a parameter that has a gradient. Hyper-parameters are keywords, by the rule's names; a rule without a weight
    decay of its own takes `weight_decay` in the form `decay`.

    Raises:
        ValueError: a hyper-parameter is unknown or negative.
    """

    rule: ClassVar[Rule]
    # how `weight_decay` enters where the rule has no place for it: "l2" or "decoupled"
    decay: ClassVar[str] = "l2"

    def __init__(self, params: ParamsT, **hyper: Any) -> None:
        name, known = type(self).__name__, {"weight_decay": 0.0, **self.rule.hyper}
        betas: Any = hyper.pop("betas", None)
        if betas is not None:
            hyper.update(beta1=betas[0], beta2=betas[1])
        for key, value in hyper.items():
            if key not in known:
                raise ValueError(f"{name} does not take {key}: expected some of {', '.join(known)}")
            if value < 0:
                raise ValueError(f"{name}: {key} must not be negative, got {value}")
        super().__init__(params, {**known, **hyper})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step over every parameter that has a gradient.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        return step_each(self, closure, self._step)

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        rows = p.shape[0] if p.dim() else 1
        w, g, state = p.float().reshape(rows, -1), grad.float().reshape(rows, -1), self.state[p]
        if not state:
            state["step"] = torch.zeros(1, dtype=torch.int64, device=p.device)
            for name, kind in self.rule.states.items():
                state[name] = torch.zeros(rows, 1 if kind == "row" else w.shape[1], device=p.device)
        state["step"] += 1
        if "weight_decay" not in self.rule.hyper and group["weight_decay"]:
            if self.decay == "l2":
                g = g + group["weight_decay"] * w
            else:
                w = w - group["lr"] * group["weight_decay"] * w
        hyper = torch.tensor([group[name] for name in self.rule.hyper], dtype=torch.float64, device=p.device)
        numbers = self.rule.values(hyper, state["step"])
        w, *states = self.rule.apply(w, g, [state[name] for name in self.rule.states], numbers.unbind())
        p.copy_(w.reshape(p.shape))
        for name, value in zip(self.rule.states, states, strict=True):
            state[name].copy_(value)


def define_optimizer(
    *,
    scalars: Callable[..., Mapping[str, Any]] | None = None,
    accumulator: str | None = None,
    **states: str,
) -> Callable[[Callable[..., Any]], type[RuleOptimizer]]:
    """Make an optimizer class of a rule `f(w, g, <states>, [row], <numbers>)`; keywords declare its states.

    A state is kept per "element" or per "row"; numbers with a default are hyper-parameters. The functions that a rule
    may use (`sqrt`, `where`, `row_mean`, ...), and `scalars`, are described in `shardwise.kernels.rule`.

    Raises:
        ValueError: the function's arguments do not fit the declaration; names them.

    Example:
        >>> @define_optimizer(total="row")
        ... def Plain(w, g, total, row, lr=0.1, eps=1e-8):
        ...     total = total + row_mean(g * g, row)
        ...     return w - lr / (sqrt(total) + eps) * g, total
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "item", feature_names=["clicked"])])
        >>> apply_optimizer_in_backward(Plain, ebc.parameters(), {"lr": 0.05})
    """

    def define(function: Callable[..., Any]) -> type[RuleOptimizer]:
        rule = define_rule(scalars=scalars, accumulator=accumulator, **states)(function)
        namespace = {"rule": rule, "__doc__": function.__doc__, "__module__": function.__module__}
        return type(function.__name__, (RuleOptimizer,), namespace)

    return define


class PartialRowWiseAdam(RuleOptimizer):
    """Adam with one second moment a row; weight decay is decoupled, as FBGEMM's. lr, betas, eps, weight_decay."""

    rule = rule_named("partial_rowwise_adam")
    decay = "decoupled"


class LAMB(RuleOptimizer):
    """Adam's direction scaled to the length of each row (You et al. 2020). lr, betas, eps, weight_decay."""

    rule = rule_named("lamb")


class PartialRowWiseLAMB(RuleOptimizer):
    """LAMB with one second moment a row. lr, betas, eps, weight_decay."""

    rule = rule_named("partial_rowwise_lamb")


class LarsSGD(RuleOptimizer):
    """SGD with momentum at a rate of its own for each row (You et al. 2017). lr, eta, momentum, weight_decay."""

    rule = rule_named("lars_sgd")


class FTRL(RuleOptimizer):
    """FTRL-Proximal (McMahan et al. 2013). lr, beta, l1, l2."""

    rule = rule_named("ftrl")
