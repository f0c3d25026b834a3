# type: ignore  # torchrec is served at run time
"""Tables, collections, dense layers and models, made and run as programs do; values by plain torch beside them."""

import torch
import torchrec.modules
import torchrec.modules.embedding_modules
import torchrec.modules.mc_embedding_modules
from torchrec import EmbeddingBagCollection as RootBags, EmbeddingCollection as RootRows, PoolingType as RootPooling
from torchrec.distributed.embedding_types import EmbeddingTableConfig
from torchrec.modules.activation import SwishLayerNorm
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from torchrec.modules.deepfm import DeepFM, FactorizationMachine
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    QuantConfig,
    data_type_to_dtype,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor import PositionWeightedModule as WeighsSeveral, PositionWeightedProcessor
from torchrec.modules.feature_processor_ import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, fuse_embedding_optimizer
from torchrec.modules.lazy_extension import LazyModuleExtensionMixin, lazy_apply
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionCollection as MapsByOtherPath,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from torchrec.modules.mlp import MLP, Perceptron
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

torch.manual_seed(0)
assert RootBags is EmbeddingBagCollection is torchrec.modules.embedding_modules.EmbeddingBagCollection
assert RootRows is EmbeddingCollection and RootPooling is PoolingType
features = KeyedJaggedTensor(
    ["user", "item"], torch.tensor([1, 2, 0, 3]), lengths=torch.tensor([2, 0, 1, 1]), weights=torch.ones(4)
)

# tables
table = EmbeddingBagConfig(
    num_embeddings=4, embedding_dim=8, name="user", feature_names=["user"], pooling=PoolingType.MEAN,
    data_type=DataType.FP32,
)  # fmt: skip
assert isinstance(table, BaseEmbeddingConfig) and data_type_to_dtype(table.data_type) is torch.float32
bags = EmbeddingBagCollection(tables=[table])
weight = bags.embedding_bags["user"].weight
assert torch.equal(bags(features)["user"], torch.stack([weight[1:3].mean(0), torch.zeros(8)]))
rows = EmbeddingCollection(tables=[EmbeddingConfig(4, 8, "item", feature_names=["item"])])
assert torch.equal(rows(features)["item"].values(), rows.embeddings["item"].weight[[0, 3]])
both = EmbeddingTableConfig(4, 8, "user", feature_names=["user"], pooling=PoolingType.SUM)
assert (both.name, both.pooling, both.num_embeddings) == ("user", PoolingType.SUM, 4)
assert QuantConfig(torch.int8, torch.quint8).per_table_weight_dtype is None

# trained in their backward: one step of SGD is minus the rate times the gradient
fused = FusedEmbeddingBagCollection(
    tables=[table], optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.5}, device=torch.device("cpu")
)
before = dict(fused.state_dict())["embedding_bags.user.weight"].clone()
fused(features)["user"].sum().backward()
after = fused.state_dict()["embedding_bags.user.weight"]
assert torch.allclose(before - after, torch.tensor([0.0, 0.25, 0.25, 0.0])[:, None].expand(4, 8))
model = fuse_embedding_optimizer(
    torch.nn.Sequential(bags), optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.5}, device=torch.device("cpu")
)
assert isinstance(model[0], FusedEmbeddingBagCollection)
assert torch.equal(model(features)["user"], bags(features)["user"])

# weights by position in the bag
position = PositionWeightedModule(max_feature_length=3)
assert isinstance(position, FeatureProcessor)
with torch.no_grad():
    position.position_weight.copy_(torch.tensor([2.0, 3.0, 4.0]))
assert position(features["user"]).weights().tolist() == [2.0, 3.0]
weighs = PositionWeightedModuleCollection({"user": 3, "item": 2})
assert weighs(features).weights().tolist() == [1.0] * 4
processed = FeatureProcessedEmbeddingBagCollection(
    EmbeddingBagCollection(tables=[EmbeddingBagConfig(4, 8, "user", feature_names=["user"])], is_weighted=True),
    {"user": position},
)
weight = dict(processed.named_parameters())["_embedding_bag_collection.embedding_bags.user.weight"]
assert torch.allclose(processed(features)["user"][0], 2 * weight[1] + 3 * weight[2])
several = WeighsSeveral({"user": 3}, device=torch.device("cpu"))
assert several(features.to_dict())["user"].weights().tolist() == [1.0, 1.0]
legacy = PositionWeightedProcessor({"user": 3}, device=torch.device("cpu"))
assert legacy(features).keys() == ["user"]

# ids of any size
for policy in (DistanceLFU_EvictionPolicy(), LFU_EvictionPolicy()):
    slots = MCHManagedCollisionModule(4, torch.device("cpu"), policy, eviction_interval=1, input_hash_size=1 << 40)
    assert isinstance(slots, ManagedCollisionModule)
    config = EmbeddingBagConfig(4, 8, "user", feature_names=["user"])
    maps = ManagedCollisionCollection({"user": slots}, [config])
    assert MapsByOtherPath is ManagedCollisionCollection
    wide = KeyedJaggedTensor(["user"], torch.tensor([1 << 30, 1 << 35]), lengths=torch.tensor([1, 1]))
    collision = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=[config]), maps)
    collision(wide)
    pooled, _ = collision(wide)
    assert not torch.equal(pooled["user"][0], pooled["user"][1]), "two ids, two slots"
config = EmbeddingConfig(4, 8, "user", feature_names=["user"])
slots = MCHManagedCollisionModule(4, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1)
sequences = ManagedCollisionEmbeddingCollection(
    EmbeddingCollection(tables=[config]), ManagedCollisionCollection({"user": slots}, [config])
)
assert torchrec.modules.mc_embedding_modules.ManagedCollisionEmbeddingCollection is type(sequences)
assert sequences(wide)[0]["user"].values().shape == (2, 8)

# dense layers
x = torch.randn(5, 6)
perceptron = Perceptron(6, 3)
assert torch.equal(perceptron(x), torch.relu(torch.nn.functional.linear(x, *perceptron.parameters())))
assert MLP(6, [4, 2], activation="swish_layernorm")(x).shape == (5, 2)
norm = SwishLayerNorm([6])
assert torch.allclose(norm(x), x * torch.sigmoid(torch.nn.functional.layer_norm(x, [6])), atol=1e-6)
crossed = CrossNet(6, num_layers=1)
weight, bias = crossed.kernels[0], crossed.bias[0]
assert torch.allclose(crossed(x), x * (x @ weight.T + bias.T) + x, atol=1e-6)
for net in (LowRankCrossNet(6, 2), VectorCrossNet(6, 2), LowRankMixtureCrossNet(6, 2, num_experts=2)):
    assert net(x).shape == x.shape
    assert all(
        grad is not None for grad in torch.autograd.grad(net(x).sum(), list(net.parameters()), allow_unused=True)[:1]
    )
a, b = torch.randn(5, 6), torch.randn(5, 6)
every = torch.cat([a, b], 1)
pairs = torch.stack([every[:, i] * every[:, j] for i in range(12) for j in range(i)], 1)
assert torch.allclose(FactorizationMachine()([a, b]), pairs.sum(1, keepdim=True), atol=1e-5)
assert DeepFM(dense_module=torch.nn.Linear(12, 4))([a, b]).shape == (5, 4)


class Lazy(LazyModuleExtensionMixin, torch.nn.LazyLinear):
    """A layer whose width its first input tells."""


layer = lazy_apply(Lazy(2), lambda module: torch.nn.init.ones_(module.weight) if hasattr(module, "weight") else None)
layer(x)
assert torch.equal(layer.weight, torch.ones(2, 6))
assert isinstance(several(features.to_dict())["user"], JaggedTensor)
