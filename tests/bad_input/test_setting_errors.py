"""Settings that used to be taken and ignored, or to show up only later and elsewhere: refused where they are given."""

from __future__ import annotations

from collections.abc import Callable
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


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables())


def parallel(*given: Any, **named: Any) -> object:
    return DistributedModelParallel(collection(), *given, **named)


def one_plan() -> Any:
    return construct_module_sharding_plan(collection(), {"t": table_wise(0)}, world_size=1)


apply: Any = apply_optimizer_in_backward
config: Any = EmbeddingBagConfig
sequences: Any = EmbeddingCollection
combined: Any = CombinedOptimizer
wrapped: Any = KeyedOptimizerWrapper
ENV, SGD = ShardingEnv.from_local(1, 0), torch.optim.SGD
NO_PLAN = r"plan must be a ShardingPlan: ShardingPlan\(\{module path: its plan\}\)"
WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "optimizer by name": (
        lambda: apply("sgd", collection().parameters(), {}),
        TypeError,
        "must be a class such as torch.optim.Adagrad, got 'sgd'",
    ),
    "named parameters": (
        lambda: apply(SGD, collection().named_parameters(), {}),
        TypeError,
        "parameters are wanted, as module.parameters",
    ),
    "optimizer without names": (
        lambda: combined([SGD([torch.nn.Parameter(torch.zeros(1))])]),
        TypeError,
        "SGD has no named parameters: wrap it in KeyedOptimizerWrapper",
    ),
    "pairs": (
        lambda: wrapped(list(torch.nn.Linear(1, 1).named_parameters()), SGD),
        TypeError,
        "a dict of named parameters is wanted",
    ),
    "feature names": (
        lambda: config(10, 4, "t", feature_names="clicked"),
        ValueError,
        "table 't': feature_names must be a list of strings, got 'clicked'",
    ),
    "data type": (
        lambda: config(10, 4, "t", "FP16"),
        ValueError,
        "data_type must be a DataType, DataType.FP16 say, got 'FP16'",
    ),
    "configs of bags": (lambda: sequences(tables()), TypeError, "EmbeddingConfig"),
    "plan of a module": (lambda: parallel(ENV, plan=one_plan()), TypeError, NO_PLAN),
    "plan in a dict": (lambda: parallel(ENV, plan={"": one_plan()}), TypeError, NO_PLAN),
    "env": (lambda: parallel(torch.device("cpu")), TypeError, "env must be a ShardingEnv, got device"),
    "sharders": (
        lambda: parallel(ENV, sharders=[EmbeddingBagCollection]),
        TypeError,
        r"sharders must be ModuleSharders, EmbeddingBagCollectionSharder\(\) say, got",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_another_kind_are_refused_by_name(name: str) -> None:
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_a_second_optimizer_in_the_backward_is_refused() -> None:
    ebc = collection()
    apply(SGD, ebc.parameters(), {})
    with pytest.raises(ValueError, match=r"this parameter \[10, 4\] already has an optimizer in the backward, SGD"):
        apply(torch.optim.Adam, ebc.parameters(), {})


def test_a_size_may_be_a_number_of_numpy() -> None:
    assert config(np.int64(10), 4, "t").num_embeddings == 10
