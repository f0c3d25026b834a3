"""Tolerances of compiled kernels against their references, and why: the one table of it.

A ratio is of the largest value of the tensor that is compared: 6e-8 is half a unit in the last place of fp32 there. A
result of fp16 or bf16 is rounded once more, and may fall to the neighbour: 1e-3 and 8e-3.
"""

from __future__ import annotations

import torch

from .agreement import Tolerance

_HALVES = {torch.float16: 1e-3, torch.bfloat16: 8e-3}

SAME = Tolerance(
    "same bits", {},
    "Copies, integers, quantized rows and lookups without weights: the same roundings, and sums in the same order.",
)  # fmt: skip
WEIGHTED = Tolerance(
    "weighted sum", {torch.float32: 2.4e-7, **_HALVES},
    "The compiler makes one fused multiply-add of a row times its id's weight and the sum: one rounding where the"
    " reference has two, once an id.",
)  # fmt: skip
RULE = Tolerance(
    "rule", {torch.float32: 2.4e-7, **_HALVES},
    "Products and sums of a rule are fused (w - lr * g; m + rate * (g - m)), and what a rule adds up over a row"
    " (rowwise_adagrad, lamb, lars_sgd, partial rowwise forms) is added in another order than torch's; gradients here"
    " are multiples of 1/8, whose sums over ids are exact. Without fusion the rules that add over no row have the"
    " reference's bits: RULE_BY_STEPS.",
)  # fmt: skip
RULE_BY_STEPS = Tolerance(
    "rule, not fused", {},
    "Compiled with enable_fp_fusion=False each product and sum is rounded by itself, as torch rounds it.",
)  # fmt: skip
AVERAGED = Tolerance(
    "averaged gradients", {torch.float32: 6e-7, **_HALVES},
    "As for a rule; besides, gradients over a bag's length are no multiples of 1/8, and the kernel adds those of a row"
    " in chunks of 32 where the reference adds one after another.",
)  # fmt: skip
DOT = Tolerance(
    "dot product over a row", {torch.float32: 6e-7, **_HALVES},
    "A gradient of a per-id weight is a sum over a row's columns, which lanes share: another order, and fused.",
)  # fmt: skip
SUM = Tolerance(
    "sum", {torch.float32: 0.0, **_HALVES},
    "Sums of multiples of 1/8, exact in fp32 in every order; results of 16 bits are rounded once.",
)  # fmt: skip
PRODUCT = Tolerance(
    "matrix product", {torch.float32: 1e-6, **_HALVES},
    "Sums of products, fused and in the order of a tile: up to 70 terms of fp32.",
)  # fmt: skip
EXPONENTIAL = Tolerance(
    "softmax", {torch.float32: 1e-6, **_HALVES},
    "ex2.approx of x * log2(e) is two units off at most, and sums over a bag are in another order.",
)  # fmt: skip
CALIBRATION = Tolerance(
    "calibration", {torch.float64: 1e-14, torch.float32: 3e-7, **_HALVES},
    "The exponential is the device's; everything else is fp64.",
)  # fmt: skip

TOLERANCES = (
    SAME, WEIGHTED, RULE, RULE_BY_STEPS, AVERAGED, DOT, SUM, PRODUCT, EXPONENTIAL, CALIBRATION,
)  # fmt: skip
