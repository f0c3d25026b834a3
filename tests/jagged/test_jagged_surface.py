"""What programs of TorchRec do with batches beside looking them up: print, check, flatten, move, free them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from shardwise import EmbeddingBagConfig, KeyedJaggedTensor, Multistreamable, Pipelineable
from shardwise.jagged import (
    JaggedTensor,
    KeyedTensor,
    flatten_kjt_list,
    kjt_is_equal,
    maybe_td_to_kjt,
    unflatten_kjt_list,
    validate_keyed_jagged_tensor,
)


def batch(*, weighted: bool = False) -> KeyedJaggedTensor:
    weights = torch.tensor([0.5, 1.0, 1.5, 2.0]) if weighted else None
    return KeyedJaggedTensor(
        ["product", "user"], torch.tensor([101, 202, 303, 404]), weights, lengths=torch.tensor([2, 0, 1, 0, 1, 0])
    )


def test_text_of_a_batch_is_torchrecs() -> None:
    assert str(batch()) == (
        'KeyedJaggedTensor({\n    "product": [[101, 202], [], [303]],\n    "user": [[], [404], []]\n})\n'
    )
    assert str(batch(weighted=True)) == (
        'KeyedJaggedTensor({\n    "product": {\n        "values": [[101, 202], [], [303]],\n'
        '        "weights": [[0.5, 1.0], [], [1.5]]\n    },\n'
        '    "user": {\n        "values": [[], [404], []],\n        "weights": [[], [2.0], []]\n    }\n})\n'
    )


def test_jagged_and_keyed_tensors_are_pytrees() -> None:
    """All of a batch goes through torch's trees, as compiled and exported programs take it."""
    pooled = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    bags = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
    tree = {"batch": batch(weighted=True), "rows": [pooled, bags]}
    leaves, spec = pytree.tree_flatten(tree)
    assert all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in leaves)
    again: Any = pytree.tree_unflatten(leaves, spec)
    assert kjt_is_equal(again["batch"], tree["batch"])
    assert again["rows"][0].keys() == ["a", "b"] and torch.equal(again["rows"][0]["b"], pooled["b"])
    assert again["rows"][1].to_dense()[1].tolist() == [1, 2]
    doubled: Any = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf * 2, {"rows": pooled})
    assert torch.equal(doubled["rows"]["b"], 2 * pooled["b"])


def test_lists_of_batches_become_lists_of_tensors_and_back() -> None:
    batches = [batch(weighted=True), batch().permute([1])]
    tensors, contexts = flatten_kjt_list(batches)
    assert all(tensor is None or isinstance(tensor, torch.Tensor) for tensor in tensors)
    for again, original in zip(unflatten_kjt_list(tensors, contexts), batches, strict=True):
        assert kjt_is_equal(again, original) and again.keys() == original.keys()
    with pytest.raises(ValueError, match="2 batches have"):
        unflatten_kjt_list(tensors[:-1], contexts)


def test_a_batch_is_validated_against_the_tables_it_is_for() -> None:
    assert validate_keyed_jagged_tensor(batch(weighted=True))
    tables = [EmbeddingBagConfig(304, 4, "product", feature_names=["product"]), EmbeddingBagConfig(404, 4, "user")]
    with pytest.warns(UserWarning, match="feature 'user': ids from 404 to 404, table 'user' has 404 rows"):
        assert not validate_keyed_jagged_tensor(batch(), tables)
    tables[1].num_embeddings = 405
    assert validate_keyed_jagged_tensor(batch(), tables)
    with pytest.raises(ValueError, match="3"):
        validate_keyed_jagged_tensor(KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1, 1])))


def test_a_tensordict_of_nested_tensors_is_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """tensordict is no dependency of ours: a class of its name stands for it."""

    class TensorDictBase(dict[str, torch.Tensor]):
        """What of a TensorDict is read: `keys()` and entries."""

    module = ModuleType("tensordict")
    module.TensorDictBase = TensorDictBase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensordict", module)
    bags = {"product": [[101, 202], [], [303]], "user": [[], [404], []]}
    entries = TensorDictBase(
        {
            key: torch.nested.nested_tensor([torch.tensor(bag, dtype=torch.int64) for bag in rows], layout=torch.jagged)
            for key, rows in bags.items()
        }
    )
    assert kjt_is_equal(maybe_td_to_kjt(entries), batch())
    assert kjt_is_equal(maybe_td_to_kjt(entries, ["user"]), batch().permute([1]))
    assert maybe_td_to_kjt(kjt := batch()) is kjt and maybe_td_to_kjt(7) == 7


def test_batches_of_ones_own_are_moved_by_pipelines() -> None:
    """What `Pipelineable` asks for is all that a pipeline needs of a batch."""
    moved: list[torch.device] = []

    class Own(Pipelineable):
        def to(self, device: torch.device, non_blocking: bool = False) -> Own:
            moved.append(device)
            return self

        def record_stream(self, stream: Any) -> None:
            raise AssertionError("there are no streams on a CPU")

    from shardwise import TrainPipelineBase

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, given: Own) -> tuple[torch.Tensor, int]:
            return self.weight.sum(), id(given)

    model = Model()
    own = [Own(), Own()]
    pipeline: Any = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), 0.5), torch.device("cpu"))
    stream = iter(own)
    assert [pipeline.progress(stream), pipeline.progress(stream)] == [id(one) for one in own]
    assert moved == [torch.device("cpu")] * 2 and model.weight.item() == 0.0
    assert isinstance(batch(), Pipelineable) and isinstance(batch()["user"], Multistreamable)


def test_clear_storage_frees_what_the_batch_held() -> None:
    kjt = batch(weighted=True)
    part = kjt["user"].values()
    held = [kjt.values(), kjt.weights(), kjt.lengths(), kjt.offsets()]
    freed = kjt.clear_storage()
    assert freed == sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert [tensor.untyped_storage().nbytes() for tensor in (*held, part)] == [0] * 5
