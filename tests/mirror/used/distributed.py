# type: ignore  # torchrec is served at run time
"""A model is sharded by plans, planners and sharders of several kinds, trained, pipelined and resharded; one rank."""

import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torchrec.distributed
import torchrec.distributed.comm_ops
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.comm_ops import all_gather_base_pooled, set_gradient_division
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import EmbeddingComputeKernel as KernelByPath
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    EmbeddingBagSharder,
    ShardedEmbeddingBagCollection,
    logger,
)
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.fused_embeddingbag import ShardedFusedEmbeddingBagCollection
from torchrec.distributed.global_settings import set_propogate_device
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel, DMPCollection
from torchrec.distributed.sharding.dynamic_sharding import (
    output_sharding_plan_delta_single,
    output_sharding_plans_delta,
)
from torchrec.distributed.sharding_plan import (
    EmbeddingBagCollectionSharder as Bags,
    EmbeddingCollectionSharder as Rows,
    FeatureProcessedEmbeddingBagCollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
    ParameterShardingGenerator,
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    get_module_to_default_sharders,
    get_sharding_constructor_from_type,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline.pipeline_context import PrefetchTrainPipelineContext, TrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import (
    PipelinedForward,
    PrefetchEmbeddingPipelinedForward,
    PrefetchPipelinedForward,
)
from torchrec.distributed.train_pipeline.tracing import ArgInfo, ArgInfoStepFactory, CallArgs, NodeArgsHelper, Tracer
from torchrec.distributed.train_pipeline.train_pipelines import EvalPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.types import CallArgs as CallArgsByPath
from torchrec.distributed.train_pipeline.utils import DataLoadingThread
from torchrec.distributed.types import (
    Awaitable,
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    DataType,
    DMPCollectionConfig,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    KeyValueParams,
    LazyAwaitable,
    ModuleSharder,
    MultiPassPrefetchConfig,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardedTensor,
    ShardingBucketMetadata,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from torchrec.distributed.utils import (
    CopyableMixin,
    add_params_from_parameter_sharding,
    convert_to_fbgemm_types,
    get_bucket_metadata_from_shard_metadata,
    get_unsharded_module_names,
    merge_fused_params,
    weights_bytes_in_emb_kernel,
)
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

store = tempfile.TemporaryDirectory()
dist.init_process_group("gloo", store=dist.FileStore(f"{store.name}/store", 1), rank=0, world_size=1)
cpu = torch.device("cpu")
names = ["user", "item"]
features = KeyedJaggedTensor(names, torch.tensor([1, 2, 5, 3]), lengths=torch.tensor([2, 0, 1, 1]))
env = ShardingEnv.from_process_group(dist.group.WORLD)
assert (env.world_size, env.rank) == (1, 0) and torchrec.distributed.types.ShardingEnv is ShardingEnv
assert torchrec.distributed.DistributedModelParallel is DistributedModelParallel


def bags(kind=EmbeddingBagCollection, **others):
    torch.manual_seed(0)
    return kind(tables=[EmbeddingBagConfig(6, 8, name, feature_names=[name]) for name in names], **others)


def rows():
    torch.manual_seed(0)
    return EmbeddingCollection(tables=[EmbeddingConfig(6, 8, name, feature_names=[name]) for name in names])


# a plan by generators, looked up as the module is
sharder = EmbeddingBagCollectionSharder()
assert Bags is EmbeddingBagCollectionSharder and Rows is EmbeddingCollectionSharder
kernels = {EmbeddingComputeKernel.FUSED.value, EmbeddingComputeKernel.DENSE.value}
assert KernelByPath is EmbeddingComputeKernel and kernels == {"fused", "dense"}
generators: list[ParameterShardingGenerator] = [
    table_wise(rank=0), row_wise(), column_wise(ranks=[0]), data_parallel(), table_row_wise(host_index=0),
    grid_shard(host_indexes=[0]), get_sharding_constructor_from_type(ShardingType.TABLE_WISE)(rank=0),
]  # fmt: skip
expected = bags()(features)
for generator in generators:
    plan = construct_module_sharding_plan(
        bags(), {"user": generator, "item": data_parallel()}, sharder, local_size=1, world_size=1, device_type="cpu"
    )
    assert isinstance(plan, EmbeddingModuleShardingPlan) and isinstance(plan["user"], ParameterSharding)
    model = DistributedModelParallel(
        bags(), env=env, device=cpu, plan=ShardingPlan(plan={"": plan}), sharders=[sharder], init_data_parallel=False
    )
    assert isinstance(model.module, ShardedEmbeddingBagCollection)
    out = model(features)
    assert isinstance(out, LazyAwaitable) and isinstance(out, Awaitable)
    assert torch.equal(out.values(), expected.values())
assert logger.name.endswith("embeddingbag") or logger.name
spec = plan["user"].sharding_spec
assert isinstance(spec, EnumerableShardingSpec) and isinstance(spec.shards[0], ShardMetadata)
sharded_rows = DistributedModelParallel(rows(), env=env, device=cpu, sharders=[EmbeddingCollectionSharder()])
assert isinstance(sharded_rows.module, ShardedEmbeddingCollection)
assert torch.equal(sharded_rows(features)["item"].values(), rows()(features)["item"].values())
single = DistributedModelParallel(
    torch.nn.EmbeddingBag(6, 8, mode="sum"), env=env, device=cpu, sharders=[EmbeddingBagSharder()]
)
assert single(torch.tensor([1, 2]), torch.tensor([0])).shape == (1, 8)

# every module that is sharded by default, and the others with their sharders
kinds = {type(one) for one in get_default_sharders()}
assert {
    EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, FusedEmbeddingBagCollectionSharder,
    FeatureProcessedEmbeddingBagCollectionSharder, ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder, QuantEmbeddingBagCollectionSharder, QuantEmbeddingCollectionSharder,
} <= kinds  # fmt: skip
by_module = get_module_to_default_sharders()
assert isinstance(by_module[EmbeddingBagCollection], EmbeddingBagCollectionSharder)
assert all(isinstance(one, ModuleSharder) for one in by_module.values())
fused = bags(FusedEmbeddingBagCollection, optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 1.0})
fused = DistributedModelParallel(torch.nn.Sequential(fused), env=env, device=cpu)
assert isinstance(fused.module[0], ShardedFusedEmbeddingBagCollection)


class Sum(torch.nn.Module):
    """What a tower does with its rows."""

    def forward(self, pooled):
        return pooled.values().sum(1, keepdim=True)


towers = EmbeddingTowerCollection(towers=[EmbeddingTower(bags(), Sum())])
for module, tower_sharder in (
    (EmbeddingTower(bags(), Sum()), EmbeddingTowerSharder()), (towers, EmbeddingTowerCollectionSharder()),
):  # fmt: skip
    model = DistributedModelParallel(module, env=env, device=cpu, sharders=[tower_sharder])
    assert torch.allclose(model(features) + 0, expected.values().sum(1, keepdim=True))

# a model trained over its wrapper, and through pipelines
data = RandomRecDataset(names, 4, hash_sizes=[6, 6], num_dense=3, manual_seed=1, num_generated_batches=4, num_batches=4)


@dataclass
class Plain(DataParallelWrapper):
    """Leaves the dense layers as they are."""

    seen: int = 0

    def wrap(self, dmp, env, device):
        self.seen += 1


def trained(wrapper=None):
    torch.manual_seed(0)
    train = DLRMTrain(DLRM(bags(), 3, [8], [4, 1]))
    apply_optimizer_in_backward(torch.optim.SGD, train.model.sparse_arch.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(train, env=env, device=cpu, data_parallel_wrapper=wrapper)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))


model, optimizer = trained(wrapper := Plain())
assert wrapper.seen == 1 and "_dmp_wrapped_module" in " ".join(get_unsharded_module_names(model))
shards = {name: param.shape for name, param in model.named_parameters() if ".embedding_bags." in name}
assert set(shards.values()) == {(6, 8)}
flat = torch.arange(96.0, requires_grad=True)
part = TableBatchedEmbeddingSlice(flat, 48, 96, 6, 8)
(flat * 2).sum().backward()
assert part[0, 0] == 48 and torch.equal(part.grad, torch.full((6, 8), 2.0))
state = model.state_dict()
assert all(isinstance(state[name], ShardedTensor) for name in shards)
losses = []
for batch in data:
    optimizer.zero_grad()
    loss, _ = model(batch)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
model, optimizer = trained()
pipeline, batches, piped = TrainPipelineSparseDist(model, optimizer, cpu), iter(data), []
piped.append(pipeline.progress(batches)[0].item())
for _ in range(3):
    piped.append(pipeline.progress(batches)[0].item())
assert piped == losses
scored = EvalPipelineSparseDist(model.eval(), optimizer, cpu).progress(iter(data))
assert scored is not None
assert TrainPipelineContext().index is None and isinstance(PrefetchTrainPipelineContext(), TrainPipelineContext)
thread = DataLoadingThread(cpu, iter(data), to_device_non_blocking=False, memcpy_stream_priority=0)
thread.start()
assert torch.equal(thread.get_next_batch().dense_features, next(iter(data)).dense_features)
thread.stop()
step = ArgInfoStepFactory.from_scalar(7)
assert ArgInfo(steps=[step]).process_steps(object()) == 7
call = CallArgs(args=[ArgInfo([step])], kwargs={})
assert CallArgsByPath is CallArgs and call.build_args_kwargs(None) == ([7], {})

# a pipeline of a program's own: ids are routed before the model is called
for kind, context in (
    (PipelinedForward, TrainPipelineContext()), (PrefetchPipelinedForward, PrefetchTrainPipelineContext()),
    (PrefetchEmbeddingPipelinedForward, PrefetchTrainPipelineContext()),
):  # fmt: skip
    own = DistributedModelParallel(torch.nn.Sequential(bags()), env=env, device=cpu, init_data_parallel=False)
    module = own.module[0]
    node = next(node for node in Tracer(leaf_modules=["0"]).trace(own.module).nodes if node.op == "call_module")
    args, _ = NodeArgsHelper(own.module, context, False).get_node_args(node)
    module.forward = kind("0", args, module, context)
    ctx = module.create_context()
    request = module.input_dist(ctx, args.build_args_kwargs(features)[0][0]).wait()
    if kind is PipelinedForward:
        context.module_contexts["0"], context.input_dist_tensors_requests["0"] = ctx, request
    else:
        context.module_contexts_post_prefetch["0"] = ctx
        context.module_input_post_prefetch["0"] = request.wait()
    if kind is PrefetchEmbeddingPipelinedForward:
        module.forward.compute_and_output_dist()
    assert torch.equal(own(features).values(), expected.values())

# another plan for a model in training: only what changed is told
old, new = (
    construct_module_sharding_plan(bags(), {"user": way, "item": row_wise()}, sharder, 1, 1, "cpu")
    for way in (table_wise(rank=0), row_wise())
)
volume, delta = output_sharding_plan_delta_single(old, new)
assert list(delta) == ["user"] and delta["user"].sharding_type == "row_wise"
assert list(output_sharding_plans_delta(ShardingPlan({"t": old}).plan, ShardingPlan({"t": new}).plan)) == ["t"]

# replicas of a sharded model, averaged
replicas = DMPCollection(
    bags(), device=cpu, plan=ShardingPlan({"": old}), world_size=1, sharding_group_size=1, global_pg=dist.group.WORLD,
    sharders=[sharder],
)  # fmt: skip
replicas.sync()
assert torch.equal(replicas(features).values(), expected.values())
assert (
    DMPCollectionConfig(module=EmbeddingBagCollection, plan=ShardingPlan({}), sharding_group_size=1).sharding_group_size
    == 1
)

# exchanges and what compresses them
config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
assert isinstance(get_qcomm_codecs(config), QuantizedCommCodecs)
registry = get_qcomm_codecs_registry(config)
compressed = DistributedModelParallel(
    bags(), env=env, device=cpu, sharders=[EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)]
)
assert torch.allclose(compressed(features).values(), expected.values(), atol=1e-3)
set_gradient_division(True)
assert torchrec.distributed.comm_ops.get_gradient_division() is True
gathered = all_gather_base_pooled(torch.ones(2, 3), dist.group.WORLD).wait()
assert torch.equal(gathered, torch.ones(2, 3))
divided, order = bucketize_kjt_before_all2all(
    features, num_buckets=2, block_sizes=torch.tensor([3, 3]), output_permute=True
)
assert divided.values().tolist() == [1, 2, 2, 0] and order is not None

# settings of tables
settings = ParameterSharding(
    "row_wise", "fused", [0], spec, cache_params=CacheParams(algorithm=CacheAlgorithm.LRU, load_factor=0.5),
    key_value_params=KeyValueParams(ssd_storage_directory="rows"), bounds_check_mode=BoundsCheckMode.WARNING,
    output_dtype=DataType.FP16,
)  # fmt: skip
joined = add_params_from_parameter_sharding({"lr": 0.1}, settings)
assert joined["cache_load_factor"] == 0.5 and joined["bounds_check_mode"] == BoundsCheckMode.WARNING
assert convert_to_fbgemm_types(joined)["lr"] == 0.1
assert merge_fused_params({"learning_rate": 0.1}, {"lr": 0.2}) == {"learning_rate": 0.2}
assert MultiPassPrefetchConfig(num_passes=3).num_passes == 3
assert weights_bytes_in_emb_kernel(sharded_rows.module) == 2 * 6 * 8 * 4
buckets = get_bucket_metadata_from_shard_metadata(
    [ShardMetadata([0, 0], [4, 8], "rank:0/cpu"), ShardMetadata([4, 0], [2, 8], "rank:0/cpu")], num_buckets=3
)
assert isinstance(buckets, ShardingBucketMetadata) and buckets.num_buckets_per_shard == [2, 1]
set_propogate_device(True)
set_propogate_device(False)


class Copied(CopyableMixin):
    """A module that copies itself."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))


copied = Copied()
assert copied.copy(cpu) is not copied and torch.equal(copied.copy(cpu).weight, copied.weight)
dist.destroy_process_group()
