"""The part of gpu_check.py that holds lookups and updates on a GPU against their references, and against themselves.

A rule, a dtype and a dim are a program of their own, which takes a compiler half a second: dtypes are sections of their
own, and only MAIN_RULES are checked at every dim. `gpu_precompile --checks` makes the programs beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.kernels import (
    ROW_FORMATS,
    RULES as DEFINED,
    check_ids,
    dequantize_rows,
    quantize_rows,
    raise_from_guard,
    sequence_lookup,
)
from shardwise.kernels.lookup import pooled, sequence
from shardwise.kernels.lookup.bounds import OK
from shardwise.kernels.quantized.pooled_lookup import quantized_pooled_lookup_ref
from shardwise.kernels.quantized.rows import quantize_rows_ref
from shardwise.kernels.quantized.sequence_lookup import quantized_sequence_lookup_ref
from shardwise.kernels.row_formats import dequantize_rows_ref
from shardwise.kernels.update import update
from shardwise.perf.gpu_scripts.gpu_sizes import Sizes
from shardwise.perf.suite.batches import Batch, make, optimizer
from shardwise.perf.suite.cases.quantized_batches import make as quantized_batch

RULES = [rule for rule in DEFINED if rule != "gradient"]
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # largest relative error of a tensor


def errors(got: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the largest expected value."""
    got, expected = got.detach().cpu().double(), expected.detach().cpu().double()
    if not bool(got.isfinite().all()):
        return float("inf")
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if got.numel() else 0.0


# rules that differ in what they keep; the others are checked on tables of few dims, for each of which they compile
MAIN_RULES = ("gradient", "sgd", "rowwise_adagrad", "adam")
FEW = ((7, 3), (50, 16), (20, 128))
MIXED = ((40, 8), (30, 1), (7, 3), (50, 16), (9, 64), (20, 128), (11, 256), (5, 20), (60, 8))


def correctness(device: str, sizes: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """Every op on tables of a dtype against its reference, which runs on the CPU."""
    differences: dict[str, float] = {}
    tables, batch_size, length = MIXED[: sizes.checked_tables], sizes.checked_batch, 3
    tolerance, name = DTYPES[dtype], str(dtype).removeprefix("torch.")
    for kind, pooling, weighted in (("sum", "sum", False), ("mean", "mean", False), ("weighted", "mean", True)):
        options: dict[str, Any] = {"pooling": pooling, "weighted": weighted, "dtype": dtype}
        of_kind = f"{name} {kind}"
        _check_pooled(differences, of_kind, make(device, tables, batch_size, length, **options), tolerance, MAIN_RULES)
        few = make(device, FEW[: sizes.checked_tables], batch_size, length, **options)
        _check_pooled(differences, of_kind, few, tolerance, [rule for rule in RULES if rule not in MAIN_RULES])
    flat = make(device, [(40, 16), (9, 16)], batch_size, length, dtype=dtype)
    _check_sequence(differences, name, flat, tolerance)
    if dtype == torch.float32:
        _check_bounds(device)
    bad = {name: error for name, error in differences.items() if error > 1}
    assert not bad, f"differs from the reference, in units of the tolerance: {bad}"
    return {"compared": len(differences), "worst_in_units_of_tolerance": round(max(differences.values()), 4)}


def _check_pooled(
    differences: dict[str, float], name: str, batch: Batch, tolerance: float, rules: Sequence[str]
) -> None:
    host = batch.to("cpu")
    args = (host.weights, host.indices, host.offsets, host.per_id_weights, host.features, host.dims)
    differences[f"pooled_lookup {name}"] = errors(batch.lookup(), pooled.pooled_lookup_ref(*args)) / 1e-5
    for rule in rules:
        state, expected = optimizer(rule, batch), optimizer(rule, host)
        on_device, on_host = replace(batch, weights=batch.weights.clone()), replace(host, weights=host.weights.clone())
        state.update(on_device)
        expected.update(on_host, by=update.fused_update_ref)
        differences[f"fused_update {rule} {name}"] = errors(on_device.weights, on_host.weights) / tolerance
        for number, (got, want) in enumerate(zip(state.states, expected.states, strict=True)):
            differences[f"fused_update {rule} state{number} {name}"] = errors(got, want) / 1e-5
    if host.per_id_weights is not None:
        scale = host.per_id_weights.requires_grad_()
        reference = torch.autograd.grad(pooled.pooled_lookup_ref(*args), scale, host.grad)[0]
        got = torch.ops.shardwise.per_id_weight_gradient(
            batch.grad, batch.weights, batch.indices, batch.offsets, batch.features, batch.dims
        )
        differences[f"per_id_weight_gradient {name}"] = errors(got, reference) / 1e-5


def _check_sequence(differences: dict[str, float], name: str, batch: Batch, tolerance: float) -> None:
    host = batch.to("cpu")
    got = sequence_lookup(batch.weights, batch.indices, batch.offsets, batch.features, 16, batch.segments)
    want = sequence.sequence_lookup_ref(host.weights, host.indices, host.offsets, host.features, 16)
    differences[f"sequence_lookup {name}"] = errors(got, want) / 1e-5
    grad = torch.randn(batch.ids, 16, device=batch.weights.device)
    on_device = replace(batch, weights=batch.weights.clone(), grad=grad)
    on_host = replace(host, weights=host.weights.clone(), grad=grad.cpu())
    optimizer("adagrad", on_device).update(on_device, "sequence")
    optimizer("adagrad", on_host).update(on_host, "sequence", by=update.fused_update_ref)
    differences[f"fused_update sequence {name}"] = errors(on_device.weights, on_host.weights) / tolerance


def _check_bounds(device: str) -> None:
    """A bad id and a bad offset raise from the guard, name the first, and mask the update."""
    batch = make(device, [(40, 8), (9, 8)], 5, 3)
    names = ["feature 'a' of table 'a'", "feature 'b' of table 'b'"]
    offsets = batch.offsets.clone()
    offsets[2] = -1
    bad_id = replace(batch, indices=batch.indices.clone())
    bad_id.indices[-1] = 9
    for bad, error, message in (
        (bad_id, IndexError, "id 9 is outside [0, 9)"),
        (replace(batch, offsets=offsets), ValueError, "decrease"),
    ):
        state, before = optimizer("sgd", bad), bad.weights.clone()
        try:
            check_ids(bad.indices, bad.offsets, bad.features, state.guard, names=names)
            assert state.guard.tolist() != [OK, OK, OK]
            state.update(bad)
            assert torch.equal(bad.weights, before) and int(state.step) == 0, "a bad batch changed the tables"
            raise_from_guard(state.guard, bad.indices, bad.offsets, bad.features, names)
            raise AssertionError(f"nothing raised for {message}")
        except error as raised:
            assert message in str(raised), str(raised)


def torch_path(device: str, sizes: Sizes) -> dict[str, Any]:
    """What runs on a GPU without triton."""
    with patch.object(update, "runs_kernel", lambda t: False), patch.object(pooled, "runs_kernel", lambda t: False):
        batch = make(device, MIXED[:4], 8, 3, pooling="mean", weighted=True)
        differences: dict[str, float] = {}
        _check_pooled(differences, "torch path", batch, 1e-5, ("gradient", *RULES))
    assert max(differences.values()) <= 1, differences
    return {"compared": len(differences)}


def same_bits(device: str, sizes: Sizes) -> dict[str, Any]:
    """20 repeats of the same lookups and updates: a race would change a bit. Stops after `sizes.same_bits_s`."""
    repeats, checked, deadline = sizes.race_repeats, [], time.monotonic() + sizes.same_bits_s
    not_run = []
    for ids in ("hot", "zipf"):
        for dim in sizes.dims[:2]:
            batch = make(device, [(min(sizes.rows, 100_000), dim)] * 2, sizes.batch, sizes.length, ids=ids)
            first = batch.lookup()
            assert all(torch.equal(batch.lookup(), first) for _ in range(repeats)), f"lookup, {ids}, dim {dim}"
            for rule in RULES:
                if time.monotonic() > deadline:
                    not_run.append(f"{rule}, {ids} D={dim}")
                    continue
                expected: list[Tensor] = []
                for _ in range(repeats):
                    updated, state = replace(batch, weights=batch.weights.clone()), optimizer(rule, batch)
                    state.update(updated)
                    got = [updated.weights, *state.states]
                    expected = expected or got
                    same = [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]
                    assert all(same), f"{rule}, {ids}, dim {dim}"
            checked.append(f"{ids} D={dim}")
    return {"repeats": repeats, "checked": checked, "no_time_for": not_run}


def quantized_correctness(device: str, sizes: Sizes) -> dict[str, Any]:
    """Every op and format of quantized rows against its reference, which runs on the CPU: in every bit.

    References round each product and sum by itself, as the CPU does.
    """
    compared = 0
    for format, kind in ROW_FORMATS.items():
        for dim in (7, *sizes.dims):
            for scale_dtype in kind.scale_dtypes or (torch.float16,):
                rows = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim)) * 0.01
                expected, got = (
                    quantize_rows_ref(rows, format, scale_dtype),
                    quantize_rows(rows.to(device), format, scale_dtype),
                )
                back = dequantize_rows(*got, dim, format).cpu()
                same = [torch.equal(result.cpu(), reference) for result, reference in zip(got, expected, strict=True)]
                same.append(torch.equal(back, dequantize_rows_ref(*expected, dim, format)))
                assert all(same), (
                    f"payload, scales, values of {format}, D={dim}, {scale_dtype} are the reference's: {same}"
                )
            there = quantized_batch(device, format, 2, 40, dim, sizes.checked_batch, 5, weighted=True)
            here = there.to("cpu")
            same = [
                torch.equal(there.pooled().cpu(), here.pooled(quantized_pooled_lookup_ref)),
                torch.equal(there.sequence().cpu(), here.sequence(quantized_sequence_lookup_ref)),
            ]
            assert all(same), f"pooled and in sequence, {format}, D={dim}: {same}"
            compared += 2 + 3 * max(1, len(kind.scale_dtypes))
    return {"compared": compared}
