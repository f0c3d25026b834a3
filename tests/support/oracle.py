"""A slow, obvious, dense float64 model of lookups and optimizers, over tables [R, D] and batches that are lists.

`bags[f][b]` are the ids of feature f in sample b, `scales[f][b]` their weights; a feature is (table, averaged).
It shares no line with the package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Bags = Sequence[Sequence[Sequence[int]]]
Scales = Sequence[Sequence[Sequence[float]]] | None
Features = Sequence[tuple[int, bool]]


def pooled(tables: Sequence[Tensor], features: Features, bags: Bags, scales: Scales = None) -> Tensor:
    """[B, sum of dims]: each bag's rows, weighted and added; divided by the bag's length where it is averaged."""
    columns = []
    for f, (t, averaged) in enumerate(features):
        column = torch.zeros(len(bags[f]), tables[t].shape[1], dtype=torch.float64)
        for b, bag in enumerate(bags[f]):
            for i, row in enumerate(bag):
                if 0 <= row < len(tables[t]):
                    column[b] += tables[t][row].double() * (scales[f][b][i] if scales is not None else 1.0)
            if averaged and bag:
                column[b] /= len(bag)
        columns.append(column)
    return torch.cat(columns, dim=1)


def sequence(tables: Sequence[Tensor], features: Features, bags: Bags) -> Tensor:
    """[N, D]: the row of every id, zeros for ids outside the table."""
    nothing = torch.zeros(tables[0].shape[1], dtype=torch.float64)
    out = []
    for f, (t, _) in enumerate(features):
        for bag in bags[f]:
            out += [tables[t][row].double() if 0 <= row < len(tables[t]) else nothing for row in bag]
    return torch.stack(out) if out else nothing[None][:0]


def gradients(
    tables: Sequence[Tensor], features: Features, bags: Bags, upstream: Tensor, scales: Scales = None
) -> tuple[list[Tensor], list[Tensor]]:
    """For each table the dense gradient [R, D] of `pooled`, and which rows some id named [R]."""
    dense = [torch.zeros(table.shape, dtype=torch.float64) for table in tables]
    touched = [torch.zeros(len(table), dtype=torch.bool) for table in tables]
    column = 0
    for f, (t, averaged) in enumerate(features):
        dim = tables[t].shape[1]
        for b, bag in enumerate(bags[f]):
            g = upstream[b, column : column + dim].cpu().double()
            for i, row in enumerate(bag):
                if 0 <= row < len(tables[t]):
                    scale = scales[f][b][i] if scales is not None else 1.0
                    dense[t][row] += g * scale / (len(bag) if averaged else 1)
                    touched[t][row] = True
        column += dim
    return dense, touched


def scale_gradient(tables: Sequence[Tensor], features: Features, bags: Bags, upstream: Tensor) -> Tensor:
    """[N]: the gradient of `pooled` by every id's weight."""
    out, column = [], 0
    for f, (t, averaged) in enumerate(features):
        dim = tables[t].shape[1]
        for b, bag in enumerate(bags[f]):
            g = upstream[b, column : column + dim].cpu().double() / (len(bag) if averaged else 1)
            out += [float(g @ tables[t][row].double()) if 0 <= row < len(tables[t]) else 0.0 for row in bag]
        column += dim
    return torch.tensor(out, dtype=torch.float64)


# Formulas of the optimizers, one row at a time, from their papers. `x` holds the row and, by name, what is remembered
# of it; `h` the hyper-parameters; `t` the number of this step. A norm of 0 scales by 1.


def _norm(v: Tensor) -> float:
    return float((v**2).sum()) ** 0.5


def _sgd(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    return h["lr"] * g


def _momentum_sgd(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    x["velocity"] = h["momentum"] * x["velocity"] + g
    return h["lr"] * (g + h["momentum"] * x["velocity"] if h["nesterov"] else x["velocity"])


def _adagrad(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    x["total"] = x["total"] + g**2
    return h["lr"] * g / (x["total"].sqrt() + h["eps"])


def _rowwise_adagrad(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    x["total"] = x["total"] + (g**2).mean()
    return h["lr"] * g / (x["total"].sqrt() + h["eps"])


def _adam_direction(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int, square: Tensor) -> Tensor:
    x["m"] = h["beta1"] * x["m"] + (1 - h["beta1"]) * g
    x["v"] = h["beta2"] * x["v"] + (1 - h["beta2"]) * square
    mean, variance = x["m"] / (1 - h["beta1"] ** t), x["v"] / (1 - h["beta2"] ** t)
    return mean / (variance.sqrt() + h["eps"])


def _adam(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    return h["lr"] * _adam_direction(x, g, h, t, g**2)


def _partial_rowwise_adam(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    return h["lr"] * _adam_direction(x, g, h, t, (g**2).mean())


def _trusted(x: dict[str, Tensor], direction: Tensor, h: dict[str, float]) -> Tensor:
    direction = direction + h["weight_decay"] * x["w"]
    length, reach = _norm(x["w"]), _norm(direction)
    return h["lr"] * direction * (length / reach if length and reach else 1.0)


def _lamb(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    return _trusted(x, _adam_direction(x, g, h, t, g**2), h)


def _partial_rowwise_lamb(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    return _trusted(x, _adam_direction(x, g, h, t, (g**2).mean()), h)


def _lars_sgd(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    length, slope, decay = _norm(x["w"]), _norm(g), h["weight_decay"]
    rate = h["lr"] * (h["eta"] * length / (slope + decay * length) if length and slope else 1.0)
    x["velocity"] = h["momentum"] * x["velocity"] + rate * (g + decay * x["w"])
    return x["velocity"]


def _ftrl(x: dict[str, Tensor], g: Tensor, h: dict[str, float], t: int) -> Tensor:
    before, x["total"] = x["total"], x["total"] + g**2
    x["z"] = x["z"] + g - (x["total"].sqrt() - before.sqrt()) / h["lr"] * x["w"]
    w = torch.zeros_like(g)
    for j, z in enumerate(x["z"].tolist()):
        if abs(z) > h["l1"]:
            rate = (h["beta"] + float(x["total"][j]) ** 0.5) / h["lr"] + h["l2"]
            w[j] = -(z - (h["l1"] if z > 0 else -h["l1"])) / rate
    return x["w"] - w


_FORMULAS: dict[str, tuple[Callable[..., Tensor], dict[str, str]]] = {
    "sgd": (_sgd, {}),
    "momentum_sgd": (_momentum_sgd, {"velocity": "element"}),
    "adagrad": (_adagrad, {"total": "element"}),
    "rowwise_adagrad": (_rowwise_adagrad, {"total": "row"}),
    "adam": (_adam, {"m": "element", "v": "element"}),
    "partial_rowwise_adam": (_partial_rowwise_adam, {"m": "element", "v": "row"}),
    "lamb": (_lamb, {"m": "element", "v": "element"}),
    "partial_rowwise_lamb": (_partial_rowwise_lamb, {"m": "element", "v": "row"}),
    "lars_sgd": (_lars_sgd, {"velocity": "element"}),
    "ftrl": (_ftrl, {"z": "element", "total": "element"}),
}


class Dense:
    """One table and its optimizer in float64; `step` changes the touched rows and no others.

    `states` are by name, [R, D] or [R, 1]; `weight_decay` enters as `decay` says unless the formula has it.
    """

    def __init__(self, table: Tensor, rule: str, hyper: dict[str, float], decay: str = "none") -> None:
        self.table, self.decay, self.hyper = table.cpu().double().clone(), decay, {"weight_decay": 0.0, **hyper}
        self.formula, kinds = _FORMULAS[rule]
        rows, dim = self.table.shape
        self.states = {
            name: torch.zeros(rows, 1 if kind == "row" else dim, dtype=torch.float64) for name, kind in kinds.items()
        }
        self.steps = 0

    def step(self, gradient: Tensor, touched: Tensor) -> None:
        """One optimizer step with a dense gradient [R, D]."""
        self.steps += 1
        for row in touched.nonzero().squeeze(1).tolist():
            w, g, factor = self.table[row], gradient[row], self.hyper["weight_decay"]
            if self.decay == "l2":
                g = g + factor * w
            if self.decay == "decoupled":
                w = w - self.hyper["lr"] * factor * w
            x = {"w": w, **{name: state[row] for name, state in self.states.items()}}
            change = self.formula(x, g, self.hyper, self.steps)
            self.table[row] = w - change
            for name, state in self.states.items():
                state[row] = x[name]
