"""Batches and collections on meta: the shapes and dtypes of what they would give, and no data."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged_batches import kjt
from model_zoo import BAGS, MAKERS, bags
from torch import Tensor

from shardwise import (
    DLRM,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)
from shardwise.inference import quantize_inference_model

META = torch.device("meta")


def empty(keys: list[str], bags_of_all: int, ids: int, **more: Any) -> KeyedJaggedTensor:
    values = torch.empty(ids, dtype=torch.int64, device=META)
    return KeyedJaggedTensor(keys, values, lengths=torch.empty(bags_of_all, dtype=torch.int64, device=META), **more)


def tensors_of(output: Any) -> list[Tensor]:
    if isinstance(output, tuple):
        return [tensor for part in output if part is not None for tensor in tensors_of(part)]
    if isinstance(output, dict):
        return [tensor for jt in output.values() for tensor in (jt.values(), jt.lengths())]
    if isinstance(output, KeyedTensor):
        return [output.values()]
    return [output] if isinstance(output, Tensor) else [output.values(), output.lengths()]


MODULES: dict[str, Callable[[str], Any]] = {
    **MAKERS,
    "quantized bags": lambda device: quantize_inference_model(bags()).to(device),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_collection_on_meta_gives_shapes_and_dtypes(name: str) -> None:
    """Ids were checked, which reads them."""
    batch = kjt(BAGS)
    # known before it loses its numbers
    batch.sync()
    there, here = tensors_of(MODULES[name]("meta")(batch.to(META))), tensors_of(MODULES[name]("cpu")(batch))
    assert all(tensor.is_meta for tensor in there)
    assert [(t.shape, t.dtype, t.requires_grad) for t in there] == [(t.shape, t.dtype, t.requires_grad) for t in here]


@pytest.mark.parametrize("name", [name for name in MODULES if "maps" not in name])
def test_a_step_on_meta_has_its_gradients_shapes(name: str) -> None:
    module = MODULES[name]("meta")
    output = sum(tensor.sum() for tensor in tensors_of(module(empty(["f", "g"], 6, 7))) if tensor.requires_grad)
    if isinstance(output, Tensor):
        output.backward()
    trained = [param for param in module.parameters() if param.grad is not None]
    assert all(param.grad.is_meta and param.grad.shape == param.shape for param in trained)  # type: ignore[union-attr]
    assert bool(trained) == (name not in ("fused bags", "fused rows", "quantized bags"))


def test_a_model_on_meta_gives_its_shapes() -> None:
    tables = [EmbeddingBagConfig(10, 8, name, feature_names=[name]) for name in "fg"]
    model = DLRM(EmbeddingBagCollection(tables, device=META), 5, [16, 8], [16, 1], META)
    assert model(torch.empty(4, 5, device=META), empty(["f", "g"], 8, 9)).shape == (4, 1)


def test_a_batch_with_batch_sizes_of_its_keys_becomes_the_full_batch_on_meta() -> None:
    inverse = torch.empty(2, 5, dtype=torch.int64, device=META)
    batch = empty(["f", "g"], 5, 9, stride_per_key_per_rank=[[3], [2]], inverse_indices=(["f", "g"], inverse))
    assert bags("meta")(batch).values().shape == (5, 11)


KJT_CALLS: dict[str, tuple[Callable[[KeyedJaggedTensor], Any], Any]] = {
    "stride": (lambda k: k.stride(), 3),
    "length_per_key": (lambda k: k.length_per_key(), [4, 3]),
    "offset_per_key": (lambda k: k.offset_per_key(), [0, 4, 7]),
    "offsets": (lambda k: k.offsets().shape, (7,)),
    "permute": (lambda k: k.permute([1, 0, 0]).values().shape, (11,)),
    "split": (lambda k: [part.values().shape for part in k.split([1, 1])], [(4,), (3,)]),
    "a key": (lambda k: k["g"].values().shape, (3,)),
    "to_dict": (lambda k: {key: jt.lengths().shape for key, jt in k.to_dict().items()}, {"f": (3,), "g": (3,)}),
    "concat": (lambda k: KeyedJaggedTensor.concat([k.permute([0]), k.permute([1])]).length_per_key(), [4, 3]),
    "sync": (lambda k: k.sync().keys(), ["f", "g"]),
    "deep copy": (lambda k: copy.deepcopy(k).values().shape, (7,)),
    "pickle": (lambda k: pickle.loads(pickle.dumps(k)).values().device, META),
    "from_jt_dict": (lambda k: KeyedJaggedTensor.from_jt_dict(k.to_dict()).keys(), ["f", "g"]),
    "repr": (lambda k: "meta" in repr(k) or "f" in repr(k), True),
    "empty": (lambda k: KeyedJaggedTensor.empty(device=META).keys(), []),
    "empty_like": (lambda k: KeyedJaggedTensor.empty_like(k).values().shape, (0,)),
    "padded": (lambda k: k["f"].to_padded_dense(2).shape, (3, 2)),
}


@pytest.mark.parametrize("call", KJT_CALLS)
def test_a_batch_of_meta_tensors_is_read_by_its_shapes(call: str) -> None:
    """Every key has as many values, and the first one what is left over: TorchRec's rule."""
    read, wanted = KJT_CALLS[call]
    assert read(empty(["f", "g"], 6, 7)) == wanted
