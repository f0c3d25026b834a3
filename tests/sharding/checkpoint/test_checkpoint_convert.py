"""torch.distributed.checkpoint: our state dicts in it, and checkpoints from and to it as TorchRec 1.8.0 has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import mix_by
from checkpoint_nets import EXTRA, A, B, loaded, net, saved, train, trained
from ranks import run_ranks
from sharding_mixes import build, environment, shard, train_alone
from sharding_steps import expect_outputs, local_tensors, train_on
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, apply_optimizer_in_backward
from shardwise.checkpoint import (
    CheckpointMismatch,
    diff,
    from_dcp_trusted,
    load,
    optimizer_state_from_torchrec,
    optimizer_state_to_torchrec,
    read_manifest,
    save,
    to_dcp,
    verify,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Please use DTensor"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam"]


def state_of(model: Any, optimizers: Any, **more: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizers.state_dict(), **more}


def write_dcp(state: dict[str, Any], folder: Path) -> Path:
    state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def kept(facts: dict[str, Any], optimizer: str) -> set[str]:
    """What of these a state dict would tell: neither classes, nor fixed settings, nor counts that no rule reads."""
    left_out = (": optimizer", "settings") if optimizer == "adam" else (": optimizer", "settings", "steps")
    return {name for name in facts if not name.endswith(left_out)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["first", "columns"])
def test_there_and_back_is_the_same_bits(optimizer: str, plan: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", optimizer, plan)
    back = from_dcp_trusted(to_dcp(source, tmp_path / "dcp"), tmp_path / "b")
    assert verify(back) == []
    difference = diff(source, back)
    assert kept(difference.facts, optimizer) == set()
    assert not (difference.values or difference.only_a or difference.only_b or difference.shapes or difference.dtypes)
    model, optimizers = trained(optimizer, plan, range(90, 92))
    assert load(back, model, optimizers).extra == EXTRA
    assert train(model, optimizers, range(2, 5)) == train(*loaded(source, optimizer, plan), range(2, 5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torch_loads_what_was_written_into_a_state_dict(optimizer: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", optimizer)
    folder = to_dcp(source, tmp_path / "dcp")
    model, optimizers = trained(optimizer, steps=range(90, 92))
    for group in optimizers.param_groups:
        group["lr"] = 9.0
    state = state_of(model, optimizers)
    state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizer"])
    loaded_model, restored = loaded(source, optimizer)
    assert [group["lr"] for group in optimizers.param_groups] == [group["lr"] for group in restored.param_groups]
    assert train(model, optimizers, range(2, 5)) == train(loaded_model, restored, range(2, 5))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_torch_saved_of_our_state_dicts_loads(optimizer: str, tmp_path: Path) -> None:
    model, optimizers = trained(optimizer)
    folder = write_dcp(state_of(model, optimizers, step=7, epoch=3), tmp_path / "dcp")
    converted = from_dcp_trusted(folder, tmp_path / "a")
    assert converted.name == "step-000000000007"
    wanted = save(tmp_path / "b", model, optimizers, step=7, extra={"epoch": 3}).path
    difference = diff(converted, wanted)
    assert kept(difference.facts, optimizer) == set()
    assert not difference.values and not difference.only_a and not difference.only_b


def as_torchrec(state: dict[str, Any]) -> dict[str, Any]:
    """A state dict as TorchRec's optimizers make it: FBGEMM's names, no counts of updates, no param_groups."""
    renamed = {}
    for parameter, states in state["optimizer"]["state"].items():
        counts = {f"{table}.step" for table in ("a", "b")}
        renamed[parameter] = {
            key.replace(".momentum2", ".exp_avg_sq"): value for key, value in states.items() if key not in counts
        }
    return {**state, "optimizer": {"state": renamed}}


def test_adam_of_torchrec_needs_its_count_of_updates(tmp_path: Path) -> None:
    model, optimizers = trained("adam")
    folder = write_dcp(as_torchrec(state_of(model, optimizers)), tmp_path / "dcp")
    with pytest.raises(ValueError, match=f"{A}: adam reads how many updates it has made, which TorchRec does not save"):
        from_dcp_trusted(folder, tmp_path / "a")
    converted = from_dcp_trusted(folder, tmp_path / "a", steps=2)
    assert train(*loaded(converted, "adam"), range(2, 5)) == train(model, optimizers, range(2, 5))


def test_torchrec_gets_its_own_names_and_nothing_else(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    folder = to_dcp(source, tmp_path / "dcp", names="torchrec")
    model, optimizers = trained("adam", steps=range(1))
    state = as_torchrec(state_of(model, optimizers))
    state_dict_loader.load(state, checkpoint_id=folder, planner=DefaultLoadPlanner(), no_dist=True)
    wanted = as_torchrec(state_of(*loaded(source, "adam")))["optimizer"]["state"]
    actual = state["optimizer"]["state"]
    assert {name: set(states) for name, states in actual.items()} == {name: set(keys) for name, keys in wanted.items()}
    assert set(actual[A]) == {"a.momentum1", "a.exp_avg_sq"}
    assert all(torch.equal(actual[name][key], wanted[name][key]) for name in wanted for key in wanted[name])
    assert not (folder / "optimizer.param_groups").exists()


def test_a_rule_can_be_said_where_states_do_not_tell(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    folder = to_dcp(source, tmp_path / "dcp")
    assert {table.rule for table in read_manifest(from_dcp_trusted(folder, tmp_path / "b")).tables.values()} == {"adam"}
    converted = from_dcp_trusted(folder, tmp_path / "b", rules={A: "lamb"})
    assert [read_manifest(converted).tables[name].rule for name in (A, B)] == ["lamb", "adam"]
    with pytest.raises(ValueError, match=rf"{A}: the states of adagrad have \[2\] dimensions, those saved \[2, 2\]"):
        from_dcp_trusted(folder, tmp_path / "b", rules="adagrad")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s["optimizer"]["state"][A].update({"a.prev_iter": torch.zeros(9)}), "'a.prev_iter' has no counter"),
        (lambda s: s.update(noise=torch.zeros(3)), "noise: a tensor that is of neither the model nor the optimizer"),
        (lambda s: s.update(when={1, 2}), "when is a set, neither tensor nor JSON"),
        (lambda s: s["optimizer"]["state"][A].update({"a.momentum1": torch.zeros(8)}), r"has shape \[8\], the table"),
        (lambda s: s.update(step="many"), "'step' was saved as 'many': say step="),
        (lambda s: s.pop("model"), r"model='model': the folder has \['optimizer'\]"),
    ],
    ids=["prev_iter", "stray tensor", "set", "shape", "step", "no model"],
)
def test_what_has_no_counterpart_is_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    model, optimizers = net("rowwise_adagrad")
    state = state_of(model, optimizers)
    change(state)
    folder = write_dcp(state, tmp_path / "dcp")
    with pytest.raises(ValueError, match=message):
        from_dcp_trusted(folder, tmp_path / "a")
    assert not list(tmp_path.glob("a/step-*"))


def test_a_model_alone_under_no_key(tmp_path: Path) -> None:
    model, optimizers = net("sgd")
    folder = write_dcp(model.state_dict(), tmp_path / "dcp")
    converted = from_dcp_trusted(folder, tmp_path / "a", model=None, optimizer=None, step=1)
    assert [table.rule for table in read_manifest(converted).tables.values()] == [None, None]
    back = to_dcp(converted, tmp_path / "back", model=None, optimizer=None)
    other, _ = trained("adam", steps=range(1))
    state = other.state_dict()
    state_dict_loader.load(state, checkpoint_id=back, no_dist=True)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_an_optimizer_that_never_stepped_has_no_states(tmp_path: Path) -> None:
    model, optimizers = net("adagrad")
    converted = from_dcp_trusted(write_dcp(state_of(model, optimizers), tmp_path / "dcp"), tmp_path / "a")
    fresh, fresh_optimizers = net("adagrad")
    load(converted, fresh, fresh_optimizers)
    assert train(fresh, fresh_optimizers, range(3)) == train(model, optimizers, range(3))


def test_an_optimizer_without_states_of_which_torch_kept_nothing(tmp_path: Path) -> None:
    model, other = (EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a", feature_names=["f"])]) for _ in range(2))
    for bags in (model, other):
        apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    folder = write_dcp({"model": model.state_dict(), "optimizer": {"state": {}}}, tmp_path / "dcp")
    converted = from_dcp_trusted(folder, tmp_path / "a")
    load(converted, other, other.fused_optimizer())
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    adagrad = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a", feature_names=["f"])])
    apply_optimizer_in_backward(torch.optim.Adagrad, adagrad.parameters(), {"lr": 0.1})
    with pytest.raises(CheckpointMismatch, match="embedding_bags.a.weight"):
        load(converted, adagrad, adagrad.fused_optimizer())
    state = {"model": model.state_dict(), "optim": state_of(*trained("adam"))["optimizer"]}
    with pytest.raises(ValueError, match=r"optim.state.*: a tensor that is of neither the model nor the optimizer"):
        from_dcp_trusted(write_dcp(state, tmp_path / "other"), tmp_path / "b")


def test_folders_in_the_way_and_folders_without_anything_are_refused(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "sgd")
    with pytest.raises(ValueError, match="is not empty"):
        to_dcp(source, tmp_path / "a")
    with pytest.raises(ValueError, match=r"names must be one of \['shardwise', 'torchrec'\], got 'fbgemm'"):
        to_dcp(source, tmp_path / "dcp", names="fbgemm")
    with pytest.raises(FileNotFoundError, match="has no .metadata"):
        from_dcp_trusted(tmp_path / "a", tmp_path / "b")


def test_large_pieces_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.sharding.checkpoint import dcp_writing

    source = saved(tmp_path / "a", "adam", "columns")
    monkeypatch.setattr(dcp_writing, "PIECE_BYTES", 64)
    folder = to_dcp(source, tmp_path / "dcp")
    back = from_dcp_trusted(folder, tmp_path / "b")
    pieces = read_manifest(back).by_address["table", A, "weight"]
    assert sorted((piece.rows, piece.columns) for piece in pieces)[:2] == [((0, 4), (0, 4)), ((0, 4), (4, 8))]
    assert not diff(source, back).values


def test_state_dicts_change_names_in_memory() -> None:
    model, optimizers = trained("adam")
    torchrec_state = optimizer_state_to_torchrec(optimizers.state_dict())
    assert set(torchrec_state) == {"state"} and set(torchrec_state["state"][A]) == {"a.momentum1", "a.exp_avg_sq"}
    assert set(torchrec_state["state"]["over.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ValueError, match="adam reads how many updates it has made"):
        optimizer_state_from_torchrec(torchrec_state)
    fresh, fresh_optimizers = net("adam")
    fresh.load_state_dict(model.state_dict())
    fresh_optimizers.load_state_dict(optimizer_state_from_torchrec(torchrec_state, steps=2))
    assert train(fresh, fresh_optimizers, range(2, 5)) == train(model, optimizers, range(2, 5))


def save_dcp(folder: str, optimizer: str, plan: str, torchrec: bool) -> list[float]:
    """What a model that was saved by torch, TorchRec's names or ours, goes on to lose."""
    model, optimizers = trained(optimizer, plan)
    state_dict_saver.save((as_torchrec if torchrec else dict)(state_of(model, optimizers)), checkpoint_id=folder)
    return train(model, optimizers, range(2, 4))


def load_dcp(folder: str, optimizer: str, plan: str, torchrec: bool) -> list[float]:
    model, optimizers = trained(optimizer, plan, range(90, 92))
    state = (as_torchrec if torchrec else dict)(state_of(model, optimizers))
    # by default torch takes the names of what has no state, on a rank without a shard of some table, for older ones
    planner = DefaultLoadPlanner(flatten_sharded_tensors=not torchrec and optimizer != "sgd")
    state_dict_loader.load(state, checkpoint_id=folder, planner=planner)
    # nothing of the model lies elsewhere than its state dict says
    model_tensors = local_tensors(model.state_dict())
    assert all(torch.equal(value, model_tensors[name]) for name, value in local_tensors(state["model"]).items())
    model.load_state_dict(state["model"])
    optimizer_state = optimizer_state_from_torchrec(state["optimizer"], steps=2) if torchrec else state["optimizer"]
    optimizers.load_state_dict(optimizer_state)
    return train(model, optimizers, range(2, 4))


def go_on_and_save(path: str, folder: str, optimizer: str, plan: str) -> list[float]:
    model, optimizers = loaded(path, optimizer, plan)
    save(folder, model, optimizers, step=2)
    return train(model, optimizers, range(2, 4))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "optimizer, before, after",
    [("adam", "columns", "rows"), ("rowwise_adagrad", "columns", "columns"), ("sgd", "rows", "first")],
)
def test_a_checkpoint_of_two_ranks_goes_over_and_back(optimizer: str, before: str, after: str, tmp_path: Path) -> None:
    """TorchRec's names and ShardedTensors, by the same code that writes them there."""
    dcp, resaved, back = str(tmp_path / "dcp"), tmp_path / "mine", tmp_path / "back"
    wanted = run_ranks(2, save_dcp, dcp, optimizer, before, True)
    converted = from_dcp_trusted(dcp, tmp_path / "made", steps=2)
    assert read_manifest(converted).world_size == 2
    for losses in run_ranks(2, go_on_and_save, str(converted), str(resaved), optimizer, after):
        assert losses == pytest.approx(wanted[0], abs=1e-6)
    to_dcp(resaved, back, names="torchrec")
    for losses in run_ranks(2, load_dcp, str(back), optimizer, before, True):
        assert losses == pytest.approx(wanted[0], abs=1e-6)


PLANS = {
    "rows": mix_by(["row_wise"] * 3),
    "tables": mix_by(["table_wise", "table_wise", "data_parallel"]),
    "columns": mix_by(["column_wise"] * 3),
    "mixed": mix_by(["grid", "table_row_wise", "table_column_wise"]),
}


def save_tables(plan: str, optimizer: str, path: str) -> None:
    mix = PLANS[plan]
    model = shard(mix, build(mix, optimizer), environment())
    train_on(mix, model, range(2))
    state_dict_saver.save(state_of(model, model.fused_optimizer), checkpoint_id=path)


def load_tables(plan: str, optimizer: str, path: str) -> list[list[Tensor]]:
    mix = PLANS[plan]
    other = build(mix, optimizer)
    for param in other.parameters():
        param.data.fill_(7.0)
    model = shard(mix, other, environment())
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 9.0
    state = state_of(model, model.fused_optimizer)
    state_dict_loader.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    return train_on(mix, model, range(2, 4))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after", "world", "optimizer"),
    [
        ("rows", "rows", 2, "adam"),
        ("rows", "tables", 2, "adam"),
        ("tables", "columns", 2, "adam"),
        ("columns", "rows", 1, "adam"),
        ("rows", "mixed", 4, "adam"),
        ("rows", "columns", 2, "rowwise_adagrad"),
    ],
)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    before: str, after: str, world: int, optimizer: str, tmp_path: Path
) -> None:
    """With row_state="table" a row has one number, whether or not its columns are cut: it crosses plans too."""
    run = train_alone(PLANS[before], optimizer, 4)
    run_ranks(2, save_tables, before, optimizer, str(tmp_path))
    ranks = run_ranks(world, load_tables, after, optimizer, str(tmp_path))
    expect_outputs(PLANS[before], run, ranks, range(2, 4))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after", "world", "optimizer"),
    [
        ("rows", "first", 2, "adagrad"),
        ("first", "columns", 2, "adam"),
        ("columns", "rows", 4, "adagrad"),
        ("rows", "first", 2, "sgd"),
    ],
)
def test_a_whole_model_crosses_plans(before: str, after: str, world: int, optimizer: str, tmp_path: Path) -> None:
    wanted = run_ranks(2, save_dcp, str(tmp_path), optimizer, before, False)
    for losses in run_ranks(world, load_dcp, str(tmp_path), optimizer, after, False):
        assert losses == pytest.approx(wanted[0], abs=1e-6)
