"""A program's own default dtype and device are not those of our tensors.

Kernels that write through addresses must not take theirs from a default. Memory of a loop that lies elsewhere is
written at an address of another device: the process died.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
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
    results = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(torch.float32)
        batch = inputs(HOT, torch_device(device))
        state, grad = optimizer("adagrad", batch), upstream(batch)
        torch.set_default_dtype(default)
        out = pooled_lookup(*batch.lookup)
        weights = batch.weights.clone()
        fused_update(*update_args(weights, state, grad, batch))
        results.append((out, weights, *state.states))
    for got, expected in zip(results[1], results[0], strict=True):
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


CALLS = """
import sys
import torch
from torch import tensor as t

if sys.argv[1] == "torch":
    sys.modules["numba"] = None

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, RowWiseAdagrad, apply_optimizer_in_backward
from shardwise import KeyedJaggedTensor
from shardwise import kernels as k

lengths, offsets, both, other = t([2, 1]), t([0, 2, 3]), t([0, 1, 1, 3]), t([0, 1, 3])
turn, straight, ids = t([1, 0]), t([0, 1]), t([1, 0, 3])
v, rows, padded = torch.arange(3.0), torch.rand(3, 4), torch.rand(2, 2, 4)
blocks, bins = t([2, 2]), torch.ones(4, dtype=torch.float64)
vectors, matrices, unary = torch.rand(2, 3), torch.rand(2, 4, 3), torch.rand(1, 4, 1)
kjt = KeyedJaggedTensor(["a", "b"], ids, torch.rand(3), t([1, 0, 1, 1]))
slots, records = [torch.rand(2, 4)], torch.zeros(3, 64, dtype=torch.uint8)
keys = t([3, 1, 2], dtype=torch.int32)
table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=5, feature_names=["a", "b"])
tables = EmbeddingBagCollection(tables=[table], device="cpu")
trained = EmbeddingBagCollection(tables=[table], device="cpu")
apply_optimizer_in_backward(RowWiseAdagrad, trained.parameters(), {"lr": 0.0})


def step():
    out = trained(kjt).values()
    out.backward(torch.ones_like(out))
    return next(trained.parameters())


calls = {
    "cumsum": lambda: k.complete_cumsum(lengths),
    "range": lambda: k.offsets_range(offsets, 3),
    "invert": lambda: k.invert_permute(turn),
    "1d": lambda: k.permute_1d(turn, lengths, v),
    "2d": lambda: k.permute_2d(turn, lengths.view(2, 1), v, rows[:, 0]),
    "segments": lambda: k.permute_segments([v], [2, 1], [1, 0]),
    "expand": lambda: k.expand_into_jagged_permute(turn, offsets, other, 3),
    "sum": lambda: k.segment_sum(offsets, rows),
    "pack": lambda: k.pack_segments(rows, lengths, 2),
    "unpack": lambda: k.unpack_segments(padded, lengths),
    "pad": lambda: k.jagged_to_padded_dense(rows, offsets, 2),
    "pad ids": lambda: k.jagged_to_padded_dense(ids, offsets, 2),
    "pad twice": lambda: k.jagged_to_padded_dense(rows, [offsets, both], [2, 2]),
    "unpad": lambda: k.padded_dense_to_jagged(padded, offsets),
    "add": lambda: k.jagged_dense_add(rows, offsets, padded),
    "multiply": lambda: k.jagged_dense_mul(rows, offsets, padded),
    "dense bmm": lambda: k.jagged_dense_bmm(rows, offsets, matrices),
    "jagged bmm": lambda: k.jagged_jagged_bmm(rows, rows, offsets),
    "softmax": lambda: k.jagged_softmax(rows, offsets),
    "vectors": lambda: k.jagged_vector_product(vectors, rows, offsets),
    "unary": lambda: k.batched_unary_embeddings(unary, t([0, 4], device="cpu"), offsets, ids),
    "select": lambda: k.jagged_index_select(rows, lengths, turn),
    "index add": lambda: k.jagged_index_add(rows, lengths, straight, lengths),
    "keyed": lambda: k.keyed_jagged_index_select(v, lengths, offsets, straight[:1], 1),
    "pooled": lambda: k.permute_pooled(rows, [2, 2], [1, 0]),
    "buckets": lambda: k.block_bucketize(lengths, ids, blocks, 2, bucketize_pos=True, sequence=True),
    "batches": lambda: k.block_bucketize(lengths, ids, blocks, 2, batch_sizes=lengths - lengths + 1),
    "unique": lambda: k.unique_ids(ids),
    "tables": lambda: k.jagged_unique(ids, offsets, [9, 9]),
    "calibrate": lambda: k.histogram_binning_calibration(v, bins, bins, positive_weight=1.0),
    "permute": lambda: kjt.unsync().permute([1, 0]).weights(),
    "dict": lambda: [jt.offsets() for jt in kjt.to_dict().values()],
    "lookup": lambda: tables(kjt).values().detach(),
    "update": step,
    "moves": lambda: (k.move_rows(slots, records, turn, straight, turn - 2), records),
    "victims": lambda: k.lowest(keys, keys - keys, other[::2], straight[1:] + 1, 3),
    "first values": lambda: k.initial_rows(ids, ids[:1], 0, 4, "normal", 0.0, 1.0, torch.float16),
}


def tensors(found):
    found = found if isinstance(found, (tuple, list)) else [found]
    return [tensor.detach().clone() for tensor in found if isinstance(tensor, torch.Tensor)]


wanted = {name: tensors(call()) for name, call in calls.items()}
torch.set_default_device("meta")
for name, call in calls.items():
    found = tensors(call())
    assert all(tensor.is_cpu for tensor in found), name
    assert len(found) == len(wanted[name]) and all(map(torch.equal, found, wanted[name])), name
print("all", len(calls))
"""


@pytest.mark.parametrize("path", ["torch", "numba"])
def test_ops_on_the_cpu_leave_the_default_device_alone(path: str) -> None:
    if path == "numba" and importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not installed")
    result = subprocess.run([sys.executable, "-c", CALLS, path], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "all 37\n"), result.stderr[-2000:]
