"""Optimizers in the backward of a collection against the same optimizers over dense tables and `F.embedding_bag`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from copies import same
from jagged_batches import draw, gradient, gradient_of, kjt, pooled, tables_of, upstream, weight
from kernel_inputs import UPDATES, assert_close, torch_device
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from shardwise import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    LookupPolicy,
    PoolingType,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    fuse_embedding_optimizer,
)

EVERYWHERE = pytest.mark.parametrize("device", UPDATES)
# class, its keyword arguments, and the dense twin's where they differ: fused defaults are lr 0.01 and eps 1e-8
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}, {"lr": 0.05}),
    "sgd by default": (torch.optim.SGD, {}, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-6}, {"lr": 0.05, "eps": 1e-6}),
    "adagrad by default": (torch.optim.Adagrad, {}, {"lr": 0.01, "eps": 1e-8}),
    "adagrad, started": (
        torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.5},
        {"lr": 0.05, "eps": 1e-8, "initial_accumulator_value": 0.5},
    ),
    "rowwise adagrad": (RowWiseAdagrad, {"lr": 0.05, "eps": 1e-6}, {"lr": 0.05, "eps": 1e-6}),
    "rowwise adagrad by default": (RowWiseAdagrad, {}, {"lr": 0.01, "eps": 1e-8}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.95)}, {"lr": 0.05, "betas": (0.8, 0.95)}),
    "adam by default": (torch.optim.Adam, {}, {"lr": 0.01, "eps": 1e-8}),
}  # fmt: skip
EVERY = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def configs(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(6, 4, "a", feature_names=["f"], pooling=pooling),
        EmbeddingBagConfig(4, 3, "b", feature_names=["g", "f_of_b"]),
    ]


def batches(steps: int) -> list[dict[str, list[list[int]]]]:
    """Every row is hit in every batch, some often: a dense Adam moves rows that nobody looked up."""
    drawn = []
    for step in range(steps):
        bags = draw({"f": 6, "g": 4, "f_of_b": 4}, 3, seed=step)
        bags["f"][0] = [0, 1, 2, 3, 4, 5, 1, 1]
        bags["g"][1] = [3, 2, 1, 0, 0]
        drawn.append(bags)
    return drawn


def train_densely(
    tables: dict[str, Tensor],
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    steps: int,
    pooling: PoolingType = PoolingType.SUM,
    weights: list[Tensor] | None = None,
) -> dict[str, Tensor]:
    params: dict[str, Tensor] = {name: nn.Parameter(table.clone()) for name, table in tables.items()}
    dense = make(params.values())
    for step, bags in enumerate(batches(steps)):
        dense.zero_grad()
        out = pooled(configs(pooling), params, bags, None if weights is None else weights[step])
        out.backward(upstream(*out.shape, seed=step).to(out.device))
        dense.step()
    return params


def assert_tables(ebc: nn.Module, expected: Mapping[str, Tensor]) -> None:
    for name, table in tables_of(ebc).items():
        assert_close(table, expected[name], 1e-5)


def train(ebc: nn.Module, steps: int, weights: list[Tensor] | None = None) -> None:
    for step, bags in enumerate(batches(steps)):
        device = next(ebc.parameters()).device
        out = ebc(kjt(bags, weights=None if weights is None else weights[step], device=device)).values()
        out.backward(upstream(*out.shape, seed=step).to(device))


@EVERYWHERE
@EVERY
def test_many_fused_steps_equal_the_dense_optimizer(device: str, optimizer: tuple[Any, Any, Any]) -> None:
    """100 steps; 4 in the interpreter, which is slow."""
    where, (kind, kwargs, dense_kwargs) = torch_device(device), optimizer
    steps = 4 if device == "interpreted" else 100
    ebc = FusedEmbeddingBagCollection(configs(PoolingType.MEAN), kind, kwargs, device=where)
    expected = train_densely(tables_of(ebc), lambda params: kind(params, **dense_kwargs), steps, PoolingType.MEAN)
    train(ebc, steps)
    assert_tables(ebc, expected)
    assert all(param.grad is None for param in ebc.parameters())


@EVERY
@pytest.mark.parametrize("apply", [apply_optimizer_in_backward, _apply_optimizer_in_backward])
def test_every_way_of_applying_an_optimizer_gives_the_same_bits(
    apply: Callable[..., None], optimizer: tuple[Any, Any, Any]
) -> None:
    kind, kwargs, _ = optimizer
    fused = FusedEmbeddingBagCollection(configs(), kind, kwargs)
    ebc = EmbeddingBagCollection(configs())
    ebc.load_state_dict(fused.state_dict())
    # the default lr of torch's own constructor must be given where it runs
    apply(kind, ebc.parameters(), {**kwargs, "lr": kwargs.get("lr", 0.01)})
    train(fused, 3)
    train(ebc, 3)
    assert same(tables_of(ebc), tables_of(fused))
    assert all(param.grad is None for param in ebc.parameters())


def test_an_optimizer_without_a_hook_trains_nothing_in_the_backward() -> None:
    """`register_hook=False` of torch's function was passed over: the backward trained the table, without a gradient."""
    tables = [EmbeddingBagConfig(4, 2, "a"), EmbeddingBagConfig(4, 2, "b")]
    ebc, plain = EmbeddingBagCollection(tables), EmbeddingBagCollection(tables)
    plain.load_state_dict(ebc.state_dict())
    _apply_optimizer_in_backward(torch.optim.SGD, [weight(ebc, "a")], {"lr": 0.5}, register_hook=False)
    _apply_optimizer_in_backward(torch.optim.SGD, [weight(ebc, "b")], {"lr": 0.5})
    for collection in (ebc, plain):
        collection(kjt({"a": [[1, 1], [3]], "b": [[2], [0]]})).values().square().sum().backward()
    assert torch.equal(weight(ebc, "a"), weight(plain, "a"))
    given, expected = weight(ebc, "a").grad, weight(plain, "a").grad
    assert given is not None and expected is not None and torch.equal(given, expected)
    assert weight(ebc, "b").grad is None and not torch.equal(weight(ebc, "b"), weight(plain, "b"))
    # the optimizer that torch made is the caller's to run
    marks: Any = weight(ebc, "a")
    marks._in_backward_optimizers[0].step()
    assert torch.equal(weight(ebc, "a"), weight(plain, "a") - 0.5 * expected)


@EVERYWHERE
@pytest.mark.parametrize("apply", ["fused", "torch"])
def test_a_sequence_collection_trains_by_the_sum_of_each_rows_gradients(device: str, apply: str) -> None:
    where = torch_device(device)
    tables = [EmbeddingConfig(5, 4, "a", feature_names=["f", "g"]), EmbeddingConfig(5, 4, "b", feature_names=["f"])]
    ec: EmbeddingCollection
    if apply == "fused":
        ec = FusedEmbeddingCollection(tables, torch.optim.Adagrad, {"lr": 0.1}, where, True)
        assert ec.need_indices()
    else:
        ec = EmbeddingCollection(tables, where)
        _apply_optimizer_in_backward(torch.optim.Adagrad, ec.parameters(), {"lr": 0.1})
    bags = {"f": [[1, 1], [4]], "g": [[1], []]}
    expected = {name: nn.Parameter(table) for name, table in tables_of(ec).items()}
    dense = torch.optim.Adagrad(expected.values(), lr=0.1, eps=1e-8)
    for step in range(3):
        out = ec(kjt(bags, device=where))
        grads = {name: upstream(*jagged.values().shape, seed=step).to(where) for name, jagged in out.items()}
        torch.autograd.backward([jagged.values() for jagged in out.values()], list(grads.values()))
        dense.zero_grad()
        looked_up = {"f@a": expected["a"][[1, 1, 4]], "g": expected["a"][[1]], "f@b": expected["b"][[1, 1, 4]]}
        torch.autograd.backward([looked_up[name] for name in grads], list(grads.values()))
        dense.step()
    assert_tables(ec, expected)


@EVERYWHERE
def test_repeated_ids_are_added_before_they_are_squared(device: str) -> None:
    """Two hits with gradient g are one step with 2g: the accumulator gets (2g)^2, not 2 g^2."""
    where = torch_device(device)
    ebc = FusedEmbeddingBagCollection([EmbeddingBagConfig(3, 2, "a")], RowWiseAdagrad, {"lr": 1.0}, device=where)
    before = tables_of(ebc)["a"]
    ebc(kjt({"a": [[1, 1], [1]]}, device=where)).values().sum().backward()
    (state,) = ebc.fused_optimizer().state_dict()["state"].values()
    assert state["a.momentum1"].tolist() == [0.0, 9.0, 0.0]
    assert_close(tables_of(ebc)["a"], before - torch.tensor([[0.0], [1.0], [0.0]], device=where), 1e-5)


def test_tables_have_optimizers_of_their_own() -> None:
    tables = [EmbeddingBagConfig(6, 4, name, feature_names=["f"]) for name in "abcd"]
    ebc = EmbeddingBagCollection(tables)
    before = tables_of(ebc)
    chosen = {"a": (torch.optim.SGD, 1.0), "b": (torch.optim.Adagrad, 0.5), "c": (torch.optim.SGD, 0.25)}
    for name, (kind, lr) in chosen.items():
        apply_optimizer_in_backward(kind, [weight(ebc, name)], {"lr": lr})
    ebc(kjt({"f": [[1, 1]]})).values().sum().backward()
    # two hits: SGD steps by 2 lr, Adagrad's first step by lr; d has no optimizer and gets a gradient
    for name, change in {"a": 2.0, "b": 0.5, "c": 0.5, "d": 0.0}.items():
        assert_close(tables_of(ebc)[name][1], before[name][1] - change)
    assert gradient(ebc, "d")[1].tolist() == [2.0] * 4
    groups = ebc.fused_optimizer().state_dict()["param_groups"]
    assert {tuple(group["params"]): group["lr"] for group in groups} == {
        ("embedding_bags.a.weight",): 1.0, ("embedding_bags.b.weight",): 0.5, ("embedding_bags.c.weight",): 0.25,
    }  # fmt: skip


def test_an_optimizer_applied_later_leaves_the_others_states_alone() -> None:
    """Applying an optimizer to a second table between steps regrouped all tables and zeroed the first one's state."""
    ebc, twin = EmbeddingBagCollection(configs()), FusedEmbeddingBagCollection(configs(), torch.optim.Adam, {"lr": 0.1})
    twin.load_state_dict(ebc.state_dict())
    apply_optimizer_in_backward(torch.optim.Adam, [weight(ebc, "a")], {"lr": 0.1})
    train(ebc, 2)
    train(twin, 2)
    apply_optimizer_in_backward(torch.optim.Adam, [weight(ebc, "b")], {"lr": 0.1})
    train(ebc, 1)
    train(twin, 1)
    assert torch.equal(tables_of(ebc)["a"], tables_of(twin)["a"])
    states = ebc.fused_optimizer().state_dict()["state"]
    assert states["embedding_bags.a.weight"]["a.step"].tolist() == [3]
    assert states["embedding_bags.b.weight"]["b.step"].tolist() == [1]


@EVERYWHERE
def test_two_forwards_before_two_backwards_are_two_steps(device: str) -> None:
    """The second backward takes the gradient that its own ids had; both updates reach the table."""
    where = torch_device(device)
    ebc = FusedEmbeddingBagCollection([EmbeddingBagConfig(4, 2, "a")], torch.optim.SGD, {"lr": 1.0}, device=where)
    before = tables_of(ebc)["a"]
    outs = [ebc(kjt({"a": [[row, 3]]}, device=where)).values() for row in (0, 1)]
    for number, out in enumerate(outs, start=1):
        out.backward(torch.full_like(out, float(number)))
    assert_close(tables_of(ebc)["a"], before - torch.tensor([[1.0], [2.0], [0.0], [3.0]], device=where))


@EVERYWHERE
def test_weights_of_a_fused_collection_get_the_gradient_of_the_rows_that_were_looked_up(device: str) -> None:
    where = torch_device(device)
    steps = 2 if device == "interpreted" else 10
    counts = [sum(len(bag) for bags in batch.values() for bag in bags) for batch in batches(steps)]
    weights = [upstream(n, seed=50 + n).to(where).requires_grad_() for n in counts]
    plain_weights = [parameter.detach().clone().requires_grad_() for parameter in weights]
    ebc = FusedEmbeddingBagCollection(configs(), torch.optim.Adagrad, {"lr": 0.1}, True, where)
    make = partial(torch.optim.Adagrad, lr=0.1, eps=1e-8)
    expected = train_densely(tables_of(ebc), make, steps, weights=plain_weights)
    train(ebc, steps, weights)
    assert_tables(ebc, expected)
    for parameter, other in zip(weights, plain_weights, strict=True):
        assert_close(gradient_of(parameter), gradient_of(other), 1e-5)


def test_no_step_without_gradients() -> None:
    ebc = FusedEmbeddingBagCollection(configs(), torch.optim.SGD, {"lr": 1.0})
    before = tables_of(ebc)
    bags = batches(1)[0]
    with torch.no_grad():
        assert not ebc(kjt(bags)).values().requires_grad
    assert_close(ebc.eval()(kjt(bags)).values(), pooled(configs(), before, bags))
    assert same(tables_of(ebc), before)


REFUSED = {
    "class": (torch.optim.RMSprop, {}, "table 'a': RMSprop has no fused rule; these do: SGD, Adagrad, Adam, AdamW"),
    "dampening": (torch.optim.SGD, {"dampening": 0.9}, "table 'a': fused SGD does not take dampening=0.9"),
    "decay": (
        torch.optim.Adam,
        {"weight_decay_mode": "COWCLIP"},
        "table 'a': weight_decay_mode 'COWCLIP' is served by no rule",
    ),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, "table 'a': fused Adam does not take amsgrad=True"),
    "unknown": (RowWiseAdagrad, {"speed": 3}, "table 'a': fused RowWiseAdagrad does not take speed=3"),
    "lr": (torch.optim.SGD, {"lr": -1.0}, "table 'a': lr must be finite and not negative"),
    "betas": (torch.optim.Adam, {"betas": (0.9, 1.0)}, r"table 'a': beta2 must be in \[0, 1\)"),
}


@pytest.mark.parametrize(("kind", "kwargs", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_rule_does_is_refused_by_name(kind: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedEmbeddingBagCollection([EmbeddingBagConfig(3, 2, "a")], kind, kwargs)
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(3, 2, "a")])
    apply_optimizer_in_backward(kind, ebc.parameters(), kwargs)
    with pytest.raises(ValueError, match=message):
        ebc(kjt({"a": [[1]]}))


def test_settings_that_ask_for_nothing_are_taken() -> None:
    kwargs = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0, "nesterov": False, "foreach": None}
    ebc = FusedEmbeddingBagCollection(configs(), torch.optim.SGD, kwargs)
    assert ebc.optimizer_type() is torch.optim.SGD
    assert ebc.optimizer_kwargs() == kwargs


def test_a_table_takes_one_optimizer() -> None:
    ebc = EmbeddingBagCollection(configs())
    apply_optimizer_in_backward(torch.optim.SGD, [weight(ebc, "b")], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"this parameter \[4, 3\] already has an optimizer in the backward"):
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    # refused as a whole: a was not marked before b was found
    assert not hasattr(weight(ebc, "a"), "_optimizer_classes")
    _apply_optimizer_in_backward(torch.optim.Adam, [weight(ebc, "b")], {"lr": 0.1})
    with pytest.raises(ValueError, match="one optimizer in the backward, got 2"):
        ebc(kjt(batches(1)[0]))


class Model(nn.Module):
    """Collections at several depths, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.pooled = EmbeddingBagCollection(configs(), policy=LookupPolicy(BoundsCheckMode.IGNORE))
        self.nested = nn.ModuleList(
            [
                nn.Linear(2, 2),
                nn.ModuleDict({"rows": EmbeddingCollection([EmbeddingConfig(5, 4, "s", DataType.FP16)], None, True)}),
            ]
        )
        self.again = self.pooled
        self.weighted = nn.Sequential(EmbeddingBagCollection(configs(), is_weighted=True))


def test_fuse_embedding_optimizer_keeps_everything_but_the_training() -> None:
    """Bounds check, dtypes after .bfloat16(), frozen tables, train mode and shared modules were lost."""
    model = Model().eval()
    model.pooled.bfloat16()
    weight(model.pooled, "b").requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 1.0}) is model
    assert list(model.state_dict()) == list(before)
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name
    rows: Any = model.get_submodule("nested.1.rows")
    weighted: Any = model.weighted[0]
    assert isinstance(model.pooled, FusedEmbeddingBagCollection)
    assert isinstance(rows, FusedEmbeddingCollection) and rows.need_indices()
    assert isinstance(weighted, FusedEmbeddingBagCollection) and weighted.is_weighted()
    assert model.again is model.pooled and not model.pooled.training
    # an id outside the table is still ignored, the frozen table still frozen
    model.train()
    model.pooled(kjt({"f": [[1, 99]], "g": [[1]], "f_of_b": [[2]]})).values().sum().backward()
    tables = tables_of(model.pooled)
    assert torch.equal(tables["b"], before["pooled.embedding_bags.b.weight"])
    assert_close(tables["a"][1], before["pooled.embedding_bags.a.weight"][1] - 1)


def test_fuse_embedding_optimizer_turns_a_collection_itself_and_leaves_the_rest() -> None:
    plain = EmbeddingBagCollection(configs())
    twin = fuse_embedding_optimizer(plain, torch.optim.Adam, {"lr": 0.1})
    assert isinstance(twin, FusedEmbeddingBagCollection) and twin is not plain
    assert fuse_embedding_optimizer(twin, torch.optim.SGD, {"lr": 0.1}) is twin
    on_meta = fuse_embedding_optimizer(EmbeddingBagCollection(configs(), device="meta"), RowWiseAdagrad, {}, "cpu")
    assert all(0 < param.abs().max() <= 0.5 for param in on_meta.parameters())
    apply_optimizer_in_backward(torch.optim.SGD, plain.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="table 'a' already has an optimizer"):
        fuse_embedding_optimizer(plain, torch.optim.SGD, {"lr": 0.1})


class Extended(EmbeddingBagCollection):
    """A collection that a user derived."""


def test_fuse_embedding_optimizer_trains_a_derived_collection_where_it_is() -> None:
    """A derived class was passed over in silence, its tables never trained."""
    model = nn.Sequential(Extended(configs()))
    derived = model[0]
    fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 1.0})
    assert model[0] is derived
    before = tables_of(derived)
    derived(kjt({"f": [[1]], "g": [[]], "f_of_b": [[]]})).values().sum().backward()
    assert_close(tables_of(derived)["a"][1], before["a"][1] - 1)
    assert next(derived.parameters()).grad is None
