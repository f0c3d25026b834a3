"""Checkpoints and state dicts of tables with a tier: those of tables on the device, into and out of any tier.

Takes most of a minute: each claim trains and saves two models on up to four processes, in files that are seen onto the
disk.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sharding_mixes as mixes
import torch
import torch.distributed as dist
from checkpoint_cases import MIX, bytes_of
from ranks import error_of, run_ranks
from tier_mixes import expect_equal, misses, small_chunks, with_strategy, with_tier
from torch import Tensor

from shardwise import checkpoint
from shardwise.planner.layout import Tier

pytestmark = pytest.mark.ranks

STEPS = 3


def tier_in(folder: Path, below: str) -> Tier | None:
    """Few rows on the device, others in memory or in a file; None is all."""
    if below == "none":
        return None
    return Tier(4, below, str(folder / "scratch") if below == "file" else None, max_slots=1.0)


def trained(mix: mixes.Mix, optimizer: str) -> Any:
    """The sharded collection after some steps."""
    model = mixes.shard(mix, mixes.build(mix, optimizer), mixes.environment())
    mixes.train(mix, model, mixes.batches_of_rank(mix, range(STEPS)), False)
    return model


def save_both(folder: Path, below: str, optimizer: str) -> int:
    """Rows that this rank's tables brought to their slots."""
    whole = trained(MIX, optimizer)
    cached = trained(with_tier(MIX, tier_in(folder, below)), optimizer)
    with small_chunks():
        checkpoint.save(folder / "whole", whole, step=1)
        checkpoint.save(folder / "cached", cached, step=1)
    dist.barrier()
    assert bytes_of(folder / "whole" / "step-000000000001") == bytes_of(folder / "cached" / "step-000000000001")
    # saving changed nothing
    expect_equal(whole, cached)
    return misses(cached)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("below", "optimizer"), [("ram", "adam"), ("file", "rowwise_adagrad"), ("ram", "sgd")])
def test_the_files_of_a_table_with_a_tier_are_those_of_one_without(
    world: int, below: str, optimizer: str, tmp_path: Path
) -> None:
    assert sum(run_ranks(world, save_both, tmp_path, below, optimizer)) > 0


def load_into(folder: Path, below: str, strategy: str) -> list[str]:
    """Load what ranks of another number saved, train on, and save again; the checksums of that."""
    mix = with_tier(with_strategy(MIX, strategy), tier_in(folder, below))
    model = mixes.shard(mix, mixes.build(mix, "adam"), mixes.environment())
    with small_chunks():
        checkpoint.load(folder / "from" / "step-000000000001", model, resplit="mean")
    # bits of what follows hang on the plan, not on the tier
    mixes.train(mix, model, mixes.batches_of_rank(mix, range(STEPS, STEPS + 2)), False)
    name = f"{below}-{strategy}"
    checkpoint.save(folder / name, model, step=2)
    dist.barrier()
    return sorted(bytes_of(folder / name).values())


def save_from(folder: Path, below: str) -> None:
    checkpoint.save(folder / "from", trained(with_tier(MIX, tier_in(folder, below)), "adam"), step=1)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_a_checkpoint_loads_into_any_tier_plan_and_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    run_ranks(before, save_from, tmp_path, "ram")
    for strategy in ("row_wise", "column_wise", "data_parallel"):
        kinds = ("none", "ram", "file") if strategy == "column_wise" else ("none", "ram")
        results = [run_ranks(after, load_into, tmp_path, below, strategy)[0] for below in kinds]
        assert all(result == results[0] for result in results)


class OwnRecords:
    """A backing of a user's: a dict of rows."""

    def __init__(self, table: str, rows: int, record_bytes: int) -> None:
        assert table.startswith("t") and rows > 0
        self._rows: dict[int, Tensor] = {}
        self._bytes = record_bytes

    def read(self, rows: Tensor, out: Tensor) -> None:
        for place, row in enumerate(rows.tolist()):
            out[place] = self._rows.get(row, torch.zeros(self._bytes, dtype=torch.uint8))

    def write(self, rows: Tensor, records: Tensor) -> None:
        for row, record in zip(rows.tolist(), records.clone(), strict=True):
            self._rows[row] = record

    def grow(self, rows: int) -> None:
        pass

    def close(self) -> None:
        self._rows.clear()


def any_mix(folder: Path, seed: int, optimizer: str) -> int:
    """Random plans, dtypes and rules: the same files, which load into either; a rank may have no rows."""
    mix = replace(mixes.mix_of(seed, pooled=seed % 2 == 0), settings=())
    cached = with_tier(mix, Tier(2, OwnRecords if seed % 3 == 0 else "ram", max_slots=1.0))
    models = [mixes.shard(one, mixes.build(one, optimizer), mixes.environment()) for one in (mix, cached)]
    with small_chunks():
        for step in range(2):
            for name, one, model in zip(("whole", "cached"), (mix, cached), models, strict=True):
                mixes.train(one, model, mixes.batches_of_rank(one, range(2 * step, 2 * step + 2)), False)
                checkpoint.save(folder / f"{seed}-{name}", model, step=step)
            dist.barrier()
            assert bytes_of(folder / f"{seed}-whole") == bytes_of(folder / f"{seed}-cached")
        # the states of two steps before, crosswise
        checkpoint.load(folder / f"{seed}-cached" / "step-000000000000", models[0])
        checkpoint.load(folder / f"{seed}-whole" / "step-000000000000", models[1])
    expect_equal(*models)
    outputs = [mixes.train(mix, model, mixes.batches_of_rank(mix, range(4, 6)), False).outputs for model in models]
    for mine, theirs in zip(*outputs, strict=True):
        assert all(map(torch.equal, mine, theirs))
    expect_equal(*models)
    return misses(models[1])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_plan_rule_and_dtype_has_the_files_of_tables_on_the_device(world: int, tmp_path: Path) -> None:
    for seed in range(world, world + 6, 2):
        assert sum(run_ranks(world, any_mix, tmp_path, seed, list(mixes.RULES)[seed])) > 0


def state_dicts(folder: Path, below: str) -> None:
    whole, cached = trained(MIX, "adam"), trained(with_tier(MIX, tier_in(folder, below)), "adam")

    def pieces(value: Any) -> list[Tensor]:
        shards = getattr(value, "local_shards", None)
        return [value] if shards is None else [shard.tensor for shard in shards()]

    def same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            for a, b in zip(pieces(value), pieces(theirs[name]), strict=True):
                assert torch.equal(a, b)

    same(whole.state_dict(), cached.state_dict())
    states = [model.fused_optimizer.state_dict()["state"] for model in (whole, cached)]
    for name, of_table in states[0].items():
        same(of_table, states[1][name])
    # copies: training on does not change them
    saved, optimizer = cached.state_dict(), cached.fused_optimizer.state_dict()
    mix = with_tier(MIX, tier_in(folder, below))
    mixes.train(mix, cached, mixes.batches_of_rank(mix, range(STEPS, STEPS + 1)), False)
    same(whole.state_dict(), saved)
    # back again, and into the other kind of table
    other = mixes.shard(mix, mixes.build(mix, "adam"), mixes.environment())
    resident = mixes.shard(MIX, mixes.build(MIX, "adam"), mixes.environment())
    for model in (cached, other, resident):
        with small_chunks():
            model.load_state_dict(saved)
            model.fused_optimizer.load_state_dict(optimizer)
        expect_equal(whole, model)
    batches = mixes.batches_of_rank(MIX, range(STEPS, STEPS + 2))
    outputs = [mixes.train(MIX, model, batches, False).outputs for model in (whole, cached, other)]
    for mine, one, two in zip(*outputs, strict=True):
        assert all(map(torch.equal, mine, one)) and all(map(torch.equal, mine, two))
    full = checkpoint.full_state_dict(cached)
    for name, value in checkpoint.full_state_dict(whole).items():
        assert torch.equal(value, full[name])


@pytest.mark.parametrize(("world", "below"), [(1, "ram"), (2, "ram"), (2, "file")])
def test_state_dicts_are_those_of_tables_on_the_device(world: int, below: str, tmp_path: Path) -> None:
    run_ranks(world, state_dicts, tmp_path, below)


def dcp(folder: Path) -> None:
    import torch.distributed.checkpoint as torch_checkpoint

    model = trained(with_tier(MIX, tier_in(folder, "ram")), "adam")
    torch_checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder / "dcp")
    mix = with_strategy(MIX, "row_wise")
    other = mixes.shard(with_tier(mix, Tier(3)), mixes.build(mix, "adam"), mixes.environment())
    state = other.state_dict()
    torch_checkpoint.load({"model": state}, checkpoint_id=folder / "dcp")
    other.load_state_dict(state)
    full = checkpoint.full_state_dict(other)
    for name, value in checkpoint.full_state_dict(model).items():
        assert torch.equal(value, full[name])


def test_torchs_checkpoints_go_from_tier_to_tier(tmp_path: Path) -> None:
    run_ranks(2, dcp, tmp_path)


def damaged(folder: Path) -> str:
    model = trained(with_tier(MIX, tier_in(folder, "file")), "adam")
    path = checkpoint.save(folder / "steps", model, step=1).path
    if dist.get_rank() == 0:
        file = path / "rank-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[-5] ^= 255
        file.write_bytes(bytes(data))
    dist.barrier()
    mix = with_tier(MIX, tier_in(folder, "ram"))
    other, untouched = (mixes.shard(mix, mixes.build(mix, "adam"), mixes.environment()) for _ in range(2))
    said = error_of(checkpoint.load, path, other)
    expect_equal(other, untouched)
    return said


def test_a_damaged_checkpoint_changes_no_row_below(tmp_path: Path) -> None:
    for said in run_ranks(2, damaged, tmp_path):
        assert said.startswith("CheckpointDamaged") and "rank-00001.safetensors" in said


def asynchronous(folder: Path) -> list[str]:
    import warnings

    mix = with_tier(MIX, Tier(4, max_slots=1.0))
    model = trained(mix, "adam")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saving = checkpoint.save(folder / "later", model, step=1, asynchronous=True)
    assert saving.done()
    path = checkpoint.save(folder / "now", model, step=1).path
    dist.barrier()
    assert bytes_of(path) == bytes_of(saving.path)
    return [str(warning.message) for warning in caught]


def test_an_asynchronous_save_says_that_it_waits(tmp_path: Path) -> None:
    for said in run_ranks(2, asynchronous, tmp_path):
        assert len(said) == 1 and said[0].startswith("asynchronous=True has no effect: tables ['embedding_bags.t0")
