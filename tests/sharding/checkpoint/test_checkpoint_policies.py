"""Checkpoint and model that differ: an exact report, and an explicit policy for each kind of difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import MIX, same, saved, trained, values_of
from ranks import run_ranks
from sharding_mixes import DataType, Mix, TableCase, build, environment, train_strips
from sharding_steps import train_on
from torch import nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    apply_optimizer_in_backward,
    checkpoint,
)
from shardwise.checkpoint import CheckpointMismatch, LoadPolicy, Report
from shardwise.planner.layout import Shard, TableOptions
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection

T0, T1, T2 = (f"embedding_bags.t{n}.weight" for n in range(3))


def with_tables(*changes: tuple[int, dict[str, Any]]) -> Mix:
    """The mix with some tables changed; a change to None takes the table away."""
    tables: list[TableCase | None] = list(MIX.tables)
    for number, change in changes:
        table = MIX.tables[min(number, 2)]
        if number > 2:
            tables.append(replace(table, name=f"t{number}", features=(f"ft{number}",)))
        elif change:
            tables[number] = replace(table, **change)
        else:
            tables[number] = None
    return Mix(tuple(table for table in tables if table is not None))


def states(name: str) -> list[str]:
    return [f"{name}: adam momentum1", f"{name}: adam momentum2"]


def mismatch(path: Path, model: Any, *optimizers: Any, **policy: Any) -> Report:
    """What a load that is refused reports."""
    with pytest.raises(CheckpointMismatch) as raised:
        checkpoint.load(path, model, *optimizers, policy=LoadPolicy(**policy))
    report: Report = raised.value.report
    return report


# what became of the tables since the save -> the exact report, and what a policy is called that allows it
CASES: dict[str, tuple[Mix, Report, dict[str, str]]] = {
    "a table added": (
        with_tables((3, {})),
        Report(missing=["embedding_bags.t3.weight", *states("embedding_bags.t3.weight")]),
        {"missing": "keep"},
    ),
    "a table removed": (with_tables((1, {})), Report(unexpected=[T1, *states(T1)]), {"unexpected": "skip"}),
    "a table grown": (
        with_tables((0, {"rows": 60})),
        Report(resized={T0: ((40, 8), (60, 8)), **dict.fromkeys(states(T0), ((40, 8), (60, 8)))}),
        {"resized": "overlap"},
    ),
    "a table shrunk": (
        with_tables((0, {"rows": 30})),
        Report(resized={T0: ((40, 8), (30, 8)), **dict.fromkeys(states(T0), ((40, 8), (30, 8)))}),
        {"resized": "overlap"},
    ),
    "another dtype": (
        with_tables((2, {"dtype": DataType.BF16})), Report(dtype={T2: ("float32", "bfloat16")}), {"dtype": "cast"},
    ),
    "a table renamed": (
        with_tables((1, {"name": "new"})),
        Report(
            missing=["embedding_bags.new.weight", *states("embedding_bags.new.weight")], unexpected=[T1, *states(T1)]
        ),
        {"missing": "keep", "unexpected": "skip"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_difference_is_reported_exactly_and_refused_unless_a_policy_allows_it(case: str, tmp_path: Path) -> None:
    """Fault 44."""
    mix, wanted, allowed = CASES[case]
    path, model = saved(tmp_path), build(mix, "adam")
    before = values_of(model)
    with pytest.raises(CheckpointMismatch) as raised:
        checkpoint.load(path, model)
    assert raised.value.report == wanted
    assert same(before, values_of(model))
    assert all(line in str(raised.value) for line in wanted.lines())
    assert all(f"{name}={word!r}" in str(raised.value) for name, word in allowed.items())
    for name, word in allowed.items():
        others = {other: way for other, way in allowed.items() if other != name}
        mismatch(path, model, **others)
        assert word != "raise"
    assert checkpoint.load(path, model, policy=LoadPolicy(**allowed)).report == wanted  # type: ignore[arg-type]
    expect_loaded(values_of(trained()), before, values_of(model))


Values = dict[str, torch.Tensor]


def expect_loaded(saved_values: Values, before: Values, after: Values) -> None:
    """What both have is loaded, row by row; the rest is as it was."""
    for name, value in after.items():
        if name.endswith("step state"):
            continue
        rows = min(len(value), len(saved_values[name])) if name in saved_values else 0
        if rows:
            assert torch.equal(value[:rows], saved_values[name][:rows].to(value.dtype)), name
        assert torch.equal(value[rows:], before[name][rows:]), name


def test_a_renamed_table_comes_with_its_states_and_steps(tmp_path: Path) -> None:
    """Fault 44."""
    new = "embedding_bags.new.weight"
    path, model = saved(tmp_path), build(with_tables((1, {"name": "new"})), "adam")
    loaded = checkpoint.load(path, model, policy=LoadPolicy(rename={T1: new}))
    assert loaded.report == Report(renamed={T1: new})
    wanted = {name.replace("t1", "new"): value for name, value in values_of(trained()).items()}
    assert same(values_of(model), wanted)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"policy": LoadPolicy(rename={"x": T0})}, r"the checkpoint has no \['x'\]"),
        ({"policy": LoadPolicy(rename={T0: "x"})}, r"the model no \['x'\]"),
        ({"policy": LoadPolicy(rename={T0: T1})}, rf"would have \['{T1}'\] twice"),
        ({"resplit": "sum"}, "resplit must be 'mean' or None, got 'sum'"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(given: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=match):
        checkpoint.load(saved(tmp_path), build(MIX, "adam"), **given)


def test_columns_do_not_overlap(tmp_path: Path) -> None:
    path, model = saved(tmp_path), build(with_tables((0, {"dim": 12})), "adam")
    mismatch(path, model)
    with pytest.raises(ValueError, match=r"t0.weight is \[40, 8\] in the checkpoint, \[40, 12\] in the model"):
        checkpoint.load(path, model, policy=LoadPolicy(resized="overlap"))


def test_states_of_another_rule_are_other_states(tmp_path: Path) -> None:
    path, model = saved(tmp_path, "adam"), build(MIX, "rowwise_adagrad")
    report = mismatch(path, model)
    assert report.missing == [f"{name}: rowwise_adagrad momentum1" for name in (T0, T1, T2)]
    assert sorted(report.unexpected) == sorted(state for name in (T0, T1, T2) for state in states(name))
    checkpoint.load(path, model, policy=LoadPolicy(missing="keep", unexpected="skip"))
    assert torch.equal(model.state_dict()[T0], trained().state_dict()[T0])


def test_a_word_that_is_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="missing must be 'raise' or 'keep', got 'skip'"):
        LoadPolicy(missing="skip")


def test_dense_layers_have_a_report_too(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    path = checkpoint.save(tmp_path, net, optimizer, step=0).path
    other = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    report = mismatch(path, other)
    assert report.resized == {"0.weight": ((4, 3), (5, 3)), "0.bias": ((4,), (5,))}
    assert report.unexpected == [
        f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]
    before = other.get_parameter("0.weight").detach().clone()
    checkpoint.load(path, other, policy=LoadPolicy(unexpected="skip", resized="overlap"))
    after = other.get_parameter("0.weight")
    assert torch.equal(after[:4], net.get_parameter("0.weight")) and torch.equal(after[4:], before[4:])
    less = nn.Sequential(nn.Linear(3, 4, bias=False))
    report = mismatch(path, less, torch.optim.Adagrad(less.parameters()))
    assert {"0.bias", "0.bias: sum", "0.bias: step", "1.weight: sum"} <= set(report.unexpected)
    assert report.missing == []


def test_a_fresh_optimizer_takes_no_states_of_another_class(tmp_path: Path) -> None:
    """Adam that got the states of Adagrad failed in its first step, with a KeyError."""
    net = nn.Linear(3, 4)
    saved_with = torch.optim.Adagrad(net.parameters(), lr=0.1)
    path = checkpoint.save(tmp_path, net, saved_with, step=0).path
    other = torch.optim.Adam(net.parameters(), lr=0.2)
    assert sorted(mismatch(path, net, other).unexpected) == [
        f"{name}: Adagrad {state}" for name in ("bias", "weight") for state in ("step", "sum")
    ]
    checkpoint.load(path, net, other, policy=LoadPolicy(unexpected="skip"))
    assert not other.state and other.param_groups[0]["lr"] == 0.2
    net(torch.ones(2, 3)).sum().backward()
    other.step()
    same_class = torch.optim.Adagrad(net.parameters())
    checkpoint.load(path, net, same_class)
    assert same_class.param_groups[0]["lr"] == 0.1


def strips(folder: str, cols: list[tuple[int, int]], resplit: str | None, steps: int) -> tuple[str, Any]:
    """A table cut by columns whose rows have a number in each block, after some steps or loaded."""
    mix = Mix((replace(MIX.tables[0], options=TableOptions("ordered", "shard")),))
    module = build(mix, "rowwise_adagrad")
    shards = [Shard("t0", number % 2, (0, 40), block) for number, block in enumerate(cols)]
    model = ShardedEmbeddingBagCollection(
        module, shards, environment(), torch.device("cpu"), default_optimizer=(torch.optim.SGD, {"lr": 0.01}),
        options={"t0": TableOptions("ordered", "shard")},
    )  # fmt: skip
    path = checkpoint.latest(folder)
    if path is None:
        train_on(mix, model, range(steps))
        checkpoint.save(folder, model, step=1)
    else:
        try:
            checkpoint.load(path, model, resplit=resplit)
        except ValueError as error:
            return str(error), None
    views = {
        str(shard.cols): group.state_views(number)["momentum1"].clone()
        for shard, group, number in model.states.homes("t0")
    }
    return "", views


@pytest.mark.ranks
def test_states_per_row_of_other_column_blocks_need_a_rule(tmp_path: Path) -> None:
    """DESIGN section 4: raise, or the mean over columns by name."""
    mix = Mix((replace(MIX.tables[0], options=TableOptions("ordered", "shard")),))
    halves = run_ranks(2, strips, str(tmp_path), [(0, 4), (4, 8)], None, 2)
    saved_states = torch.cat([torch.stack(list(views.values())) for _, views in halves])
    alone = train_strips(mix, "rowwise_adagrad", 2, mix.tables[0], [(0, 4), (4, 8)])
    assert torch.equal(saved_states.t(), alone.states["t0/momentum1"])
    for cols, resplit in (([(0, 2), (2, 8)], None), ([(0, 8)], None)):
        for text, _ in run_ranks(2, strips, str(tmp_path), cols, resplit, 0):
            assert "t0.weight: rowwise_adagrad momentum1 is one number for each row of columns" in text
            assert "resplit='mean'" in text
    loaded_states: dict[str, torch.Tensor] = {}
    for _, views in run_ranks(2, strips, str(tmp_path), [(0, 2), (2, 8)], "mean", 0):
        loaded_states.update(views)
    assert torch.equal(loaded_states["(0, 2)"], saved_states[0])
    assert torch.allclose(loaded_states["(2, 8)"], saved_states[0] / 3 + saved_states[1] * 2 / 3)


def test_tables_of_one_group_that_counted_otherwise_are_refused(tmp_path: Path) -> None:
    """Adam corrects by the number of updates, and a group of tables has one number."""
    tables = [EmbeddingBagConfig(4, 8, name, feature_names=[name]) for name in ("a", "b")]

    def collection(rates: tuple[float, float]) -> EmbeddingBagCollection:
        ebc = EmbeddingBagCollection(tables)
        for name, lr in zip(("a", "b"), rates, strict=True):
            apply_optimizer_in_backward(
                torch.optim.Adam, [ebc.get_parameter(f"embedding_bags.{name}.weight")], {"lr": lr}
            )
        return ebc

    apart = collection((0.1, 0.2))
    for number, group in enumerate(apart.fused_optimizer().groups):
        group.step.fill_(number)
    path = checkpoint.save(tmp_path, apart, step=1).path
    with pytest.raises(ValueError, match=r"have seen different numbers of updates, \[0, 1\]"):
        checkpoint.load(path, collection((0.1, 0.1)))
