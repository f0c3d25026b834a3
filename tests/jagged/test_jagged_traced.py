"""The jagged types in what records programs: torch.compile, torch.export and torch.fx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx
from torch import Tensor

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, KTRegroupAsDict

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
LISTS = {"a": [[1, 2], [], [3]], "b": [[4], [5, 6], []]}
OTHERS = {"a": [[7], [1, 2], [3], []], "b": [[4], [], [2, 2], [1]]}


def batch(lists: dict[str, list[list[int]]] = LISTS) -> KeyedJaggedTensor:
    """Of which nothing is known on the host."""
    kjt = KeyedJaggedTensor.from_lists(lists)
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=kjt.lengths())


class Model(torch.nn.Module):
    """Tables and a layer, as one that is served."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["a", "b"])]
        self.tables = EmbeddingBagCollection(tables=tables)
        self.group = KTRegroupAsDict([["b", "a"], ["a"]], ["both", "one"])
        self.over = torch.nn.Linear(8, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        groups = self.group([self.tables(kjt)])
        return self.over(groups["both"]) + groups["one"].sum(1, keepdim=True)


class Pieces(torch.nn.Module):
    """Most of what is done with a batch on its way to a lookup."""

    def forward(self, kjt: KeyedJaggedTensor) -> tuple[Tensor, ...]:
        turned = kjt.permute([1, 0])
        b, a = turned.split([1, 1])
        again = KeyedJaggedTensor.concat([a, b])
        parts = again.to_dict()
        made = KeyedJaggedTensor(["x"], kjt.values(), lengths=kjt.lengths())
        jt = JaggedTensor(parts["a"].values(), lengths=parts["a"].lengths())
        return turned.values(), again.values(), parts["b"].lengths(), kjt["b"].values(), made.offsets(), jt.offsets()


@pytest.fixture(autouse=True)
def _read_in_graph() -> Iterator[None]:
    """Sizes of pieces are numbers in tensors: a graph has to read them."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield
    torch._dynamo.reset()


def assert_same(actual: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    assert len(actual) == len(wanted)
    for actual_part, wanted_part in zip(actual, wanted, strict=True):
        assert torch.equal(actual_part, wanted_part)


def test_pieces_compile_into_one_graph() -> None:
    compiled: Any = torch.compile(Pieces(), fullgraph=True, backend="eager")
    for lists in (LISTS, OTHERS):
        assert_same(compiled(batch(lists)), Pieces()(batch(lists)))


def exported(model: torch.nn.Module, strict: bool) -> torch.nn.Module:
    """The model for any number of ids and samples."""
    auto = {0: torch.export.Dim.AUTO}
    program = torch.export.export(model, (batch(),), strict=strict, dynamic_shapes=([auto, None, auto, None, None],))
    return program.module()


@pytest.mark.parametrize("strict", [False, True])
def test_pieces_are_exported(strict: bool) -> None:
    program = torch.export.export(Pieces(), (batch(),), strict=strict).module()
    assert_same(program(batch()), Pieces()(batch()))


@pytest.mark.parametrize(
    "strict",
    [
        False,
        # torch 2.9 writes guards on sizes of strictly exported programs that it cannot read itself (NameError: 'L')
        pytest.param(True, marks=pytest.mark.skipif(TORCH < (2, 10), reason="torch 2.9 cannot run it")),
    ],
)
def test_a_model_is_exported_and_takes_batches_of_any_size(strict: bool) -> None:
    model = Model()
    program = exported(model, strict)
    for lists in (LISTS, OTHERS):
        assert torch.allclose(program(batch(lists)), model(batch(lists)))


def test_an_exported_model_refuses_what_the_model_refuses() -> None:
    program = exported(Model(), strict=False)
    with pytest.raises(IndexError, match="feature 'b'.*sample 1.*99"):
        program(batch({"a": [[1], [2]], "b": [[3], [99]]}))


def test_fx_records_constructions_and_calls() -> None:
    """A type built from proxies while tracing is a call in the graph, as TorchRec's is."""
    traced = torch.fx.symbolic_trace(Pieces())
    assert_same(traced(batch()), Pieces()(batch()))
    built = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert {KeyedJaggedTensor, JaggedTensor} <= built


def test_fx_records_static_methods_and_dense_types() -> None:
    class Dense(torch.nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            both = [KeyedTensor(["a"], [2], x), KeyedTensor(["b"], [1], y)]
            return KeyedTensor.regroup(both, [["b", "a"]])[0]

    traced = torch.fx.symbolic_trace(Dense())
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    assert torch.equal(traced(x, y), torch.cat([y, x], 1))
