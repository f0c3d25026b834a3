"""`repr()` of the jagged types: one line, and nothing is read for it. Their text is in the tests of each type."""

import pytest
import torch
from torch import tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

IDS, WEIGHTS = torch.zeros(7, dtype=torch.int64), torch.zeros(7)
REPRS = {
    "JaggedTensor(values=[7] int64 cpu, bags=2)": JaggedTensor(IDS, lengths=tensor([3, 4])),
    "JaggedTensor(values=[7] int64 cpu, weights=[7] float32 cpu, bags=1)": JaggedTensor(IDS, WEIGHTS, tensor([7])),
    "KeyedJaggedTensor(keys=['user', 'item'], stride=3, values=[7] int64 cpu)": KeyedJaggedTensor(
        ["user", "item"], IDS, lengths=tensor([1, 1, 1, 1, 1, 2])
    ),
    "KeyedJaggedTensor(keys=[], stride=0, values=[0] int64 meta)": KeyedJaggedTensor.empty(device="meta"),
    "KeyedTensor(keys=['user', 'item'], values=[3, 12] float32 cpu)": KeyedTensor(
        ["user", "item"], [4, 8], torch.zeros(3, 12)
    ),
}


@pytest.mark.parametrize("expected", REPRS)
def test_repr_is_one_line_of_keys_shapes_and_device(expected: str) -> None:
    assert repr(REPRS[expected]) == expected


def test_repr_reads_nothing() -> None:
    """Fake tensors have no numbers: reading one raises."""
    with FakeTensorMode():
        ids, lengths = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        assert repr(JaggedTensor(ids, lengths=lengths)) == "JaggedTensor(values=[4] int64 cpu, bags=4)"
        kjt = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)
        assert repr(kjt) == "KeyedJaggedTensor(keys=['a', 'b'], stride=2, values=[4] int64 cpu)"
