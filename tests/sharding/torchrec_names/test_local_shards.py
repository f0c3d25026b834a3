"""`LocalShardsWrapper`: a rank's pieces as one tensor, alone, inside DTensors, and in torch's checkpoints."""

from __future__ import annotations

import copy
import pickle
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model_zoo import bag_tables
from ranks import error_of, run_ranks, world_group
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard as Along

from shardwise import EmbeddingBagCollection, RowWiseAdagrad, ShardingEnv
from shardwise.embeddings import apply_optimizer_in_backward
from shardwise.planner.layout import Shard
from shardwise.sharding import ShardedEmbeddingBagCollection
from shardwise.sharding.plan.local_shards import LocalShardsWrapper
from shardwise.sharding.torchrec.state_dict_transform import state_dict_gather, state_dict_to_device


def pieces() -> LocalShardsWrapper:
    """Columns [0, 2) and [5, 8) of 4 rows."""
    return LocalShardsWrapper([torch.arange(8.0).view(4, 2), -torch.arange(12.0).view(4, 3)], [(0, 0), (0, 5)])


def test_it_has_the_shape_of_its_pieces_side_by_side_and_says_where_they_lie() -> None:
    made = pieces()
    assert (made.shape, made.dtype, made.device) == ((4, 5), torch.float32, torch.device("cpu"))
    assert made.local_sizes() == [(4, 2), (4, 3)] and made.local_offsets() == [(0, 0), (0, 5)]
    assert [(c.offsets, c.sizes) for c in made.local_chunks] == [((0, 0), (4, 2)), ((0, 5), (4, 3))]
    assert not made.is_empty_shard() and made._get_tensor_size_bytes() == 20 * 4
    rows = LocalShardsWrapper([torch.zeros(3), torch.ones(2)], [(0,), (7,)])
    assert rows.shape == (5,)
    none = LocalShardsWrapper([], [])
    assert (
        none.is_empty_shard()
        and none._get_tensor_size_bytes() == 0
        and none.shape == (0, 0)
        and none.is_meta
        and none.local_sizes() == [(0, 0)]
    )
    assert torch.equal(none.clone(), none) and none.__create_chunk_list__() == []


def test_operations_act_on_each_piece() -> None:
    made: Any = pieces()
    other: Any = pieces()
    doubles = made.to(torch.float64)
    assert doubles.dtype == torch.float64 and [s.dtype for s in doubles.local_shards()] == [torch.float64] * 2
    zeros: Any = torch.zeros_like(made)
    empty: Any = torch.empty_like(made)
    assert all(not s.any() for s in zeros.local_shards()) and empty.local_offsets() == made.local_offsets()
    assert made.new_empty([4, 5]).local_sizes() == made.local_sizes()
    assert torch.equal(made, other) and not torch.equal(made, zeros)
    elsewhere = LocalShardsWrapper(made.local_shards(), [(0, 0), (0, 4)])
    assert not torch.equal(made, elsewhere)
    copied = made.clone()
    made.zero_()
    assert torch.equal(copied, other) and torch.equal(made, zeros)
    assert made.copy_(copied) is made and torch.equal(made, other)
    # a view and what is detached share memory
    for alias in (made.view([4, 5]), made.detach(), made.view_as(made)):
        alias.local_shards()[1].fill_(9)
        assert made.local_shards()[1].unique().item() == 9
        made.copy_(copied)
    one: Any = LocalShardsWrapper([torch.arange(6.0).view(3, 2)], [(1, 0)])
    assert one.view([2, 3]).local_shards()[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    made.requires_grad_()
    assert all(s.requires_grad for s in made.local_shards())
    assert not any(s.requires_grad for s in made.detach().local_shards())
    for again in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert torch.equal(again, other) and again.local_shards()[0].data_ptr() != other.local_shards()[0].data_ptr()


def test_what_it_has_no_meaning_for_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"aten.add.Tensor is not supported for LocalShardsWrapper"):
        pieces() + 1
    with pytest.raises(NotImplementedError, match="channels_last"):
        pieces().clone(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"has no view \[20\]"):
        pieces().view([20])
    with pytest.raises(ValueError, match="cannot be filled from Tensor"):
        pieces().copy_(torch.zeros(4, 5))
    with pytest.raises(ValueError, match="1 local_shards, but 2 local_offsets"):
        LocalShardsWrapper([torch.zeros(1)], [(0,), (1,)])
    with pytest.raises(ValueError, match="one dtype, got"):
        LocalShardsWrapper([torch.zeros(1), torch.zeros(1).half()], [(0,), (1,)])
    with pytest.raises(ValueError, match=r"cannot begin at \[0\] beside"):
        LocalShardsWrapper([torch.zeros(1, 1)], [(0,)])


def test_checkpoints_find_a_piece_by_its_place() -> None:
    made, whole = pieces(), torch.empty(4, 8, device="meta")
    items = made.__create_write_items__("t", whole)
    assert [(i.index.fqn, i.index.offset, i.tensor_data.size) for i in items if i.tensor_data] == [
        ("t", (0, 0), (4, 8)), ("t", (0, 5), (4, 8)),
    ]  # fmt: skip
    for index in (MetadataIndex("t", [0, 5]), MetadataIndex("t", [0, 5], 1), MetadataIndex("t", [0, 5], 0)):
        assert made.__get_tensor_shard__(index) is made.local_shards()[1]
    with pytest.raises(ValueError, match="Could not find shard at .*'t': pieces begin at"):
        made.__get_tensor_shard__(MetadataIndex("t", [0, 4]))


ROWS, DIM = 6, 8
# rank 0 has the outer columns of `a` and two strips of rows of `b`, rank 1 all of `c`
CUTS = [
    *(Shard("ta", rank, (0, ROWS), cols) for rank, cols in ((0, (0, 2)), (1, (2, 6)), (0, (6, 8)))),
    *(Shard("tb", rank, rows, (0, DIM)) for rank, rows in ((0, (0, 2)), (1, (2, 3)), (0, (3, 6)))),
    Shard("tc", 1, (0, ROWS), (0, DIM)),
]
OTHERWISE = [
    *(Shard("ta", rank, (3 * rank, 3 * rank + 3), (0, DIM)) for rank in (0, 1)),
    Shard("tb", 1, (0, ROWS), (0, DIM)),
    *(Shard("tc", rank, (0, ROWS), cols) for rank, cols in ((1, (0, 3)), (0, (3, 5)), (1, (5, 8)))),
]


def plain() -> EmbeddingBagCollection:
    torch.manual_seed(2)
    tables = EmbeddingBagCollection(bag_tables(dict.fromkeys("abc", ROWS), DIM))
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    return tables


def over_ranks(cuts: list[Shard]) -> ShardedEmbeddingBagCollection:
    env = ShardingEnv.from_process_group(world_group(), output_dtensor=True)
    return ShardedEmbeddingBagCollection(
        plain(), cuts, env, torch.device("cpu"), default_optimizer=(torch.optim.SGD, {"lr": 0.01})
    )


def block_of_rows(at: int) -> tuple[Tensor | None, str]:
    """Two rows from `at` on each rank as a whole, and why not."""
    rows = LocalShardsWrapper([torch.tensor([[1.0 + dist.get_rank()] * 3, [5.0] * 3])], [(at, 0)])
    mesh = DeviceMesh.from_group(world_group(), "cpu")
    cut = DTensor.from_local(rows, mesh, [Along(0)], run_check=False, shape=torch.Size([4, 3]), stride=(3, 1))
    whole: list[Tensor] = []
    error = error_of(lambda: whole.append(cut.full_tensor()))
    return (whole[0] if whole else None), error


def kinds_of(values: dict[str, Any]) -> dict[str, str]:
    kinds = {}
    for name, value in values.items():
        local = value.to_local()
        assert isinstance(value, DTensor) and isinstance(local, LocalShardsWrapper)
        places = [list(at) for at in local.local_offsets()[: len(local.local_shards())]]
        kinds[name.split(".")[-2]] = f"{value.placements[0]} {places}"
    return kinds


def saved_and_loaded(folder: str) -> Any:
    module = over_ranks(CUTS)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(1)
    state = module.state_dict()
    copies = {name: torch.zeros_like(value).copy_(value.detach()).clone() for name, value in state.items()}
    dcp.save(state, checkpoint_id=folder)
    others = over_ranks(OTHERWISE)
    target = others.state_dict()
    dcp.load(target, checkpoint_id=folder)
    # what was read is in the tables, whose pieces were filled
    whole = {name: torch.zeros(ROWS, DIM) for name in state}
    state_dict_gather(others.state_dict(), whole)
    # from copies on another rank's memory, back into the plan that they are of
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    module.load_state_dict(state_dict_to_device(copies, world_group(), "cpu"))
    back = {name: torch.zeros(ROWS, DIM) for name in state}
    state_dict_gather(module.state_dict(), back)
    module.fused_optimizer.load_state_dict(module.fused_optimizer.state_dict())
    blocks = block_of_rows(2 * dist.get_rank()), block_of_rows(2 - 2 * dist.get_rank())
    states = {
        f"{key}.": value
        for values in module.fused_optimizer.state_dict()["state"].values()
        for key, value in values.items()
    }
    return kinds_of(state), {key: str(value.placements) for key, value in states.items()}, whole, back, blocks


@pytest.mark.ranks
def test_sharded_tables_with_several_pieces_a_rank_are_dtensors_that_checkpoints_save_and_load() -> None:
    """TorchRec's `output_dtensor=True`: tables that were not cut evenly came as ShardedTensors."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(2, saved_and_loaded, str(Path(folder) / "step"))
    columns, rows, whole_of = Along(1), Along(0), Replicate()
    assert [kinds for kinds, *_ in ranks] == [
        {"ta": f"{columns} [[0, 0], [0, 6]]", "tb": f"{rows} [[0, 0], [3, 0]]", "tc": f"{whole_of} []"},
        {"ta": f"{columns} [[0, 2]]", "tb": f"{rows} [[2, 0]]", "tc": f"{whole_of} [[0, 0]]"},
    ]
    assert all(states for _, states, *_ in ranks)
    wanted = {name: value + 1 for name, value in plain().state_dict().items()}
    for rank, (_, _, whole, back, ((rows, _), (none, error))) in enumerate(ranks):
        for name, value in wanted.items() if rank == 0 else ():
            assert torch.equal(whole[name], value) and torch.equal(back[name], value), name
        # blocks in rank order are gathered, others would come in a wrong order
        assert rows[:, 0].tolist() == [1, 5, 2, 5] and none is None
        assert f"rank {rank}: a piece of shape [2, 3] at [{2 - 2 * rank}, 0] is no block of rows in rank order" in error


def test_torchrecs_name_is_served() -> None:
    served = import_module("shardwise.torchrec.distributed.shards_wrapper")
    assert served.LocalShardsWrapper is LocalShardsWrapper
