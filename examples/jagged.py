"""Jagged batches by hand: made of lists, checked, taken apart, put together, and moved as a pipeline moves them.

docs/concepts/jagged.md explains the types. python examples/jagged.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    KTRegroupAsDict,
    Multistreamable,
    Pipelineable,
    flatten_kjt_list,
    jt_is_equal,
    kjt_is_equal,
    maybe_td_to_kjt,
    permute_multi_embedding,
    regroup_kts,
    unflatten_kjt_list,
    validate_keyed_jagged_tensor,
)

TABLES = [
    EmbeddingBagConfig(num_embeddings=100, embedding_dim=4, name="item", feature_names=["clicked"]),
    EmbeddingBagConfig(num_embeddings=10, embedding_dim=2, name="tag", feature_names=["tag"]),
]


@dataclass
class Batch(Pipelineable):
    """What a data loader hands out: a pipeline copies it to the device while the step before is still running."""

    lists: KeyedJaggedTensor
    dense: KeyedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.lists.to(device, non_blocking),
            self.dense.to(device, non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.lists.record_stream(stream)
        self.dense.record_stream(stream)
        self.labels.record_stream(stream)


@dataclass
class Towers(Multistreamable):
    """What one stage leaves for the next: made on the device, so never copied, but read on another stream."""

    inputs: dict[str, Tensor]

    def record_stream(self, stream: torch.Stream) -> None:
        for tensor in self.inputs.values():
            tensor.record_stream(stream)


def load() -> Batch:
    """Three samples: lists of ids by feature, and two numbers each."""
    lists = KeyedJaggedTensor.from_lists({"clicked": [[11, 12], [], [13]], "tag": [[5], [6, 7, 8], [6]]})
    numbers = [torch.tensor([[31.0], [24.0], [57.0]]), torch.tensor([[9.0], [23.0], [14.0]])]
    return Batch(lists, KeyedTensor.from_tensor_list(["age", "hour"], numbers), torch.tensor([1.0, 0.0, 1.0]))


def without_repeats(lists: KeyedJaggedTensor, key: str) -> KeyedJaggedTensor:
    """The same with each bag of one key sorted and free of repeats."""
    jts: dict[str, JaggedTensor] = ComputeKJTToJTDict()(lists)
    jts[key] = JaggedTensor.from_dense([torch.unique(bag) for bag in jts[key].to_dense()])
    joined: KeyedJaggedTensor = ComputeJTDictToKJT()(jts)
    return joined


def main() -> None:
    batch = load()
    print(batch.lists)
    print("fits its tables:", validate_keyed_jagged_tensor(batch.lists, TABLES))

    # A pipeline moves the batch ahead of its step, if there is a device to move it to.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = batch.to(device, non_blocking=True)
    if device.type == "cuda":
        batch.record_stream(torch.cuda.current_stream())

    # Features by themselves, one of them changed, and all of them joined again. Here nothing was to be done.
    unique = without_repeats(batch.lists, "tag")
    print("same lists:", kjt_is_equal(unique, batch.lists), jt_is_equal(unique["tag"], batch.lists["tag"]))

    # Cut by feature, as for tables that live on two devices. The tensors of both pieces travel as one list.
    tensors, contexts = flatten_kjt_list(batch.lists.split([1, 1]))
    arrived = unflatten_kjt_list([None if tensor is None else tensor.clone() for tensor in tensors], contexts)
    print("arrived:", [piece.keys() for piece in arrived])
    print("same batch:", kjt_is_equal(KeyedJaggedTensor.concat(arrived), batch.lists))

    # Pooled rows beside the dense numbers, grouped as two towers want them. A TensorDict would do as input, too.
    pooled: KeyedTensor = EmbeddingBagCollection(TABLES, device=device)(maybe_td_to_kjt(batch.lists))
    groups = [["clicked", "age"], ["tag", "hour", "age"]]
    towers = Towers(KTRegroupAsDict(groups, ["item tower", "query tower"])([pooled, batch.dense]))
    print("towers:", {name: tuple(rows.shape) for name, rows in towers.inputs.items()})

    # The same as functions, under the names that TorchRec has for them.
    grouped = regroup_kts([pooled, batch.dense], groups)
    permuted = permute_multi_embedding([pooled, batch.dense], groups)
    print("same columns:", all(map(torch.equal, grouped, permuted)))


if __name__ == "__main__":
    main()
