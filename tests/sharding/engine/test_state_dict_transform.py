"""TorchRec's `inference.state_dict_transform` on our state dicts: gathered on one rank, their names, on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks, world_group
from sharding_mixes import Mix, TableCase, build, environment, shard
from sharding_steps import local_part
from test_sharded_state import STRATEGIES, mix_with, told, whole_of
from torch import Tensor

from shardwise import ShardingEnv
from shardwise.sharding.torchrec.state_dict_transform import (
    state_dict_all_gather_keys,
    state_dict_gather,
    state_dict_to_device,
)

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore:Please use DTensor")]


def place(dtensors: bool) -> ShardingEnv:
    return ShardingEnv.from_process_group(world_group(), True) if dtensors else environment()


def sharded(mix: Mix, dtensors: bool) -> dict[str, Any]:
    state = shard(mix, build(mix, "adam"), place(dtensors)).state_dict()
    return {**state, "dense": torch.full((2,), 3.0)}


def gathered(mix: Mix, dtensors: bool, dtype: torch.dtype) -> tuple[dict[str, Tensor], set[str]]:
    state = sharded(mix, dtensors)
    whole = {f"embedding_bags.{table.name}.weight": (table.rows, table.dim) for table in mix.tables}
    target = {name: torch.full(size, -7.0, dtype=dtype) for name, size in {"dense": (2,), **whole}.items()}
    state_dict_gather(state, target)
    return target, {type(state[name]).__name__ for name in whole}


@pytest.mark.parametrize(
    ("world", "dtensors", "dtype"), [(1, False, torch.float32), (4, False, torch.float64), (2, True, torch.float32)]
)
def test_a_sharded_state_dict_is_gathered_on_rank_0(world: int, dtensors: bool, dtype: torch.dtype) -> None:
    mix = mix_with()
    if dtensors:
        cut = [TableCase("row_wise", 12, 8, ("a",), "row_wise"), TableCase("column_wise", 5, 8, ("b",), "column_wise")]
        mix = Mix((*mix.tables[:1], *cut))
    alone = build(mix, "adam").state_dict()
    ranks = run_ranks(world, gathered, mix, dtensors, dtype)
    if world > 1:
        assert ("DTensor" if dtensors else "ShardedTensor") in ranks[0][1]
    for rank, (found, _) in enumerate(ranks):
        assert len(found) == len(alone) + 1 and torch.equal(found["dense"], torch.full((2,), 3.0, dtype=dtype))
        for name, weight in alone.items():
            replicated = "data_parallel" in name
            wanted = weight if rank == 0 or replicated else torch.full_like(weight, -7.0)
            assert torch.equal(found[name], wanted.to(dtype)), (rank, name)


def refused(_: None) -> list[str]:
    mix = Mix((TableCase("a", 12, 8, ("a",), "row_wise"),))
    state, found = sharded(mix, False), []
    name = "embedding_bags.a.weight"
    good = {name: torch.zeros(12, 8)}
    lone: list[tuple[dict[str, Any], dict[str, Tensor]]] = [
        ({**state, name: state[name]}, {name: torch.zeros(12, 4)}),
        ({name: state[name]}, {**good, "lost": torch.zeros(2)}),
        ({**state, "dense": 3}, {**good, "dense": torch.zeros(2)}),
    ]
    for given in lone:
        # only rank 0 has the fault
        found.append(
            error_of(lambda given=given: state_dict_gather(*(given if dist.get_rank() == 0 else (state, good))))
        )  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="ranks differ in what all must share: names to gather, in their order"):
        state_dict_gather({**state, "b": state[name]}, {("b" if dist.get_rank() else name): torch.zeros(12, 8)})
    state_dict_gather(state, good)
    return found


def test_what_is_wrong_on_rank_0_is_raised_on_all() -> None:
    wrong = "src has shape (12, 8), dst (12, 4)"
    for found in run_ranks(2, refused, None):
        assert wrong in found[0] and "src has no 'lost'" in found[1]
        assert "'dense': a tensor is what can be gathered, not int" in found[2]


def names_and_moves(mix: Mix, dtensors: bool) -> tuple[list[str], dict[str, Any], dict[str, str], set[str]]:
    state, rank = sharded(mix, dtensors), dist.get_rank()
    names = state_dict_all_gather_keys({f"rank{rank}": torch.zeros(1), "b": 1, "a": 2}, world_group())
    moved = state_dict_to_device(state, world_group(), torch.device("cpu"))
    assert list(moved) == sorted(state)
    for name, value in moved.items():
        here, before = local_part(value), local_part(state[name])
        assert here is None or torch.equal(here, before)
    # what only some ranks have: a table on one rank is a ShardedTensor without pieces on the others, as upstream's are
    lone = dict(state)
    if rank:
        del lone["embedding_bags.table_wise.weight"]
    back = state_dict_to_device(lone, world_group(), "cpu")
    # and they load
    model = shard(mix, build(mix, "adam"), place(dtensors))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict({name: value for name, value in back.items() if name != "dense"})
    meta = state_dict_to_device(state, world_group(), "meta")
    places = {str(one.placement) for one in meta["embedding_bags.row_wise.weight"].metadata().shards_metadata}
    return (
        names, {name: told(value) for name, value in model.state_dict().items()},
        {name: type(value).__name__ for name, value in back.items()}, places,
    )  # fmt: skip


def test_names_of_all_ranks_and_values_on_a_device() -> None:
    mix = mix_with(STRATEGIES)
    alone = build(mix, "adam").state_dict()
    ranks = run_ranks(2, names_and_moves, mix, False)
    for names, weights, kinds, places in ranks:
        assert names == ["a", "b", "rank0", "rank1"]
        assert weights.keys() == alone.keys()
        assert kinds["embedding_bags.table_wise.weight"] == kinds["embedding_bags.grid.weight"] == "ShardedTensor"
        assert kinds["dense"] == "Tensor"
        assert places == {"rank:0/meta", "rank:1/meta"}
    for name, weight in alone.items():
        parts = [weights[name] for _, weights, _, _ in ranks]
        assert torch.equal(whole_of(parts), weight), name


def cannot_move(_: None) -> list[str]:
    mix = Mix((TableCase("a", 12, 8, ("a",), "row_wise"),))
    found = []
    dtensor = "embedding_bags.a.weight"
    for dtensors, bad in ((False, {"dense": None}), (True, {dtensor: None}), (False, {"extra": "text"})):
        state = sharded(mix, dtensors)
        if dist.get_rank() == 1:
            state = {name: value for name, value in {**state, **bad}.items() if value is not None}
        found.append(error_of(state_dict_to_device, state, world_group(), "cpu"))
    return found


def test_what_cannot_be_moved_is_named_on_all_ranks() -> None:
    extra = "'extra': rank 1 has str, which is no tensor"
    lack = "ranks [1] lack it, and only a ShardedTensor has no piece on a rank"
    assert (
        run_ranks(2, cannot_move, None)
        == [[f"ValueError: {text}" for text in (f"'dense': {lack}", f"'embedding_bags.a.weight': {lack}", extra)]] * 2
    )
