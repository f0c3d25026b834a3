"""Ids of tables that are cut by rows: divided with their batch ahead of its sizes, or alone once those are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from ranks import run_ranks
from sharding_mixes import Mix, TableCase, batches_of_rank, build, dressed, environment, shard, train
from sharding_steps import blocks_of, routed_step
from torch import Tensor

from shardwise import KeyedJaggedTensor
from shardwise.embeddings import OptimizerSpec
from shardwise.kernels import BoundsCheckMode
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda
from shardwise.planner import layout
from shardwise.planner.layout import Shard, TableOptions
from shardwise.sharding.engine.route import Sending, _of_bags, divide_ahead
from shardwise.sharding.engine.routes import Routes, Table, plan_routes
from shardwise.sharding.engine.step import Step

CPU = torch.device("cpu")
ROWS, DIM, WORLD, BATCH = 9, 4, 3, 2
PLACES = {
    "whole": lambda t: layout.table_wise(t, ROWS, DIM, 1),
    "even": lambda t: layout.row_wise(t, ROWS, DIM, range(WORLD)),
    "uneven": lambda t: layout.row_wise(t, ROWS, DIM, [2, 0], [7, 2]),
    "empty": lambda t: layout.row_wise(t, ROWS, DIM, [0, 1], [0, ROWS]),
    "columns": lambda t: layout.column_wise(t, ROWS, DIM, [0, 2], [1, 3]),
    "grid": lambda t: layout.grid(t, ROWS, DIM, [[0, 1], [2, 0]]),
    "replica": lambda t: layout.data_parallel(t, ROWS, DIM, WORLD),
}


def routes_of(places: Iterable[str], **more: Any) -> Routes:
    """Table n of feature n, where `places` says."""
    sgd, tables, shards = OptimizerSpec("sgd"), [], list[Shard]()
    options = TableOptions(reduction="ordered") if more.pop("ordered", False) else TableOptions()
    for n, place in enumerate(places):
        tables.append(Table(f"t{n}", ROWS, DIM, torch.float32, sgd, (f"f{n}",), mean=n % 2 == 0, options=options))
        shards += PLACES[place](f"t{n}")
    return plan_routes(tables, shards, WORLD, **more)


def same(left: Step, right: Step, routes: Routes) -> None:
    """What leaves, what is looked up here, and how results find their ids."""
    assert left.counts == right.counts and left.ids_to_groups == right.ids_to_groups and left.batch == right.batch
    for block, other_block in zip(blocks_of(left), blocks_of(right), strict=True):
        assert block.tolist() == other_block.tolist()
    assert len(left.replicated) == len(right.replicated)
    for batch, other_batch in zip(left.replicated, right.replicated, strict=True):
        assert batch.sizes == other_batch.sizes
        assert torch.equal(batch.ids, other_batch.ids) and torch.equal(batch.offsets, other_batch.offsets)
        assert (batch.weights is None) == (other_batch.weights is None)
        if batch.weights is not None and other_batch.weights is not None:
            assert torch.equal(batch.weights, other_batch.weights)
    first, second = left.division, right.division
    for cut in range(len(routes.cuts)):
        assert first is not None and second is not None
        assert first.counts_of_cut(cut) == second.counts_of_cut(cut)
        assert torch.equal(first.lengths_of_cut(cut), second.lengths_of_cut(cut))
        assert (first.places is None) == (second.places is None)
        if first.places is not None:
            assert torch.equal(first.places_of_cut(cut), second.places_of_cut(cut))
        if first.given_weights is not None:
            assert second.given_weights is not None
            ids, other_ids = first.ids_of_cut(cut), second.ids_of_cut(cut)
            assert torch.equal(first.given_weights[ids], second.given_weights[other_ids])


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(sorted(PLACES)), min_size=1, max_size=4),
    st.fixed_dictionaries({"pooled": st.booleans(), "weighted": st.booleans(), "ordered": st.booleans()}),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_what_is_divided_ahead_leaves_as_what_is_divided_later(
    places: list[str], how: dict[str, bool], lenient: bool, update: bool, random: Any
) -> None:
    routes = routes_of(places, **how)
    keys = [f"f{n}" for n in range(len(places))] + ["nobody's"]
    random.shuffle(keys)
    lengths = [random.randrange(4) for _ in range(len(keys) * BATCH)]
    low, high = (-3, ROWS + 3) if lenient else (0, ROWS)
    ids = torch.tensor([random.randrange(low, high) for _ in range(sum(lengths))], dtype=torch.int64)
    weights = torch.arange(1.0, len(ids) + 1) if how["weighted"] else None
    kjt = KeyedJaggedTensor(keys, ids, weights, torch.tensor(lengths), stride=BATCH)
    sending = Sending(routes, keys, update, CPU)
    divided = divide_ahead(kjt, routes, sending, weights, lenient=lenient)
    assert (divided is None) == (not routes.cuts)
    later = routed_step(kjt, routes, sending, weights, lenient=lenient)
    same(later, routed_step(kjt, routes, sending, weights, lenient=lenient, divided=divided), routes)


def test_a_cut_feature_that_another_table_looks_up_is_divided_later() -> None:
    routes = routes_of(["even", "whole"])
    tables = tuple(replace(table, features=("f0",)) for table in routes.tables)
    shards = [shard for n, place in enumerate(("even", "whole")) for shard in PLACES[place](f"t{n}")]
    both = plan_routes(tables, shards, WORLD)
    kjt = KeyedJaggedTensor(["f0"], torch.tensor([8, 1]), lengths=torch.tensor([1, 1]))
    assert divide_ahead(kjt, both, Sending(both, ["f0"], True, CPU), None, lenient=False) is None


needs_triton = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")


@needs_triton
def test_numbers_of_bags_are_found_by_lengths_that_fit_nothing() -> None:
    """They are looked at later; repeat_interleave would stop the device."""
    with use_fake_cuda(counts := Counted()):
        ids, numbers = torch.zeros(4).to(CUDA), torch.tensor([5, 6]).to(CUDA)
        counts.clear()
        for lengths in ([1, 3], [9, -7], [-1, 2], [0, 0]):
            # a place outside would raise here
            per_id = _of_bags(numbers, torch.tensor(lengths).to(CUDA, non_blocking=True), ids)
            assert per_id.shape == (4,) and not counts.syncs
        assert _of_bags(numbers, torch.tensor([1, 3]).to(CUDA), ids).cpu().tolist() == [5, 6, 6, 6]


WAYS = (("row_wise", 2), ("table_wise", 5), ("row_wise", 1), ("data_parallel", 0), ("row_wise", 2))


def mix_of(options: TableOptions | None = None, shared: bool = False, mean: bool = False, **more: Any) -> Mix:
    """Tables cut by rows, evenly and not, whole and replicated."""
    features = [(f"f{n}", "f0") if n == 3 and shared else (f"f{n}",) for n in range(5)]
    cases = zip(features, WAYS, strict=True)
    tables = (
        TableCase(f"t{n}", 20, 8, of, way, mean, options=options or TableOptions(), seed=seed)
        for n, (of, (way, seed)) in enumerate(cases)
    )
    return Mix(tuple(tables), **more)


ORDERED = TableOptions(reduction="ordered")
# mixes, and whether ids travel once
SETTINGS = (
    (mix_of(), False),
    (mix_of(weighted=True), False),
    (mix_of(ORDERED, mean=True), False),
    (mix_of(ORDERED, mean=True, weighted=True), False),
    (mix_of(outside=True, bounds_check=BoundsCheckMode.IGNORE), False),
    (mix_of(pooled=False), False),
    (mix_of(pooled=False), True),
    (mix_of(shared=True), False),
)


def trained(mix: Mix, dedup: bool, device: torch.device) -> list[Tensor]:
    """Outputs, gradients of weights and tables of some steps, with a feature that nobody looks up.

    Without padding: what has any is divided later.
    """
    model = shard(mix, build(mix, "sgd"), environment(), device, dedup=dedup)
    batches = [
        (dressed(kjt, dist.get_rank(), padded=False).to(device), [gradient.to(device) for gradient in upstream])
        for kjt, upstream in batches_of_rank(mix, range(2))
    ]
    run = train(mix, model, batches, mix.weighted)
    tensors = [*chain(*run.outputs), *run.weight_gradients, *model.parameters()]
    return [tensor.detach().cpu() for tensor in tensors]


def like_the_host() -> list[bool]:
    """Of each setting, whether the device that is not there, whose batches are divided ahead, has the host's bits."""
    agreements = []
    for setting in SETTINGS:
        on_host = trained(*setting, CPU)
        with use_fake_cuda(Counted()):
            on_device = trained(*setting, CUDA)
        agreements.append(len(on_host) == len(on_device) and all(map(torch.equal, on_host, on_device)))
    return agreements


@needs_triton
@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
def test_the_path_of_a_gpu_has_the_bits_of_the_path_of_the_host(world: int) -> None:
    assert run_ranks(world, like_the_host) == [[True] * len(SETTINGS)] * world
