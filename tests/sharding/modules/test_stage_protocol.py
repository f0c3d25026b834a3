"""Stages of every sharded module, called one by one as pipelines of others do: the bits of its forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from model_zoo import MAKERS, values_of
from ranks import error_of, run_ranks, world_group
from torch import Tensor

from shardwise import RowWiseAdagrad, ShardingEnv, apply_optimizer_in_backward, construct_module_sharding_plan
from shardwise.sharding import Awaitable, ShardedModule, column_wise, get_default_sharders, row_wise, table_wise
from shardwise.sharding.modules.default_sharders import sharder_of
from shardwise.sharding.modules.nested import EmbeddingTowerCollectionSharder

KINDS = [kind for kind in MAKERS if kind != "model"]
STEPS = 3


def sharded(kind: str) -> tuple[Any, type]:
    """The sharded module, at path "m", and the class that it was."""
    torch.manual_seed(8)
    module: Any = MAKERS[kind]("cpu")
    tables = [param for name, param in module.named_parameters() if name.endswith(".weight") and "fused" not in kind]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.1})
    # towers have no default sharder, as in TorchRec
    sharder = EmbeddingTowerCollectionSharder() if kind == "towers" else sharder_of(module, get_default_sharders())
    assert sharder is not None
    cut = {"a": row_wise(), "b": table_wise(1), "c": table_wise(0)}
    where = {name: cut[name] for name in sharder.shardable_parameters(module)}
    plan = construct_module_sharding_plan(module, where, sharder, dist.get_world_size(), dist.get_world_size(), "cpu")
    return sharder.shard(module, plan, ShardingEnv.from_process_group(world_group()), "cpu", "m"), type(module)


def trained(module: Any, outputs: list[Any]) -> list[Tensor]:
    """The values of each step's output, after its backward."""
    values = []
    for output in outputs:
        first = output[0] if isinstance(output, tuple) else output
        of_step = values_of(first.wait() if isinstance(first, Awaitable) else first)
        (of_step * torch.arange(of_step.numel()).view(of_step.shape).cos()).sum().backward()
        values.append(of_step.detach().clone())
    return values


def numbers_of(module: Any) -> dict[str, Tensor]:
    """All that training changes on this rank."""
    named = [*module.named_parameters(), *module.named_buffers()]
    gradients = [(f"{name}.grad", param.grad) for name, param in module.named_parameters() if param.grad is not None]
    return {name: tensor.detach().clone() for name, tensor in [*named, *gradients]}


def both_ways(kind: str) -> Any:
    rank = dist.get_rank()
    (whole, _), (staged, before) = sharded(kind), sharded(kind)
    batches = [random_kjt({"f": 5, "g": 6}, 3 + rank, seed=10 * step + rank) for step in range(STEPS)]
    by_forward = [value for batch in batches for value in trained(whole, [whole(batch)])]
    by_stages = []
    # the next batch leaves while this one is computed
    waiting = [(ctx := staged.create_context(), staged.input_dist(ctx, batches[0]))]
    for step in range(STEPS):
        ctx, sizes = waiting.pop()
        ids = sizes.wait().wait()
        if step + 1 < STEPS:
            ahead = staged.create_context()
            waiting.append((ahead, staged.input_dist(ahead, batches[step + 1])))
        assert staged.prefetch(ids, ctx=ctx)
        if step % 2:
            output = staged.output_dist(ctx, staged.compute(ctx, ids))
        else:
            output = staged.compute_and_output_dist(ctx, ids)
        by_stages += trained(staged, [output])
    same = all(map(torch.equal, by_forward, by_stages)) and any(bool(values.any()) for values in by_stages)
    ends, others = numbers_of(whole), numbers_of(staged)
    same = same and list(ends) == list(others) and all(torch.equal(ends[name], others[name]) for name in ends)
    args, kwargs = staged.preprocess_input([batches[0]], {"k": 1})
    tables = sorted(f"m.{name}" for name, _ in staged.named_parameters() if name.endswith(".weight"))
    facts = (
        isinstance(staged, ShardedModule), staged.unsharded_module_type is before, staged.module_fqn,
        sorted(staged.sharded_parameter_names("m")) == tables and bool(tables), (args[0] is batches[0], kwargs),
    )  # fmt: skip
    return same, facts


@pytest.mark.ranks
@pytest.mark.parametrize("kind", KINDS)
def test_stages_are_the_forward_of_every_sharded_module(kind: str) -> None:
    assert run_ranks(2, both_ways, kind) == [(True, (True, True, "m", True, (True, {"k": 1})))] * 2


def updated() -> Any:
    """Tables that go over to another plan by their module and its sharder, in the middle of training."""
    (module, _), (still, _) = sharded("bags"), sharded("bags")
    env, rank = module._env, dist.get_rank()
    sharder: Any = sharder_of(MAKERS["bags"]("cpu"), get_default_sharders())
    plain = MAKERS["bags"]("cpu")
    moved = construct_module_sharding_plan(
        plain, {"a": column_wise([0, 1]), "b": row_wise(), "c": table_wise(1)}, world_size=2, device_type="cpu"
    )
    batches = [random_kjt({"f": 5, "g": 6}, 3 + rank, seed=10 * step + rank) for step in range(2)]
    outputs = [trained(one, [one(batches[0])]) for one in (module, still)]
    module.update_shards({"b": moved["b"]}, env, torch.device("cpu"))
    same = sharder.reshard(module, {"c": moved["c"]}, env) is module
    outputs += [trained(one, [one(batches[1])]) for one in (module, still)]
    close = all(torch.allclose(a[0], b[0], atol=1e-6) for a, b in (outputs[:2], outputs[2:]))
    value: Any = module.state_dict()["embedding_bags.b.weight"]
    offsets = [list(shard.metadata.shard_offsets) for shard in value.local_shards()]
    other = ShardingEnv.from_process_group(dist.new_group([0, 1]))  # type: ignore[arg-type]
    errors = [error_of(module.update_shards, {}, other), error_of(module.update_shards, {}, env, "cuda")]
    return close and same, offsets, errors


@pytest.mark.ranks
def test_a_sharded_collection_goes_over_to_another_plan_by_update_shards() -> None:
    for rank, (same, offsets, errors) in enumerate(run_ranks(2, updated)):
        assert same and offsets == [[3 * rank, 0]]
        assert "env must have the process group over which" in errors[0] and "tables are on cpu, got cuda" in errors[1]
