"""Optimizer states of tables by the names that TorchRec 1.8.0 gives them, and by ours.

TorchRec keeps `<table>.momentum1`, and what follows by FBGEMM's names: `exp_avg_sq` is our `momentum2`. It does not
save how many updates Adam and its kin have counted; here that is `<table>.step`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch

from shardwise.kernels import rule_named

STEP = "step"
_OURS = {"momentum1": "momentum1", "momentum2": "momentum2", "exp_avg_sq": "momentum2", STEP: STEP}
_THEIRS = {"momentum1": "momentum1", "momentum2": "exp_avg_sq"}
_TABLE = re.compile(r"(?:.*\.)?(?:embedding_bags|embeddings)\.([^.]+)\.weight")
# how many dimensions the states of a table have -> the rule that is meant where nothing else is said
_RULES = {(): "sgd", (1,): "rowwise_adagrad", (2,): "adagrad", (2, 2): "adam", (2, 1): "partial_rowwise_adam"}


def table_in(parameter: str) -> str | None:
    """The table that a parameter of this name is, by the names of collections."""
    match = _TABLE.fullmatch(parameter)
    return None if match is None else match[1]


def our_state(parameter: str, key: str) -> str:
    """Our name of a state that is saved as `<table>.<state>`.

    Raises:
        ValueError: shardwise has no such state; TorchRec's `prev_iter` and `row_counter` are some.
    """
    name = key.rpartition(".")[2]
    if name not in _OURS:
        raise ValueError(
            f"{parameter}: optimizer state {key!r} has no counterpart: shardwise has {sorted(set(_OURS.values()))};"
            " rules of FBGEMM that keep others (counters of rows, moving averages of weights) are not served"
        )
    return _OURS[name]


def their_state(state: str) -> str | None:
    """TorchRec's name of our state; None for the count of updates, which it does not keep."""
    return _THEIRS.get(state)


def rule_of(parameter: str, dims: Collection[int], rules: Mapping[str, str] | str | None) -> str:
    """The rule of a table whose states have so many dimensions each.

    Raises:
        ValueError: `rules` names none, or one of other states, or without it there is none with such states.
    """
    named = rules if isinstance(rules, str) or rules is None else rules.get(parameter)
    if named is None and tuple(dims) not in _RULES:
        raise ValueError(f"{parameter}: no rule has states of {list(dims)} dimensions: say rules={{parameter: rule}}")
    rule = named or _RULES[tuple(dims)]
    kinds = tuple(1 if kind == "row" else 2 for kind in rule_named(rule).kinds)
    if kinds != tuple(dims):
        raise ValueError(f"{parameter}: the states of {rule} have {list(kinds)} dimensions, those saved {list(dims)}")
    return rule


def steps_of(parameter: str, rule: str, saved: int | None, given: int | None) -> int:
    """How many updates a table has counted.

    Raises:
        ValueError: its rule reads that, and nobody says.
    """
    counted = saved if given is None else given
    if counted is None and rule_named(rule).counts_steps:
        raise ValueError(
            f"{parameter}: {rule} reads how many updates it has made, which TorchRec does not save: say steps="
        )
    return counted or 0


def optimizer_state_from_torchrec(state_dict: Mapping[str, Any], *, steps: int | None = None) -> dict[str, Any]:
    """The state dict of a TorchRec optimizer by our names; tensors are the same ones.

    It loads into the optimizer of a sharded model if its tensors are whole, or in the pieces of the same plan.

    Args:
        state_dict: of a keyed optimizer, `{"state": {parameter: {state: value}}, ...}`.
        steps: updates that Adam and its kin have counted.

    Raises:
        ValueError: a state has no counterpart, or there are second moments and no `steps`.
    """
    renamed = {}
    for parameter, states in state_dict["state"].items():
        table, made = table_in(parameter), dict(states)
        if table is not None and all(key.startswith(f"{table}.") for key in states):
            made = {f"{table}.{our_state(parameter, key)}": value for key, value in states.items()}
            if f"{table}.momentum2" in made and f"{table}.{STEP}" not in made:
                count = steps_of(parameter, "adam", None, steps)
                made[f"{table}.{STEP}"] = torch.tensor([count])
        renamed[parameter] = made
    return {**state_dict, "state": renamed}


def optimizer_state_to_torchrec(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of one of our optimizers by TorchRec's names, without what it does not keep; tensors are the same.

    Give TorchRec's optimizer the count of updates by its `set_optimizer_step`.
    """
    by_parameter = {}
    for parameter, states in state_dict["state"].items():
        table, made = table_in(parameter), dict(states)
        if table is not None and all(key.startswith(f"{table}.") for key in states):
            renamed = {their_state(key.rpartition(".")[2]): value for key, value in states.items()}
            made = {f"{table}.{name}": value for name, value in renamed.items() if name is not None}
        by_parameter[parameter] = made
    return {"state": by_parameter}
