"""The default dtype of torch is a program's own; kernels that write through addresses must not take theirs from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_inputs import UPDATES, Case, assert_same_bits, inputs, optimizer, torch_device, update_args, upstream

from shardwise.kernels import fused_update, pooled_lookup
from shardwise.kernels.cpu import update as cpu_update

HOT = Case("hot", tables=((12, 8), (1, 8)), features=((0, False), (1, False)), batch=40, lengths=(0, 8))


@pytest.fixture
def _restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", UPDATES)
def test_lookups_and_updates_have_their_bits_under_any_default_dtype(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and partial sums took the default dtype, and the compiled loops wrote past them."""
    # runs of one row that are summed in parts
    monkeypatch.setattr(cpu_update, "_LONG", 40)
    monkeypatch.setattr(cpu_update, "_ALONE", 0)
    found = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(torch.float32)
        batch = inputs(HOT, torch_device(device))
        state, grad = optimizer("adagrad", batch), upstream(batch)
        torch.set_default_dtype(default)
        out = pooled_lookup(*batch.lookup)
        weights = batch.weights.clone()
        fused_update(*update_args(weights, state, grad, batch))
        found.append((out, weights, *state.states))
    for got, expected in zip(found[1], found[0], strict=True):
        assert got.dtype == torch.float32
        assert_same_bits(got, expected)


@pytest.mark.parametrize("device", UPDATES)
def test_a_weight_for_each_id_or_none(device: str) -> None:
    """Loops that take addresses read what lay behind too few weights."""
    batch = inputs(HOT, torch_device(device))
    few = torch.ones(3, device=batch.weights.device)
    args = list(batch.lookup)
    args[3] = few
    with pytest.raises(ValueError, match=f"3 per-id weights for {batch.indices.shape[0]} ids"):
        pooled_lookup(*args)
