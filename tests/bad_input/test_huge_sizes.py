"""Sizes of reference/faults.md that a test of usual size never meets; numbers in the names are those of the list.

Memory past 2^31 elements is reserved and never touched but in a few pages. Where a machine does not lend the addresses
the test says so and is skipped.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICES, HYPER, assert_same_bits, torch_device
from torch import Tensor

from shardwise.kernels import (
    RULES,
    Feature,
    Segment,
    check_ids,
    flatten_segments,
    fused_update,
    new_guard,
    pack_features,
    per_id_weight_gradient,
    pooled_lookup,
    sequence_lookup,
)
from shardwise.kernels._op import tl, triton
from shardwise.kernels.lookup import bounds, weight_gradient
from shardwise.kernels.update import row_chunks, update
from shardwise.perf.compile.recorded import Fault, Launch, recorded

TEN_MILLION = 10_000_000
FAR = 2**31
# the interpreter would take an hour for ten million ids
AT_FULL_SIZE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def untouched(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written: pages of an anonymous map, without a promise of memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        memory = mmap.mmap(-1, elements * dtype.itemsize, flags=flags)
    except OSError as error:
        pytest.skip(f"this machine lends no {elements * dtype.itemsize / 2**30:.0f} GiB of addresses: {error}")
    return torch.frombuffer(memory, dtype=dtype)


def one_table(rows: int, dim: int, device: torch.device, mean: bool = False) -> tuple[Tensor, list[int], list[int]]:
    """Features, dims and segments of one feature over one table."""
    features = pack_features([Feature(0, rows, dim, 0, mean)], device)
    return features, [dim], flatten_segments([Segment(dim, 0, rows, 0)])


def step_by(
    rule: str, weights: Tensor, states: list[Tensor], grad: Tensor, ids: Tensor, offsets: Tensor, table: Any
) -> None:
    """One fused step at the rates of HYPER, with lr a power of two."""
    features, dims, segments = table
    hyper = [{**HYPER, "lr": 0.5}.get(name, default) for name, default in RULES[rule].hyper.items()] + [0.0]
    fused_update(
        weights, states, torch.zeros(1, dtype=torch.int64, device=weights.device), grad, ids, offsets, None, features,
        dims, segments, rule, torch.tensor(hyper, dtype=torch.float64, device=weights.device),
        new_guard(weights.device), "sum",
    )  # fmt: skip


# Ten million ids. Sums are of small integers, so every order of addition gives the same fp32.


@AT_FULL_SIZE
def test_20_one_bag_of_ten_million_ids(where: torch.device) -> None:
    rows, dim = 1000, 4
    start = torch.randint(-1, 2, (rows, dim), generator=torch.Generator().manual_seed(0)).float()
    weights, table = start.flatten().clone().to(where), one_table(rows, dim, where)
    ids = torch.arange(TEN_MILLION, device=where) % rows
    offsets = torch.tensor([0, TEN_MILLION, TEN_MILLION], device=where)
    out = pooled_lookup(weights, ids, offsets, None, *table, "sum")
    hits = TEN_MILLION // rows
    expected = torch.stack([start.double().sum(0) * hits, torch.zeros(dim)]).float()
    assert_same_bits(out, expected)
    grad = torch.tensor([[1.0, -1.0, 0.5, 2.0], [float("nan")] * 4], device=where)
    step_by("sgd", weights, [], grad, ids, offsets, table)
    assert_same_bits(weights.view(rows, dim), start - 0.5 * hits * grad[0].cpu())


@AT_FULL_SIZE
def test_21_the_same_id_ten_million_times(where: torch.device) -> None:
    """A gradient of its own for every id: the row moves by their exact sum, its neighbours not at all."""
    rows, dim = 5, 2
    weights, table = torch.zeros(rows * dim, device=where), one_table(rows, dim, where)
    ids = torch.full((TEN_MILLION,), 3, dtype=torch.int32, device=where)
    offsets = torch.arange(TEN_MILLION + 1, device=where)
    grad = torch.randint(0, 2, (TEN_MILLION, dim), generator=torch.Generator().manual_seed(0)).float()
    step_by("sgd", weights, [], grad.to(where), ids, offsets, table)
    expected = torch.zeros(rows, dim)
    expected[3] = -0.5 * grad.double().sum(0)
    assert_same_bits(weights.view(rows, dim), expected)


# More than 2^31 ids. The interpreter runs the last program of each grid, which works at the far end of every array.


@triton.jit
def short_kernel(I, Y, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A kernel with the fault: its positions are int32."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + tl.arange(0, BLOCK), tl.load(I + position))


def last_program(call: Callable[[], object]) -> list[Launch]:
    with recorded(order=[-1]) as launches:
        call()
    return launches


def reaches_past(launch: Launch, name: str, elements: int) -> bool:
    """Whether the launch accessed an argument beyond so many of its elements."""
    tensor = launch.tensors[name]
    end = tensor.data_ptr() + tensor.numel() * tensor.itemsize
    limit = tensor.data_ptr() + elements * tensor.itemsize
    return any(((access.addresses >= limit) & (access.addresses < end)).any() for access in launch.accesses)


@pytest.fixture
def lazy_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ops allocate by the number of ids is not poisoned or filled, which would touch it all."""
    for name in ("empty", "zeros"):
        usual = getattr(torch, name)

        def allocate(*size: int, usual: Any = usual, dtype: Any = None, device: Any = None) -> Tensor:
            n = 1
            for part in size:
                n *= part if isinstance(part, int) else 0
            if n < FAR:
                return usual(*size, dtype=dtype, device=device)  # type: ignore[no-any-return]
            return untouched(n, dtype or torch.float32).view(size)

        monkeypatch.setattr(torch, name, allocate)


SPARE = 64


def far_batch() -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, list[int], list[int]]]:
    """64 bags of which the first holds 2^31 ids and the others one each: ids, offsets, table [9, 1] and its layout."""
    ids = untouched(FAR + SPARE, torch.int32)
    ids[-SPARE:] = torch.arange(SPARE) % 9
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), FAR + 1 + torch.arange(SPARE)])
    offsets[-1] = FAR + SPARE
    return ids, offsets, torch.arange(9.0) + 1, one_table(9, 1, torch.device("cpu"))


@pytest.mark.interpreted
def test_22_a_position_of_32_bits_would_be_seen() -> None:
    ids, out = untouched(FAR + SPARE, torch.int32), torch.zeros(SPARE, dtype=torch.int32)
    with pytest.raises(Fault, match="in no argument"):
        last_program(lambda: short_kernel[((FAR + SPARE) // SPARE,)](ids, out, SPARE))


@pytest.mark.interpreted
def test_22_more_ids_than_int32_counts_are_looked_up() -> None:
    ids, offsets, weights, table = far_batch()
    outputs: list[Tensor] = []
    launches = last_program(lambda: outputs.append(pooled_lookup(weights, ids, offsets, None, *table, "sum")))
    assert [launch.kernel for launch in launches] == ["_pooled_lookup_kernel"]
    assert launches[0].programs[0][0] > 0 and reaches_past(launches[0], "I", FAR)
    expected = weights[ids[-32:].long()][:, None]
    assert_same_bits(outputs[0][-32:], expected)


@pytest.mark.interpreted
def test_22_more_ids_than_int32_counts_are_checked() -> None:
    ids, offsets, _, (features, _, _) = far_batch()
    ids[-1] = 9
    message = r"^the feature, sample 63: id 9 is outside \[0, 9\)$"
    with pytest.raises(IndexError, match=message):
        last_program(lambda: check_ids(ids, offsets, features, new_guard(), names=["the feature"]))
    assert bounds._BLOCK <= SPARE


@pytest.mark.interpreted
def test_22_more_ids_than_int32_counts_give_their_rows(lazy_memory: None) -> None:
    ids, offsets, weights, (features, _, segments) = far_batch()
    outputs: list[Tensor] = []
    launches = last_program(
        lambda: outputs.append(sequence_lookup(weights, ids, offsets, features, 1, segments, torch.float16))
    )
    assert [launch.kernel for launch in launches] == ["_resolve_kernel", "_gather_kernel"]
    assert reaches_past(launches[0], "at", FAR) and reaches_past(launches[1], "Y", FAR)
    assert_same_bits(outputs[0][-32:, 0], weights[ids[-32:].long()].half())


@pytest.mark.interpreted
def test_22_more_weights_than_int32_counts_get_their_gradients(lazy_memory: None) -> None:
    ids, offsets, weights, (features, dims, _) = far_batch()
    grad, outputs = torch.arange(float(SPARE))[:, None], list[Tensor]()
    launches = last_program(lambda: outputs.append(per_id_weight_gradient(grad, weights, ids, offsets, features, dims)))
    assert reaches_past(launches[0], "Q", FAR)
    bags = weight_gradient.weight_gradient_tile(1, 4, 1)[0]
    expected = grad[-bags:, 0] * weights[ids[-bags:].long()]
    assert_same_bits(outputs[0][-bags:], expected)


@pytest.mark.interpreted
def test_22_more_ids_than_int32_counts_are_added_to_their_rows() -> None:
    """Sorting so many ids would take all day: the kernel gets an index of two rows, whose ids lie at its far end.

    Of the gradient rows [N, 1] of a sequence too those past 2^31 are read.
    """
    n = FAR + SPARE
    weights, numbers = torch.zeros(9), torch.tensor([1.0, 0.0])
    source, scale, grad = (untouched(n, dtype) for dtype in (torch.int64, torch.float32, torch.float32))
    source[-SPARE:] = torch.arange(FAR, n).flip(0)
    scale[-SPARE:], grad[-SPARE:] = 0.5, torch.arange(float(SPARE))
    begin = torch.tensor([n - SPARE, n - SPARE + 30, n - SPARE + 61])
    row, whole, count = torch.tensor([4, 7, 0]), torch.full((3,), -1), torch.tensor([2])
    columns = {row_chunks.START: begin, row_chunks.ROW: row, row_chunks.SLOT: whole, row_chunks.HASH: row}
    columns[row_chunks.SOURCE] = source[begin.clamp(max=n - 1)]
    chunks = torch.stack([columns[field] for field in range(row_chunks.CHUNK_FIELDS)])
    block_c, block_d, warps = update.update_tile(1)
    with recorded() as launches:
        update._update_kernel[(1,)](
            W=weights, states=(), partial=numbers, chunks=chunks, n_chunks=count, src=source, scale=scale, grad=grad,
            numbers=numbers, seed=count, step=count, guard=new_guard(), low=0, high=9, stride=3, steps=2, programs=1,
            D=1, NONE=bounds.OK, RULE=RULES["sgd"].in_triton, KINDS=(), NUMBERS=2, TAKES_ROW=False, DECAY=0, ROUNDS=0,
            HAS_SCALE=True, UPPER=False, ONE_SEGMENT=True, CHUNK=32, ROW=row_chunks.ROW, SLOT=row_chunks.SLOT,
            HASH=row_chunks.HASH, SOURCE=row_chunks.SOURCE, BLOCK_C=block_c, BLOCK_D=block_d, ALIGN=1, SRC_ALIGN=1,
            FILLED=block_d == 1, TAIL=True, NEXT=False, PREFETCH=False, CONTIGUOUS=False, num_warps=warps,
        )  # fmt: skip
    assert all(reaches_past(launches[0], name, FAR) for name in ("src", "scale", "grad"))
    expected = torch.zeros(9)
    expected[4], expected[7] = -0.5 * sum(range(34, 64)), -0.5 * sum(range(3, 34))
    assert_same_bits(weights, expected)


# A table of more than 2^31 elements. (Its lookup is in tests/kernels/lookup/test_lookup.py.)


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("device", DEVICES)
def test_23_the_last_row_of_a_table_past_2_to_the_31_is_trained(device: str, rule: str) -> None:
    """It gets the bits of the last row of a small table; the row that a product of 32 bits would name does not move."""
    where, dim = torch_device(device), 1024
    far_rows = FAR // dim + 8
    last = torch.randn(dim, generator=torch.Generator().manual_seed(0)).half()
    grad = torch.randn(3, dim, generator=torch.Generator().manual_seed(1)).to(where)
    results = []
    for rows in (16, far_rows):
        elements = rows * dim
        weights = untouched(elements, torch.float16).to(where)
        weights[-dim:] = last.to(where)
        kinds = RULES[rule].kinds
        states = [untouched(rows if kind == "row" else elements, torch.float32).to(where) for kind in kinds]
        ids = torch.tensor([rows - 1, 0, rows - 1], dtype=torch.int32, device=where)
        offsets = torch.tensor([0, 1, 2, 3], device=where)
        # recorded, an address outside the arguments is an error instead of the end of the process
        with recorded() if device == "interpreted" else nullcontext():
            step_by(rule, weights, states, grad, ids, offsets, one_table(rows, dim, where))
        named = [weights.view(rows, dim)[[0, rows - 1]]]
        named += [state.view(rows, -1)[[0, rows - 1]] for state in states]
        results.append(named)
        # 2^31 elements after row rows - 1, in 32 bits: row 7
        assert (weights.view(rows, dim)[1:9] == 0).all()
    assert not torch.equal(results[0][0][1].cpu(), last)
    assert_same_bits(results[1], results[0])
