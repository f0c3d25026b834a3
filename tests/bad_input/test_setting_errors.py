"""Settings that used to be taken and ignored, or to show up only later and elsewhere: refused where they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shardwise import (
    BoundsCheckMode,
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    FusedEmbeddingBagCollection,
    KeyedOptimizerWrapper,
    LookupPolicy,
    RowWiseAdagrad,
    ShardingEnv,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.sharding import table_wise


def tables() -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(10, 4, "t", feature_names=["f"])]


@pytest.mark.parametrize("mode", ["FATAL", "fatal", 0, None])
def test_an_unknown_bounds_check_is_refused(mode: Any) -> None:
    """Compared by identity, a name instead of the member counted as WARNING: ids out of range went through."""
    with pytest.raises(TypeError, match="bounds_check must be a BoundsCheckMode, BoundsCheckMode.FATAL say"):
        EmbeddingBagCollection(tables(), policy=LookupPolicy(mode))
    EmbeddingBagCollection(tables(), policy=LookupPolicy(BoundsCheckMode.FATAL))


@pytest.mark.parametrize(
    ("kind", "kwargs", "message"),
    [
        (torch.optim.SGD, {"eps": 5.0}, "table 't': fused SGD does not take eps=5.0"),
        (torch.optim.SGD, {"beta1": 0.5}, "table 't': fused SGD does not take beta1=0.5"),
        (RowWiseAdagrad, {"betas": (0.4, 0.9)}, "table 't': fused RowWiseAdagrad does not take beta1=0.4"),
        (torch.optim.SGD, {"lr": float("nan")}, "table 't': lr must be finite and not negative, got nan"),
        (torch.optim.Adagrad, {"eps": float("inf")}, "table 't': eps must be finite and not negative, got inf"),
        (torch.optim.Adagrad, {"initial_accumulator_value": -1}, "initial_accumulator_value must be finite and not"),
        (torch.optim.Adam, {"lr": "x"}, "table 't': lr must be a number, got 'x'"),
        (torch.optim.Adam, {"betas": (0.9,)}, "table 't': betas must be two numbers"),
        (torch.optim.Adam, {"betas": (0.9, 1.0)}, r"table 't': beta2 must be in \[0, 1\), got 1.0"),
    ],
)
def test_what_a_rule_does_not_do_is_refused(kind: type[torch.optim.Optimizer], kwargs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedEmbeddingBagCollection(tables(), kind, kwargs)


def test_none_asks_for_nothing() -> None:
    FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": None, "eps": None})


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -5.0])
def test_a_schedule_cannot_poison_the_tables(lr: float) -> None:
    fused = FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.1}).fused_optimizer()
    fused.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"tables \['t'\]: lr must be finite and not negative"):
        fused.step()


def test_apply_takes_a_class_and_parameters() -> None:
    ebc = EmbeddingBagCollection(tables())
    wrong: Any = "sgd"
    with pytest.raises(TypeError, match="must be a class such as torch.optim.Adagrad, got 'sgd'"):
        apply_optimizer_in_backward(wrong, ebc.parameters(), {})
    pairs: Any = ebc.named_parameters()
    with pytest.raises(TypeError, match="parameters are wanted, as module.parameters"):
        apply_optimizer_in_backward(torch.optim.SGD, pairs, {})
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {})
    with pytest.raises(ValueError, match=r"this parameter \[10, 4\] already has an optimizer in the backward, SGD"):
        apply_optimizer_in_backward(torch.optim.Adam, ebc.parameters(), {})


def test_keyed_optimizers_say_what_they_want() -> None:
    sgd: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(TypeError, match="SGD has no named parameters: wrap it in KeyedOptimizerWrapper"):
        CombinedOptimizer([sgd])
    pairs: Any = list(torch.nn.Linear(1, 1).named_parameters())
    with pytest.raises(TypeError, match="a dict of named parameters is wanted"):
        KeyedOptimizerWrapper(pairs, lambda params: torch.optim.SGD(params))


def test_configs_say_what_they_want() -> None:
    wrong: Any = "clicked"
    with pytest.raises(ValueError, match="table 't': feature_names must be a list of strings, got 'clicked'"):
        EmbeddingBagConfig(10, 4, "t", feature_names=wrong)
    data_type: Any = "FP16"
    with pytest.raises(ValueError, match="data_type must be a DataType, DataType.FP16 say, got 'FP16'"):
        EmbeddingBagConfig(10, 4, "t", data_type)
    sizes: Any = np.int64(10)
    assert EmbeddingBagConfig(sizes, 4, "t").num_embeddings == 10
    bags: Any = tables()
    with pytest.raises(TypeError, match="EmbeddingConfig"):
        EmbeddingCollection(bags)


def test_a_plan_in_the_wrong_wrapper_is_named() -> None:
    env = ShardingEnv.from_local(1, 0)
    ebc = EmbeddingBagCollection(tables())
    plan: Any = construct_module_sharding_plan(ebc, {"t": table_wise(0)}, world_size=1)
    wrappers: list[Any] = [plan, {"": plan}]
    for wrong in wrappers:
        with pytest.raises(TypeError, match=r"plan must be a ShardingPlan: ShardingPlan\(\{module path: its plan\}\)"):
            DistributedModelParallel(ebc, env, plan=wrong)
    device: Any = torch.device("cpu")
    with pytest.raises(TypeError, match="env must be a ShardingEnv, got device"):
        DistributedModelParallel(ebc, device)
    sharders: Any = [EmbeddingBagCollection]
    with pytest.raises(TypeError, match=r"sharders must be ModuleSharders, EmbeddingBagCollectionSharder\(\) say, got"):
        DistributedModelParallel(ebc, env, sharders=sharders)
