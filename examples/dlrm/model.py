"""The model of the example, a DLRM with one table per sparse feature, and its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from arguments import Options

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedOptimizerWrapper,
    ParameterConstraints,
    PoolingType,
    RowWiseAdagrad,
    ShardingPlan,
    Tier,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.data import Source
from shardwise.models import DLRM, DLRMTrain
from shardwise.sharding.planning.machines import topology_here

# name -> what updates the tables during backward, and what updates the dense layers
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
    "rowwise_adagrad": (RowWiseAdagrad, torch.optim.Adagrad),
    "adam": (torch.optim.Adam, torch.optim.Adam),
}


def build_dlrm(feature_rows: Mapping[str, int], dense: int, dim: int, device: torch.device) -> DLRMTrain:
    """The model before it is sharded: the tables on the CPU, the dense layers on `device`."""
    tables = [
        EmbeddingBagConfig(
            name=f"t_{feature}",
            embedding_dim=dim,
            num_embeddings=rows,
            feature_names=[feature],
            pooling=PoolingType.MEAN,
        )
        for feature, rows in feature_rows.items()
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    return DLRMTrain(
        DLRM(
            ebc,
            dense_in_features=dense,
            dense_arch_layer_sizes=[64, dim],
            over_arch_layer_sizes=[16, 1],
            dense_device=device,
        )
    )


def build_model(source: Source, args: Options, device: torch.device) -> DistributedModelParallel:
    """The model, its tables where the best plan for this run's batches has them; all ranks call this together."""
    # Seeded weights on the CPU, the same on each rank: sharding keeps them, so the run does not depend on the number of
    # ranks. Tables too large for one process go on device="meta" instead, and each rank makes its own shards.
    torch.manual_seed(args.seed)
    model = build_dlrm(source.feature_rows, len(source.dense_names), args.dim, device)
    sparse_optimizer, _ = OPTIMIZERS[args.optimizer]
    tables = model.model.sparse_arch.embedding_bag_collection
    apply_optimizer_in_backward(sparse_optimizer, tables.parameters(), {"lr": args.lr})
    return DistributedModelParallel(model, device=device, plan=make_plan(model, source, args, device))


def make_plan(model: DLRMTrain, source: Source, args: Options, device: torch.device) -> ShardingPlan:
    """The best plan for the batches of this run, on all ranks; without a plan there would be one for 512 samples a rank
    of one id for each feature."""
    tier = None
    if args.tier != "none":
        # a batch that wants more rows than there is room for gets more
        folder = str(args.tier_folder) if args.tier == "file" else None
        tier = Tier(args.tier_slots, args.tier, folder, max_slots=1.0)
    ids = {
        f"t_{feature}": ParameterConstraints(pooling_factors=[mean], tier=tier)
        for feature, mean in source.ids_per_sample.items()
    }
    samples = args.batch_size // dist.get_world_size()
    planner = EmbeddingShardingPlanner(topology_here(device.type), samples, constraints=ids)
    return planner.collective_plan(model)


def build_optimizer(model: DistributedModelParallel, args: Options) -> CombinedOptimizer:
    """The tables' optimizer, which runs inside backward, and the dense layers' optimizer, as one."""
    _, dense_optimizer = OPTIMIZERS[args.optimizer]
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), partial(dense_optimizer, lr=args.lr)
    )
    return CombinedOptimizer([model.fused_optimizer, dense])
