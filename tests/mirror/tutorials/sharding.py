# type: ignore  # torchrec is served at run time
"""TorchRec's sharding tutorial: two spawned processes, four tables, and the plan of each sharding type."""

import os
import sys
from typing import Dict, cast  # noqa: UP035  as the tutorial writes it

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel  # noqa: F401  imported there, too
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingType

try:
    import multiprocess
except ModuleNotFoundError:
    # dill's multiprocessing, which the tutorial takes because it runs in a notebook
    import torch.multiprocessing as multiprocess

has_gpu = torch.cuda.device_count() > 1
large_table_cnt = 2
small_table_cnt = 2
large_tables = [
    torchrec.EmbeddingBagConfig(
        name="large_table_" + str(i),
        embedding_dim=64,
        num_embeddings=4096,
        feature_names=["large_table_feature_" + str(i)],
        pooling=torchrec.PoolingType.SUM,
    )
    for i in range(large_table_cnt)
]
small_tables = [
    torchrec.EmbeddingBagConfig(
        name="small_table_" + str(i),
        embedding_dim=64,
        num_embeddings=1024,
        feature_names=["small_table_feature_" + str(i)],
        pooling=torchrec.PoolingType.SUM,
    )
    for i in range(small_table_cnt)
]


def gen_constraints(sharding_type: ShardingType = ShardingType.TABLE_WISE) -> Dict[str, ParameterConstraints]:  # noqa: UP006
    large_table_constraints = {
        "large_table_" + str(i): ParameterConstraints(sharding_types=[sharding_type.value])
        for i in range(large_table_cnt)
    }
    small_table_constraints = {
        "small_table_" + str(i): ParameterConstraints(sharding_types=[sharding_type.value])
        for i in range(small_table_cnt)
    }
    return {**large_table_constraints, **small_table_constraints}


def single_rank_execution(
    rank: int,
    world_size: int,
    constraints: Dict[str, ParameterConstraints],  # noqa: UP006
    module: torch.nn.Module,
    backend: str,
) -> None:
    def init_distributed_single_host(rank: int, world_size: int, backend: str) -> dist.ProcessGroup:
        os.environ["RANK"] = f"{rank}"
        os.environ["WORLD_SIZE"] = f"{world_size}"
        dist.init_process_group(rank=rank, world_size=world_size, backend=backend)
        return dist.group.WORLD

    if backend == "nccl":
        device = torch.device(f"cuda:{rank}")
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    topology = Topology(world_size=world_size, compute_device="cuda")
    pg = init_distributed_single_host(rank, world_size, backend)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    sharders = [cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder())]
    plan: ShardingPlan = planner.collective_plan(module, sharders, pg)  # noqa: F821  the tutorial does not import it

    sharded_model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(pg),
        plan=plan,
        sharders=sharders,
        device=device,
    )
    print(f"rank:{rank},sharding plan: {plan}", flush=True)
    # one batch of two samples, which every type must answer alike
    keys = [config.feature_names[0] for config in (*large_tables, *small_tables)]
    kjt = torchrec.KeyedJaggedTensor(
        keys=keys, values=torch.arange(8, device=device) + rank, lengths=torch.ones(8, dtype=torch.int64, device=device)
    )
    rows = sharded_model(kjt).to_dict()
    for key in keys:
        table = getattr(module.embedding_bags, key.replace("_feature", ""))
        torch.testing.assert_close(rows[key].detach(), table.weight.detach()[kjt[key].values()])
    print(f"rank:{rank},answers are those of the unsharded tables", flush=True)
    dist.destroy_process_group()


def spmd_sharing_simulation(sharding_type: ShardingType = ShardingType.TABLE_WISE, world_size: int = 2) -> None:
    ctx = multiprocess.get_context("spawn")
    processes = []
    for rank in range(world_size):
        p = ctx.Process(
            target=single_rank_execution,
            args=(rank, world_size, gen_constraints(sharding_type), ebc, "nccl" if has_gpu else "gloo"),
        )
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
        assert p.exitcode == 0


if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "29500")
    ebc = torchrec.EmbeddingBagCollection(device="cuda" if has_gpu else "cpu", tables=large_tables + small_tables)
    spmd_sharing_simulation(ShardingType[sys.argv[1]])
