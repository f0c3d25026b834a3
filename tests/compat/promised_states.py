"""Keys of the state dicts of every public module and optimizer, with dtype and shape of each tensor.

Sizes are told apart by reading: tables of 40 rows (t0) and 12 (t1), rows of 8, a batch has 5 samples of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor

import shardwise
from shardwise import (
    DLRM,
    CombinedOptimizer,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    GradientClippingOptimizer,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ShardingEnv,
    ShardingPlan,
    WarmupOptimizer,
    WarmupStage,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    models,
    quant as quantized,
)
from shardwise.embeddings import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    PositionWeightedModuleCollection,
)
from shardwise.embeddings.managed_collision import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.embeddings.optim.fbgemm_types import ComputeDevice, EmbeddingLocation, OptimType, SparseType
from shardwise.embeddings.pools import KeyedJaggedTensorPool, TensorPool
from shardwise.embeddings.pruning import GenericITEPModule, ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from shardwise.fbgemm.tables import (
    BatchedUnaryEmbeddingBag,
    DenseTableBatchedEmbeddingBagsCodegen,
    IntNBitTableBatchedEmbeddingBagsCodegen,
    PermutePooledEmbeddingsSplit,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from shardwise.models import DLRM_DCN, DLRM_Projection, DLRM_Transformer
from shardwise.planner.layout import Tier
from shardwise.sharding import (
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)

DIM = 8
TABLES = {"t0": ("f0", 40), "t1": ("f1", 12)}
CUTS: Mapping[str, Callable[[], Any]] = {
    "data_parallel": data_parallel,
    "table_wise": lambda: table_wise(rank=0),
    "row_wise": row_wise,
    "column_wise": lambda: column_wise(ranks=[0, 0]),
    "table_row_wise": lambda: table_row_wise(host_index=0),
    "table_column_wise": lambda: table_column_wise(host_index=0),
    "grid_shard": lambda: grid_shard(host_indexes=[0]),
}
# the optimizers that our tables train with, by name, and what they are made with
OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    **{f"torch.optim.{name}": getattr(torch.optim, name) for name in ("SGD", "Adagrad", "Adam", "AdamW")},
    **{
        name: getattr(shardwise, name)
        for name in ("FTRL", "LAMB", "LarsSGD", "PartialRowWiseAdam", "PartialRowWiseLAMB", "RowWiseAdagrad")
    },
}


def states() -> dict[str, Any]:
    """By module or optimizer: {key: "dtype [shape]"}; of optimizers, "state" and "param_groups" both."""
    with torch.random.fork_rng(devices=[]), _one_rank():
        torch.manual_seed(0)
        found = {name: _tensors(make().state_dict()) for name, make in {**_modules(), **_parts()}.items()}
        for cut in CUTS:
            found[f"DistributedModelParallel {cut}"] = _tensors(_sharded(bags(), cut).state_dict())
            found[f"DistributedModelParallel of rows {cut}"] = _tensors(_sharded(rows(), cut).state_dict())
        for name, optimizer in OPTIMIZERS.items():
            found[f"EmbeddingBagCollection.fused_optimizer() {name}"] = _optimizer(
                _trained(_fused(bags(), optimizer)).fused_optimizer(), skip_groups=name.startswith("torch.")
            )
            found[f"DistributedModelParallel.fused_optimizer {name}"] = _optimizer(
                _trained(_sharded(bags(), "row_wise", optimizer)).fused_optimizer,
                skip_groups=name.startswith("torch."),
            )
        tiered = _sharded(bags(), "row_wise", shardwise.RowWiseAdagrad, tier=Tier(slots=10))
        found["DistributedModelParallel row_wise tier"] = _tensors(_trained(tiered).state_dict())
        found["DistributedModelParallel.fused_optimizer tier"] = _optimizer(tiered.fused_optimizer)
        found |= {name: _optimizer(optimizer, skip_groups=True) for name, optimizer in _wrappers().items()}
    return {name: {"kind": "state dict", "states": keys} for name, keys in sorted(found.items())}


@contextmanager
def _one_rank() -> Iterator[None]:
    """A world of this process alone, which needs no port."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bags(**fields: Any) -> EmbeddingBagCollection:
    """A pooled collection of both tables."""
    return EmbeddingBagCollection(_configs(**fields), is_weighted=False)


def rows() -> EmbeddingCollection:
    """A sequence collection of both tables."""
    return EmbeddingCollection(_row_configs())


def _configs(**fields: Any) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(count, DIM, name, feature_names=[feature], **fields)
        for name, (feature, count) in TABLES.items()
    ]


def _row_configs() -> list[EmbeddingConfig]:
    return [EmbeddingConfig(count, DIM, name, feature_names=[feature]) for name, (feature, count) in TABLES.items()]


def ids() -> KeyedJaggedTensor:
    """A batch of ids of both features."""
    return KeyedJaggedTensor(["f0", "f1"], torch.arange(10), lengths=torch.ones(10, dtype=torch.int64))


def _modules() -> dict[str, Callable[[], nn.Module]]:
    def dlrm(kind: type[nn.Module], **more: Any) -> nn.Module:
        return kind(bags(), 3, dense_arch_layer_sizes=[4, DIM], over_arch_layer_sizes=[5, 1], **more)

    fused = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}

    def managed(kind: Any, make: Callable[[], nn.Module], policy: Any) -> nn.Module:
        wrapped: nn.Module = kind(make(), _collisions(make(), policy()))
        return wrapped

    return {
        "EmbeddingBagCollection": bags,
        "EmbeddingBagCollection fp16": lambda: bags(data_type=DataType.FP16),
        "EmbeddingBagCollection bf16": lambda: bags(data_type=DataType.BF16),
        "EmbeddingCollection": rows,
        "FusedEmbeddingBagCollection": lambda: FusedEmbeddingBagCollection(_configs(), **fused),
        "FusedEmbeddingCollection": lambda: FusedEmbeddingCollection(_row_configs(), **fused),
        "FeatureProcessedEmbeddingBagCollection": lambda: FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(_configs(), is_weighted=True), PositionWeightedModuleCollection({"f0": 3, "f1": 6})
        ),
        "EmbeddingTowerCollection": lambda: EmbeddingTowerCollection([EmbeddingTower(bags(), nn.Linear(16, 1))]),
        **{
            f"{kind.__name__} {policy.__name__}": partial(managed, kind, make, policy)
            for kind, make in (
                (ManagedCollisionEmbeddingBagCollection, bags), (ManagedCollisionEmbeddingCollection, rows),
            )
            for policy in (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)
        },
        **{
            f"quant.{kind.__name__} {dtype}": lambda kind=kind, make=make, dtype=dtype: kind.from_float(  # type: ignore[misc]
                quant_ready(make(), dtype)
            )
            for kind, make in ((quantized.EmbeddingBagCollection, bags), (quantized.EmbeddingCollection, rows))
            for dtype in (torch.qint8, torch.quint4x2, torch.float16)
        },
        "DLRM": lambda: dlrm(DLRM),
        "DLRMTrain": lambda: shardwise.DLRMTrain(dlrm(DLRM)),  # type: ignore[arg-type]
        "DLRM_DCN": lambda: dlrm(DLRM_DCN, dcn_num_layers=2, dcn_low_rank_dim=3),
        "DLRM_Projection": lambda: dlrm(
            DLRM_Projection, interaction_branch1_layer_sizes=[DIM], interaction_branch2_layer_sizes=[DIM]
        ),
        "DLRM_Transformer": lambda: dlrm(DLRM_Transformer, nhead=2, ntransformer_layers=1),
    }  # fmt: skip


def _parts() -> dict[str, Callable[[], nn.Module]]:
    """Parts of models, metrics, pools, pruned collections and FBGEMM's tables."""
    crosses: dict[str, Callable[[], nn.Module]] = {
        "CrossNet": lambda: models.CrossNet(DIM, 2),
        "LowRankCrossNet": lambda: models.LowRankCrossNet(DIM, 2, 3),
        "LowRankMixtureCrossNet": lambda: models.LowRankMixtureCrossNet(DIM, 2, num_experts=2, low_rank=3),
        "VectorCrossNet": lambda: models.VectorCrossNet(DIM, 2),
    }
    tables = [(rows, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for _, rows in TABLES.values()]
    return {
        **crosses,
        "SimpleDeepFMNN": lambda: models.SimpleDeepFMNN(3, bags(), hidden_layer_size=4, deep_fm_dimension=5),
        "SwishLayerNorm": lambda: models.SwishLayerNorm(DIM),
        "StreamingAUC": lambda: models.StreamingAUC(2),
        "StreamingNE": models.StreamingNE,
        "MetricWindow": lambda: models.MetricWindow(models.StreamingAUC(2), samples=8, pieces=4),
        "TensorPool": lambda: TensorPool(40, DIM, torch.float32),
        "KeyedJaggedTensorPool": lambda: KeyedJaggedTensorPool(40, {"f0": 3, "f1": 2}, is_weighted=True),
        "ITEPEmbeddingBagCollection": lambda: ITEPEmbeddingBagCollection(bags(), GenericITEPModule({"t0": 100})),
        "ITEPEmbeddingCollection": lambda: ITEPEmbeddingCollection(rows(), GenericITEPModule({"t0": 100})),
        "PermutePooledEmbeddingsSplit": lambda: PermutePooledEmbeddingsSplit([DIM, 4], [1, 0]),
        "BatchedUnaryEmbeddingBag": lambda: BatchedUnaryEmbeddingBag(2, [40, 12]),
        "DenseTableBatchedEmbeddingBagsCodegen": lambda: DenseTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM) for _, rows in TABLES.values()], use_cpu=True
        ),
        **{
            f"SplitTableBatchedEmbeddingBagsCodegen {kind.name}": partial(
                SplitTableBatchedEmbeddingBagsCodegen, tables, optimizer=kind
            )
            for kind in (OptimType.EXACT_SGD, OptimType.EXACT_ROWWISE_ADAGRAD, OptimType.ADAM)
        },
        "IntNBitTableBatchedEmbeddingBagsCodegen": lambda: IntNBitTableBatchedEmbeddingBagsCodegen(
            [(name, rows, DIM, SparseType.INT8, EmbeddingLocation.HOST) for name, (_, rows) in TABLES.items()],
            device="cpu",
        ),
    }


def _wrappers() -> dict[str, torch.optim.Optimizer]:
    """Optimizers around that of two dense parameters."""

    def dense() -> KeyedOptimizerWrapper:
        layer = nn.Linear(3, 1)
        optimizer = KeyedOptimizerWrapper(
            dict(layer.named_parameters()), partial(torch.optim.SGD, lr=0.1, momentum=0.5)
        )
        layer(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return optimizer

    return {
        "KeyedOptimizerWrapper": dense(),
        "CombinedOptimizer": CombinedOptimizer([("dense", dense())]),
        "WarmupOptimizer": WarmupOptimizer(dense(), [WarmupStage(max_iters=3)]),
        "GradientClippingOptimizer": GradientClippingOptimizer(dense(), max_gradient=1.0),
    }


def quant_ready(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with the qconfig that `from_float` reads."""
    module.qconfig = quantized.QuantConfig(activation=torch.float32, weight=dtype)  # type: ignore[assignment]
    return module


def _collisions(module: Any, policy: Any) -> ManagedCollisionCollection:
    configs = module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()
    collisions = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings, device=torch.device("cpu"), eviction_interval=2, eviction_policy=policy
        )
        for config in configs
    }
    return ManagedCollisionCollection(collisions, configs)


def _fused(module: Any, optimizer: type[torch.optim.Optimizer]) -> Any:
    apply_optimizer_in_backward(optimizer, module.parameters(), {"lr": 0.1})
    return module


class _Net(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.tables(features)


def _sharded(
    module: Any, cut: str, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, *, tier: Tier | None = None
) -> DistributedModelParallel:
    net = _Net(_fused(module, optimizer))
    plan = construct_module_sharding_plan(
        module, {name: CUTS[cut]() for name in TABLES}, local_size=1, world_size=1, device_type="cpu"
    )
    for sharding in plan.values():
        sharding.tier = tier
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    return DistributedModelParallel(net, env, "cpu", ShardingPlan({"tables": plan}))


def _trained(module: Any) -> Any:
    module(ids()).values().sum().backward()
    return module


def _tensors(state: Mapping[str, Any]) -> dict[str, str]:
    return dict(_leaves("", state))


def _optimizer(optimizer: Any, *, skip_groups: bool = False) -> dict[str, str]:
    """The keys of a state dict of an optimizer; groups of torch's have what its version has."""
    content = optimizer.state_dict()
    kept = {key: value for key, value in content.items() if key != "param_groups" or not skip_groups}
    return dict(_leaves("", kept))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path} / {key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)):
        for n, item in enumerate(value):
            yield from _leaves(f"{path}[{n}]", item)
    else:
        yield path, _tensor(value)


def _tensor(value: Any) -> str:
    if isinstance(value, ShardedTensor):
        whole = value.metadata()
        pieces = [f"{shard.shard_offsets}{shard.shard_sizes}" for shard in whole.shards_metadata]
        dtype = str(whole.tensor_properties.dtype).removeprefix("torch.")
        return f"sharded {dtype} {list(whole.size)}, shards {' '.join(pieces)}"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
