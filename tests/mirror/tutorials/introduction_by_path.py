# type: ignore  # torchrec is served at run time
"""The introduction's notebook twin: the same program by TorchRec's module paths."""

import os

import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
has_gpu = torch.cuda.is_available()
device = torch.device("cuda" if has_gpu else "cpu")
dist.init_process_group(backend="nccl" if has_gpu else "gloo")

ebc = EmbeddingBagCollection(
    device=torch.device("meta"),
    tables=[
        EmbeddingBagConfig(
            name=f"{feature}_table",
            embedding_dim=64,
            num_embeddings=4096,
            feature_names=[feature],
            pooling=PoolingType.SUM,
        )
        for feature in ("product", "user")
    ],
)
apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
sharders = get_default_sharders()
assert any(isinstance(sharder, EmbeddingBagCollectionSharder) for sharder in sharders)
planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device=device.type))
plan = planner.collective_plan(ebc, sharders, dist.group.WORLD)
model = DistributedModelParallel(
    ebc, env=ShardingEnv.from_process_group(dist.group.WORLD), plan=plan, sharders=sharders, device=device
)
print(model.plan)

mb = KeyedJaggedTensor.from_lengths_sync(
    keys=["product", "user"],
    values=torch.tensor([101, 202, 303, 404, 505, 606]).to(device),
    lengths=torch.tensor([2, 0, 1, 1, 1, 1]).to(device),
)
tables = {name.split(".")[-2]: value.local_shards()[0].tensor for name, value in model.state_dict().items()}
before = {name: table.clone() for name, table in tables.items()}
pooled_embeddings = model(mb)
print(pooled_embeddings)
pooled_embeddings["product"].sum().backward()
for name, table in tables.items():
    moved = (table - before[name]).abs().sum(dim=1).nonzero().flatten().tolist()
    print(name, "moved rows", moved)
dist.destroy_process_group()
