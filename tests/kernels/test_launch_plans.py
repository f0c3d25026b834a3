"""What the host does for a launch does not grow with the number of features, and is what it was.

Work is counted as bytecodes of kernels/ on a device that is not there: no launch, no clock. Triton is imported, and
kernels are made, when one is first used.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import KeyedJaggedTensor, kernels
from shardwise.kernels import launch_plans
from shardwise.kernels._op import HAS_TRITON, INTERPRETED, next_power_of_2
from shardwise.kernels.features import (
    Feature,
    Segment,
    column_offsets,
    flatten_segments,
    launch_order,
    row_alignment,
    unflatten_segments,
)
from shardwise.kernels.launch_plans import gradient_plan, lookup_plan, source_alignment
from shardwise.kernels.quantized.pooled_lookup import quantized_plan, unit_alignment, unit_count
from shardwise.kernels.row_formats import row_format
from shardwise.kernels.rule import rule_named
from shardwise.kernels.update.step import numbers_of
from shardwise.kernels.update.update import _kernel_numbers
from shardwise.perf.counts.fake_cuda import FakeCudaTensor
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda

needs_triton = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")
FOLDER = str(Path(kernels.__file__).resolve().parent)
DIMS = [(8,), (128,) * 5, (3, 8, 64, 8, 20, 1, 8), tuple(range(1, 70)), (16, 1024, 12, 16)]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: that would be more launches."""
    yield


def bytecodes(call: Callable[[], object]) -> int:
    """How many run in functions of kernels/."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.replace("/shardwise/kernels", "/kernels").startswith(FOLDER):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return seen

    before = sys.gettrace()
    sys.settrace(seen)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def there(*shape: int, dtype: torch.dtype = torch.float32) -> FakeCudaTensor:
    """A tensor on the device that is not there, without values."""
    return FakeCudaTensor(torch.empty(*shape, dtype=dtype, device="meta"))


def calls_of(features: int, mixed: bool) -> dict[str, Callable[[], object]]:
    """Calls over so many features, of one width or of three."""
    dims = [(8, 16, 20)[f * 3 // features] if mixed else 16 for f in range(features)]
    batch, ids, rows = 4, 64, 10
    names = [f"feature 'f{f}' (table 't{f}')" for f in range(features)]
    weights, index = there(rows * sum(dims)), there(ids, dtype=torch.int64)
    offsets, table = there(features * batch + 1, dtype=torch.int64), there(features, 8, dtype=torch.int64)
    guard, step, grad = there(3, dtype=torch.int64), there(1, dtype=torch.int64), there(batch, sum(dims))
    segments, first, base = [], 0, 0
    for dim, members in groupby(dims):
        count = len(list(members)) * rows
        segments.append(Segment(dim, first, first + count, base))
        first, base = first + count, base + count * dim
    flat = flatten_segments(segments)
    payload, scales = there(rows * sum(dims), dtype=torch.uint8), there(2 * rows * features)
    hyper = there(3, dtype=torch.float64)
    rows_of_ids, state = there(ids, 16), there(first)
    backwards = list(range(features))[::-1]
    calls: dict[str, Callable[[], object]] = {
        "pooled lookup": lambda: kernels.pooled_lookup(weights, index, offsets, None, table, dims, flat, "sum"),
        "check": lambda: kernels.check_ids(index, offsets, table, guard, names=names, step_guard=guard),
        "update": lambda: kernels.fused_update(
            weights, [state], step, grad, index, offsets, None, table, dims, flat, "rowwise_adagrad", hyper,
            guard, "sum",
        ),
        "weight gradient": lambda: kernels.per_id_weight_gradient(grad, weights, index, offsets, table, dims),
        "quantized lookup": lambda: kernels.quantized_pooled_lookup(
            payload, scales, index, offsets, None, table, dims, "int8"
        ),
        "permute": lambda: kernels.permute_pooled(grad, dims, backwards),
    }  # fmt: skip
    if not mixed:
        calls |= {
            "sequence lookup": lambda: kernels.sequence_lookup(weights, index, offsets, table, 16, flat),
            "quantized sequence": lambda: kernels.quantized_sequence_lookup(
                payload, scales, index, offsets, table, 16, "int8"
            ),
            "update of a sequence": lambda: kernels.fused_update(
                weights, [state], step, rows_of_ids, index, offsets, None, table, dims, flat,
                "rowwise_adagrad", hyper, guard, "sequence",
            ),
        }  # fmt: skip
    return calls


@needs_triton
@pytest.mark.parametrize("mixed", [False, True], ids=["one width", "three widths"])
def test_the_host_does_no_more_for_856_features_than_for_26(mixed: bool) -> None:
    """A lookup took Python 45 us over 26 features and 650 us over 856, a check 15 and 77, an update 90 and 289."""
    few, many = calls_of(26, mixed), calls_of(856, mixed)
    with use_fake_cuda(seen := Counted()):
        for name, call in few.items():
            call()
            seen.clear()
            once = bytecodes(call)
            launched = dict(seen.kernels)
            many[name]()
            seen.clear()
            often = bytecodes(many[name])
            assert launched == dict(seen.kernels), name
            assert launched, name
            # searches are deeper, by a bit for each doubling
            assert 50 < often <= once + 20, (name, once, often)


def by_features(dims: tuple[int, ...], itemsize: int, out_itemsize: int) -> list[tuple[int, ...]]:
    """Launches of a lookup, from each of its features."""
    columns, order = column_offsets(dims), launch_order(dims)
    launches = []
    for width in sorted({next_power_of_2(dim) for dim in dims}):
        fs = [f for f in order if next_power_of_2(dims[f]) == width]
        starts = [columns[f] for f in fs if columns[f]] + [columns[-1]]
        launches.append(
            (
                order.index(fs[0]), len(fs), width, min(row_alignment(dims[f], itemsize) for f in fs),
                min(row_alignment(n, out_itemsize) for n in starts), min(row_alignment(dims[f], 1) for f in fs),
            )
        )  # fmt: skip
    return launches


@pytest.mark.parametrize("dims", DIMS)
def test_a_plan_says_of_its_features_what_each_of_them_needs(dims: tuple[int, ...]) -> None:
    for itemsize, out_itemsize in ((4, 4), (2, 4), (4, 2), (2, 2)):
        plan = lookup_plan(dims, itemsize, out_itemsize)
        assert plan.columns == sum(dims)
        assert list(map(tuple, plan.launches)) == by_features(dims, itemsize, out_itemsize)
        launches = gradient_plan(dims, itemsize, out_itemsize).launches
        classes = {(next_power_of_2(dim), row_alignment(dim, itemsize)) for dim in dims}
        assert [(launch.width, launch.align) for launch in launches] == sorted(classes)
        assert [launch.first for launch in launches] == column_offsets([launch.features for launch in launches])[:-1]
        assert sum(launch.features for launch in launches) == len(dims)
    for name in ("int8", "int4", "int2", "fp16"):
        kind = row_format(name)
        for launch in quantized_plan(dims, name, 4).launches:
            fs = launch_order(dims)[launch.first : launch.first + launch.features]
            assert {next_power_of_2(unit_count(dims[f], kind)) for f in fs} == {launch.width}
            assert min(unit_alignment(dims[f], kind) for f in fs) == launch.align
    columns = column_offsets(dims)
    for dim in set(dims):
        numbers = [dim, sum(dims), *(columns[f] for f, other in enumerate(dims) if other == dim)]
        assert source_alignment(dims, dim) == min(row_alignment(n, 4) for n in numbers if n)


def test_plans_hold_no_tensor_and_are_bounded() -> None:
    def numbers(value: Any) -> bool:
        return all(map(numbers, value)) if isinstance(value, tuple) else type(value) is int

    assert numbers(lookup_plan((4, 8, 8), 4, 4)) and numbers(gradient_plan((4, 8, 8), 4, 4))
    for cached in (lookup_plan, gradient_plan, source_alignment, quantized_plan):
        assert cached.cache_info().maxsize == launch_plans.PLANS


def test_segments_come_back_as_they_were_and_are_the_callers_own() -> None:
    segments = [Segment(8, 0, 10, 0), Segment(16, 10, 12, 80)]
    restored = unflatten_segments(flatten_segments(segments))
    assert restored == segments
    restored.clear()
    assert unflatten_segments(flatten_segments(segments)) == segments


@needs_triton
def test_a_bad_id_is_named_though_the_kernel_gets_no_names() -> None:
    names = ["feature 'a' (table 't')", "feature 'b' (table 'u')"]
    given: list[list[str]] = []

    def checked(*args: Any) -> None:
        given.append(args[4])

    ids, offsets = torch.tensor([1, 9]), torch.tensor([0, 1, 2])
    features = kernels.pack_features([Feature(0, 5, 4, 0), Feature(20, 5, 4, 5)])
    with pytest.raises(IndexError, match="feature 'b'"):
        kernels.check_ids(ids, offsets, features, kernels.new_guard(), names=names)
    with use_fake_cuda(Counted()):
        moved: list[Tensor] = [tensor.to(CUDA) for tensor in (torch.tensor([1, 4]), offsets, features)]
        guard = kernels.new_guard(CUDA)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.ops.shardwise, "check_ids", checked)
            kernels.check_ids(moved[0], moved[1], moved[2], guard, names=names)
        assert given == [[]]
        guard[0] = 1
        with pytest.raises(IndexError, match="feature 'b' .*id 4 is outside"):
            kernels.raise_from_guard(guard, moved[0], moved[1], moved[2], names)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.25), (0.0, 1 - 2**-40), (0.987654321, 0.1)])
def test_numbers_of_a_step_are_those_of_the_formula_bit_for_bit(betas: tuple[float, float]) -> None:
    """Both powers are taken at once; each must be what it is by itself, and what a kernel rounds what torch rounds."""
    rule = rule_named("adam")
    hyper = torch.tensor([0.01, 1e-8, *betas, 0.1], dtype=torch.float64)
    lr, eps, beta1, beta2, decay = hyper.unbind()
    for count in (*range(1, 200), 1000, 65537, 2**40):
        step = torch.tensor([count])
        power = step[0].double()
        numbers = {
            "lr": lr, "eps": eps, "rate1": 1 - beta1, "rate2": 1 - beta2, "part1": 1 - beta1**power,
            "part2": 1 - beta2**power,
        }  # fmt: skip
        expected = torch.stack([*(numbers[name] for name in rule.numbers), decay])
        assert torch.equal(_kernel_numbers(rule, hyper, step, "l2"), expected)
        assert torch.equal(numbers_of(rule, hyper, step, "l2"), expected.float())
        expected[-1] = decay * lr
        assert torch.equal(_kernel_numbers(rule, hyper, step, "decoupled"), expected)
        assert torch.equal(numbers_of(rule, hyper, step, "decoupled"), expected.float())


@needs_triton
def test_a_step_of_adam_launches_five_kernels_less() -> None:
    """Eleven small kernels of torch computed its numbers."""
    from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, apply_optimizer_in_backward

    with use_fake_cuda(seen := Counted()):
        model = EmbeddingBagCollection([EmbeddingBagConfig(10, 16, "t", feature_names=["f"])], device=CUDA)
        apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
        for _ in range(2):
            ids, offsets = (torch.arange(n).to(CUDA) for n in (4, 5))
            out = model(KeyedJaggedTensor(["f"], ids, offsets=offsets)).values()
            grad = torch.ones_like(out)
            seen.clear()
            out.backward(grad)
    of_torch = {name: n for name, n in seen.kernels.items() if name.startswith("torch") and name != "torch sort"}
    assert of_torch == {"torch _to_copy": 1, "torch sub": 2, "torch pow": 1, "torch cat": 2}


PROGRAM = """
import sys
from shardwise import EmbeddingBagCollection
from shardwise.kernels import _op, rule_named
from shardwise.kernels.jagged import segments
from shardwise.kernels.lookup import pooled, sequence
assert "triton" not in sys.modules, "imported"
early = segments._gather_kernel
assert early.arg_names[0] == sequence._gather_kernel.arg_names[0]
made = [type(kernel).__name__ for kernel in (pooled._pooled_lookup_kernel, sequence._gather_kernel)]
assert made == ["JITFunction"] * 2, made
assert segments._gather_kernel is sequence._gather_kernel is early.made
assert pooled.tl is sys.modules["triton.language"]
assert type(rule_named("adam").in_triton).__name__ == "JITFunction"
"""


@needs_triton
def test_triton_is_imported_when_a_kernel_is_first_used() -> None:
    """Importing a collection took half its time for triton, of which a CPU uses nothing."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
