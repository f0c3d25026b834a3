"""The built-in optimizer rules. What a rule is and what it may use: `rule.py`.

Gradients of a row are added up before its rule runs, so each rule follows the formula of its dense form; states of rows
that no id named do not change. `weight_decay` and gradient clipping are applied around a rule (`update.py`), unless the
formula itself has a place for them (LAMB, LARS).

Sources: Adagrad, Duchi et al. 2011; rowwise Adagrad, Mudigere et al. 2022 (arXiv:2104.05158); Adam, Kingma and Ba 2015;
LAMB, You et al. 2020 (arXiv:1904.00962); LARS, You et al. 2017 (arXiv:1708.03888); FTRL-Proximal, McMahan et al. 2013.
The partial rowwise forms keep one second moment a row, of the mean of its squared gradient, as FBGEMM's do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rule import (
    RULES,
    absolute,
    define_rule,
    maximum,
    row_mean,
    row_sum,
    sign,
    sqrt,
    where,
)


@define_rule()
def gradient(w: Any, g: Any) -> Any:
    """No optimizer: the summed gradients themselves, for those who bring their own."""
    return g


@define_rule()
def sgd(w: Any, g: Any, lr: float = 0.01) -> Any:
    """Stochastic gradient descent."""
    return w - lr * g


@define_rule(velocity="element")
def momentum_sgd(w: Any, g: Any, velocity: Any, lr: float = 0.01, momentum: float = 0.9, nesterov: float = 0.0) -> Any:
    """SGD with momentum; Nesterov's where `nesterov` is not 0."""
    velocity = momentum * velocity + g
    return w - lr * where(nesterov != 0, g + momentum * velocity, velocity), velocity


@define_rule(total="element", accumulator="total")
def adagrad(w: Any, g: Any, total: Any, lr: float = 0.01, eps: float = 1e-8) -> Any:
    """Adagrad: a sum of squares for each element."""
    total = total + g * g
    return w - lr * g / (sqrt(total) + eps), total


@define_rule(total="row", accumulator="total")
def rowwise_adagrad(w: Any, g: Any, total: Any, row: Any, lr: float = 0.01, eps: float = 1e-8) -> Any:
    """Adagrad with one sum a row, of the mean of its squared gradient."""
    total = total + row_mean(g * g, row)
    return w - lr / (sqrt(total) + eps) * g, total


def _corrected(
    step: Tensor, lr: float = 0.01, eps: float = 1e-8, beta1: Any = 0.9, beta2: Any = 0.999
) -> dict[str, Any]:
    """The Adam family's numbers of a step: rates 1 - beta, and how much of each moment has built up."""
    # both at once, as each operation is a launch
    betas = torch.stack((beta1, beta2))
    rates, parts = 1 - betas, 1 - betas**step
    return {"rate1": rates[0], "rate2": rates[1], "part1": parts[0], "part2": parts[1]}


def _corrected_with_decay(
    step: Tensor,
    lr: float = 0.01,
    eps: float = 1e-8,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
) -> dict[str, Any]:
    return _corrected(step, lr, eps, beta1, beta2)


@define_rule(scalars=_corrected, m="element", v="element")
def adam(w: Any, g: Any, m: Any, v: Any, lr: Any, eps: Any, rate1: Any, rate2: Any, part1: Any, part2: Any) -> Any:
    """Adam on the rows of the batch; moments of other rows wait."""
    m = m + rate1 * (g - m)
    v = v + rate2 * (g * g - v)
    return w - lr * (m / part1) / (sqrt(v / part2) + eps), m, v


@define_rule(scalars=_corrected, m="element", v="row")
def partial_rowwise_adam(
    w: Any, g: Any, m: Any, v: Any, row: Any, lr: Any, eps: Any, rate1: Any, rate2: Any, part1: Any, part2: Any
) -> Any:
    """Adam with one second moment a row."""
    m = m + rate1 * (g - m)
    v = v + rate2 * (row_mean(g * g, row) - v)
    return w - lr * (m / part1) / (sqrt(v / part2) + eps), m, v


@define_rule(scalars=_corrected_with_decay, m="element", v="element")
def lamb(
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    row: Any,
    lr: Any,
    eps: Any,
    weight_decay: Any,
    rate1: Any,
    rate2: Any,
    part1: Any,
    part2: Any,
) -> Any:
    """Adam's direction, scaled per row to the length of the row; a row or direction of length 0 is not scaled."""
    m = m + rate1 * (g - m)
    v = v + rate2 * (g * g - v)
    direction = (m / part1) / (sqrt(v / part2) + eps) + weight_decay * w
    length, reach = sqrt(row_sum(w * w, row)), sqrt(row_sum(direction * direction, row))
    trust = where((length > 0) & (reach > 0), length / reach, 1.0)
    return w - lr * trust * direction, m, v


@define_rule(scalars=_corrected_with_decay, m="element", v="row")
def partial_rowwise_lamb(
    w: Any,
    g: Any,
    m: Any,
    v: Any,
    row: Any,
    lr: Any,
    eps: Any,
    weight_decay: Any,
    rate1: Any,
    rate2: Any,
    part1: Any,
    part2: Any,
) -> Any:
    """LAMB with one second moment a row."""
    m = m + rate1 * (g - m)
    v = v + rate2 * (row_mean(g * g, row) - v)
    direction = (m / part1) / (sqrt(v / part2) + eps) + weight_decay * w
    length, reach = sqrt(row_sum(w * w, row)), sqrt(row_sum(direction * direction, row))
    trust = where((length > 0) & (reach > 0), length / reach, 1.0)
    return w - lr * trust * direction, m, v


@define_rule(velocity="element")
def lars_sgd(
    w: Any,
    g: Any,
    velocity: Any,
    row: Any,
    lr: float = 0.01,
    eta: float = 0.001,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
) -> Any:
    """SGD with momentum at a rate of its own for each row: eta times the row's length over its gradient's."""
    length, slope = sqrt(row_sum(w * w, row)), sqrt(row_sum(g * g, row))
    trust = where((length > 0) & (slope > 0), eta * length / (slope + weight_decay * length), 1.0)
    velocity = momentum * velocity + lr * trust * (g + weight_decay * w)
    return w - velocity, velocity


@define_rule(z="element", total="element", accumulator="total")
def ftrl(
    w: Any, g: Any, z: Any, total: Any, lr: float = 0.01, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0
) -> Any:
    """FTRL-Proximal with per-element rates: weights whose evidence stays below l1 are exactly 0."""
    grown = total + g * g
    z = z + g - (sqrt(grown) - sqrt(total)) / lr * w
    kept = maximum(absolute(z) - l1, 0.0)
    return -sign(z) * kept / ((beta + sqrt(grown)) / lr + l2), z, grown


# those of this file, and none that a program defines later
BUILT_IN = tuple(RULES)
