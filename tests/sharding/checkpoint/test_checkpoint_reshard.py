"""Checkpoints cut anew: the same content under every plan and number of ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_nets import net, train
from ranks import run_ranks

from shardwise.checkpoint import CheckpointDamaged, diff, load, read_manifest, reshard, save, verify
from shardwise.planner.layout import Shard

A, B = "ebc.embedding_bags.a.weight", "ebc.embedding_bags.b.weight"


def saved(folder: Path, optimizer: str = "adam", plan: str = "first", *, step: int = 5) -> Path:
    model, every = net(optimizer, plan)
    train(model, every, range(2))
    return save(folder, model, every, step=step, extra={"epoch": 3}).path


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rowwise_adagrad"])
@pytest.mark.parametrize(
    "world, plan",
    [(1, "row_wise"), (2, "table_wise"), (3, "row_wise"), (4, "row_wise"), (2, "data_parallel"), (4, None)],
)
def test_only_the_plan_changes(optimizer: str, world: int, plan: str | None, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", optimizer)
    made = reshard(source, tmp_path / "b", world_size=world, plan=plan)
    assert made == tmp_path / "b" / source.name
    assert verify(made) == []
    assert diff(source, made).same_content
    assert read_manifest(made).world_size == world


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_columns_are_cut_where_states_are_of_elements(optimizer: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", optimizer)
    made = reshard(source, tmp_path / "b", world_size=4, plan="column_wise")
    assert [shard.cols for shard in read_manifest(made).tables[A].shards] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert diff(source, made).same_content
    back = reshard(made, tmp_path / "c", world_size=1, plan="table_wise")
    assert not diff(source, back)


def test_numbers_per_row_of_column_blocks_are_not_split_silently(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "rowwise_adagrad", "columns")
    with pytest.raises(ValueError, match=rf"{A}: momentum1 is a number a row of each of the column blocks"):
        reshard(source, tmp_path / "b", plan="table_wise")
    assert not list((tmp_path / "b").glob("step-*"))
    with pytest.raises(ValueError, match="resplit must be 'mean' or None, got 'sum'"):
        reshard(source, tmp_path / "b", plan="table_wise", resplit="sum")


def test_a_mean_over_columns_is_what_a_load_makes_of_them(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "rowwise_adagrad", "columns")
    made = reshard(source, tmp_path / "b", plan="table_wise", resplit="mean")
    whole, every = net("rowwise_adagrad", "first")
    load(source, whole, every, resplit="mean")
    wanted = save(tmp_path / "c", whole, every, step=5, extra={"epoch": 3}).path
    assert diff(made, wanted).same_content


def test_blocks_that_stay_keep_their_numbers_under_other_rows(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "rowwise_adagrad", "columns")
    cut = [Shard("a", rank, rows, cols) for rank, (rows, cols) in enumerate(
        (((0, 4), (0, 4)), ((4, 9), (0, 4)), ((0, 7), (4, 8)), ((7, 9), (4, 8)))
    )]  # fmt: skip
    made = reshard(source, tmp_path / "b", world_size=4, plan={A: cut})
    assert diff(source, made).same_content
    assert list(read_manifest(made).tables[A].shards) == cut


def test_tables_that_the_plan_leaves_out_keep_their_cut(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    made = reshard(source, tmp_path / "b", plan={B: "row_wise"}, world_size=2)
    tables = read_manifest(made).tables
    assert [shard.rows for shard in tables[A].shards] == [(0, 9)]
    assert [shard.rows for shard in tables[B].shards] == [(0, 3), (3, 6)]


def test_a_plan_object_places_tables(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    model, _ = net("adam", "columns")
    made = reshard(source, tmp_path / "b", plan=model.plan)
    assert [shard.cols for shard in read_manifest(made).tables[A].shards] == [(0, 4), (4, 8)]
    assert diff(source, made).same_content


@pytest.mark.parametrize(
    "world, plan, message",
    [
        (0, None, "world_size must be at least 1, got 0"),
        (2, "diagonal", r"strategies \['diagonal'\] are none of"),
        (2, {"c": "row_wise"}, r"the plan places \['c'\], the checkpoint has"),
        (3, "column_wise", "table 'a': 8 columns do not divide by 3"),
        (1, {A: [Shard("a", 0, (0, 8), (0, 8))]}, "shards hold 64 of 72 cells"),
        (1, {A: [Shard("a", 1, (0, 9), (0, 8))]}, "rank 1 is not one of 1"),
    ],
)
def test_plans_that_do_not_fit_are_refused(world: int, plan: object, message: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    with pytest.raises(ValueError, match=message):
        reshard(source, tmp_path / "b", world_size=world, plan=plan)  # type: ignore[arg-type]
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_is_not_replaced_by_its_own_copy(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    with pytest.raises(ValueError, match="has the checkpoint itself: give another folder"):
        reshard(source, tmp_path / "a", plan="row_wise")


def test_damage_is_not_copied_under_a_fresh_checksum(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    file = source / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CheckpointDamaged, match="rank-00000.safetensors has other bytes than were saved"):
        reshard(source, tmp_path / "b", world_size=2)
    assert not (tmp_path / "b").exists()


def test_the_newest_of_a_folder_is_taken(tmp_path: Path) -> None:
    saved(tmp_path / "a", "sgd", step=5)
    saved(tmp_path / "a", "sgd", step=12)
    assert reshard(tmp_path / "a", tmp_path / "b").name == "step-000000000012"
    with pytest.raises(FileNotFoundError, match="is no checkpoint, and no folder that has a good one"):
        reshard(tmp_path, tmp_path / "b")


def test_blocks_are_read_and_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is never in memory as a whole: with blocks of 64 bytes each piece comes in many."""
    from shardwise.sharding.checkpoint import files
    from shardwise.sharding.checkpoint.offline import Source

    source = saved(tmp_path / "a", "adam", "columns")
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    with Source(source) as opened:
        piece = opened.manifest.by_address["table", A, "weight"][0]
        blocks = list(opened.blocks(piece))
    assert [len(block) for block in blocks] == [4, 4, 1]
    assert torch.cat(blocks).shape == (9, 4)
    assert diff(source, reshard(source, tmp_path / "b", world_size=3, plan="row_wise")).same_content


def save_on_ranks(folder: str, optimizer: str, plan: str) -> list[float]:
    model, every = net(optimizer, plan)
    train(model, every, range(2))
    save(folder, model, every, step=2)
    return train(model, every, range(2, 5))


def load_on_ranks(path: str, optimizer: str, plan: str) -> list[float]:
    model, every = net(optimizer, plan)
    train(model, every, range(90, 92))
    load(path, model, every)
    return train(model, every, range(2, 5))


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer, plan", [("rowwise_adagrad", "columns"), ("adam", "rows")])
def test_training_goes_on_from_a_checkpoint_cut_anew(optimizer: str, plan: str, tmp_path: Path) -> None:
    wanted = run_ranks(2, save_on_ranks, str(tmp_path / "a"), optimizer, plan)
    made = reshard(tmp_path / "a", tmp_path / "b", world_size=3, plan=None)
    assert diff(tmp_path / "a", made).same_content
    for losses in run_ranks(2, load_on_ranks, str(made), optimizer, plan):
        assert losses == wanted[0]
