# type: ignore  # torchrec is served at run time
"""Jagged and keyed tensors, as programs make, take apart, compare, check and move them."""

import torch
import torchrec
import torchrec.modules
from torchrec import KeyedJaggedTensor as RootBatch, KeyedTensor as RootKeyedTensor
from torchrec.fx import Tracer, symbolic_trace
from torchrec.fx.tracer import symbolic_trace as trace_by_path
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    jt_is_equal,
    kjt_is_equal,
)
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt
from torchrec.streamable import Pipelineable
from torchrec.types import DataType

kjt = KeyedJaggedTensor.from_lengths_sync(
    keys=["user", "item"], values=torch.arange(6), lengths=torch.tensor([2, 0, 1, 3]), weights=torch.arange(6) / 2
)
assert torchrec.KeyedJaggedTensor is RootBatch is KeyedJaggedTensor and isinstance(kjt, Pipelineable)
assert kjt.stride() == 2 and kjt.length_per_key() == [2, 4] and kjt["item"].to_dense()[1].tolist() == [3, 4, 5]

# a batch and the dict of its features
parts = ComputeKJTToJTDict()(kjt)
assert jt_is_equal(parts["user"], JaggedTensor(torch.tensor([0, 1]), torch.tensor([0.0, 0.5]), torch.tensor([2, 0])))
assert not jt_is_equal(parts["user"], parts["item"])
assert kjt_is_equal(ComputeJTDictToKJT()(parts), kjt) and not kjt_is_equal(kjt.permute([1, 0]), kjt)
assert maybe_td_to_kjt(kjt) is kjt

assert validate_keyed_jagged_tensor(kjt)
wrong = KeyedJaggedTensor(["user"], torch.arange(3), lengths=torch.tensor([1, 1]))
try:
    validate_keyed_jagged_tensor(wrong)
except ValueError as error:
    assert "3" in str(error)
else:
    raise AssertionError("three values in bags of two")

# pooled rows side by side, and in groups
pooled = KeyedTensor(["user", "item"], [2, 3], torch.arange(10.0).view(2, 5))
assert RootKeyedTensor is KeyedTensor and pooled["item"].tolist() == [[2, 3, 4], [7, 8, 9]]
groups = KTRegroupAsDict(groups=[["item"], ["user"]], keys=["first", "second"])([pooled])
assert groups["second"].tolist() == [[0, 1], [5, 6]] and groups["first"].shape == (2, 3)


class Lengths(torch.nn.Module):
    """A dense function of a batch."""

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return features.lengths() * 2


for traced in (symbolic_trace(Lengths()), trace_by_path(Lengths())):
    assert traced(kjt).tolist() == [4, 0, 2, 6]
graph = Tracer().trace(Lengths())
assert [node.op for node in graph.nodes][0] == "placeholder"
assert DataType.FP16.value == "FP16" and "modules" in dir(torchrec)
