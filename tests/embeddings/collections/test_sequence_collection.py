"""`EmbeddingCollection` against indexing, one table and one feature at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from jagged_batches import draw, gradient, gradient_of, kjt, tables_of, upstream
from kernel_inputs import DEVICES, assert_close, torch_device

from shardwise import DataType, EmbeddingCollection, EmbeddingConfig

FP32, FP16, BF16 = DataType.FP32, DataType.FP16, DataType.BF16


@dataclass(frozen=True)
class Case:
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


MIXED = (("a", 9, ("f",), FP32), ("b", 5, ("g", "h"), FP16), ("c", 7, ("h",), FP32), ("d", 6, ("f",), BF16))
CASES = {
    "two tables": Case((("a", 9, ("f",), FP32), ("b", 5, ("g",), FP32))),
    "one table, two features": Case((("a", 9, ("f", "g"), FP32),)),
    "mixed dtypes and shared features": Case(MIXED),
    "other order in the batch": Case(MIXED, order=("h", "g", "f")),
    "int32 ids": Case(MIXED, ids=torch.int32),
    "dim 1": Case((("a", 9, ("f",), FP32),), dim=1),
    "dim 3": Case(MIXED, dim=3),
    "no ids": Case(MIXED, longest=0),
    "batch 0": Case(MIXED, samples=0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_id_gives_its_row_and_takes_its_gradient(device: str, case: Case) -> None:
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
    torch.autograd.backward([mine for mine, _ in rows], grads)
    torch.autograd.backward([theirs for _, theirs in rows], grads)
    for config in configs:
        assert_close(gradient(ec, config.name), gradient_of(tables[config.name]))


def test_output_follows_the_configs_and_renames_shared_features() -> None:
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
    with pytest.raises(ValueError, match=r"one embedding_dim, got \{'a': 2, 'b': 3\}"):
        EmbeddingCollection([EmbeddingConfig(5, 2, "a"), EmbeddingConfig(5, 3, "b")])
