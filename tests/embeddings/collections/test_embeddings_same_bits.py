"""A table trains to the same bits whatever else its collection holds, on whatever tile: the contract of transpose.py.

Three steps of each rule. In the first one row is hit by 100 ids, which are added in two levels, later by 40, and other
rows by a few; once that row is hit by 3,000 ids, in three levels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_inputs import DEFINED, RULES, UPDATES, assert_same_bits, per_rule, torch_device
from torch import Tensor

from shardwise import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    LookupPolicy,
    PoolingType,
    RuleOptimizer,
    apply_optimizer_in_backward,
)
from shardwise.kernels import configs as tuned
from shardwise.kernels import persistent_grid
from shardwise.kernels._op import gather_tile
from shardwise.kernels.cpu import update as cpu_update
from shardwise.kernels.transpose import levels_for
from shardwise.kernels.update import update

ROWS, DIM, SAMPLES = 40, 48, 16


def configs(dtype: DataType, behind: bool) -> list[EmbeddingBagConfig]:
    """The table "mine", alone or behind tables of other dims and dtypes and one that shares its sort and its launch."""
    mine = EmbeddingBagConfig(ROWS, DIM, "mine", dtype, ["f"])
    if not behind:
        return [mine]
    return [
        EmbeddingBagConfig(9, 5, "narrow", feature_names=["g"]),
        EmbeddingBagConfig(11, DIM, "twin", dtype, ["h"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(6, DIM, "other", DataType.FP16, ["g"]),
        EmbeddingBagConfig(7, 64, "wide", dtype, ["h", "g"]),
        mine,
    ]


def bags_of_mine(step: int, hot: int) -> tuple[Tensor, Tensor]:
    """Ids and lengths of feature f, spread evenly over the samples: row 7 `hot` times among 60 ids of any row."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.cat([torch.full((hot,), 7), torch.randint(0, ROWS, (60,), generator=generator)])
    ends = torch.linspace(0, len(ids), SAMPLES + 1).long()
    return ids[torch.randperm(len(ids), generator=generator)], ends.diff()


def batch_of(step: int, hot: int, behind: bool) -> KeyedJaggedTensor:
    ids, lengths = bags_of_mine(step, hot if step == 0 else 40)
    if not behind:
        return KeyedJaggedTensor(["f"], ids, lengths=lengths)
    generator = torch.Generator().manual_seed(100 + step)
    others = torch.randint(0, 6, (2 * SAMPLES,), generator=generator)
    return KeyedJaggedTensor(
        ["g", "h", "f"],
        torch.cat([others, ids]),
        lengths=torch.cat([torch.ones(2 * SAMPLES, dtype=torch.int64), lengths]),
    )


def trained(rule: str, dtype: DataType, hot: int, device: torch.device, *, behind: bool) -> list[Tensor]:
    """Three steps: each one's output for "mine", and its rows and states at the end."""
    policy = LookupPolicy(BoundsCheckMode.IGNORE)
    module: Any = EmbeddingBagCollection(configs(dtype, behind), device=device, policy=policy)
    with torch.no_grad():
        weights = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
        module.embedding_bags["mine"].weight.copy_(weights)
    kind: Any = type("Ruled", (RuleOptimizer,), {"rule": DEFINED[rule]})
    apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
    found = []
    for step in range(3):
        out = module(batch_of(step, hot, behind).to(device))
        mine = out["f"]
        found.append(mine.detach().clone())
        generator = torch.Generator().manual_seed(step)
        grad = torch.randn(SAMPLES, DIM, generator=generator).to(device)
        # the other tables train too: their gradients are ones
        torch.autograd.backward([mine, out.values()[:, :-DIM]], [grad, torch.ones_like(out.values()[:, :-DIM])])
    found.append(module.embedding_bags["mine"].weight.detach().clone())
    states = module.fused_optimizer().state_dict()["state"]["embedding_bags.mine.weight"]
    return found + [value.clone() for value in states.values()]


def use_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile of a launch, and every block of the torch path, in another size."""
    chosen, doubled = update.update_tile(DIM), update.update_tile(DIM, 2)
    assert doubled[0] == 2 * chosen[0] and doubled[1] == chosen[1]
    of_dim = update.update_tile
    monkeypatch.setattr(update, "update_tile", lambda dim, *_: of_dim(dim, 2))
    monkeypatch.setattr(persistent_grid, "PERSISTENT_PROGRAMS", 3)
    rows, block_d, _ = gather_tile(DIM, 4, 4)
    monkeypatch.setattr(tuned, "gather_tile", lambda *_: (2 * rows, block_d // 2, 1))
    monkeypatch.setattr(cpu_update, "_BLOCK_ELEMENTS", 7 * DIM)


RUNS = [
    *((rule, DataType.FP32, 100) for rule in RULES),
    ("rowwise_adagrad", DataType.BF16, 100),
    ("adam", DataType.FP16, 100),
    ("rowwise_adagrad", DataType.FP32, 3000),
]


@pytest.mark.parametrize(
    ("device", "rule", "dtype", "hot"),
    [
        pytest.param(
            *pair.values, dtype, hot, marks=pair.marks, id=f"{pair.values[0]}-{pair.values[1]}-{dtype.value}-{hot}"
        )
        for pair in per_rule(UPDATES) for rule, dtype, hot in RUNS if rule == pair.values[1]
    ],
)  # fmt: skip
def test_a_table_has_the_same_bits_behind_others_and_on_other_tiles(
    device: str, rule: str, dtype: DataType, hot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of fp16 and bf16 are rounded stochastically: by their own numbers, not by their place in the buffer."""
    where = torch_device(device)
    assert levels_for(hot) == (3 if hot > 1024 else 2)
    alone = trained(rule, dtype, hot, where, behind=False)
    behind = trained(rule, dtype, hot, where, behind=True)
    use_other_tiles(monkeypatch)
    elsewhere = trained(rule, dtype, hot, where, behind=True)
    for expected, *others in zip(alone, behind, elsewhere, strict=True):
        for got in others:
            assert_same_bits(got, expected)
