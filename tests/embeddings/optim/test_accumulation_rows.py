"""Gradients of fused tables that wait for a step, in one process: what is added, in which order, what it changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from jagged_batches import Bags, draw, kjt, tables_of, upstream, weight
from torch import Tensor

from shardwise.embeddings import (
    FTRL,
    LAMB,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    GradientCheckMode,
    LarsSGD,
    LookupFeature,
    LookupPolicy,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    PoolingType,
    RowWiseAdagrad,
    TableGroup,
    TableShape,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.tables.table_layout import OptimizerSpec

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "rowwise adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "partial adam": (PartialRowWiseAdam, {"lr": 0.05}),
    "lamb": (LAMB, {"lr": 0.05, "weight_decay": 0.01}),
    "partial lamb": (PartialRowWiseLAMB, {"lr": 0.05}),
    "lars": (LarsSGD, {"lr": 0.1}),
    "ftrl": (FTRL, {"lr": 0.1, "l1": 0.01}),
    "cut": (torch.optim.SGD, {"lr": 0.1, "gradient_clipping": True, "max_gradient": 0.5}),
}
ROWS = {"f": 9, "g": 9, "h": 5, "i": 40}


def bag_collection(rule: str, dtype: DataType = DataType.FP32, policy: LookupPolicy | None = None) -> Any:
    """Tables of two dims, one of them averaged, one looked up by two features."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(9, 8, "a", feature_names=["f", "g"], data_type=dtype),
        EmbeddingBagConfig(5, 4, "b", feature_names=["h"], pooling=PoolingType.MEAN, data_type=dtype),
        EmbeddingBagConfig(40, 4, "c", feature_names=["i"], data_type=dtype),
    ]
    kind, kwargs = RULES[rule]
    return FusedEmbeddingBagCollection(tables, kind, dict(kwargs), is_weighted=True, policy=policy or LookupPolicy())


def row_collection(rule: str, dtype: DataType = DataType.FP32) -> Any:
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(9, 8, "a", feature_names=["f", "g"], data_type=dtype),
        EmbeddingConfig(40, 8, "c", feature_names=["i"], data_type=dtype),
    ]
    kind, kwargs = RULES[rule]
    return FusedEmbeddingCollection(tables, kind, dict(kwargs))


def accumulating(module: Any) -> tuple[Any, Any]:
    """A module whose gradients wait for a step, and the optimizer that takes it."""
    optimizer = module.fused_optimizer()
    optimizer.accumulate_gradients()
    return module, optimizer


def batches(sizes: Sequence[int], seed: int = 0) -> list[Bags]:
    """Micro-batches of so many samples; hot rows, so that they share some."""
    return [draw(ROWS, size, seed=seed + 7 * n) for n, size in enumerate(sizes)]


def together(parts: Sequence[Bags]) -> Bags:
    return {name: [bag for part in parts for bag in part[name]] for name in ROWS}


def train(module: Any, bags: Bags, first: int = 0) -> None:
    """Backward of one batch, with the weights and gradients of samples `first` and on of a fixed sequence."""
    samples = len(bags["f"])
    if isinstance(module, FusedEmbeddingBagCollection):
        scales = [0.5 + (7 * i % 5) / 4 + n / 8 for n, name in enumerate(ROWS) for bag in bags[name] for i in bag]
        out = module(kjt(bags, weights=torch.tensor(scales))).values()
        out.backward(upstream(64, out.shape[1], seed=3)[first : first + samples])
        return
    rows = module(kjt({name: bags[name] for name in ("f", "g", "i")}))
    tensors, grads = [], []
    for name, jagged in rows.items():
        sample = torch.arange(samples).repeat_interleave(jagged.lengths()) + first
        tensors.append(jagged.values())
        grads.append(upstream(64, 8, seed=ord(name[0]))[sample])
    torch.autograd.backward(tensors, grads)


def state_of(module: Any) -> dict[str, Tensor]:
    states = module.fused_optimizer().state_dict()["state"].values()
    return {**tables_of(module), **{key: value.clone() for state in states for key, value in state.items()}}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name, value in actual.items() if not torch.equal(value, expected[name])]
    assert not different


@pytest.mark.parametrize("dtype", [DataType.FP32, DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [bag_collection, row_collection])
def test_a_gradient_that_waited_changes_the_bits_that_it_would_have_changed_at_once(
    make: Any, rule: str, dtype: DataType
) -> None:
    at_once, (waiting, optimizer) = make(rule, dtype), accumulating(make(rule, dtype))
    for step, bags in enumerate(batches([6, 1, 0, 5])):
        train(at_once, bags, step)
        before = state_of(waiting)
        train(waiting, bags, step)
        assert_same_bits(state_of(waiting), before)
        optimizer.step()
        assert_same_bits(state_of(waiting), state_of(at_once))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [bag_collection, row_collection])
def test_micro_batches_are_one_step_on_all_their_samples(make: Any, rule: str) -> None:
    sizes, whole, (waiting, optimizer) = [4, 0, 1, 7], make(rule), accumulating(make(rule))
    for seed in (0, 100):
        parts = batches(sizes, seed)
        train(whole, together(parts))
        for n, part in enumerate(parts):
            train(waiting, part, sum(sizes[:n]))
        optimizer.step()
    torch.testing.assert_close(state_of(waiting), state_of(whole), rtol=2e-5, atol=2e-6)


def test_sums_of_batches_are_added_one_batch_after_another() -> None:
    """Of 1e8, 1 and -1e8 nothing is left in fp32 in this order, 1 in others."""
    group = TableGroup(
        [TableShape("a", 4, 1)], [LookupFeature("f", 0)], dtype=torch.float32, device=torch.device("cpu"),
        optimizer=OptimizerSpec("sgd", lr=1.0),
    )  # fmt: skip
    group.flat.zero_()
    group.accumulation.on = True
    for number in (1e8, 1.0, -1e8):
        group.update(torch.tensor([[number]]), torch.tensor([2]), torch.tensor([0, 1]), pooling="sum")
    assert group.sums is not None and group.sums[0].gradient.tolist() == [[0.0]]
    group.accumulation.on = False
    # what comes before the step waits too
    group.update(torch.tensor([[5.0], [3.0]]), torch.tensor([3, 2]), torch.tensor([0, 1, 2]), pooling="sum")
    assert group.sums[0].rows.tolist() == [2, 3] and group.flat.tolist() == [0.0] * 4
    group.apply_sums()
    assert group.flat.tolist() == [0.0, 0.0, -3.0, -5.0]
    assert int(group.step) == 1 and group.sums is None


def test_weight_decay_and_the_count_of_steps_enter_once() -> None:
    module, optimizer = accumulating(bag_collection("adamw"))
    for part in batches([3, 3, 3]):
        train(module, part)
    optimizer.step()
    optimizer.step()
    assert [int(group.step) for group in optimizer.groups] == [1]


def test_the_learning_rate_of_the_step_counts_and_not_that_of_the_backward() -> None:
    first, second = bag_collection("sgd"), bag_collection("sgd")
    (bags,) = batches([5])
    for module, before, after in ((first, 0.1, 0.3), (second, 0.3, 0.3)):
        _, optimizer = accumulating(module)
        optimizer.update_hyper_parameters({"lr": before})
        train(module, bags)
        optimizer.param_groups[0]["lr"] = after
        optimizer.step()
    assert_same_bits(tables_of(first), tables_of(second))


def test_zero_grad_drops_what_waits() -> None:
    module, optimizer = accumulating(bag_collection("adam"))
    before = state_of(module)
    train(module, batches([5])[0])
    assert [tuple(sums.shape)[1] for sums in optimizer.gradient_sums()] == [4, 8]
    optimizer.zero_grad()
    assert optimizer.gradient_sums() == []
    optimizer.step()
    assert_same_bits(state_of(module), before)


def test_frozen_tables_are_left_alone() -> None:
    frozen, (module, optimizer) = bag_collection("adagrad"), accumulating(bag_collection("adagrad"))
    for collection in (frozen, module):
        collection.embedding_bags["a"].weight.requires_grad_(False)
    for bags in batches([4, 4]):
        train(frozen, bags)
        train(module, bags)
        optimizer.step()
    assert_same_bits(state_of(module), state_of(frozen))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_whose_gradient_is_not_finite_is_left_out_or_raises(bad: float) -> None:
    good, broken = batches([4, 4])
    expected = bag_collection("adam")
    train(expected, good)
    skipping = bag_collection("adam", policy=LookupPolicy(gradient_check=GradientCheckMode.SKIP))
    raising = bag_collection("adam", policy=LookupPolicy(gradient_check=GradientCheckMode.RAISE))
    for module in (skipping, raising):
        module.fused_optimizer().accumulate_gradients()
        train(module, good)
        out = module(kjt(broken, weights=torch.ones(sum(len(bag) for bags in broken.values() for bag in bags))))
        grad = torch.ones_like(out.values())
        grad[1, 2] = bad
        if module is raising:
            with pytest.raises(FloatingPointError, match="feature 'f'"):
                out.values().backward(grad)
        else:
            out.values().backward(grad)
        # what waited before is still good
        module.fused_optimizer().step()
        assert_same_bits(state_of(module), state_of(expected))


def test_only_bad_batches_are_no_step() -> None:
    skipping = LookupPolicy(gradient_check=GradientCheckMode.SKIP)
    module, optimizer = accumulating(bag_collection("adam", policy=skipping))
    before = state_of(module)
    (bags,) = batches([4])
    out = module(kjt(bags, weights=torch.ones(sum(len(bag) for bags in bags.values() for bag in bags)))).values()
    out.backward(torch.full_like(out, float("nan")))
    optimizer.step()
    assert_same_bits(state_of(module), before)


def test_gradients_that_wait_are_copied_and_moved_with_their_tables() -> None:
    module, optimizer = accumulating(bag_collection("adam"))
    train(module, batches([5])[0])
    copied = copy.deepcopy(module).to("cpu")
    assert len(copied.fused_optimizer().gradient_sums()) == 2
    copied.fused_optimizer().step()
    assert len(optimizer.gradient_sums()) == 2
    optimizer.step()
    assert_same_bits(state_of(copied), state_of(module))


def test_no_table_joins_an_optimizer_while_gradients_wait() -> None:
    half = EmbeddingBagCollection(bag_collection("sgd").embedding_bag_configs(), is_weighted=True)
    apply_optimizer_in_backward(torch.optim.SGD, [weight(half, "a")], {"lr": 0.1})
    half.fused_optimizer().accumulate_gradients()
    (bags,) = batches([3])
    weights = torch.ones(sum(len(bag) for bags in bags.values() for bag in bags))
    half(kjt(bags, weights=weights)).values().sum().backward()
    apply_optimizer_in_backward(torch.optim.SGD, [weight(half, "b")], {"lr": 0.1})
    with pytest.raises(RuntimeError, match=r"gradients wait for a step: call step\(\) or zero_grad\(\)"):
        half(kjt(bags, weights=weights))


class Leases:
    """A store that keeps each table's rows in slots in reverse, and lists the leases that are out."""

    def __init__(self, rows: int) -> None:
        self.rows, self.out, self.made = rows, [], 0  # type: ignore[var-annotated]

    def attach(self, group: TableGroup) -> None:
        pass

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, int]:
        self.made += 1
        self.out.append(self.made)
        return self.rows - 1 - ids, self.made

    def release(self, lease: int) -> None:
        self.out.remove(lease)


def test_slots_are_held_until_the_step_that_updates_them() -> None:
    store = Leases(4)
    group = TableGroup(
        [TableShape("a", 4, 2)], [LookupFeature("f", 0)], dtype=torch.float32, device=torch.device("cpu"),
        optimizer=OptimizerSpec("sgd", lr=1.0), store=store,
    )  # fmt: skip
    group.flat.zero_()
    group.accumulation.on = True
    for row in (0, 3):
        group.pooled(torch.tensor([row]), torch.tensor([0, 1])).sum().backward()
    assert store.out == [1, 2]
    group.apply_sums()
    assert store.out == []
    assert group.view(0)[:, 0].tolist() == [-1.0, 0.0, 0.0, -1.0]
