# type: ignore  # torchrec is served at run time
"""What a rank has of which table, groups of tables that are looked up together, and a sharded module of one's own."""

import tempfile

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo, group_tables
from torchrec.distributed.embedding_types import (
    EmbeddingComputeKernel,
    GroupedEmbeddingConfig,
    KJTList,
    ListOfKJTList,
    ShardedEmbeddingTable,
)
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import ShardedModule as ModuleByPath
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.shard import _shard_modules
from torchrec.distributed.types import (
    DataType,
    ParameterSharding,
    ShardedModule,
    ShardedTensorMetadata,
    ShardingEnv,
    ShardMetadata,
)
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    EmbeddingBagConfig,
    EmbeddingTableConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

torch.manual_seed(0)
cpu = torch.device("cpu")
assert DATA_TYPE_NUM_BITS[DataType.FP16] == 16 and ModuleByPath is ShardedModule


def table(name, pooling=PoolingType.SUM, **others):
    return ShardedEmbeddingTable(
        num_embeddings=4, embedding_dim=8, name=name, embedding_names=[name], feature_names=[name], pooling=pooling,
        local_rows=4, local_cols=8, compute_kernel=EmbeddingComputeKernel.DENSE, **others,
    )  # fmt: skip


# tables of one rank by data type and pooling
tables = [table("a"), table("b", PoolingType.MEAN), table("c")]
(groups,) = group_tables([tables])
assert all(isinstance(group, GroupedEmbeddingConfig) for group in groups)
assert [group.feature_names() for group in groups] == [["a", "c"], ["b"]] and groups[0].dim_sum() == 16

# a lookup of each group trains as tables of its own do
kjt = KeyedJaggedTensor(["a", "c", "b"], torch.tensor([1, 2, 0, 3, 3]), lengths=torch.tensor([2, 0, 1, 1, 0, 1]))
lookup = GroupedPooledEmbeddingsLookup(grouped_configs=groups, device=cpu)
weights = {name.split(".")[-2]: param for name, param in lookup.named_parameters()}
pooled = lookup(kjt)
assert pooled.shape == (2, 24)
assert torch.allclose(pooled[0], torch.cat([weights["a"][[1, 2]].sum(0), weights["c"][0], torch.zeros(8)]))
pooled.sum().backward()
sequences = GroupedEmbeddingsLookup(grouped_configs=group_tables([[table("a", PoolingType.NONE)]])[0], device=cpu)
weight = next(iter(sequences.parameters()))
assert torch.equal(sequences(kjt.permute([0])).view(-1, 8), weight[[1, 2]])

lists = ListOfKJTList([KJTList([kjt, kjt.permute([1])])])
assert len(lists) == 1 and lists[0][1].keys() == ["c"]
metadata = ShardedTensorMetadata([ShardMetadata([0, 0], [4, 8], "rank:0/cpu")], torch.Size([4, 8]))
assert metadata.size == (4, 8)
sharding = ParameterSharding("data_parallel", "dense", [0])
info = EmbeddingShardingInfo(EmbeddingTableConfig(4, 8, "a"), sharding, torch.nn.Parameter(torch.zeros(4, 8)))
assert info.param_sharding is sharding and info.embedding_config.name == "a"
assert optimizer_type_to_emb_opt_type(torch.optim.SGD).name == "EXACT_SGD"
assert EmbeddingSharding.__abstractmethods__, "a strategy of one's own says how"

# as TorchRec's own notebook shards the modules of a model
store = tempfile.TemporaryDirectory()
dist.init_process_group("gloo", store=dist.FileStore(f"{store.name}/store", 1), rank=0, world_size=1)
model = torch.nn.Sequential(EmbeddingBagCollection(tables=[EmbeddingBagConfig(4, 8, "a", feature_names=["a"])]))
expected = model(kjt)
env = ShardingEnv.from_process_group(dist.group.WORLD)
sharders = [EmbeddingBagCollectionSharder()]
planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
plan = planner.collective_plan(model, sharders, dist.group.WORLD)
sharded = _shard_modules(module=model, env=env, device=cpu, plan=plan, sharders=sharders)
assert isinstance(sharded[0], ShardedModule)
assert torch.equal(sharded(kjt)["a"], expected["a"])
dist.destroy_process_group()
