# type: ignore  # torchrec is served at run time
"""The snippet of TorchRec 1.0's announcement: jagged tensors, a plan, sharding, quantizing, serving."""

import os

import torch
import torch.distributed as dist
import torchrec
from torchrec import EmbeddingBagCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.inference.modules import quantize_inference_model, shard_quant_model

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
device = "cuda" if torch.cuda.is_available() else "cpu"

ebc = EmbeddingBagCollection(
    device="cpu",
    tables=[
        torchrec.EmbeddingBagConfig(
            name="user_table", embedding_dim=64, num_embeddings=100, feature_names=["user"],
            pooling=torchrec.PoolingType.SUM,
        ),
        torchrec.EmbeddingBagConfig(
            name="item_table", embedding_dim=64, num_embeddings=100, feature_names=["item"],
            pooling=torchrec.PoolingType.SUM,
        ),
    ],
)  # fmt: skip

user_jt = JaggedTensor(values=torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
item_jt = JaggedTensor(values=torch.tensor([5, 6]), lengths=torch.tensor([1, 1]))
kjt = KeyedJaggedTensor.from_jt_dict({"user": user_jt, "item": item_jt})
print(kjt)
float_result = ebc(kjt)
print("unsharded:", type(float_result).__name__, float_result.keys())

# the planner, for two GPUs that need not be here
planner = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cuda"))
plan = planner.plan(ebc, torchrec.distributed.model_parallel.get_default_sharders())
print(plan)

dist.init_process_group(backend="gloo")
sharded = torchrec.distributed.DistributedModelParallel(ebc, device=torch.device(device))
moved = kjt.to(torch.device(device))
torch.testing.assert_close(sharded(moved).values().detach(), float_result.values().detach().to(device))
dist.destroy_process_group()

quant_model = quantize_inference_model(ebc)
print(quant_model)
sharded_model, _ = shard_quant_model(quant_model, compute_device=device, sharding_device=device)
result = sharded_model(moved)
error = (result["user"].cpu().float() - float_result["user"]).abs().max()
print("sharded and quantized:", result.keys(), "off by less than 0.01:", bool(error < 0.01))
