# type: ignore  # torchrec is served at run time
"""DLRM and DeepFM from their parts, trained a step."""

from types import SimpleNamespace

import torch
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.models.deepfm import DenseArch as FMDense, FMInteractionArch, SimpleDeepFMNN, SimpleDeepFMNNWrapper
from torchrec.models.dlrm import (
    DLRM,
    DLRM_DCN,
    DenseArch,
    DLRM_Projection,
    DLRMTrain,
    DLRMWrapper,
    InteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    SparseArch,
    choose,
)
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP

torch.manual_seed(0)
names = ["user", "item"]
batch = next(iter(RandomRecDataset(names, batch_size=3, hash_sizes=[10, 10], num_dense=4, manual_seed=1)))
assert isinstance(batch, Batch)


def tables():
    return EmbeddingBagCollection(tables=[EmbeddingBagConfig(10, 8, name, feature_names=[name]) for name in names])


# the model is its parts, one after the other
model = DLRM(tables(), dense_in_features=4, dense_arch_layer_sizes=[8], over_arch_layer_sizes=[5, 1])
assert isinstance(model.sparse_arch, SparseArch) and isinstance(model.dense_arch, DenseArch)
assert isinstance(model.inter_arch, InteractionArch)
logits = model(batch.dense_features, batch.sparse_features)
dense = model.dense_arch(batch.dense_features)
sparse = model.sparse_arch(batch.sparse_features)
assert torch.equal(logits, model.over_arch(model.inter_arch(dense, sparse)))
stacked = torch.cat([dense[:, None], sparse], 1)
first, second = torch.triu_indices(3, 3, offset=1)
pairs = torch.einsum("bfd,bgd->bfg", stacked, stacked)[:, first, second]
assert torch.allclose(model.inter_arch(dense, sparse)[:, 8:].sort(1)[0], pairs.sort(1)[0], atol=1e-5)
assert choose(3, 2) == 3
crossing = InteractionDCNArch(num_sparse_features=2, crossnet=LowRankCrossNet(24, 2, low_rank=3))
assert crossing(dense, sparse).shape == (3, 24)
projecting = InteractionProjectionArch(2, MLP(24, [16]), MLP(24, [16]))
assert projecting(torch.randn(3, 8), sparse).shape[0] == 3

for other in (
    DLRM_DCN(tables(), 4, [8], [5, 1], dcn_num_layers=2, dcn_low_rank_dim=3),
    DLRM_Projection(
        tables(), 4, [8], [5, 1], interaction_branch1_layer_sizes=[16], interaction_branch2_layer_sizes=[16]
    ),
):
    assert other(batch.dense_features, batch.sparse_features).shape == (3, 1)

train = DLRMTrain(model)
optimizer = torch.optim.SGD(train.parameters(), lr=0.5)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss, (detached, out, labels) = train(batch)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] and torch.equal(labels, batch.labels)
wrapped = DLRMWrapper(tables(), 4, [8], [5, 1])
model_input = SimpleNamespace(
    float_features=batch.dense_features, idlist_features=batch.sparse_features, label=batch.labels.float()
)
assert wrapped(model_input)[0].ndim == 0 and wrapped.eval()(model_input).numel() == 3

# DeepFM
assert FMDense(4, 6, 8)(batch.dense_features).shape == (3, 8)
deep = SimpleDeepFMNN(num_dense_features=4, embedding_bag_collection=tables(), hidden_layer_size=6, deep_fm_dimension=5)
out = deep(dense_features=batch.dense_features, sparse_features=batch.sparse_features)
assert out.shape == (3, 1) and bool(((out > 0) & (out < 1)).all())
interaction = FMInteractionArch(24, sparse_feature_names=names, deep_fm_dimension=5)
assert isinstance(deep.inter_arch, type(interaction))
wrapper = SimpleDeepFMNNWrapper(
    num_dense_features=4, embedding_bag_collection=tables(), hidden_layer_size=6, deep_fm_dimension=5
)
assert wrapper(model_input)[0].ndim == 0
