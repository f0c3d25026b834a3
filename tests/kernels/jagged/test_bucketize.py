"""`block_bucketize` divides ids as lists in Python would, on every path, with gradients and errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bucket_inputs import CASES, CPU_PATHS, Bags, lists, running_on
from hypothesis import given, settings, strategies as st
from kernel_inputs import DEVICES, UPDATES, assert_compiled_equals_eager, assert_same_bits
from torch import Tensor

from shardwise.kernels import block_bucketize
from shardwise.kernels.cpu import buckets as cpu_buckets
from shardwise.kernels.jagged.bucketize import block_bucketize_ref

LOOPS = cpu_buckets, "loops"
CPU = torch.device("cpu")
INTEGERS = [torch.int32, torch.int64]


def assert_divided(batch: Bags, result: Any) -> None:
    expected = batch.model()
    for name, values in expected.items():
        got = getattr(result, name)
        if name == "weights" and not batch.weighted:
            assert got is None
            continue
        assert got.tolist() == values, name
        kept = {"lengths": batch.lengths_dtype, "weights": torch.float32}
        assert got.dtype == kept.get(name, batch.ids_dtype), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", UPDATES)
def test_ids_go_where_lists_say(where: torch.device, case: str) -> None:
    batch = CASES[case]
    assert_divided(batch, block_bucketize(*batch.tensors(where), **batch.options(where)))


@pytest.mark.parametrize("case", CASES)
def test_the_reference_says_the_same(case: str) -> None:
    batch = CASES[case]
    options = batch.options(CPU)
    options["keep_orig_idx"] = torch.tensor(batch.keep) if batch.block_sizes else False
    assert_divided(batch, block_bucketize_ref(*batch.tensors(CPU), **options))


@st.composite
def batches(draw: Any) -> Bags:
    features, buckets = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    variable = draw(st.booleans())
    batch = draw(st.integers(0, 4))
    id = st.one_of(st.integers(0, 30), st.integers(0, 2**31 - 1))
    bags = [
        [draw(st.lists(id, max_size=4)) for _ in range(draw(st.integers(0, 4)) if variable else batch)]
        for _ in range(features)
    ]
    steps = st.lists(st.integers(0, 6), min_size=buckets, max_size=buckets)
    borders = [[0, *torch.tensor(draw(steps)).cumsum(0).tolist()] for _ in range(features)]
    return Bags(
        bags,
        [draw(st.integers(0, 7)) for _ in range(features)],
        buckets,
        borders=borders if draw(st.booleans()) else None,
        totals=[buckets * draw(st.integers(1, 3)) for _ in range(features)] if draw(st.booleans()) else None,
        keep=draw(st.one_of(st.booleans(), st.lists(st.booleans(), min_size=features, max_size=features))),
        ids_dtype=draw(st.sampled_from(INTEGERS)),
        lengths_dtype=draw(st.sampled_from(INTEGERS)),
        weighted=draw(st.booleans()),
        variable=variable,
    )


@pytest.mark.parametrize("device", CPU_PATHS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(batch=batches())
def test_any_batch_is_divided_as_lists_are(device: str, batch: Bags) -> None:
    assert_divided(batch, block_bucketize(*batch.tensors(CPU), **batch.options(CPU)))


def test_threads_divide_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    lengths = torch.randint(0, 7, (3 * 100,))
    n = int(lengths.sum())
    args = (lengths, torch.randint(0, 1000, (n,)), torch.tensor([100, 0, 7]), 7)
    options: dict[str, Any] = {"weights": torch.rand(n), "bucketize_pos": True, "sequence": True}
    with running_on("numba"):
        alone = block_bucketize(*args, **options)
        monkeypatch.setattr(cpu_buckets, "parts_of", lambda ids, most: min(8, most))
        threads = block_bucketize(*args, **options)
        for single, other in zip(alone, threads, strict=True):
            assert single is not None and other is not None
            assert_same_bits(other, single)
        args[1][400] = -5
        with pytest.raises(ValueError, match=re.escape("ids[400] is -5")):
            block_bucketize(*args, **options)
        lengths[250] = -1
        with pytest.raises(ValueError, match=re.escape("lengths[250] is -1")):
            block_bucketize(*args, **options)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_without_a_look_at_values_bad_ids_stay_and_ids_of_no_bag_come_last(where: torch.device) -> None:
    """A negative id goes to bucket 0 as it is, for the lookup's check to name it."""
    ids = torch.tensor([5, -7, 2, 1, 88, 99], device=where)
    sizes = torch.tensor([2], device=where)
    result = block_bucketize(torch.tensor([3, 1], device=where), ids, sizes, 3, sequence=True)
    assert lists(result)[:2] == [[1, 1, 1, 0, 1, 0], [-7, 1, 0, 1, 88, 99]]
    assert lists(result)[4] == [3, 0, 2, 1, 4, 5]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("device", UPDATES)
def test_gradients_of_weights_come_back_through_the_places(where: torch.device, sequence: bool) -> None:
    batch = CASES["outside and raw"]
    weights = torch.rand(len(batch.flat), dtype=torch.float64, device=where, requires_grad=True)
    upstream = torch.arange(float(len(batch.flat)), dtype=torch.float64, device=where)
    result = block_bucketize(*batch.tensors(where), weights=weights, sequence=sequence)
    assert result.weights is not None
    (grad,) = torch.autograd.grad(result.weights, weights, upstream)
    assert grad.tolist() == upstream[torch.tensor(batch.model()["unbucketize_permute"], device=where)].tolist()
    assert (result.unbucketize_permute is not None) == sequence


@pytest.mark.parametrize("device", CPU_PATHS)
def test_gradcheck(where: torch.device) -> None:
    batch = CASES["borders"]
    options = batch.options(where)
    weights = torch.rand(len(batch.flat), dtype=torch.float64, requires_grad=True)

    def divide(w: Tensor) -> Tensor:
        divided = block_bucketize(*batch.tensors(where), **{**options, "weights": w}).weights
        assert divided is not None
        return divided

    assert torch.autograd.gradcheck(divide, weights)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", UPDATES)
def test_weights_of_any_type_are_moved_bit_for_bit(where: torch.device, dtype: torch.dtype) -> None:
    batch = CASES["even"]
    weights = torch.randn(len(batch.flat), device=where).to(dtype)
    result = block_bucketize(*batch.tensors(where), weights=weights, sequence=True)
    assert result.weights is not None and result.unbucketize_permute is not None
    assert_same_bits(result.weights[result.unbucketize_permute], weights)


@pytest.mark.parametrize("device", UPDATES)
def test_the_same_bits_twice_from_inputs_that_are_not_contiguous(where: torch.device) -> None:
    batch = CASES["long bag"]
    lengths, ids, sizes, buckets = batch.tensors(where)
    first = block_bucketize(lengths, ids, sizes, buckets, bucketize_pos=True, sequence=True)
    lengths, ids, sizes = (torch.stack([tensor, tensor], 1)[:, 0] for tensor in (lengths, ids, sizes))
    second = block_bucketize(lengths, ids, sizes, buckets, bucketize_pos=True, sequence=True)
    for earlier, later in zip(first, second, strict=True):
        assert (earlier is None and later is None) or torch.equal(earlier, later)  # type: ignore[arg-type]


def test_it_compiles_with_its_backward_for_any_size() -> None:
    def loss(lengths: Tensor, ids: Tensor, sizes: Tensor, weights: Tensor) -> Tensor:
        result = block_bucketize(lengths, ids, sizes, 3, weights=weights, sequence=True)
        assert result.weights is not None
        return (result.weights * result.ids).sum()

    def batch(case: str) -> tuple[Tensor, ...]:
        lengths, ids, sizes, _ = Bags(CASES[case].bags[:1], [3], 3).tensors(CPU)
        return lengths, ids, sizes, torch.rand(len(ids), requires_grad=True)

    with running_on("cpu"):
        assert_compiled_equals_eager(loss, map(batch, ("even", "varying batches")), 0.0)


T = torch.tensor
GOOD: dict[str, Any] = {"lengths": T([2, 1]), "ids": T([1, 2, 3]), "block_sizes": T([4]), "num_buckets": 2}
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lengths": T([1.0])}, TypeError, "lengths must be int32 or int64, got float32"),
    ({"ids": T([True])}, TypeError, "ids must be int32 or int64, got bool"),
    ({"ids": T([[1]])}, ValueError, "ids must have one dimension, got shape (1, 1)"),
    ({"num_buckets": 0}, ValueError, "num_buckets must be positive, got 0"),
    ({"weights": torch.rand(2)}, ValueError, "weights must have shape (3,) as ids, got (2,)"),
    ({"block_sizes": T([4, 4, 4])}, ValueError, "2 lengths do not divide among 3 block_sizes"),
    ({"block_sizes": T([4], device="meta")}, ValueError, "block_sizes is on meta, ids on cpu"),
    ({"block_sizes": T([-4])}, ValueError, "block_sizes[0] is -4, block sizes must not be negative"),
    ({"lengths": T([4, -1])}, ValueError, "lengths[1] is -1, lengths must not be negative"),
    ({"lengths": T([2, 2])}, ValueError, "lengths add up to 4, but there are 3 ids"),
    ({"lengths": T([2**62, 2**62, 2**62, 2**62 + 3])}, ValueError, "lengths[3] is 4611686018427387907 of 3 ids"),
    ({"lengths": T([0, 2])}, ValueError, "lengths add up to 2, but there are 3 ids"),
    ({"ids": T([1, -2, 3])}, ValueError, "ids[1] is -2, ids must not be negative"),
    ({"batch_sizes": [1]}, ValueError, "batch_sizes add up to 1, but there are 2 lengths"),
    ({"batch_sizes": [1, 1]}, ValueError, "batch_sizes must have shape (1,), got (2,)"),
    ({"batch_sizes": [3, -1], "block_sizes": T([4, 4])}, ValueError, "batch_sizes must not be negative, got [3, -1]"),
    ({"total_num_blocks": [3]}, ValueError, "total_num_blocks must be positive multiples of 2 buckets, got [3]"),
    ({"total_num_blocks": T([2.0])}, TypeError, "total_num_blocks must be integers, got torch.float32"),
    ({"keep_orig_idx": [True, False]}, ValueError, "keep_orig_idx must have shape (1,), got (2,)"),
    ({"block_bucketize_pos": []}, ValueError, "block_bucketize_pos must be of 1 features, got 0"),
    ({"block_bucketize_pos": [T([0, 1])]}, ValueError, "block_bucketize_pos[0] must have 3 borders of 2 buckets"),
    ({"block_bucketize_pos": [T([0, 4, 3])]}, ValueError, "must begin at 0 and not decrease, got [0, 4, 3]"),
    ({"block_bucketize_pos": [T([1, 2, 3])]}, ValueError, "must begin at 0 and not decrease, got [1, 2, 3]"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), BAD, ids=[message for _, _, message in BAD])
@pytest.mark.parametrize("device", CPU_PATHS)
def test_bad_input_is_named(device: str, wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {**GOOD, **wrong}
    with pytest.raises(error, match=re.escape(message)):
        args = [arguments.pop(name) for name in ("lengths", "ids", "block_sizes", "num_buckets")]
        block_bucketize(*args, **arguments)
