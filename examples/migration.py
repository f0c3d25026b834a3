"""A program written for TorchRec: after `install()` its imports are served from here, FBGEMM's enums too.

Without a change to the program at all: `python -m shardwise.torchrec train.py --epochs 2`, or `-m package.train`.
"""

# ruff: noqa: E402
# pyright: reportMissingImports=false
import shardwise.torchrec

shardwise.torchrec.install()

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.shard import shard
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import quantize_inference_model

# a training step of one process, the optimizer by FBGEMM's name
tables = [EmbeddingBagConfig(name="item", embedding_dim=16, num_embeddings=1000, feature_names=["clicked"])]
sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1})
sharded = shard(EmbeddingBagCollection(tables=tables), row_wise(), ShardingEnv.from_local(1, 0), "cpu", sharder)
batch = KeyedJaggedTensor(["clicked"], torch.tensor([3, 5, 8]), lengths=torch.tensor([2, 1]))
sharded(batch).values().sum().backward()

# the quantized model, its graph, and the same rows from both
model = quantize_inference_model(EmbeddingBagCollection(tables=tables))
traced = symbolic_trace(torch.nn.Sequential(model))
print("graph:", [node.op for node in traced.graph.nodes])
print("same rows:", torch.equal(traced(batch).values(), model(batch).values()))

# a name that we lack says so, and what is near
try:
    print(torchrec.optim.RowWiseAdaGrad)
except AttributeError as error:
    print(error)

# later imports of torchrec are the real one's again
shardwise.torchrec.uninstall()
