"""Batches without keys, without bags and without values in every spelling; keys that are ints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, tensor
from torch.utils import _pytree as pytree

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, kjt_is_equal

KJT = KeyedJaggedTensor
# as users write "nothing": it is float
NOTHING, NO_IDS = tensor([]), torch.empty(0, dtype=torch.int64)
IDS, LENGTHS = torch.arange(6), tensor([2, 0, 1, 3])

NO_KEYS: dict[str, Callable[[], KeyedJaggedTensor]] = {
    "empty": KJT.empty,
    "empty, weighted": lambda: KJT.empty(is_weighted=True),
    "empty, of dtypes": lambda: KJT.empty(True, "cpu", torch.int32, torch.float64, torch.int64),
    "empty_like": lambda: KJT.empty_like(KJT.empty()),
    "lengths": lambda: KJT.from_lengths_sync([], NOTHING, NOTHING),
    "lengths, int": lambda: KJT.from_lengths_sync([], NO_IDS, NO_IDS),
    "lengths, weights": lambda: KJT.from_lengths_sync([], NOTHING, NOTHING, NOTHING),
    "lengths, stride 0": lambda: KJT.from_lengths_sync([], NOTHING, NOTHING, stride=0),
    "offsets": lambda: KJT.from_offsets_sync([], NOTHING, NOTHING),
    "offsets of 0": lambda: KJT.from_offsets_sync([], NOTHING, tensor([0])),
    "neither": lambda: KJT([], NOTHING),
    "neither, stride 0": lambda: KJT([], NO_IDS, stride=0),
    "batch sizes of no keys": lambda: KJT([], NOTHING, lengths=NOTHING, stride_per_key_per_rank=[]),
    "batch sizes in a tensor": lambda: KJT([], NO_IDS, lengths=NO_IDS, stride_per_key_per_rank=torch.empty(0, 2)),
    "from_jt_dict": lambda: KJT.from_jt_dict({}),
    "dist_init": lambda: KJT.dist_init([], [NO_IDS, NO_IDS], False, 2, torch.empty(0, dtype=torch.int32), [1, 1]),
    "dist_init, no recat": lambda: KJT.dist_init([], [NO_IDS, NO_IDS], False, 2, None, [1, 1]),
    "permute": lambda: batch().permute([]),
    "split": lambda: batch().split([0, 2])[0],
}
NO_IDS_OF_KEYS: dict[str, Callable[[], KeyedJaggedTensor]] = {
    "no samples": lambda: KJT.from_lengths_sync(["a", "b"], NOTHING, NOTHING),
    "no samples, int": lambda: KJT.from_lengths_sync(["a", "b"], NO_IDS, NO_IDS),
    "no offsets": lambda: KJT.from_offsets_sync(["a", "b"], NOTHING, NOTHING),
    "offsets of 0": lambda: KJT.from_offsets_sync(["a", "b"], NO_IDS, tensor([0])),
    "stride 0": lambda: KJT(["a", "b"], NOTHING, lengths=NOTHING, stride=0),
    "empty bags": lambda: KJT.from_lengths_sync(["a", "b"], NOTHING, torch.zeros(4, dtype=torch.int32)),
    "empty bags, int": lambda: KJT.from_lengths_sync(["a", "b"], NO_IDS, torch.zeros(4, dtype=torch.int64)),
    "batches of 0": lambda: KJT(["a", "b"], NO_IDS, lengths=NO_IDS, stride_per_key_per_rank=[[0], [0]]),
    "jagged tensors": lambda: KJT.from_jt_dict({"a": JaggedTensor.empty(), "b": JaggedTensor.empty()}),
    "dist_init": lambda: KJT.dist_init(
        ["a", "b"], [NO_IDS, NO_IDS], False, 2, torch.arange(4, dtype=torch.int32), [0, 0]
    ),
    "dist_init of batch sizes": lambda: KJT.dist_init(
        ["a", "b"], [NO_IDS, NO_IDS, tensor([0, 0, 0, 0])], True, 2, torch.arange(4, dtype=torch.int32), None
    ),
}


def batch() -> KeyedJaggedTensor:
    return KJT(["a", "b"], IDS, lengths=LENGTHS)


@pytest.mark.parametrize("make", NO_KEYS.values(), ids=NO_KEYS.keys())
def test_a_batch_without_keys_answers_everything(make: Callable[[], KeyedJaggedTensor]) -> None:
    kjt = make()
    assert kjt.keys() == []
    assert kjt.values().numel() == kjt.lengths().numel() == 0
    assert kjt.offsets().tolist() == [0]
    assert kjt.length_per_key() == []
    assert kjt.offset_per_key() == [0]
    assert kjt.to_dict() == {}
    assert [piece.keys() for piece in kjt.split([0, 0])] == [[], []]
    assert kjt.permute([]).keys() == []
    assert kjt_is_equal(KJT.concat([kjt, kjt]), kjt)
    assert kjt_is_equal(kjt.to("cpu"), kjt)
    assert kjt_is_equal(pytree.tree_unflatten(*pytree.tree_flatten(kjt)), kjt)
    assert str(kjt) == "KeyedJaggedTensor()\n"
    assert [tensor.numel() for tensor in kjt.dist_tensors()] == [0] * len(kjt.dist_labels())
    assert KJT.concat([kjt, batch()]).keys() == ["a", "b"]


@pytest.mark.parametrize("make", NO_IDS_OF_KEYS.values(), ids=NO_IDS_OF_KEYS.keys())
def test_keys_without_values_are_looked_up_as_nothing(make: Callable[[], KeyedJaggedTensor]) -> None:
    kjt = make()
    assert kjt.length_per_key() == [0, 0]
    for key, jt in kjt.to_dict().items():
        assert (
            [bag.numel() for bag in jt.to_dense()] == [bag.numel() for bag in kjt[key].to_dense()] == [0] * kjt.stride()
        )
    assert kjt.permute([1, 0]).keys() == ["b", "a"]
    assert [piece.keys() for piece in kjt.split([1, 1])] == [["a"], ["b"]]
    bag = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["a", "b"])])
    assert torch.equal(bag(kjt).values(), torch.zeros(kjt.stride(), 8))
    rows = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["a", "b"])])(kjt)
    assert {key: list(jt.values().shape) for key, jt in rows.items()} == {"a": [0, 4], "b": [0, 4]}


def test_values_that_are_no_ids_are_refused_by_lookups_unless_there_are_none() -> None:
    bag = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["a", "b"])], is_weighted=True)
    with pytest.raises(TypeError, match="feature ids must be int32 or int64, got float32"):
        bag(KJT(["a", "b"], IDS.float(), torch.ones(6), LENGTHS))
    assert (
        bag(KJT(["a", "b"], NOTHING, NOTHING, torch.zeros(4, dtype=torch.int64))).values().tolist() == [[0.0] * 8] * 2
    )


def test_keys_may_be_ints() -> None:
    kjt: Any = KJT([3, 7], IDS, lengths=LENGTHS)
    assert kjt.keys() == [3, 7]
    assert torch.equal(kjt[7].values(), IDS[2:])
    assert list(kjt.to_dict()) == [3, 7]
    assert kjt.index_per_key() == {3: 0, 7: 1}
    assert kjt.permute([1, 0]).keys() == [7, 3]
    assert [piece.keys() for piece in kjt.split([1, 1])] == [[3], [7]]
    other: Any = KJT(["c"], IDS, lengths=tensor([3, 3]))
    assert KJT.concat([kjt, other]).keys()[:2] == [*kjt.keys()]
    assert kjt_is_equal(KJT.from_jt_dict(kjt.to_dict()), kjt)
    assert list(map(int, KJT(range(2), IDS, lengths=LENGTHS).keys())) == [0, 1]
    assert KJT(dict.fromkeys(["a", "b"]).keys(), IDS, lengths=LENGTHS).keys() == ["a", "b"]
    assert str(kjt) == 'KeyedJaggedTensor({\n    "3": [[0, 1], []],\n    "7": [[2], [3, 4, 5]]\n})\n'
    with pytest.raises(KeyError, match="unknown key '7', keys are \\[3, 7\\]"):
        kjt["7"]
    with pytest.raises(TypeError, match="keys must be strings or ints, got True"):
        KJT([True, False], IDS, lengths=LENGTHS)


def test_dense_keys_may_be_ints() -> None:
    kt: Any = KeyedTensor([1, 2], [2, 3], torch.arange(10.0).view(2, 5))
    assert torch.equal(kt[2], torch.tensor([[2.0, 3, 4], [7, 8, 9]]))
    assert list(kt.to_dict()) == [1, 2]
    regrouped = KeyedTensor.regroup([kt], cast(Any, [[2], [1]]))
    assert [group.shape[1] for group in regrouped] == [3, 2]


def test_tables_are_looked_up_by_int_features() -> None:
    kjt: Any = KJT([3, 7], IDS, lengths=LENGTHS)
    bag = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=[7, 3])])  # type: ignore[list-item]
    pooled: Any = bag(kjt)
    assert pooled.keys() == [7, 3]
    weight: Tensor = bag.embedding_bags["t"].weight  # type: ignore[assignment]
    assert torch.allclose(pooled[3][0], weight[:2].sum(0))
    assert torch.allclose(pooled[7][1], weight[3:6].sum(0))
