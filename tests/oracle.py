"""A slow, obvious, dense float64 model of lookups and optimizers, over tables [R, D] and batches that are lists.

`bags[f][b]` are the ids of feature f in sample b, `scales[f][b]` their weights; a feature is (table, averaged).
It shares no line with the package.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Dense:
    """One table and its optimizer in float64; `step` changes the touched rows and no others."""

    def __init__(
        self, table: Tensor, rule: str, *, lr: float, eps: float, beta1: float = 0.9, beta2: float = 0.99
    ) -> None:
        self.table, self.rule = table.cpu().double().clone(), rule
        self.lr, self.eps, self.beta1, self.beta2 = lr, eps, beta1, beta2
        self.steps = 0
        self.first = torch.zeros(len(table), 1 if rule == "rowwise_adagrad" else table.shape[1], dtype=torch.float64)
        self.second = torch.zeros_like(self.table)

    def step(self, gradient: Tensor, touched: Tensor) -> None:
        """One optimizer step with a dense gradient [R, D]."""
        self.steps += 1
        for row in touched.nonzero().squeeze(1).tolist():
            g = gradient[row]
            if self.rule == "sgd":
                change = g
            elif self.rule == "adagrad":
                self.first[row] += g**2
                change = g / (self.first[row].sqrt() + self.eps)
            elif self.rule == "rowwise_adagrad":
                self.first[row] += (g**2).mean()
                change = g / (self.first[row].sqrt() + self.eps)
            else:
                self.first[row] = self.beta1 * self.first[row] + (1 - self.beta1) * g
                self.second[row] = self.beta2 * self.second[row] + (1 - self.beta2) * g**2
                mean = self.first[row] / (1 - self.beta1**self.steps)
                variance = self.second[row] / (1 - self.beta2**self.steps)
                change = mean / (variance.sqrt() + self.eps)
            self.table[row] -= self.lr * change
