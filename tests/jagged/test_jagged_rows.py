"""Values that are dense rows [L, D] travel as ids do, with weights [L] or [L, W]; beside plain lists of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from shardwise.jagged import ComputeJTDictToKJT, ComputeKJTToJTDict, JaggedTensor, KeyedJaggedTensor, kjt_is_equal

VALUES = torch.arange(12.0).view(6, 2)
LENGTHS = torch.tensor([2, 0, 1, 3])
# of the bags of LENGTHS
A, B = ([VALUES[:2], VALUES[2:2]], [VALUES[2:3], VALUES[3:]])
WEIGHTS = {"none": None, "numbers": torch.arange(6.0) / 8, "rows": torch.arange(18.0).view(6, 3) / 8}
EVERY_WEIGHT = pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())


def rows(weights: Tensor | None = None, values: Tensor = VALUES) -> KeyedJaggedTensor:
    """Keys a and b, two samples each."""
    return KeyedJaggedTensor(["a", "b"], values, weights, LENGTHS)


def variable(weights: Tensor | None = None) -> KeyedJaggedTensor:
    """Batches of 1 and 3."""
    return KeyedJaggedTensor(["a", "b"], VALUES, weights, LENGTHS, stride_per_key_per_rank=[[1], [3]])


def bags(kjt: KeyedJaggedTensor, key: str) -> list[Tensor]:
    return kjt[key].to_dense()


def assert_bags(actual: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(actual) == len(wanted)
    for one, other in zip(actual, wanted, strict=True):
        assert torch.equal(one, other)


def assert_weights_follow(kjt: KeyedJaggedTensor, weights: Tensor | None) -> None:
    """The weight of the row that begins with x is that of position x / 2."""
    if weights is None:
        assert kjt.weights_or_none() is None
    else:
        assert torch.equal(kjt.weights(), weights[(kjt.values()[:, 0] / 2).long()])


MOVES: dict[str, Callable[[KeyedJaggedTensor], KeyedJaggedTensor]] = {
    "permute": lambda kjt: kjt.permute([1, 0]),
    "permute, twice": lambda kjt: kjt.permute([1, 0]).permute([1, 0]),
    "split and concat": lambda kjt: KeyedJaggedTensor.concat(kjt.split([1, 1])[::-1]),
    "to_dict and back": lambda kjt: KeyedJaggedTensor.from_jt_dict(kjt.to_dict()),
    "modules": lambda kjt: ComputeJTDictToKJT()(ComputeKJTToJTDict()(kjt)),
    "pytree": lambda kjt: pytree.tree_unflatten(*pytree.tree_flatten(kjt)),
    "to": lambda kjt: kjt.to("cpu"),
    "copy_": lambda kjt: KeyedJaggedTensor.empty_like(kjt, "cpu").copy_(kjt),
}


@EVERY_WEIGHT
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("make", [rows, variable])
def test_rows_stay_in_their_bags(make: Any, move: Callable[..., KeyedJaggedTensor], weights: Tensor | None) -> None:
    before = make(weights)
    moved = move(before)
    for key in ("a", "b"):
        assert_bags(bags(moved, key), bags(before, key))
    assert_weights_follow(moved, weights)


@EVERY_WEIGHT
def test_a_batch_of_rows_says_what_one_of_ids_says(weights: Tensor | None) -> None:
    kjt = rows(weights)
    assert_bags(bags(kjt, "a"), A)
    assert_bags(bags(kjt, "b"), B)
    assert kjt.length_per_key() == [2, 4]
    assert kjt.offset_per_key() == [0, 2, 6]
    assert kjt.offsets().tolist() == [0, 2, 2, 3, 6]
    assert kjt.stride() == 2
    first, second = kjt.split([1, 1])
    assert torch.equal(first.values(), VALUES[:2])
    assert torch.equal(second.values(), VALUES[2:])
    assert kjt_is_equal(kjt, KeyedJaggedTensor.from_offsets_sync(["a", "b"], VALUES, kjt.offsets(), weights))
    assert "[6, 2] float32" in repr(kjt)
    nothing = KeyedJaggedTensor.empty_like(kjt)
    assert nothing.values().shape[0] == 0
    assert nothing.stride() == 2


def test_a_key_comes_twice_with_its_rows_and_their_gradients() -> None:
    values = VALUES.clone().requires_grad_()
    twice = rows(values=values).permute([1, 0, 1])
    assert torch.equal(twice.values(), VALUES[[2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])
    (twice.values() * torch.arange(20.0).view(10, 2)).sum().backward()  # type: ignore[no-untyped-call]
    weights = torch.arange(20.0).view(10, 2)
    wanted = torch.cat([weights[4:6], weights[:4] + weights[6:]])
    assert values.grad is not None
    assert torch.equal(values.grad, wanted)


def test_text_shows_rows_as_torchrec_does() -> None:
    wanted = (
        'KeyedJaggedTensor({\n    "a": [[[0.0, 1.0], [2.0, 3.0]], []],\n'
        '    "b": [[[4.0, 5.0]], [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]]\n})\n'
    )
    assert str(rows()) == wanted


@EVERY_WEIGHT
def test_rows_of_several_ranks_are_put_together(weights: Tensor | None) -> None:
    tensors = rows(weights).dist_tensors()
    turned = KeyedJaggedTensor.dist_init(["b", "a"], tensors, False, 1, torch.tensor([1, 0]), [2])
    assert_bags(bags(turned, "a"), A)
    assert_bags(bags(turned, "b"), B)
    assert_weights_follow(turned, weights)
    # one key of two ranks, with batches of 1 and 3
    uneven = KeyedJaggedTensor.dist_init(["a"], tensors, False, 2, torch.tensor([1, 2, 3, 0]), [1, 3])
    assert_bags(bags(uneven, "a"), [*A[1:], *B, A[0]])
    assert_weights_follow(uneven, weights)


def test_bags_of_rows_become_dense_and_come_from_dense() -> None:
    jt = JaggedTensor(VALUES, WEIGHTS["rows"], torch.tensor([2, 0, 4]))
    assert_bags(jt.to_dense(), [VALUES[:2], VALUES[:0], VALUES[2:]])
    padded = jt.to_padded_dense(3, 7.0)
    assert torch.equal(padded[0], torch.cat([VALUES[:2], torch.full((1, 2), 7.0)]))
    assert torch.equal(padded[2], VALUES[2:5])
    of_weights = jt.to_padded_dense_weights(3)
    assert of_weights is not None
    assert of_weights.shape == (3, 3, 3)
    again = JaggedTensor.from_dense(jt.to_dense(), jt.to_dense_weights())
    assert torch.equal(again.values(), VALUES)
    assert torch.equal(again.weights(), jt.weights())
    cut = JaggedTensor.from_dense_lengths(padded, torch.tensor([2, 0, 3]), of_weights)
    assert torch.equal(cut.values(), VALUES[:5])
    assert torch.equal(cut.weights(), jt.weights()[:5])


class Moves(torch.nn.Module):
    """Most of what is done with a batch of rows."""

    def forward(self, kjt: KeyedJaggedTensor) -> tuple[Tensor, ...]:
        turned = kjt.permute([1, 0])
        b, a = turned.split([1, 1])
        again = KeyedJaggedTensor.concat([a, b])
        return turned.values(), again.values(), again.weights(), kjt["b"].values(), again.to_dict()["b"].offsets()


@pytest.fixture
def _sizes_in_the_graph() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_sizes_in_the_graph")
@pytest.mark.parametrize("how", ["compile", "export", "fx"])
def test_programs_of_rows_are_recorded(how: str) -> None:
    model, batch = Moves(), rows(WEIGHTS["rows"])
    if how == "compile":
        recorded: Any = torch.compile(model, fullgraph=True, backend="eager")
    elif how == "export":
        recorded = torch.export.export(model, (batch,), strict=False).module()
    else:
        recorded = torch.fx.symbolic_trace(model)
    assert_bags(list(recorded(rows(WEIGHTS["rows"]))), list(model(batch)))


def test_a_lookup_takes_ids_alone() -> None:
    bag = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["a", "b"])], is_weighted=True)
    sequence = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["a", "b"])])
    for module in (bag, sequence):
        with pytest.raises(ValueError, match=r"looks ids up, \[N\]: got values of shape \[6, 2\] for \['a', 'b'\]"):
            module(rows(torch.ones(6), VALUES.long()))
    with pytest.raises(ValueError, match=r"a weight for each id, got weights of shape \[6, 3\]"):
        bag(KeyedJaggedTensor(["a", "b"], torch.arange(6), WEIGHTS["rows"], LENGTHS))
