# type: ignore  # torchrec is served at run time
"""TorchRec's introduction, as a user would write it: tables on meta, DistributedModelParallel, a batch by hand."""

import os

import torch
import torch.distributed as dist
import torchrec

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "localhost")
os.environ.setdefault("MASTER_PORT", "29500")
# the tutorial recommends nccl where there is a GPU
has_gpu = torch.cuda.is_available()
device = torch.device("cuda" if has_gpu else "cpu")
dist.init_process_group(backend="nccl" if has_gpu else "gloo")

ebc = torchrec.EmbeddingBagCollection(
    device="meta",
    tables=[
        torchrec.EmbeddingBagConfig(
            name="product_table",
            embedding_dim=64,
            num_embeddings=4096,
            feature_names=["product"],
            pooling=torchrec.PoolingType.SUM,
        ),
        torchrec.EmbeddingBagConfig(
            name="user_table",
            embedding_dim=64,
            num_embeddings=4096,
            feature_names=["user"],
            pooling=torchrec.PoolingType.SUM,
        ),
    ],
)

model = torchrec.distributed.DistributedModelParallel(ebc, device=torch.device("cuda"))
print(model)
print(model.plan)

product_eb = torch.nn.EmbeddingBag(4096, 64)
pooled = product_eb(input=torch.tensor([101, 202, 303]), offsets=torch.tensor([0, 2, 2]))
print("by hand:", tuple(pooled.shape), bool((pooled[1] == 0).all()))

mb = torchrec.KeyedJaggedTensor(
    keys=["product", "user"],
    values=torch.tensor([101, 202, 303, 404, 505, 606]).to(device),
    lengths=torch.tensor([2, 0, 1, 1, 1, 1], dtype=torch.int64).to(device),
)
print(mb.to(torch.device("cpu")))

pooled_embeddings = model(mb)
print(pooled_embeddings)

# what the tutorial says of the numbers, computed by hand
weights = {name.split(".")[-2]: value.local_shards()[0].tensor.cpu() for name, value in model.state_dict().items()}
product, user = weights["product_table"], weights["user_table"]
expected = torch.cat(
    [
        torch.stack([product[101] + product[202], torch.zeros(64), product[303]]),
        torch.stack([user[404], user[505], user[606]]),
    ],
    dim=1,
)
torch.testing.assert_close(pooled_embeddings.values().cpu(), expected)
print("keys:", pooled_embeddings.keys(), "equal to the sums by hand")
dist.destroy_process_group()
