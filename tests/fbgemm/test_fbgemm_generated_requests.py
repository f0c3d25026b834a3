"""Random batches by FBGEMM's name are of the shapes, ranges and distributions that are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.fbgemm.tables import (
    TBERequest,
    b_indices,
    generate_requests,
    get_device,
    get_table_batched_offsets_from_dense,
    round_up,
    tensor_to_device,
    to_device,
)

T, B, L, E = 3, 8, 4, 50


def requests(iters: int = 2, **settings: Any) -> list[TBERequest]:
    torch.manual_seed(0)
    return generate_requests(iters, B, T, L, E, use_cpu=True, **settings)


def bags(request: TBERequest) -> list[Tensor]:
    return [request.indices[a:b] for a, b in zip(request.offsets[:-1], request.offsets[1:], strict=True)]


@pytest.mark.parametrize("alpha", [1.0, 1.15])
@pytest.mark.parametrize("rows", [None, [6, 50, 500]], ids=["one size", "sizes"])
def test_bags_have_the_length_and_rows_that_are_asked_for(alpha: float, rows: list[int] | None) -> None:
    first, second = requests(alpha=alpha, Es=rows, weighted=True)
    assert not torch.equal(first.indices, second.indices)
    for request in (first, second):
        assert request.indices.dtype == torch.int32 and request.offsets.dtype == torch.int64
        assert request.offsets.tolist() == list(range(0, T * B * L + 1, L))
        assert request.unpack_2() == (request.indices, request.offsets)
        weights = request.unpack_3()[2]
        assert weights is not None and weights.shape == request.indices.shape
        assert request.unpack_4()[3] is None
        for bag, ids in enumerate(bags(request)):
            assert int(ids.min()) >= 0 and int(ids.max()) < (rows or [E] * T)[bag // B]
            # under a Zipf distribution they differ, otherwise they ascend
            assert len(ids.unique()) == L if alpha > 1 else torch.equal(ids, ids.sort().values)


@pytest.mark.parametrize("alpha", [1.0, 1.15])
def test_lengths_and_batch_sizes_may_vary(alpha: float) -> None:
    for request in requests(alpha=alpha, sigma_L=2, sigma_B=3, vbe_num_ranks=2, index_dtype=torch.int64):
        sizes = request.Bs_per_feature_per_rank
        assert sizes is not None and [len(of_table) for of_table in sizes] == [2] * T
        assert min(map(min, sizes)) >= 1 and sum(map(sum, sizes)) == len(request.offsets) - 1
        lengths = request.offsets.diff()
        assert len(lengths.unique()) > 1 and int(lengths.sum()) == len(request.indices)
        assert request.indices.dtype == torch.int64
    one, two = requests(alpha=alpha, Ls=[1, 0, 3], offset_dtype=torch.int32)
    assert one.offsets.diff().tolist() == [1] * B + [0] * B + [3] * B == two.offsets.diff().tolist()
    assert one.offsets.dtype == torch.int32
    uniform = requests(alpha=alpha, sigma_L=6, length_dist="uniform")[0].offsets.diff()
    assert sorted(uniform.unique().tolist()) == [4, 5, 6]
    assert not requests(alpha=alpha, Ls=[0, 0, 0])[0].indices.numel()


def test_uniform_ids_are_uniform_and_zipf_ids_are_not() -> None:
    torch.manual_seed(0)
    (uniform,) = generate_requests(1, 2000, 1, 1, 10, use_cpu=True)
    counts = uniform.indices.long().bincount(minlength=10)
    assert int(counts.min()) > 130 and int(counts.max()) < 270
    (zipf,) = generate_requests(1, 20000, 1, 1, 10**6, use_cpu=True, alpha=3.0, zipf_oversample_ratio=1)
    # a bag's only id is the smallest of twenty candidates
    assert int(zipf.indices.long().bincount().max()) > 19900


def test_a_part_of_the_ids_is_used_again() -> None:
    first, second = requests(reuse=0.5, alpha=1.0)
    same = (first.indices == second.indices).view(T, -1).sum(1)
    assert bool((same >= B * L // 2).all()) and int(same.sum()) < T * B * L


def test_pruned_ids_are_marked() -> None:
    (request,) = requests(1, emulate_pruning=True)
    marked = (request.indices == -1).view(T, -1).sum(1)
    assert bool(((marked >= 1) & (marked <= B // 2)).all())


def test_the_order_of_rows_repeats_where_that_is_asked_for() -> None:
    torch.manual_seed(0)
    names = [
        int(generate_requests(1, 200, 1, 1, E, use_cpu=True, alpha=4.0, deterministic_output=True)[0].indices.mode()[0])
        for _ in range(3)
    ]
    assert len(set(names)) == 1


def test_saved_batches_are_read(tmp_path: Path) -> None:
    ids, offsets = torch.randint(0, E, (T * B * L,)), torch.arange(0, T * B * L + 1, L)
    both, one, other = (tmp_path / name for name in ("both", "ids", "offsets"))
    torch.save((ids, offsets), both)
    torch.save(ids, one)
    torch.save(offsets, other)
    for settings in (
        {"requests_data_file": str(both)},
        {"indices_file": str(one), "offsets_file": str(other)},
    ):
        read = generate_requests(2, B, T, T * L, E, use_cpu=True, **settings)  # type: ignore[arg-type]
        assert len(read) == 2 and torch.equal(read[1].indices, ids) and torch.equal(read[1].offsets, offsets)
    (picked,) = generate_requests(1, B, 2, 2 * L, E, use_cpu=True, requests_data_file=str(both), tables="2,0")
    assert torch.equal(picked.indices, torch.cat([ids[2 * B * L :], ids[: B * L]]))
    assert picked.offsets.tolist() == offsets[: 2 * B + 1].tolist()
    for settings, message in (
        ({"tables": "0"}, "the file has 8 bags"),
        ({"L": L}, "the ids of a sample in the file, 12, got 4"),
        ({"E": 1}, "tables have E=1 rows"),
        ({"indices_file": str(one)}, "leave indices_file and offsets_file out"),
        ({"sigma_L": 1}, "leave sigma_L and sigma_B out"),
    ):
        given = {"iters": 1, "B": B, "T": T, "L": T * L, "E": E, "requests_data_file": str(both), **settings}
        with pytest.raises(ValueError, match=message):
            generate_requests(use_cpu=True, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both or not at all"):
        requests(indices_file=str(one))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"Ls": [1]}, "Ls must have 3 numbers"),
        ({"Es": [1]}, "Es must have 3 numbers"),
        ({"Ls": [1, 2, 3], "sigma_L": 1}, "exclude each other"),
        ({"reuse": 0.5, "sigma_L": 1}, "bags of one length"),
        ({"emulate_pruning": True, "sigma_B": 1, "vbe_num_ranks": 1}, "one batch size"),
        ({"sigma_B": 1}, "wants vbe_num_ranks"),
        ({"sigma_L": 1, "length_dist": "other"}, "'normal' or 'uniform', got 'other'"),
        ({"alpha": 2.0, "Es": [2, 50, 50]}, "want as many rows"),
        ({"alpha": 50.0}, "too skewed distribution"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requests(**settings)


def test_dense_ids_become_bags() -> None:
    dense = torch.arange(24).view(2, 3, 4)
    ids, offsets = get_table_batched_offsets_from_dense(dense, use_cpu=True)
    assert torch.equal(ids, torch.arange(24)) and offsets.tolist() == list(range(0, 25, 4))
    assert get_table_batched_offsets_from_dense(dense, 2, 12, True)[1].tolist() == list(range(0, 25, 2))
    with pytest.raises(ValueError, match="both or not at all, got 2 and None"):
        get_table_batched_offsets_from_dense(dense, 2)
    bag, single = torch.nn.EmbeddingBag(24, 4, mode="sum"), torch.nn.Embedding(24, 4)
    torch.testing.assert_close(b_indices(bag, dense[0], use_cpu=True), bag.weight[dense[0]].sum(1))
    weights = torch.arange(12.0)
    scaled = (bag.weight[dense[0]] * weights.view(3, 4, 1)).sum(1)
    torch.testing.assert_close(b_indices(bag, dense[0], weights, use_cpu=True), scaled)
    assert b_indices(single, dense[0], use_cpu=True, do_pooling=False).shape == (12, 4)


def test_small_functions() -> None:
    assert [round_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert get_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert to_device(torch.ones(2), use_cpu=True).is_cpu
    assert tensor_to_device(torch.ones(2, device="meta"), torch.device("cpu")).shape == (2,)
    assert tensor_to_device(torch.ones(2), torch.device("cpu")).tolist() == [1, 1]
