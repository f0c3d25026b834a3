"""A sharded torch.nn.EmbeddingBag: inputs, outputs, training and state dicts of one process, under every cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import gradient_of
from ranks import error_of, run_ranks
from torch import Tensor, nn
from torch.testing import assert_close

from shardwise import DistributedModelParallel, RowWiseAdagrad, ShardingEnv, ShardingPlan, apply_optimizer_in_backward
from shardwise.planner import layout
from shardwise.sharding import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    row_wise,
    table_wise,
)
from shardwise.sharding.dmp.unwrap import sharded_parameter_names
from shardwise.sharding.modules.embedding_bag import EmbeddingBagSharder, ShardedEmbeddingBag

ROWS, DIM, BATCH = 11, 8, 5
CUTS: dict[str, Callable[[int], Any]] = {
    "data_parallel": lambda world: data_parallel(),
    "table_wise": lambda world: table_wise(world - 1),
    "row_wise": lambda world: row_wise(),
    "column_wise": lambda world: column_wise(list(range(world))),
}


class Model(nn.Module):
    """Bags, and a layer above them."""

    # its sharded form later
    bags: Any

    def __init__(self, mode: str, **settings: Any) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, DIM, mode=mode, **settings)
        self.over = nn.Linear(DIM, 1)

    def forward(self, *args: Any) -> Tensor:
        return self.over(self.bags(*args))  # type: ignore[no-any-return]


def inputs(rank: int, form: str, step: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(17 * rank + step)
    if form == "matrix":
        ids = torch.randint(0, ROWS, (BATCH, 3), generator=generator)
        return (ids,)
    lengths = torch.randint(0, 4, (BATCH,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator)
    if form == "last_offset":
        return ids.int(), offsets.int()
    return (ids, offsets[:-1], *([torch.rand(ids.shape, generator=generator)] if form == "weights" else []))


def make(mode: str, form: str) -> Model:
    torch.manual_seed(5)
    return Model(mode, include_last_offset=form == "last_offset")


def check(mode: str, form: str, cuts: tuple[str, ...]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for cut in cuts:
        alone = make(mode, form)
        model = make(mode, form)
        if cut != "data_parallel":
            apply_optimizer_in_backward(torch.optim.SGD, [model.bags.weight], {"lr": 0.5})
        sharder = EmbeddingBagSharder()
        plan = construct_module_sharding_plan(model.bags, {"weight": CUTS[cut](world)}, sharder, world, world, "cpu")
        dmp = DistributedModelParallel(model, plan=ShardingPlan({"bags": plan}), sharders=[sharder])
        inner: Any = dmp.module
        sharded = inner.bags
        assert isinstance(sharded, ShardedEmbeddingBag)
        assert [name for name, _ in dmp.named_parameters()] == ["bags.weight", "over.weight", "over.bias"]
        assert set(sharded_parameter_names(dmp)) == (set() if cut == "data_parallel" else {"bags.weight"}), cut
        dense = torch.optim.SGD(inner.over.parameters(), lr=0.1)
        if cut == "data_parallel":
            dense.add_param_group({"params": [inner.bags.weight], "lr": 0.5})
        alone_optimizer = torch.optim.SGD(alone.over.parameters(), lr=0.1)
        alone_optimizer.add_param_group({"params": [alone.bags.weight], "lr": 0.5})
        factor = torch.arange(1.0, BATCH + 1)[:, None]
        for step in range(2):
            outputs = [alone(*inputs(r, form, step)) for r in range(world)]
            out = dmp(*inputs(rank, form, step))
            assert_close(out, outputs[rank], msg=lambda text, cut=cut: f"{cut}: {text}")
            dense.zero_grad()
            alone_optimizer.zero_grad()
            (out * factor).sum().mul(rank + 1).backward()
            sum(((out * factor).sum() * (r + 1) / world for r, out in enumerate(outputs)), torch.zeros(())).backward()
            dense.step()
            alone_optimizer.step()
        whole = alone.bags.weight
        local = dmp.state_dict()["bags.weight"]
        if hasattr(local, "local_shards"):
            for piece in local.local_shards():
                (row, col), (height, width) = piece.metadata.shard_offsets, piece.metadata.shard_sizes
                assert_close(piece.tensor, whole[row : row + height, col : col + width].detach())
        else:
            assert_close(local.detach(), whole.detach())
        # what one process saved
        dmp.load_state_dict({**dmp.state_dict(), "bags.weight": torch.full((ROWS, DIM), 2.0)})
        assert not sharded.weight.numel() or bool((sharded.weight == 2).all())


def check_all() -> None:
    check("sum", "weights", tuple(CUTS))
    check("sum", "offsets", ("row_wise",))
    check("sum", "matrix", ("data_parallel",))
    check("mean", "offsets", ("row_wise",))
    check("mean", "last_offset", ("data_parallel", "column_wise"))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_it_trains_as_the_bag_of_one_process(world: int) -> None:
    run_ranks(world, check_all)


def check_learned_weights() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = make("sum", "weights").bags
    sharded = shard(make("sum", "weights").bags, row_wise(), world, dist.group.WORLD)
    ids, offsets, weights = inputs(rank, "weights", 0)
    sharded_weights, alone_weights = (weights.clone().requires_grad_() for _ in range(2))
    out = sharded(ids, offsets, sharded_weights)
    # the awaitable passes for what it becomes
    assert isinstance(out, Tensor)
    (out * torch.arange(DIM)).sum().backward()
    (alone(ids, offsets, alone_weights) * torch.arange(DIM)).sum().backward()
    assert_close(gradient_of(sharded_weights), gradient_of(alone_weights))


def shard(bags: nn.EmbeddingBag, cut: Any, world: int, pg: dist.ProcessGroup | None, **settings: Any) -> Any:
    sharder = EmbeddingBagSharder(**settings)
    plan = construct_module_sharding_plan(bags, {"weight": cut}, sharder, world, world, "cpu")
    env = ShardingEnv.from_local(1, 0) if pg is None else ShardingEnv.from_process_group(pg)
    return sharder.shard(bags, plan, env)


def check_other_plans() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    bags = make("sum", "weights").bags
    wanted = [bags(*inputs(rank, "weights", step)).detach() for step in range(2)]
    sharded = shard(bags, row_wise(compute_kernel="fused"), world, dist.group.WORLD)
    parameter = sharded.weight
    sharded.reshard(layout.column_wise("weight", ROWS, DIM, [1, 0]))
    assert_close(sharded(*inputs(rank, "weights", 0)).wait(), wanted[0])
    assert sharded.weight is parameter
    assert parameter.shape == (ROWS, DIM // 2)
    assert list(sharded.state_dict()) == ["weight"]
    # without a plan the planner makes one
    dmp: Any = DistributedModelParallel(make("sum", "weights"), sharders=[EmbeddingBagSharder()])
    assert_close(dmp.module.bags(*inputs(rank, "weights", 1)).wait(), wanted[1])
    assert set(dmp.plan.plan["bags"]) == {"weight"}


@pytest.mark.ranks
@pytest.mark.parametrize("check", [check_learned_weights, check_other_plans], ids=["weights learn", "other plans"])
def test_it_learns_weights_and_goes_over_to_other_plans(check: Callable[[], None]) -> None:
    run_ranks(2, check)


def check_bad_batches() -> list[str]:
    """What rank 1 does wrong, all ranks are told."""
    rank, world = dist.get_rank(), dist.get_world_size()
    summed = shard(nn.EmbeddingBag(ROWS, DIM, mode="sum"), row_wise(), world, dist.group.WORLD)
    averaged = shard(nn.EmbeddingBag(ROWS, DIM), row_wise(), world, dist.group.WORLD)
    ids, start = torch.tensor([1, 2]), torch.tensor([0])
    bad: list[tuple[Any, tuple[Tensor, ...]]] = [
        (averaged, (ids, start, torch.ones(2))),
        (summed, (ids, start, torch.ones(3))),
        (summed, (ids,)),
        (summed, (ids.view(1, 2), start)),
        (summed, (ids.view(1, 1, 2),)),
        (summed, (torch.tensor([1, ROWS]), start)),
        (summed, (ids, torch.tensor([1]))),
    ]
    return [error_of(module, *(args if rank == 1 else (ids, start))) for module, args in bad]


@pytest.mark.ranks
def test_a_bad_batch_of_one_rank_raises_on_all() -> None:
    wanted = ("mode 'sum'", "shape", "needs offsets", "leave offsets None", "dimensions", str(ROWS), "offsets")
    for errors in run_ranks(2, check_bad_batches):
        for words, text in zip(wanted, errors, strict=True):
            assert text.startswith(("ValueError", "IndexError", "RefusedIndexError")) and words in text


def test_optimizer_states_are_those_of_the_parameter() -> None:
    bags = nn.EmbeddingBag(ROWS, DIM, mode="sum")
    apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
    sharded = shard(bags, row_wise(), 1, None)
    sharded(torch.tensor([[1, 2]])).sum().backward()
    assert list(sharded.fused_optimizer.params) == ["weight"]
    (state,) = sharded.fused_optimizer.state_dict()["state"].values()
    assert all(name.startswith("weight.") for name in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_output_has_the_dtype_of_the_table(mode: str, dtype: torch.dtype) -> None:
    bags = nn.EmbeddingBag(ROWS, DIM, mode=mode, dtype=dtype)
    wanted = bags(torch.tensor([[1, 2], [3, 3]]))
    output = shard(bags, row_wise(), 1, None)(torch.tensor([[1, 2], [3, 3]]))
    assert output.dtype == dtype
    assert_close(output.wait(), wanted, rtol=1e-2, atol=1e-2)


def test_empty_batches_and_bags_are_zeros() -> None:
    sharded = shard(nn.EmbeddingBag(ROWS, DIM), row_wise(), 1, None)
    assert sharded(torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 2
    assert sharded(torch.zeros(3, 0, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 3


def test_a_table_on_meta_is_initialised_as_torch_does() -> None:
    sharded = shard(nn.EmbeddingBag(1000, DIM, device="meta"), row_wise(), 1, None)
    assert sharded.weight.detach().std().item() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mode": "max"}, "mode 'max'"),
        ({"padding_idx": 0}, "padding_idx=0"),
        ({"max_norm": 1.0}, "max_norm=1.0"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True"),
    ],
)
def test_what_is_not_served_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shard(nn.EmbeddingBag(ROWS, DIM, **settings), row_wise(), 1, None)


def test_settings_without_effect_warn_and_wrong_plans_raise() -> None:
    with pytest.warns(UserWarning, match="sparse=True has no effect"):
        shard(nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True), row_wise(), 1, None)
    sharder, env = EmbeddingBagSharder(), ShardingEnv.from_local(1, 0)
    with pytest.raises(ValueError, match=r"of module 'bags' has tables \['w'\]"):
        sharder.shard(nn.EmbeddingBag(ROWS, DIM), {"w": None}, env, module_fqn="bags")  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="got Linear"):
        sharder.shard(nn.Linear(1, 1), {}, env)  # type: ignore[arg-type]
    assert not any(isinstance(default, EmbeddingBagSharder) for default in get_default_sharders())
