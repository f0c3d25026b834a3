"""Two checkpoints side by side, and one as a plain file of whole tensors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoint_nets import Net, net, train
from safetensors.torch import load_file

from shardwise.checkpoint import CheckpointDamaged, Values, diff, export, full_state_dict, save
from shardwise.sharding.checkpoint.difference import Difference

A, B = "ebc.embedding_bags.a.weight", "ebc.embedding_bags.b.weight"


def saved(folder: Path, optimizer: str = "adam", plan: str = "first", *, steps: int = 2) -> Path:
    model, every = net(optimizer, plan)
    train(model, every, range(steps))
    return save(folder, model, every, step=5).path


def test_the_same_training_twice_makes_no_difference(tmp_path: Path) -> None:
    found = diff(saved(tmp_path / "a"), saved(tmp_path / "b"))
    assert not found and found.same_content
    assert found.lines() == []
    assert found == Difference()


def test_plans_are_told_and_make_no_difference_in_content(tmp_path: Path) -> None:
    found = diff(saved(tmp_path / "a"), saved(tmp_path / "b", plan="columns"))
    assert found and found.same_content
    assert found.plans == {
        A: (
            "rank 0: rows [0, 9] columns [0, 8]",
            "rank 0: rows [0, 9] columns [0, 4], rank 0: rows [0, 9] columns [4, 8]",
        )
    }


def test_changed_elements_are_counted_and_measured(tmp_path: Path) -> None:
    model, every = net("adam")
    train(model, every, range(2))
    a = save(tmp_path / "a", model, every, step=5).path
    with torch.no_grad():
        model.module.ebc.state_dict()["embedding_bags.a.weight"][3:5, 2] += torch.tensor([0.5, -2.0])
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.25
    found = diff(a, save(tmp_path / "b", model, every, step=6, extra={"epoch": 1}).path)
    assert set(found.values) == {A}
    assert found.values[A].different == 2 and found.values[A].elements == 72
    assert found.values[A].largest == pytest.approx(2.0, abs=1e-6)
    assert found.facts["step"] == (5, 6)
    assert found.facts["extra: epoch"] == (None, 1)
    assert [one["lr"] for one in found.facts[f"{A}: fused param_group"]] == [0.1, 0.25]
    assert not found.same_content
    assert f"values: {A} differs in 2 of 72 elements, by up to 2" in found.lines()


def test_nan_equals_nan_and_no_number(tmp_path: Path) -> None:
    model, every = net("sgd")
    table = model.module.over.weight
    with torch.no_grad():
        table[0, 3] = math.nan
    a = save(tmp_path / "a", model, every, step=5).path
    assert not diff(a, save(tmp_path / "b", model, every, step=5).path)
    with torch.no_grad():
        table[0, 4] = math.nan
    found = diff(a, save(tmp_path / "c", model, every, step=5).path)
    one = found.values["over.weight"]
    assert (one.different, one.elements) == (1, 16) and math.isnan(one.largest)
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["values"]["over.weight"]["largest"] is None


def test_other_tables_states_shapes_and_dtypes_are_named(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", "adam"), saved(tmp_path / "b", "rowwise_adagrad")
    found = diff(a, b)
    assert found.only_a == [f"{A}: momentum2", f"{B}: momentum2"] and found.only_b == []
    assert found.shapes[f"{A}: momentum1"] == ([9, 8], [9])
    assert found.facts[f"{A}: rule"] == ("adam", "rowwise_adagrad")
    small = torch.nn.Linear(16, 1, dtype=torch.bfloat16)
    large = torch.nn.Linear(16, 2)
    c, d = (save(tmp_path / name, one, step=5).path for name, one in (("c", small), ("d", large)))
    found = diff(c, d)
    assert found.shapes == {"weight": ([1, 16], [2, 16]), "bias": ([1], [2])}
    assert found.dtypes == {"weight": ("bfloat16", "float32"), "bias": ("bfloat16", "float32")}


def test_numbers_per_row_of_other_column_blocks_differ_in_shape(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", "rowwise_adagrad"), saved(tmp_path / "b", "rowwise_adagrad", "columns")
    assert diff(a, b).shapes == {f"{A}: momentum1": ([9], [9, 2])}


def test_whole_numbers_and_truth_are_compared_too(tmp_path: Path) -> None:
    def module(count: int, on: bool) -> torch.nn.Module:
        found = torch.nn.Module()
        found.register_buffer("count", torch.tensor([2**62 + count, 3]))
        found.register_buffer("on", torch.tensor(on))
        return found

    a, b = (save(tmp_path / name, module(n, bool(n)), step=5).path for n, name in enumerate("ab"))
    found = diff(a, b)
    # float64 has no numbers between these two
    assert found.values["count"] == Values(1, 2, 1.0)
    assert found.values["on"] == Values(1, 1, 1.0)


@pytest.mark.parametrize("plan", ["first", "columns"])
def test_an_exported_file_loads_into_the_unsharded_model(plan: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a", plan=plan)
    whole = load_file(export(path, tmp_path / "model.safetensors"))
    wanted = full_state_dict(path)
    assert set(whole) == set(wanted) and all(torch.equal(whole[name], wanted[name]) for name in wanted)
    plain = Net("adam")
    plain.load_state_dict(whole)
    bag = torch.nn.EmbeddingBag.from_pretrained(whole[A])
    assert torch.equal(bag.weight, plain.ebc.state_dict()["embedding_bags.a.weight"])


def test_states_are_exported_on_request(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", "rowwise_adagrad", "columns")
    whole = load_file(export(path, tmp_path / "all.safetensors", states=True))
    sums = {name: tensor.shape for name, tensor in whole.items() if "momentum1" in name}
    assert sums == {f"{A}/momentum1/0:4": (9,), f"{A}/momentum1/4:8": (9,), f"{B}/momentum1": (6,)}
    assert whole["over.weight/exp_avg"].shape == (1, 16)
    assert float(whole["over.weight/step"]) == 2


def test_a_parameter_of_two_names_is_exported_under_both(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(3, 3), "two": torch.nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    whole = load_file(export(save(tmp_path / "a", model, step=1).path, tmp_path / "model.safetensors"))
    assert torch.equal(whole["one.weight"], whole["two.weight"])
    model.load_state_dict(whole)


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    path, target = saved(tmp_path / "a"), tmp_path / "model.safetensors"
    target.write_text("before")
    with open(path / "rank-00000.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointDamaged, match="rank-00000.safetensors has 100 bytes"):
        export(path, target)
    assert target.read_text() == "before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "model.safetensors"]
