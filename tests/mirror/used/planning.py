# type: ignore  # torchrec is served at run time
"""The planner's parts, TorchRec's own and those that a program writes in their place."""

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.constants import (
    BATCH_SIZE,
    CROSS_NODE_BANDWIDTH,
    DDR_MEM_BW,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
    kernel_bw_lookup,
)
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner, SortBy
from torchrec.distributed.planner.perf_models import NoopPerfModel, NoopStorageModel
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner as PlannerByPath, extract_plan
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats, EmbeddingPerfEstimator
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    DeviceHardware,
    Enumerator,
    ParameterConstraints as ConstraintsByPath,
    PartitionByType,
    Partitioner,
    Perf,
    PerfModel,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    Proposer,
    Shard,
    ShardEstimator,
    ShardingOption,
    Stats,
    Storage,
    StorageReservation,
    Topology as TopologyByPath,
)
from torchrec.distributed.planner.utils import BinarySearchPredicate, LuusJaakolaSearch, reset_shard_rank
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

assert PlannerByPath is EmbeddingShardingPlanner and ConstraintsByPath is ParameterConstraints
assert TopologyByPath is Topology
sharder = EmbeddingBagCollectionSharder()
names = ["user", "item", "shop"]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(1000 * (n + 1), 64, name, feature_names=[name]) for n, name in enumerate(names)],
            device=torch.device("meta"),
        )


gib = 1024**3
topology = Topology(
    world_size=2, compute_device="cuda", hbm_cap=4 * gib, ddr_cap=8 * gib, intra_host_bw=INTRA_NODE_BANDWIDTH,
    inter_host_bw=CROSS_NODE_BANDWIDTH, hbm_mem_bw=HBM_MEM_BW, ddr_mem_bw=DDR_MEM_BW,
)  # fmt: skip
storage = topology.devices[0].storage
assert (storage.hbm, storage.ddr) == (4 * gib, 8 * gib) and (storage + Storage(1, 2)).ddr == 8 * gib + 2
assert isinstance(topology.devices[0], DeviceHardware) and BATCH_SIZE == 512
assert isinstance(topology.comms_bandwidths, BasicCommsBandwidths)
speed = kernel_bw_lookup("cuda", "fused", HBM_MEM_BW, DDR_MEM_BW, HBM_TO_DDR_MEM_BW)
cached = kernel_bw_lookup("cuda", "fused_uvm_caching", HBM_MEM_BW, DDR_MEM_BW, HBM_TO_DDR_MEM_BW, 0.2)
assert HBM_TO_DDR_MEM_BW / 10 < cached < speed <= HBM_MEM_BW

constraints = {"user": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])}
enumerator = EmbeddingEnumerator(topology=topology, batch_size=BATCH_SIZE, constraints=constraints)
assert isinstance(enumerator, Enumerator)
space = enumerator.enumerate(module=Model(), sharders=[sharder])
assert {option.sharding_type for option in space if option.name == "user"} == {"row_wise"}
assert all(isinstance(option, ShardingOption) and isinstance(option.shards[0], Shard) for option in space)
assert space[0].partition_by in {kind.value for kind in PartitionByType}
assert all(isinstance(shard.perf, Perf) and shard.perf.total > 0 for option in space for shard in option.shards)
estimator = EmbeddingPerfEstimator(topology=topology, constraints=constraints)
assert isinstance(estimator, ShardEstimator)
told = [shard.perf.total for shard in space[0].shards]
for shard in space[0].shards:
    shard.perf = None
only_time = EmbeddingEnumerator(topology, BATCH_SIZE, constraints=constraints, estimator=estimator)
only_time.enumerate(Model(), [sharder])
only_time.populate_estimates(space[:1])
assert [shard.perf.total for shard in space[0].shards] == told

# proposals, placed and rated
for proposer in (
    GreedyProposer(), UniformProposer(), GridSearchProposer(), DynamicProgrammingProposer(),
    EmbeddingOffloadScaleupProposer(),
):  # fmt: skip
    assert isinstance(proposer, Proposer)
    proposer.load(search_space=space, enumerator=enumerator)
    proposal = proposer.propose()
    assert sorted(option.name for option in proposal) == sorted(names)
reserved = HeuristicalStorageReservation(percentage=0.1)
assert isinstance(reserved, StorageReservation)
left = reserved.reserve(topology, BATCH_SIZE, Model(), [sharder], constraints)
assert left.devices[0].storage.hbm < topology.devices[0].storage.hbm
ratings = []
for partitioner in (GreedyPerfPartitioner(sort_by=SortBy.PERF), MemoryBalancedPartitioner()):
    assert isinstance(partitioner, Partitioner)
    reset_shard_rank(proposal)
    assert all(shard.rank is None for option in proposal for shard in option.shards)
    placed = partitioner.partition(proposal=proposal, storage_constraint=left)
    assert all(shard.rank in (0, 1) for option in placed for shard in option.shards)
    for model in (NoopPerfModel(topology=topology), NoopStorageModel(topology=topology)):
        assert isinstance(model, PerfModel)
        ratings.append(model.rate(placed))
assert all(rating > 0 for rating in ratings)
made = extract_plan(space, {option.storage_hash(): option for option in placed})
assert sorted(option.name for option in made) == sorted(names)
assert all(shard.rank is not None for option in made for shard in option.shards)


# a planner of a program's own parts
class First(Proposer):
    """The first option of each table."""

    def load(self, search_space, enumerator=None):
        first = {}
        for option in search_space:
            first.setdefault(option.name, option)
        self.proposal = list(first.values())

    def feedback(self, partitionable, plan=None, perf_rating=None, storage_constraint=None):
        self.proposal = None

    def propose(self):
        return self.proposal


class Heard(Stats):
    """Remembers what it was told."""

    plans = []

    def log(self, sharding_plan, **others):
        self.plans.append(sharding_plan)


class Loader(PlanLoader):
    """A plan that was made before."""

    def load(self):
        return self.options

    def plan_context_hash(self):
        return self.hash


planner = EmbeddingShardingPlanner(
    topology=topology, constraints=constraints, proposer=[First()], stats=[Heard()], partitioner=GreedyPerfPartitioner()
)
plan = planner.plan(Model(), [sharder])
assert plan.plan["tables"]["user"].sharding_type == "row_wise" and Heard.plans == [plan]
loader = Loader()
loader.options = {option.storage_hash(): option for option in placed}
loader.hash = None
again = EmbeddingShardingPlanner(topology=topology, constraints=constraints, plan_loader=loader)
assert set(again.plan(Model(), [sharder]).plan["tables"]) == set(names)

# what cannot be placed says so
tiny = Topology(world_size=2, compute_device="cuda", hbm_cap=1000, ddr_cap=1000)
try:
    EmbeddingShardingPlanner(topology=tiny).plan(Model(), [sharder])
except PlannerError as error:
    assert error.error_type in set(PlannerErrorType) and str(error)
else:
    raise AssertionError("1000 bytes were enough")

# searches
search = BinarySearchPredicate(1, 100, 0)
tried = []
while (number := search.next(not tried or tried[-1] <= 42)) is not None:
    tried.append(number)
assert max(number for number in tried if number <= 42) == 42 and len(tried) < 10
minimum = LuusJaakolaSearch(0, 10, max_iterations=50, seed=1)
points = []
while (point := minimum.next((points[-1] - 3.0) ** 2 if points else 0.0)) is not None:
    points.append(point)
assert min(abs(point - 3.0) for point in points) < 0.5

# statistics of a cache: rows by how often they are asked for
stats = EmbeddingOffloadStats(
    cacheability=0.2, expected_lookups=100, mrc_hist_counts=torch.tensor([50, 30, 20]), height=3
)
assert stats.expected_lookups == 100 and stats.expected_miss_rate(1.0) <= stats.expected_miss_rate(0.1)
