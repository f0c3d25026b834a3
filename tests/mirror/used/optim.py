# type: ignore  # torchrec is served at run time
"""Optimizers: keyed, combined, warmed up, clipped, and in the backward of the tables."""

import torch
import torchrec.optim
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad as RootRowWise
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

assert RootRowWise is RowWiseAdagrad is torchrec.optim.RowWiseAdagrad
layer = torch.nn.Linear(2, 1, bias=False)
named = dict(layer.named_parameters())


def gradient(value):
    layer.weight.grad = torch.full((1, 2), float(value))


keyed = KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.5))
assert isinstance(keyed, KeyedOptimizer)
before = layer.weight.detach().clone()
gradient(0.25)
keyed.step()
assert torch.allclose(before - layer.weight, torch.full((1, 2), 0.25))
combined = CombinedOptimizer([("dense", keyed)])
assert list(combined.state_dict()["state"]) == ["dense.weight"]

# the first of two stages takes a half of the rate
warm = WarmupOptimizer(
    KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=1.0)),
    [
        WarmupStage(WarmupPolicy.CONSTANT, max_iters=1, value=0.5),
        WarmupStage(policy=WarmupPolicy.NONE, max_iters=9),
    ],
    lr=1.0,
)
assert isinstance(warm, OptimizerWrapper)
moves = []
for _ in range(3):
    before = layer.weight.detach().clone()
    gradient(1)
    warm.step()
    moves.append((before - layer.weight)[0, 0].item())
assert [round(move, 5) for move in moves[::2]] == [0.5, 1.0]

# a gradient of norm 5 is cut to 1
clipped = GradientClippingOptimizer(
    KeyedOptimizerWrapper(named, lambda params: torch.optim.SGD(params, lr=1.0)),
    clipping=GradientClipping.NORM, max_gradient=1.0,
)  # fmt: skip
before = layer.weight.detach().clone()
layer.weight.grad = torch.tensor([[3.0, 4.0]])
clipped.step()
assert torch.allclose(before - layer.weight, torch.tensor([[0.6, 0.8]]), atol=1e-5)

# tables trained in their backward are told from the others
tables = EmbeddingBagCollection(tables=[EmbeddingBagConfig(4, 8, "user", feature_names=["user"])])
torchrec.optim.apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
both = torch.nn.ModuleDict({"tables": tables, "layer": layer})
assert list(dict(in_backward_optimizer_filter(both.named_parameters()))) == ["layer.weight"]
trained = dict(in_backward_optimizer_filter(both.named_parameters(), include=True))
assert list(trained) == ["tables.embedding_bags.user.weight"]
# and by itself, with a sum of mean squares a row
rowwise = RowWiseAdagrad([layer.weight], lr=0.5, eps=0.0)
before = layer.weight.detach().clone()
layer.weight.grad = torch.tensor([[3.0, 4.0]])
rowwise.step()
assert torch.allclose(before - layer.weight, 0.5 * torch.tensor([[3.0, 4.0]]) / 12.5**0.5)
