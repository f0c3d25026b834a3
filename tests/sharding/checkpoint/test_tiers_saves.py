"""Saves, loads and reads of tables with tiers at any time: batches under way, gradients that wait, disks that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sharding_mixes as mixes
import torch
import torch.distributed as dist
from checkpoint_cases import bytes_of
from ranks import run_ranks
from sharding_steps import expect_equal, held_of, small_chunks, with_tier
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ShardingEnv,
    apply_optimizer_in_backward,
    checkpoint,
)
from shardwise.embeddings.tiers import HostRecords, cached_rows
from shardwise.planner import layout
from shardwise.planner.layout import TableOptions, Tier
from shardwise.sharding import ShardedEmbeddingBagCollection
from shardwise.sharding.checkpoint import files
from shardwise.sharding.engine import reshard

pytestmark = pytest.mark.ranks

MIX = mixes.Mix(
    tuple(
        mixes.TableCase(f"t{n}", rows, 8, (f"f{n}",), cut, options=TableOptions("ordered", "table"), seed=n)
        for n, (rows, cut) in enumerate(((40, "row_wise"), (23, "column_wise"), (9, "data_parallel")))
    )
)


ROWS_OF_ONE = layout.row_wise("t", 2**17, 16, [0])


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made while it is on; not of those that were there before."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.nbytes = 0
        groups = model._tables.all_groups()
        held = [tensor for group in groups for tensor in (group.flat, *group.states)]
        for store in model._tables.stores():
            held += [value for value in vars(store.residency).values() if isinstance(value, Tensor)]
            held += [below.records for below in store.below if isinstance(below, HostRecords)]
        self._held = {tensor.untyped_storage().data_ptr() for tensor in held}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.set_.source_Storage:
            # a file that is mapped, and takes no memory
            self._held.add(out.untyped_storage().data_ptr())
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._held:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


def large(tier: Tier) -> Any:
    """A table of 8 MiB with 16 MiB of states, on meta until it is sharded; in one process."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(2**17, 16, "t", feature_names=["f"])], device="meta")
    apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.1})
    options = {"t": TableOptions(tier=tier)}
    return ShardedEmbeddingBagCollection(
        module, ROWS_OF_ONE, ShardingEnv.from_local(1, 0), torch.device("cpu"),
        default_optimizer=(torch.optim.SGD, {"lr": 0.1}), options=options,
    )  # fmt: skip


@pytest.mark.parametrize("below", ["ram", "file"])
def test_no_more_than_chunks_of_a_table_are_in_memory(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tensor that a save, a load, a reshard or a copy makes, of a table of 32 MiB with its states."""
    chunk = 2**18
    monkeypatch.setattr(cached_rows, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(reshard, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(files, "BLOCK_BYTES", chunk)
    filed = Tier(100, "file", str(tmp_path / "scratch"), max_slots=1000)
    model = large(filed if below == "file" else Tier(100, max_slots=1000))
    rows = torch.arange(0, 2**17, 3)
    group = model._tables.groups[0]
    group.renew(0, rows[:500], torch.ones(500, 16))
    for what, act in {
        "save": lambda: checkpoint.save(tmp_path / "steps", model, step=1),
        "load": lambda: checkpoint.load(tmp_path / "steps" / "step-000000000001", model),
        "reshard": lambda: model.reshard(ROWS_OF_ONE, {"t": TableOptions(tier=filed)}),
        "move": lambda: model.cpu(),
    }.items():
        with Largest(model) as largest:
            act()
        # a move makes none, a reshard the map of all rows, which has four bytes of each
        assert largest.nbytes <= 2 * chunk and (largest.nbytes or what == "move"), f"{what}: {largest.nbytes}"
    tensors = checkpoint.full_state_dict(tmp_path / "steps" / "step-000000000001")
    assert torch.equal(checkpoint.full_state_dict(model)["embedding_bags.t.weight"], tensors["embedding_bags.t.weight"])
    assert bool((tensors["embedding_bags.t.weight"][rows[:500]] == 1).all())


def save_under_way(folder: Path) -> None:
    """Rows of the next batch are on their way into slots when all are read, and written."""
    mix = with_tier(MIX, Tier(12, "file", str(folder / "scratch"), max_slots=1.0))
    cached, whole = (mixes.shard(m, mixes.build(m, "adam"), mixes.environment()) for m in (mix, MIX))
    batches = mixes.batches_of_rank(mix, range(4))
    for model in (cached, whole):
        mixes.train(mix, model, batches[:3], False)
    step = cached.start(batches[3][0])
    cached.send_ids(step)
    cached.receive_ids(step)
    prefetched = cached.prefetch(step)
    assert prefetched and any(store._transfers._loads for store in cached._tables.stores())
    with small_chunks():
        for name, model in (("whole", whole), ("cached", cached)):
            checkpoint.save(folder / name, model, step=1)
            dist.barrier()
    assert bytes_of(folder / "whole" / "step-000000000001") == bytes_of(folder / "cached" / "step-000000000001")
    # rows that are replaced now are those that the batch finds
    state = {name: value * 2 for name, value in checkpoint.full_state_dict(whole).items()}
    for model in (whole, cached):
        model.load_state_dict(state)
    cached.routed_ahead.append(step)
    outputs = [mixes.by_lookup(mix, model(batches[3][0])) for model in (cached, whole)]
    assert all(map(torch.equal, *outputs))
    for of_model in outputs:
        mixes.backward(of_model, batches[3][1])
    expect_equal(whole, cached)


@pytest.mark.parametrize("world", [1, 2])
def test_rows_that_are_on_their_way_are_saved_and_replaced(world: int, tmp_path: Path) -> None:
    """A prefetch that ended after a load put back what was there before; a save read slots that were not filled."""
    run_ranks(world, save_under_way, tmp_path)


def waiting_gradients(folder: Path) -> None:
    """Gradients that wait for a step hold their rows: saves, loads and reads of all rows pass them by."""
    mix = with_tier(MIX, Tier(12, max_slots=1.0))
    cached, whole = (mixes.shard(m, mixes.build(m, "adam"), mixes.environment()) for m in (mix, MIX))
    batches = mixes.batches_of_rank(mix, range(4))
    for model in (cached, whole):
        model.fused_optimizer.accumulate_gradients()
        mixes.train(mix, model, batches[:2], False)
        with small_chunks():
            checkpoint.save(folder / str(model is cached), model, step=1)
        model.fused_optimizer.step()
        mixes.train(mix, model, batches[2:], False)
        model.fused_optimizer.step()
        dist.barrier()
    assert bytes_of(folder / "True") == bytes_of(folder / "False")
    expect_equal(whole, cached)


def test_gradients_that_wait_are_left_alone_by_a_save(tmp_path: Path) -> None:
    run_ranks(2, waiting_gradients, tmp_path)


def failing_save(folder: Path) -> tuple[str, list[str]]:
    """The disk below a table fails in the middle of a save: all ranks raise, the older checkpoint stays."""
    mix = with_tier(MIX, Tier(12, "file", str(folder / "scratch"), max_slots=1.0))
    model = mixes.shard(mix, mixes.build(mix, "adam"), mixes.environment())
    mixes.train(mix, model, mixes.batches_of_rank(mix, range(2)), False)
    checkpoint.save(folder / "steps", model, step=1)
    before = held_of(model)
    below: Any = None
    if dist.get_rank() == 1:
        below = model._tables.stores()[0].below[0]
        read, calls = below.read, iter(range(100))

        def failing(rows: Tensor, out: Tensor) -> None:
            if next(calls) == 1:
                raise OSError(5, "table 't0.1': its rows cannot be read: Input/output error")
            read(rows, out)

        below.read = failing
    with small_chunks(), pytest.raises(OSError) as error:
        checkpoint.save(folder / "steps", model, step=2)
    if dist.get_rank() == 1:
        del below.read
    for mine, theirs in zip(held_of(model), before, strict=True):
        assert mixes.same_tensors(mine, theirs)
    dist.barrier()
    names = [path.name for path in checkpoint.steps(folder / "steps")]
    checkpoint.save(folder / "steps", model, step=3)
    return str(error.value), names


def test_a_disk_that_fails_in_a_save_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    for said, names in run_ranks(2, failing_save, tmp_path):
        assert "its rows cannot be read: Input/output error" in said
        assert names == ["step-000000000001"]
