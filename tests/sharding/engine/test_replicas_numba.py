"""Replicated tables on ranks whose updates run by other means: with numba and without."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from batches import random_kjt, upstream
from model_zoo import bag_tables, fused
from ranks import run_ranks

from shardwise import EmbeddingBagCollection, RowWiseAdagrad
from shardwise.kernels import _op, numba_loops
from shardwise.sharding import (
    DistributedModelParallel,
    ShardingPlan,
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)

pytestmark = pytest.mark.ranks
ROWS, STEPS = 60, 20
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "rowwise": RowWiseAdagrad, "Adagrad": torch.optim.Adagrad, "Adam": torch.optim.Adam,
}  # fmt: skip


def trained(optimizer: str, how: str, processors: tuple[str, str] | None = None) -> tuple[torch.Tensor, list[str]]:
    """A table after some steps on ranks of which the second has no compiled loops, and what was warned of."""
    rank, usual = dist.get_rank(), (_op.NUMBA, numba_loops.arithmetic)
    try:
        if processors is None:
            _op.NUMBA = rank == 0
        else:
            numba_loops.arithmetic = lambda: ("numba 1", processors[rank])
        numba_loops.loops.cache_clear()
        torch.manual_seed(0)
        ebc = fused(EmbeddingBagCollection(bag_tables({"f": ROWS}, 16)), OPTIMIZERS[optimizer])
        strategy = {"tf": data_parallel() if how == "replicated" else table_wise(rank=0)}
        plan = ShardingPlan({"": construct_module_sharding_plan(ebc, strategy, world_size=2)})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = DistributedModelParallel(ebc, plan=plan)
        for step in range(STEPS):
            out = model(random_kjt({"f": ROWS}, 30, seed=2 * step + rank, longest=5)).values()
            (out * upstream(*out.shape, seed=2 * step + rank)).sum().backward()
        weights = model.module.state_dict()["embedding_bags.tf.weight"]
        return weights if isinstance(weights, torch.Tensor) and how == "replicated" else torch.zeros(1), [
            str(one.message) for one in caught if "drift" in str(one.message)
        ]
    finally:
        _op.NUMBA, numba_loops.arithmetic = usual
        numba_loops.loops.cache_clear()


@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam"])
def test_replicas_of_exact_rules_keep_their_bits_with_numba_and_without(optimizer: str) -> None:
    """457 of 500 rows of two replicas differed after 20 steps: torch's square root was not rounded correctly."""
    pytest.importorskip("numba")
    (first, said), (second, _) = run_ranks(2, trained, optimizer, "replicated")
    assert torch.equal(first, second) and not said
    assert first.abs().max() > 0.5


def test_replicas_of_a_rule_with_sums_over_a_row_need_the_same_numba_on_all_ranks() -> None:
    """The loops and torch add up a row in other orders: nobody was told, and replicas drifted."""
    pytest.importorskip("numba")
    with pytest.raises(
        RuntimeError, match="replicated table 'tf' .rowwise_adagrad.*SHARDWISE_NUMBA=0 on all"
    ) as raised:
        run_ranks(2, trained, "rowwise", "replicated")
    assert "rank 0 has numba " in str(raised.value) and "rank 1 has torch alone" in str(raised.value)


def test_a_table_of_one_owner_may_be_updated_with_numba_beside_ranks_without() -> None:
    pytest.importorskip("numba")
    assert [said for _, said in run_ranks(2, trained, "rowwise", "sharded")] == [[], []]


def test_replicas_on_other_processors_are_warned_of_and_go_on() -> None:
    found = run_ranks(2, trained, "rowwise", "replicated", ("znver5", "haswell"))
    for _, said in found:
        assert len(said) == 1 and "rank 0 has znver5, rank 1 has haswell" in said[0] and "'tf'" in said[0]
