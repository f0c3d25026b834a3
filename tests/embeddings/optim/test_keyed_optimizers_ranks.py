"""Keyed optimizers over two ranks: states that are DTensor or ShardedTensor, norms of gradients held in parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import kjt, upstream
from ranks import run_ranks
from test_clipping import norm_of_a_step
from torch import Tensor, nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ShardMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    ShardingPlan,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.sharding import table_wise

pytestmark = pytest.mark.ranks

WHOLE = torch.arange(12.0).reshape(4, 3)


def by_shards(whole: Tensor, cuts: list[int]) -> ShardedTensor:
    """Rows `cuts[rank]` to `cuts[rank + 1]` on each rank."""
    rank = dist.get_rank()
    pieces = []
    if cuts[rank + 1] > cuts[rank]:
        place = ShardMetadata([cuts[rank], 0], [cuts[rank + 1] - cuts[rank], 3], f"rank:{rank}/cpu")
        pieces.append(sharded_tensor.Shard(whole[cuts[rank] : cuts[rank + 1]].clone(), place))
    return sharded_tensor.init_from_local_shards(pieces, [4, 3])


def by_placement(whole: Tensor, placement: Any) -> DTensor:
    return distribute_tensor(whole.clone(), init_device_mesh("cpu", (2,)), [placement])


def by_pieces(whole: Tensor) -> DTensor:
    """A DTensor as TorchRec has it: rank 0 holds the outer columns as two pieces, rank 1 the one between."""
    columns = [(0, 1), (2, 3)] if dist.get_rank() == 0 else [(1, 2)]
    local = LocalShardsWrapper([whole[:, lo:hi].clone() for lo, hi in columns], [(0, lo) for lo, _ in columns])
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=whole.size(), stride=whole.stride())


def keyed(value: Any) -> tuple[KeyedOptimizer, nn.Parameter]:
    param = nn.Parameter(torch.zeros(4, 3))
    return KeyedOptimizer({"w": param}, {param: {"sum": value, "inner": {"sum": value}}}, []), param


def my_part(value: Any) -> Tensor:
    local = value.to_local() if hasattr(value, "to_local") else value
    if isinstance(local, LocalShardsWrapper):
        return torch.cat(local.local_shards(), dim=1)
    if not hasattr(local, "local_shards"):
        return local.clone()
    shards = local.local_shards()
    return shards[0].tensor.clone() if shards else torch.zeros(0, 3)


MAKE: dict[str, Callable[[Tensor], Any]] = {
    "even shards": lambda whole: by_shards(whole, [0, 2, 4]),
    "one rank without": lambda whole: by_shards(whole, [0, 4, 4]),
    "dtensor of rows": lambda whole: by_placement(whole, Shard(0)),
    "dtensor of columns": lambda whole: by_placement(whole, Shard(1)),
    "replicated dtensor": lambda whole: by_placement(whole, Replicate()),
    "dtensor of pieces": by_pieces,
}


def load_a_like_one(kind: str) -> tuple[bool, Tensor, Tensor]:
    value = MAKE[kind](torch.zeros(4, 3))
    optimizer, param = keyed(value)
    other = MAKE[kind](WHOLE)
    optimizer.load_state_dict({"state": {"w": {"sum": other, "inner": {"sum": other}}}})
    fresh = KeyedOptimizer({"w": param}, {}, [])
    fresh.load_state_dict(optimizer.state_dict())
    value = optimizer.state[param]["sum"]
    return optimizer.state[param]["sum"] is value, my_part(value), my_part(fresh.state[param]["sum"])


@pytest.mark.parametrize("kind", MAKE)
def test_sharded_states_are_loaded_in_place_piece_by_piece(kind: str) -> None:
    expected = {
        "even shards": [WHOLE[:2], WHOLE[2:]],
        "one rank without": [WHOLE, WHOLE[4:]],
        "dtensor of rows": [WHOLE[:2], WHOLE[2:]],
        "dtensor of columns": [WHOLE[:, :2], WHOLE[:, 2:]],
        "replicated dtensor": [WHOLE, WHOLE],
        "dtensor of pieces": [WHOLE[:, [0, 2]], WHOLE[:, 1:2]],
    }[kind]
    for (same, loaded, fresh), part in zip(run_ranks(2, load_a_like_one, kind), expected, strict=True):
        assert same
        assert torch.equal(loaded, part) and torch.equal(fresh, part)


def load_a_whole_one(kind: str) -> Tensor:
    optimizer, param = keyed(MAKE[kind](torch.zeros(4, 3)))
    optimizer.load_state_dict({"state": {"w": {"sum": WHOLE, "inner": {"sum": WHOLE}}}})
    return my_part(optimizer.state[param]["sum"])


PARTS = {"even shards": [WHOLE[:2], WHOLE[2:]], "dtensor of pieces": [WHOLE[:, [0, 2]], WHOLE[:, 1:2]]}


@pytest.mark.parametrize("kind, parts", PARTS.items(), ids=PARTS)
def test_a_whole_tensor_fills_the_pieces_of_each_rank(kind: str, parts: list[Tensor]) -> None:
    filled = run_ranks(2, load_a_whole_one, kind)
    assert all(torch.equal(own_part, part) for own_part, part in zip(filled, parts, strict=True))


def refused() -> dict[str, str]:
    whole, rows = torch.zeros(4, 3), by_shards(torch.ones(4, 3), [0, 2, 4])
    pairs: dict[str, tuple[Any, Any]] = {
        "cut otherwise": (rows, by_shards(whole, [0, 1, 4])),
        "other placement": (by_placement(whole, Shard(0)), by_placement(whole, Shard(1))),
        "sharded into whole": (whole, rows),
        "plain into DTensor": (by_placement(whole, Shard(0)), whole),
        "other size": (rows, torch.zeros(5, 3)),
        "a number": (rows, 1.0),
    }
    messages = {}
    for case, (own, loaded) in pairs.items():
        optimizer, _ = keyed(own)
        before = my_part(own) if own is not whole else whole
        try:
            optimizer.load_state_dict({"state": {"w": {"sum": loaded, "inner": {"sum": loaded}}}})
        except ValueError as error:
            messages[case] = str(error)
        assert torch.equal(my_part(own) if own is not whole else whole, before)
    return messages


def test_pieces_that_do_not_fit_are_refused_and_change_nothing() -> None:
    expected = {
        "cut otherwise": "w: state sum is sharded as",
        "other placement": "reshard one of them first",
        "sharded into whole": "gather it first",
        "plain into DTensor": "distribute it first",
        "other size": r"shape (4, 3), loaded (5, 3)",
        "a number": "loaded 1.0",
    }
    for messages in run_ranks(2, refused):
        assert set(messages) == set(expected)
        for case, part in expected.items():
            assert part in messages[case], messages[case]


GRADS = [upstream(6, 4, seed=1), upstream(5, seed=2), upstream(2, 2, seed=3)]


def reduce_norm(number: Tensor, group: Any, largest: bool) -> Tensor:
    dist.all_reduce(number, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return number


def clipped(norm_type: float, enable: bool) -> tuple[float, list[Tensor]]:
    """One DTensor cut by rows, one parameter of which each rank has a part, one replicated; the cut gradients whole."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    sharded = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]))
    sharded.grad = distribute_tensor(GRADS[0].clone(), mesh, [Shard(0)])
    # uneven, as tables by rows are
    part = GRADS[1][:1] if rank == 0 else GRADS[1][1:]
    spread, replicated = nn.Parameter(torch.zeros_like(part)), nn.Parameter(torch.zeros(2, 2))
    spread.grad, replicated.grad = part.clone(), GRADS[2].clone()
    params: dict[str, Tensor] = {"sharded": sharded, "spread": spread, "replicated": replicated}
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, lr=0.0)),
        GradientClipping.NORM, 0.5, norm_type, enable, {spread: [dist.group.WORLD]}, reduce_norm=reduce_norm,
    )  # fmt: skip
    norm, local = norm_of_a_step(optimizer), sharded.grad
    return norm, [local.to_local(), spread.grad, replicated.grad]  # type: ignore[union-attr]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_global_norm_is_that_of_the_whole_model_on_every_rank(norm_type: float) -> None:
    norm = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in GRADS]), norm_type).item()
    ranks = run_ranks(2, clipped, norm_type, True)
    assert [rank_norm for rank_norm, _ in ranks] == pytest.approx([norm, norm], rel=1e-6)
    whole = [torch.cat([ranks[0][1][0], ranks[1][1][0]]), torch.cat([ranks[0][1][1], ranks[1][1][1]]), ranks[0][1][2]]
    for cut, grad in zip(whole, GRADS, strict=True):
        torch.testing.assert_close(cut, grad * (0.5 / norm), rtol=1e-5, atol=0)


def test_without_the_global_norm_each_rank_uses_what_it_holds() -> None:
    ranks = run_ranks(2, clipped, 2.0, False)
    for rank, (norm, _) in enumerate(ranks):
        own_grads = [GRADS[0][3 * rank : 3 * rank + 3], GRADS[1][:1] if rank == 0 else GRADS[1][1:], GRADS[2]]
        assert norm == pytest.approx(torch.cat([g.flatten() for g in own_grads]).norm().item(), rel=1e-6)


def clipped_where_one_rank_has_no_gradient() -> float:
    param = nn.Parameter(torch.zeros(3))
    if dist.get_rank() == 0:
        param.grad = torch.tensor([3.0, 0.0, 4.0])
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"p": param}, lambda p: torch.optim.SGD(p, lr=0.0)),
        GradientClipping.NORM, 1.0, 2.0, True, {param: [dist.group.WORLD]}, reduce_norm=reduce_norm,
    )  # fmt: skip
    return norm_of_a_step(optimizer)


def test_a_rank_without_gradients_still_takes_part() -> None:
    """A rank whose parameters got no gradient skipped the reduction, for which the other ranks wait."""
    assert run_ranks(2, clipped_where_one_rank_has_no_gradient, timeout=30.0) == pytest.approx([5.0, 5.0])


def few_rows(norm_type: float) -> float:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(distribute_tensor(torch.zeros(1, 3), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.tensor([[3.0, 0.0, -4.0]]), mesh, [Shard(0)])
    inner = KeyedOptimizerWrapper({"p": param}, lambda p: torch.optim.SGD(p, lr=0.0))
    optimizer = GradientClippingOptimizer(
        CombinedOptimizer([inner]), GradientClipping.NORM, 1.0, norm_type, enable_global_grad_clip=True
    )
    return norm_of_a_step(optimizer)


@pytest.mark.parametrize("norm_type, expected", [(2.0, 5.0), (math.inf, 4.0)])
def test_a_rank_may_hold_no_row_of_a_dtensor(norm_type: float, expected: float) -> None:
    assert run_ranks(2, few_rows, norm_type, timeout=30.0) == pytest.approx([expected, expected])


def rates_of_sharded_tables() -> list[float]:
    """By how much a gradient of one moves row 1 of each rank's table, step by step."""
    tables = [EmbeddingBagConfig(6, 4, name, feature_names=[name]) for name in ("a", "b")]
    ebc = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 9.0})
    plan = ShardingPlan({"": construct_module_sharding_plan(ebc, {"a": table_wise(rank=0), "b": table_wise(rank=1)})})
    model = DistributedModelParallel(ebc, plan=plan)
    stages = [WarmupStage(WarmupPolicy.LINEAR, 2, 0.5), WarmupStage(WarmupPolicy.CONSTANT, 3, 0.25)]
    optimizer = WarmupOptimizer(CombinedOptimizer([model.fused_optimizer]), stages, lr=1.0)
    rates = []
    for _ in range(5):
        optimizer.zero_grad()
        # gradients of the ranks are averaged
        before = model(kjt({"a": [[1]], "b": [[1]]})).values()
        before.sum().backward()
        with torch.no_grad():
            moved = before - model(kjt({"a": [[1]], "b": [[1]]})).values()
        rates.append(moved.mean().item())
        assert moved.max() - moved.min() < 1e-5
        optimizer.step()
    return rates


def test_the_schedule_steers_tables_of_every_rank() -> None:
    for rates in run_ranks(2, rates_of_sharded_tables):
        assert rates == pytest.approx([0.5, 0.75, 1.0, 0.25, 1.0], rel=1e-4)
