"""`EmbeddingBagCollection` against `F.embedding_bag`, one table and one feature at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jagged_batches import draw, gradient, gradient_of, kjt, pooled, tables_of, upstream, weight
from kernel_inputs import DEVICES, assert_close, torch_device
from torch import Tensor

from shardwise import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedTensor, PoolingType

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
FP32, FP16, BF16 = DataType.FP32, DataType.FP16, DataType.BF16


@dataclass(frozen=True)
class Case:
    """Tables as (name, rows, dim, features, pooling, dtype); a batch over f, g, h and `unused`."""

    tables: tuple[tuple[Any, ...], ...]
    weighted: bool = False
    samples: int = 4
    longest: int = 4
    ids: torch.dtype = torch.int64
    order: tuple[str, ...] = ("f", "g", "h")

    def configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(rows, dim, name, dtype, list(features), pooling=pooling)
            for name, rows, dim, features, pooling, dtype in self.tables
        ]

    def bags(self, seed: int = 0) -> dict[str, list[list[int]]]:
        rows = {"f": 9, "g": 9, "h": 9, "unused": 10**6}
        for _, count, _, features, _, _ in self.tables:
            rows.update({feature: min(count, rows[feature]) for feature in features})
        bags = draw(rows, self.samples, longest=self.longest, seed=seed)
        return {feature: bags[feature] for feature in self.order}


TWO = (("a", 9, 4, ("f",), SUM, FP32), ("b", 5, 4, ("g",), SUM, FP32))
MIXED = (
    ("a", 9, 8, ("f",), MEAN, FP32), ("b", 5, 3, ("g", "h"), SUM, FP16), ("c", 7, 1, ("h",), MEAN, BF16),
    ("d", 6, 8, ("f",), SUM, FP32), ("e", 4, 16, ("g",), SUM, FP32),
)  # fmt: skip
CASES = {
    "sum": Case(TWO),
    "mean": Case((("a", 9, 4, ("f",), MEAN, FP32), ("b", 5, 4, ("g",), MEAN, FP32))),
    "one table, two features": Case((("a", 9, 4, ("f", "g"), SUM, FP32),)),
    "shared feature": Case((("a", 9, 4, ("f",), SUM, FP32), ("b", 5, 4, ("f", "g"), SUM, FP32))),
    "mixed dims, dtypes and pooling": Case(MIXED),
    "weighted": Case(TWO, weighted=True),
    "weighted, mixed": Case(MIXED, weighted=True),
    "other order in the batch": Case(MIXED, order=("h", "unused", "g", "f")),
    "unused feature": Case(TWO, order=("f", "unused", "g")),
    "fp16": Case((("a", 9, 4, ("f",), SUM, FP16),)),
    "bf16, weighted mean": Case((("a", 9, 4, ("f",), MEAN, BF16),), weighted=True),
    "int32 ids": Case(MIXED, ids=torch.int32),
    "empty bags only": Case(MIXED, longest=0),
    "batch 0": Case(MIXED, samples=0),
    "one row": Case((("a", 1, 4, ("f",), MEAN, FP32),)),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
EVERYWHERE = pytest.mark.parametrize("device", DEVICES)


def weights_for(case: Case, bags: dict[str, list[list[int]]], device: torch.device) -> Tensor | None:
    count = sum(len(bag) for feature in bags.values() for bag in feature)
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, generator=generator).to(device).requires_grad_() if case.weighted else None


@EVERYWHERE
@EVERY
def test_output_and_gradients_are_those_of_embedding_bag_per_table(device: str, case: Case) -> None:
    where, configs, bags = torch_device(device), case.configs(), case.bags()
    ebc = EmbeddingBagCollection(configs, case.weighted, where)
    weights = weights_for(case, bags, where)
    out = ebc(kjt(bags, weights=weights, dtype=case.ids, device=where)).values()
    assert out.dtype == torch.float32

    tables = {name: table.requires_grad_() for name, table in tables_of(ebc).items()}
    their_weights = None if weights is None else weights.detach().clone().requires_grad_()
    expected = pooled(configs, tables, bags, their_weights)
    assert_close(out, expected)

    grad = upstream(*out.shape).to(where)
    out.backward(grad)
    expected.backward(grad)
    for config in configs:
        mine = gradient(ebc, config.name)
        assert_close(mine, gradient_of(tables[config.name]))
    if weights is not None:
        assert their_weights is not None
        assert_close(gradient_of(weights), gradient_of(their_weights))


@EVERYWHERE
def test_weights_of_the_batch_are_ignored_unless_the_collection_is_weighted(device: str) -> None:
    where, case = torch_device(device), CASES["sum"]
    bags = case.bags()
    ebc = EmbeddingBagCollection(case.configs(), device=where)
    count = sum(len(bag) for feature in bags.values() for bag in feature)
    weighted = kjt(bags, weights=torch.full((count,), float("nan"), device=where), device=where)
    assert_close(ebc(weighted).values(), ebc(kjt(bags, device=where)).values())


def test_output_follows_the_configs_and_renames_shared_features() -> None:
    configs = [
        EmbeddingBagConfig(5, 2, "t1", feature_names=["b", "a"]),
        EmbeddingBagConfig(5, 3, "t2", feature_names=["a"]),
        EmbeddingBagConfig(5, 4, "c"),
    ]
    ebc = EmbeddingBagCollection(configs)
    bags = {"x": [[9]], "a": [[1]], "c": [[2]], "b": [[3]]}
    out = ebc(kjt(bags))
    assert isinstance(out, KeyedTensor)
    assert out.keys() == ["b", "a@t1", "a@t2", "c"]
    assert out.length_per_key() == [2, 2, 3, 4]
    tables = tables_of(ebc)
    expected = {"b": tables["t1"][3], "a@t1": tables["t1"][1], "a@t2": tables["t2"][1], "c": tables["c"][2]}
    for key, row in expected.items():
        assert torch.equal(out[key], row[None]), key
    assert configs[2].feature_names == ["c"]


def test_tables_of_several_dtypes_and_optimizers_keep_the_order_of_the_configs() -> None:
    """Groups are by dtype: fp16 lies elsewhere, its columns must still stand between those of its neighbours."""
    names = [("a", FP32), ("b", FP16), ("c", BF16), ("d", FP16), ("e", FP32)]
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, name, dtype) for name, dtype in names])
    out = ebc(kjt({name: [[k % 4]] for k, (name, _) in enumerate(names)}))
    tables = tables_of(ebc)
    expected = torch.cat([tables[name][k % 4].float() for k, (name, _) in enumerate(names)])
    assert torch.equal(out.values(), expected[None])


@pytest.mark.parametrize("samples", [0, 3])
def test_no_tables_give_no_columns(samples: int) -> None:
    ebc = EmbeddingBagCollection([])
    out = ebc(kjt({"f": [[1]] * samples}))
    assert out.keys() == []
    assert out.values().shape == (samples, 0)
    assert list(ebc.parameters()) == []
    assert ebc.state_dict() == {}
    assert ebc.fused_optimizer().state_dict() == {"state": {}, "param_groups": ()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_gradients_of_per_id_weights_have_their_dtype(dtype: torch.dtype) -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "a")], is_weighted=True)
    weights = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    ebc(kjt({"a": [[3], [4]]}, weights=weights)).values().sum().backward()
    assert weights.grad is not None and weights.grad.dtype == dtype
    assert_close(weights.grad, tables_of(ebc)["a"][[3, 4]].sum(1), 1e-3)


def test_ids_may_be_strided() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a")], is_weighted=True)
    batch = kjt({"a": [[1], [2, 3]]}, weights=torch.tensor([1.0, 2.0, 3.0]))
    expected = ebc(batch).values()
    batch._values = torch.tensor([1, 0, 2, 0, 3, 0])[::2]
    batch._weights = torch.tensor([1.0, 9.0, 2.0, 9.0, 3.0, 9.0])[::2]
    assert torch.equal(ebc(batch).values(), expected)


def test_keys_of_a_batch_may_change_from_batch_to_batch() -> None:
    """Where the features of a group stand in a batch is found once for each list of keys."""
    case = CASES["mixed dims, dtypes and pooling"]
    ebc, bags = EmbeddingBagCollection(case.configs()), case.bags()
    expected = ebc(kjt(bags)).values()
    for order in (("h", "f", "g"), ("g", "h", "f"), ("h", "f", "g"), ("f", "g", "h")):
        assert torch.equal(ebc(kjt({feature: bags[feature] for feature in order})).values(), expected), order
    with pytest.raises(KeyError, match=r"features \['h'\] are not in the batch, which has \['f', 'g'\]"):
        ebc(kjt({feature: bags[feature] for feature in ("f", "g")}))
    assert torch.equal(ebc(kjt(bags)).values(), expected)


def test_gradients_of_tables_are_their_own_and_a_frozen_table_has_none() -> None:
    case = CASES["mixed dims, dtypes and pooling"]
    ebc, bags = EmbeddingBagCollection(case.configs()), case.bags()
    weight(ebc, "d").requires_grad_(False)
    ebc(kjt(bags)).values().backward(upstream(4, 39))
    assert weight(ebc, "d").grad is None
    before = {name: gradient(ebc, name).clone() for name in ("a", "b", "c", "e")}
    gradient(ebc, "a").mul_(2)
    assert torch.equal(gradient(ebc, "a"), 2 * before.pop("a"))
    for name, grad in before.items():
        assert torch.equal(gradient(ebc, name), grad), name
        assert grad.any(), name


def test_two_forwards_before_two_backwards_add_up() -> None:
    case = CASES["mixed dims, dtypes and pooling"]
    ebc, first, second = EmbeddingBagCollection(case.configs()), case.bags(1), case.bags(2)
    grad = upstream(4, 39)
    outs = [ebc(kjt(bags)).values() for bags in (first, second)]
    for out in outs:
        out.backward(grad)
    tables = {name: table.requires_grad_() for name, table in tables_of(ebc).items()}
    for bags in (first, second):
        pooled(case.configs(), tables, bags).backward(grad)
    for name, table in tables.items():
        assert_close(gradient(ebc, name), gradient_of(table))


def test_an_optimizer_may_step_between_a_forward_and_its_backward() -> None:
    """As with nn.EmbeddingBag: the gradient of a table does not need its rows.
    Failed with "modified by an inplace operation" while the lookup saved the rows' version."""
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "a")])
    optimizer = torch.optim.SGD(ebc.parameters(), lr=1.0)
    before = tables_of(ebc)["a"]
    outs = [ebc(kjt({"a": [[row]]})).values().sum() for row in (1, 2)]
    for out in outs:
        optimizer.zero_grad()
        out.backward()
        optimizer.step()
    expected = before.clone()
    expected[1:3] -= 1
    assert_close(tables_of(ebc)["a"], expected)


def test_a_step_between_is_refused_where_the_backward_needs_the_rows() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "a")], is_weighted=True)
    weights = torch.ones(1, requires_grad=True)
    out = ebc(kjt({"a": [[1]]}, weights=weights)).values().sum()
    with torch.no_grad():
        weight(ebc, "a").add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        out.backward()


def test_nothing_is_recorded_without_gradients() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "a")])
    with torch.no_grad():
        assert not ebc(kjt({"a": [[1]]})).values().requires_grad
    assert ebc(kjt({"a": [[1]]})).values().requires_grad
    ebc.requires_grad_(False)
    assert not ebc(kjt({"a": [[1]]})).values().requires_grad
