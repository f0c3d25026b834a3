"""Pooled and sequence lookups: what they return and how their gradients flow, on every path (see kernel_inputs)."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
import torch.nn.functional as nnf
from kernel_inputs import (
    CASES,
    DEVICES,
    SMALL,
    Case,
    Inputs,
    assert_close,
    assert_same_bits,
    inputs,
    per_device,
    torch_device,
    upstream,
)
from torch import Tensor

from shardwise.kernels import Feature, flatten_segments, pack_features, pooled_lookup, sequence_lookup
from shardwise.kernels.features import BASE, ROWS, Segment, batch_size
from shardwise.kernels.lookup.pooled import pooled_lookup_ref
from shardwise.kernels.lookup.sequence import sequence_lookup_ref

EQUAL_DIMS = [case for case in CASES if len({dim for _, dim in case.tables}) == 1 and not case.weighted]


def look_up(batch: Inputs) -> Tensor:
    return pooled_lookup(*batch.lookup)


def sequence_args(batch: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    return batch.weights, batch.indices, batch.offsets, batch.features, batch.dims[0]


def flat_gradient(batch: Inputs, dense: list[Tensor]) -> Tensor:
    """Per-table gradients in the layout of W."""
    flat = torch.zeros(batch.weights.numel(), dtype=torch.float64)
    for part, gradient in zip(batch.tables(flat), dense, strict=True):
        part.copy_(gradient)
    return flat


@pytest.mark.parametrize(("device", "case"), per_device(CASES))
def test_pooled_lookup_matches_the_oracle_and_its_reference(device: str, case: Case) -> None:
    batch = inputs(case, torch_device(device))
    got = look_up(batch)
    assert got.dtype == torch.float32 and got.device == batch.weights.device
    assert_close(got, oracle.pooled([t.cpu() for t in batch.tables()], case.features, batch.bags, batch.scales))
    assert_close(got, pooled_lookup_ref(*batch.lookup_ref))


@pytest.mark.parametrize(("device", "case"), per_device([case for case in SMALL if case.dtype == torch.float32]))
def test_pooled_lookup_equals_embedding_bag(device: str, case: Case) -> None:
    batch = inputs(case, torch_device(device))
    columns = []
    for f, (t, mean) in enumerate(case.features):
        offsets = batch.offsets[f * case.batch : (f + 1) * case.batch + 1].long()
        begin, end = int(offsets[0]), int(offsets[-1])
        scale = None if batch.per_id_weights is None else batch.per_id_weights[begin:end]
        columns.append(
            nnf.embedding_bag(
                batch.indices[begin:end].long(), batch.tables()[t], offsets - begin, mode="sum",
                per_sample_weights=scale, include_last_offset=True,
            )
        )  # fmt: skip
        if mean:
            columns[-1] = columns[-1] / offsets.diff().clamp(min=1)[:, None]
    assert_close(look_up(batch), torch.cat(columns, dim=1))


@pytest.mark.parametrize(("device", "case"), per_device(CASES))
def test_gradients_of_a_pooled_lookup_match_the_oracle_and_the_references(device: str, case: Case) -> None:
    batch = inputs(case, torch_device(device))
    grad = upstream(batch)
    wanted = [batch.weights.requires_grad_()]
    if batch.per_id_weights is not None:
        wanted.append(batch.per_id_weights.requires_grad_())
    got = torch.autograd.grad(look_up(batch), wanted, grad)
    reference = torch.autograd.grad(pooled_lookup_ref(*batch.lookup_ref), wanted, grad)

    tables = [table.detach().cpu() for table in batch.tables()]
    dense, _ = oracle.gradients(tables, case.features, batch.bags, grad, batch.scales)
    assert got[0].dtype == case.dtype
    assert_close(got[0], flat_gradient(batch, dense))
    # autograd of the reference adds row after row, in the precision of the table
    exact = case.dtype == torch.float32 and not case.slow
    assert_close(got[0], reference[0], 1e-5 if exact else 0.03)
    if case.weighted:
        assert_close(got[1], oracle.scale_gradient(tables, case.features, batch.bags, grad))
        assert_close(got[1], reference[1])


@pytest.mark.parametrize("device", DEVICES)
def test_finite_differences_agree_with_the_gradients(device: str) -> None:
    """The lookup is linear in the weights and in the per-id weights, so a wide central difference is exact in fp32."""
    case = Case("small", tables=((3, 4), (2, 3)), features=((0, True), (1, False)), batch=2, weighted=True)
    batch = inputs(case, torch_device(device))

    def lookup(weights: Tensor, scale: Tensor) -> Tensor:
        return look_up(replace(batch, weights=weights, per_id_weights=scale))

    assert batch.per_id_weights is not None
    arguments = (batch.weights.requires_grad_(), batch.per_id_weights.requires_grad_())
    with pytest.warns(UserWarning, match="not a double precision"):
        assert torch.autograd.gradcheck(lookup, arguments, eps=0.25, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("device", "case"), per_device(EQUAL_DIMS))
def test_sequence_lookup_matches_the_oracle_and_its_reference(device: str, case: Case) -> None:
    batch = inputs(case, torch_device(device))
    got = sequence_lookup(*sequence_args(batch), batch.segments)
    assert got.dtype == torch.float32
    expected = oracle.sequence([t.cpu() for t in batch.tables()], case.features, batch.bags)
    assert_same_bits(got, expected.float())
    assert_same_bits(got, sequence_lookup_ref(*sequence_args(batch)))


@pytest.mark.parametrize(("device", "case"), per_device(EQUAL_DIMS))
def test_gradient_of_a_sequence_lookup_adds_the_rows_of_each_id(device: str, case: Case) -> None:
    batch = inputs(case, torch_device(device))
    batch.weights.requires_grad_()
    out = sequence_lookup(*sequence_args(batch), batch.segments)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device)
    (got,) = torch.autograd.grad(out, batch.weights, grad)
    # one id a sample turns a sequence into a sum
    bags = [[[i] for bag in feature for i in bag] for feature in batch.bags]
    counts = [len(feature) for feature in bags]
    dense = [torch.zeros(table, dtype=torch.float64) for table in case.tables]
    for (t, _), own, g in zip(case.features, bags, grad.split(counts), strict=True):
        (gradient,), _ = oracle.gradients([batch.tables()[t].detach().cpu()], [(0, False)], [own], g)
        dense[t] += gradient
    assert_close(got, flat_gradient(batch, dense))


OUTSIDE = {
    "below": -1,
    "num_embeddings": 6,
    "above int32": 2**31 + 3,
    "lowest int64": -(2**63),
    "highest int64": 2**63 - 1,
}


@pytest.mark.parametrize("bad", OUTSIDE.values(), ids=OUTSIDE.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_an_id_outside_its_table_counts_as_none(device: str, bad: int) -> None:
    """Not as a weight of zero: the row that it multiplies may hold NaN. A mean still divides by the bag's length."""
    case = Case("bad", tables=((6, 4), (6, 3)), features=((0, False), (0, True), (1, True)), batch=2, weighted=True)
    bags = [[[bad, 2], [3]], [[1, bad, 5], []], [[bad], [bad, 0]]]
    batch = inputs(case)
    flat = [i for feature in bags for bag in feature for i in bag]
    batch = replace(
        batch,
        indices=torch.tensor(flat),
        offsets=torch.tensor([0, 2, 3, 6, 6, 7, 9]),
        per_id_weights=torch.arange(1.0, 10.0),
    ).to(torch_device(device))
    assert batch.per_id_weights is not None
    scales = [[[1.0, 2.0], [3.0]], [[4.0, 5.0, 6.0], []], [[7.0], [8.0, 9.0]]]
    tables = [table.clone().cpu() for table in batch.tables()]
    expected = oracle.pooled(tables, case.features, bags, scales)
    grad = upstream(batch)
    dense, _ = oracle.gradients(tables, case.features, bags, grad, scales)
    # rows that no good id names, among them the one that a clamped bad id would find
    batch.tables()[0][[0, 4]] = float("nan")
    batch.tables()[1][5] = float("inf")

    wanted = (batch.weights.requires_grad_(), batch.per_id_weights.requires_grad_())
    out = look_up(batch)
    got = torch.autograd.grad(out, wanted, grad)
    assert_close(out, expected)
    assert_close(pooled_lookup_ref(*batch.lookup_ref), expected)
    assert_close(got[0], flat_gradient(batch, dense))
    assert_close(got[1], oracle.scale_gradient(tables, case.features, bags, grad))


@pytest.mark.parametrize("device", DEVICES)
def test_an_id_outside_its_table_gives_a_row_of_zeros_in_a_sequence(device: str) -> None:
    batch = inputs(Case("bad", tables=((6, 4), (3, 4)), features=((0, False), (1, False)), batch=1))
    bags = [[[0, -1, 6, 5]], [[3, 2]]]
    batch = replace(batch, indices=torch.tensor([0, -1, 6, 5, 3, 2]), offsets=torch.tensor([0, 4, 6]))
    batch = batch.to(torch_device(device))
    got = sequence_lookup(*sequence_args(batch), batch.segments)
    assert_same_bits(got, oracle.sequence([t.cpu() for t in batch.tables()], batch.case.features, bags).float())


@pytest.mark.parametrize("device", DEVICES)
def test_ids_past_the_last_offset_are_ignored_forward_and_backward(device: str) -> None:
    case = Case("capacity", tables=((6, 4), (3, 4)), features=((0, False), (1, True)), weighted=True)
    batch = inputs(case, torch_device(device))
    assert batch.per_id_weights is not None
    longer = replace(
        batch,
        indices=torch.cat([batch.indices, batch.indices.new_tensor([1, 99, 2])]),
        per_id_weights=torch.cat([batch.per_id_weights, batch.per_id_weights.new_full((3,), float("nan"))]),
    )
    assert_same_bits(look_up(longer), look_up(batch))
    grad, weights = upstream(batch), batch.weights.requires_grad_()
    assert_same_bits(
        torch.autograd.grad(look_up(longer), weights, grad)[0], torch.autograd.grad(look_up(batch), weights, grad)[0]
    )
    rows = sequence_lookup(*sequence_args(longer), batch.segments)
    assert_same_bits(rows[:-3], sequence_lookup(*sequence_args(batch), batch.segments))
    assert (rows[-3:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_need_not_be_contiguous(device: str) -> None:
    """The kernels read ids one after another: a strided tensor (a column of a frame) gave the rows of others."""
    batch = inputs(Case("strided", weighted=True), torch_device(device))
    assert batch.per_id_weights is not None

    def strided(tensor: Tensor) -> Tensor:
        return torch.stack([tensor, torch.ones_like(tensor)], dim=1)[:, 0]

    other = replace(
        batch,
        indices=strided(batch.indices),
        offsets=strided(batch.offsets),
        per_id_weights=strided(batch.per_id_weights),
    )
    assert not other.indices.is_contiguous()
    assert_same_bits(look_up(other), look_up(batch))
    same = sequence_lookup(*sequence_args(batch), batch.segments)
    assert_same_bits(sequence_lookup(*sequence_args(other), batch.segments), same)
    grad, weights = upstream(batch), batch.weights.requires_grad_()
    expected = torch.autograd.grad(look_up(batch), weights, grad)[0]
    assert_same_bits(torch.autograd.grad(look_up(other), weights, strided(grad.T).T)[0], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shift", [1, 2, 3])
def test_a_table_group_may_begin_anywhere_in_memory(device: str, shift: int) -> None:
    """128-bit loads need rows on 16 bytes: a storage that is not there falls back to narrow ones."""
    batch = inputs(Case("shifted", tables=((9, 8), (4, 4)), features=((0, False), (1, True))), torch_device(device))
    moved = torch.empty(batch.weights.numel() + shift, device=batch.weights.device)[shift:].copy_(batch.weights)
    assert moved.data_ptr() % 16
    assert_same_bits(look_up(replace(batch, weights=moved)), look_up(batch))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_rows_past_element_2_to_the_31_are_found(where: torch.device, index_dtype: torch.dtype) -> None:
    """The reference multiplied int32 ids by the dim in int32. The 4 GiB here are reserved, not touched."""
    dim, rows = 1024, 2**21 + 8
    weights = torch.empty(rows * dim, dtype=torch.float16, device=where)
    last = torch.randn(dim, generator=torch.Generator().manual_seed(0)).half()
    weights[-dim:] = last.to(where)
    weights[:dim] = 1
    features = pack_features([Feature(0, rows, dim, 0)], where)
    segments = flatten_segments([Segment(dim, 0, rows, 0)])
    ids = torch.tensor([rows - 1, 0], dtype=index_dtype, device=where)
    offsets = torch.tensor([0, 1, 2], device=where)
    expected = torch.stack([last.float(), torch.ones(dim)])
    assert_same_bits(pooled_lookup(weights, ids, offsets, None, features, [dim], segments, "sum"), expected)
    assert_same_bits(pooled_lookup_ref(weights, ids, offsets, None, features, [dim]), expected)
    assert_same_bits(sequence_lookup(weights, ids, offsets, features, dim, segments), expected)
    assert_same_bits(sequence_lookup_ref(weights, ids, offsets, features, dim), expected)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("offset", [2**32 - 100, -(2**32) + 100, 2**63 - 1, -(2**63)])
def test_bad_offsets_are_not_followed_outside_the_ids(device: str, offset: int) -> None:
    """On a GPU they raise a step later, through the guard. A length cut to 32 bits sent the kernel 2^32 ids away."""
    batch = inputs(Case("offsets", batch=2, lengths=(3, 3)), torch_device(device))
    batch.offsets[1] = offset
    assert look_up(batch).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_lookup_gives_the_same_bits_twice_and_alone(device: str) -> None:
    """A bag's bits do not depend on the other bags or features of its batch."""
    case = Case("mixed", tables=((50, 8), (9, 3), (7, 8)), features=((0, False), (1, True), (2, False)), batch=40)
    batch = inputs(case, torch_device(device))
    both = look_up(batch)
    assert_same_bits(look_up(batch), both)
    alone_features = pack_features([Feature(batch.bases[0], 50, 8, batch.first_rows[0])], batch.weights.device)
    for b in (0, 17, 39):
        begin, end = batch.offsets[b : b + 2].tolist()
        alone = pooled_lookup(
            batch.weights, batch.indices[begin:end], batch.offsets[b : b + 2] - begin, None, alone_features,
            [8], batch.segments, "sum",
        )  # fmt: skip
        assert_same_bits(alone[0], both[b, :8])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_bag_are_added_one_after_another_in_the_order_of_its_ids(device: str) -> None:
    """A kernel that added four rows as two pairs passed every test: sums were compared by tolerance alone."""
    case = Case("order", tables=((50, 16), (20, 16)), features=((0, False), (1, False)), batch=6, lengths=(0, 40))
    batch = inputs(case, torch_device(device))
    expected = torch.zeros(case.batch, 32)
    for f, (table, _) in enumerate(case.features):
        rows = batch.tables()[table].cpu()
        for b, bag in enumerate(batch.bags[f]):
            for i in bag:
                expected[b, 16 * f : 16 * (f + 1)] += rows[i]
    assert_same_bits(pooled_lookup(*batch.lookup), expected)


def test_a_table_off_its_boundary_is_refused() -> None:
    with pytest.raises(ValueError, match="feature 0: a table of dim 8 cannot begin at element 4"):
        pack_features([Feature(4, 10, 8, 0)])


def test_offsets_that_do_not_divide_among_the_features_are_refused() -> None:
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"{count} offsets do not divide among 2 features: expected F\\*B \\+ 1"):
            batch_size(torch.zeros(count, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match="0 offsets"):
        batch_size(torch.zeros(0, dtype=torch.int64), 1)


def test_inputs_lay_tables_out_as_features_expect() -> None:
    batch = inputs(next(case for case in CASES if case.name == "mixed dims"))
    for f, (t, _) in enumerate(batch.case.features):
        rows, dim = batch.case.tables[t]
        assert batch.features[f, [BASE, ROWS]].tolist() == [batch.bases[t], rows]
        assert batch.bases[t] % min(dim & -dim, 8) == 0
