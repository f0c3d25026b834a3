"""Collections against `F.embedding_bag` and indexing, one table and one feature at a time; and in one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jagged_batches import draw, gradient, gradient_of, kjt, pooled, tables_of, upstream, weight
from kernel_inputs import DEVICES, assert_close, torch_device
from model_zoo import fused
from torch import Tensor

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    RowWiseAdagrad,
)

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
    for name, table in tables.items():
        assert_close(gradient(ebc, name), gradient_of(table))
    if weights is not None:
        assert their_weights is not None
        assert_close(gradient_of(weights), gradient_of(their_weights))


@EVERYWHERE
def test_weights_of_the_batch_are_ignored_unless_the_collection_is_weighted(device: str) -> None:
    where, case = torch_device(device), CASES["sum"]
    bags = case.bags()
    ebc = EmbeddingBagCollection(case.configs(), device=where)
    plain = kjt(bags, device=where)
    weighted = kjt(bags, weights=torch.full(plain.values().shape, float("nan"), device=where), device=where)
    assert_close(ebc(weighted).values(), ebc(plain).values())


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
    assert gradient_of(weights).dtype == dtype
    assert_close(gradient_of(weights), tables_of(ebc)["a"][[3, 4]].sum(1), 1e-3)


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
    assert_close(tables_of(ebc)["a"], before - torch.tensor([[0.0], [1.0], [1.0], [0.0], [0.0]]))


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


IDS, LENGTHS = torch.tensor([1, 2, 3, 0]), torch.tensor([2, 0, 1, 1])


def collection(optimizer: Any) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "a"), EmbeddingBagConfig(6, 8, "b")])
    return ebc if optimizer is None else fused(ebc, optimizer)


def loss_of(ebc: EmbeddingBagCollection) -> Any:
    def loss(ids: Tensor, lengths: Tensor) -> Tensor:
        return ebc(KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)).values().square().sum()

    return loss


@pytest.mark.parametrize("optimizer", [None, RowWiseAdagrad])
def test_one_graph_trains_as_eager_does(optimizer: Any) -> None:
    torch._dynamo.reset()
    ebc, eager = collection(optimizer), collection(optimizer)
    ebc.fused_optimizer()
    compiled = torch.compile(loss_of(ebc), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        compiled_loss, eager_loss = compiled(IDS, LENGTHS), loss_of(eager)(IDS, LENGTHS)
        assert_close(compiled_loss, eager_loss)
        compiled_loss.backward()
        eager_loss.backward()
    for param, expected in zip(ebc.parameters(), eager.parameters(), strict=True):
        assert_close(param, expected)
        assert (param.grad is None) == (optimizer is not None)
        if optimizer is None:
            assert_close(gradient_of(param), gradient_of(expected))


def test_an_optimizer_applied_just_before_is_never_compiled_away() -> None:
    """Traced before the first lookup, tables were still unfused: a graph that trained them by dense gradients, or that
    lost the parameters' new memory. One graph is refused with a way out; in several it trains as eager does."""
    torch._dynamo.reset()
    ebc, eager = collection(RowWiseAdagrad), collection(RowWiseAdagrad)
    with pytest.raises(Exception, match="call fused_optimizer\\(\\) or look one batch up before torch.compile"):
        torch.compile(loss_of(ebc), backend="eager", fullgraph=True)(IDS, LENGTHS)
    torch._dynamo.reset()
    compiled = torch.compile(loss_of(ebc), backend="eager")
    for _ in range(2):
        compiled(IDS, LENGTHS).backward()
        loss_of(eager)(IDS, LENGTHS).backward()
    for name, table in tables_of(eager).items():
        assert_close(tables_of(ebc)[name], table)
    assert ebc._groups[0].optimizer is not None


def test_a_compiled_lookup_still_checks_its_ids() -> None:
    """aot_eager and inductor dropped the check, whose guard nobody read: a bad id counted as none without a word."""
    torch._dynamo.reset()
    ebc = collection(None)
    compiled = torch.compile(loss_of(ebc), backend="aot_eager", fullgraph=True)
    compiled(IDS, LENGTHS)
    with pytest.raises(IndexError, match=r"feature 'a' \(table 'a'\), sample 0: id 11 is outside \[0, 5\)"):
        compiled(IDS + 10, LENGTHS)


@dataclass(frozen=True)
class Rows:
    """Tables as (name, rows, features, dtype), all of `dim`; a batch over f, g, h."""

    tables: tuple[tuple[Any, ...], ...]
    dim: int = 4
    samples: int = 4
    longest: int = 4
    ids: torch.dtype = torch.int64
    order: tuple[str, ...] = ("f", "g", "h")

    def configs(self) -> list[EmbeddingConfig]:
        return [EmbeddingConfig(rows, self.dim, name, dtype, list(fs)) for name, rows, fs, dtype in self.tables]

    def bags(self) -> dict[str, list[list[int]]]:
        bags = draw({"f": 5, "g": 5, "h": 5}, self.samples, longest=self.longest)
        return {feature: bags[feature] for feature in self.order}


MIXED_ROWS = (("a", 9, ("f",), FP32), ("b", 5, ("g", "h"), FP16), ("c", 7, ("h",), FP32), ("d", 6, ("f",), BF16))
ROW_CASES = {
    "two tables": Rows((("a", 9, ("f",), FP32), ("b", 5, ("g",), FP32))),
    "one table, two features": Rows((("a", 9, ("f", "g"), FP32),)),
    "mixed dtypes and shared features": Rows(MIXED_ROWS),
    "other order in the batch": Rows(MIXED_ROWS, order=("h", "g", "f")),
    "int32 ids": Rows(MIXED_ROWS, ids=torch.int32),
    "dim 1": Rows((("a", 9, ("f",), FP32),), dim=1),
    "dim 3": Rows(MIXED_ROWS, dim=3),
    "no ids": Rows(MIXED_ROWS, longest=0),
    "batch 0": Rows(MIXED_ROWS, samples=0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ROW_CASES.values(), ids=ROW_CASES.keys())
def test_every_id_gives_its_row_and_takes_its_gradient(device: str, case: Rows) -> None:
    where, configs, bags = torch_device(device), case.configs(), case.bags()
    ec = EmbeddingCollection(configs, where, need_indices=True)
    out = ec(kjt(bags, dtype=case.ids, device=where))
    tables = {name: table.requires_grad_() for name, table in tables_of(ec).items()}
    names = iter(name for names in ec.embedding_names_by_table() for name in names)
    grads, rows = [], []
    for config in configs:
        for feature in config.feature_names:
            jagged = out[next(names)]
            ids = torch.tensor([i for bag in bags[feature] for i in bag], dtype=case.ids, device=where)
            assert torch.equal(jagged.weights(), ids)
            assert jagged.lengths().tolist() == [len(bag) for bag in bags[feature]]
            expected = tables[config.name][ids.long()].float()
            assert jagged.values().dtype == torch.float32
            assert torch.equal(jagged.values(), expected)
            grads.append(upstream(*expected.shape, seed=len(grads)).to(where))
            rows.append((jagged.values(), expected))
    torch.autograd.backward([actual for actual, _ in rows], grads)
    torch.autograd.backward([reference for _, reference in rows], grads)
    for config in configs:
        assert_close(gradient(ec, config.name), gradient_of(tables[config.name]))


def test_output_of_rows_follows_the_configs_and_renames_shared_features() -> None:
    ec = EmbeddingCollection(
        [
            EmbeddingConfig(5, 2, "t1", feature_names=["b", "a"]),
            EmbeddingConfig(5, 2, "t2", FP16, feature_names=["a"]),
            EmbeddingConfig(5, 2, "c"),
        ]
    )
    out = ec(kjt({"x": [[9]], "a": [[1]], "c": [[2]], "b": [[3]]}))
    assert list(out) == ["b", "a@t1", "a@t2", "c"]
    assert ec.embedding_names_by_table() == [["b", "a@t1"], ["a@t2"], ["c"]]
    tables = tables_of(ec)
    for name, (table, row) in {"b": ("t1", 3), "a@t1": ("t1", 1), "a@t2": ("t2", 1), "c": ("c", 2)}.items():
        assert torch.equal(out[name].values(), tables[table][row].float()[None]), name


def test_ids_are_given_only_where_they_are_asked_for() -> None:
    ec = EmbeddingCollection([EmbeddingConfig(5, 2, "a")])
    assert not ec.need_indices()
    batch = kjt({"a": [[1, 2]]}, weights=torch.tensor([5.0, 6.0]))
    assert ec(batch)["a"].weights_or_none() is None
    # per-id weights of the batch are ignored
    assert torch.equal(ec(batch)["a"].values(), tables_of(ec)["a"][[1, 2]])


def test_rows_of_a_feature_may_be_changed_in_place() -> None:
    """Rows were one of several views that a split made at once, which autograd lets nobody change."""
    ec = EmbeddingCollection([EmbeddingConfig(3, 2, "a", feature_names=["f", "g"])])
    out = ec(kjt({"f": [[0], [2]], "g": [[1], []]}))
    rows, expected = out["f"].values(), 2 * out["f"].values().detach()
    rows.mul_(2).sum().backward()
    assert torch.equal(rows.detach(), expected)
    table = ec.get_parameter("embeddings.a.weight")
    assert torch.equal(gradient_of(table), torch.tensor([[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]]))


def test_no_tables_give_an_empty_dict() -> None:
    ec = EmbeddingCollection([])
    assert ec(kjt({"f": [[1]]})) == {}
    assert ec.embedding_dim() == 0


def test_tables_of_several_dims_are_refused() -> None:
    with pytest.raises(ValueError, match=r"b's embedding_dim 3 != 2; all are \{'a': 2, 'b': 3\}"):
        EmbeddingCollection([EmbeddingConfig(5, 2, "a"), EmbeddingConfig(5, 3, "b")])


def test_tables_without_a_device_are_where_torch_makes_tensors() -> None:
    """`with torch.device("meta")` allocated every table on the CPU, though nothing named that."""
    with torch.device("meta"):
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(10**9, 64, "user", feature_names=["u"])])
    assert ebc.device.type == "meta" and {parameter.device.type for parameter in ebc.parameters()} == {"meta"}
