"""`ShardedModule`: modules of one's own over ranks, and the stages of ours that no other test calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import bag_tables
from ranks import error_of, run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    ModuleSharder,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
)
from shardwise.embeddings import FeatureProcessedEmbeddingBagCollection
from shardwise.sharding import Awaitable, LazyAwaitable, NoWait, construct_module_sharding_plan, row_wise, table_wise
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.dmp.unwrap import sharded_parameter_names
from shardwise.sharding.modules.embedding_bag import EmbeddingBagSharder, ShardedEmbeddingBag
from shardwise.sharding.plan.plan import EmbeddingModuleShardingPlan
from shardwise.sharding.plan.sharded_module import NullShardedModuleContext

pytestmark = pytest.mark.ranks

ROWS, DIM, SAMPLES = 12, 4, 6


class Pool(nn.Module):
    """A table of numbers, looked up by id: [N, DIM]."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(float(ROWS * DIM)).view(ROWS, DIM))

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows[ids]


class PoolContext:
    """The ids of a step."""

    ids: Tensor


class Rows(LazyAwaitable[Tensor]):
    """Rows of all ranks, added."""

    awaited_type = Tensor

    def __init__(self, exchange: Exchange, rows: Tensor, own: slice) -> None:
        super().__init__()
        self._exchange, self._rows, self._own = exchange, rows, own

    def _wait_impl(self) -> Tensor:
        sizes = [self._rows.numel()] * self._exchange.world_size
        everywhere = self._rows.flatten().repeat(self._exchange.world_size)
        of_all = self._exchange.all_to_all(everywhere, sizes, sizes, what="rows").wait()
        return of_all.view(self._exchange.world_size, *self._rows.shape).sum(0)[self._own]


class ShardedPool(ShardedModule[Tensor, Tensor, Tensor, PoolContext]):
    """Each rank has some of the rows, and adds zeros for others. All batches have one size."""

    def __init__(self, module: Pool, env: ShardingEnv, codecs: Mapping[str, Any] | None = None) -> None:
        super().__init__(codecs)
        self.exchange, self.world, self.rank = Exchange(env.require_group()), env.world_size, env.rank
        self.rows = nn.Parameter(module.rows.detach().clone())
        with torch.no_grad():
            self.rows[torch.arange(ROWS) % self.world != self.rank] = 0
        self.stages: list[str] = []

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return Pool

    def create_context(self) -> PoolContext:
        return PoolContext()

    def input_dist(self, ctx: PoolContext, ids: Tensor) -> Awaitable[Awaitable[Tensor]]:  # type: ignore[override]
        self.stages.append("input_dist")
        ctx.ids = ids
        sizes = [ids.numel()] * self.world
        everyones = self.exchange.all_to_all(ids.repeat(self.world), sizes, sizes, what="ids").wait()
        return NoWait(NoWait(everyones))

    def compute(self, ctx: PoolContext, dist_input: Tensor) -> Tensor:
        self.stages.append("compute")
        return self.rows[dist_input]

    def output_dist(self, ctx: PoolContext, output: Tensor) -> Rows:
        self.stages.append("output_dist")
        begin = self.rank * ctx.ids.numel()
        return Rows(self.exchange, output.detach(), slice(begin, begin + ctx.ids.numel()))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        yield f"{prefix}.rows" if prefix else "rows"

    def write_dist(self, ctx: PoolContext, ids: Tensor, values: Tensor) -> Any:  # type: ignore[override]
        ctx.ids = ids
        return NoWait(NoWait(values))

    @torch.no_grad()
    def update(self, ctx: PoolContext, dist_input: Tensor) -> None:
        own = ctx.ids % self.world == self.rank
        self.rows[ctx.ids[own]] = dist_input[own]


class PoolSharder(ModuleSharder[Pool]):
    """Gives pools to all ranks."""

    @property
    def module_type(self) -> type[Pool]:
        return Pool

    def shard(  # type: ignore[override]
        self, module: Pool, params: Mapping[str, ParameterSharding], env: ShardingEnv, device: Any = None,
        module_fqn: str | None = None,
    ) -> ShardedPool:  # fmt: skip
        return ShardedPool(module, env, self.qcomm_codecs_registry)


class Net(nn.Module):
    """A pool and a layer."""

    # its sharded form later
    pool: Any

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool, self.over = Pool(), nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.over(self.pool(ids) / ROWS)  # type: ignore[no-any-return]


def of_a_users_module() -> tuple[Any, ...]:
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, net = Net(), Net()
    plan = EmbeddingModuleShardingPlan({"rows": ParameterSharding("data_parallel", "dense", list(range(world)))})
    dmp = DistributedModelParallel(net, plan=ShardingPlan({"pool": plan}), sharders=[PoolSharder()])
    pool, ids = net.pool, torch.arange(SAMPLES) * (rank + 1) % ROWS
    output = dmp(ids)
    stages, pool.stages = pool.stages, []
    same = torch.equal(output, plain(ids))
    # one node in torch.fx, whose tracer does not know the class
    traced = torch.fx.symbolic_trace(net)
    same = same and torch.equal(traced(ids), output) and [node.op for node in traced.graph.nodes][1] == "call_module"
    pool.stages.clear()
    output.sum().backward()
    # of the layer, by DDP; the pool's own are left alone
    averaged = [name for name, param in net.named_parameters() if param.grad is not None]
    pool.write(torch.tensor([3, 4]), torch.tensor([[7.0] * DIM, [8.0] * DIM]))
    written = pool(torch.tensor([4, 3] * 3))[:2, 0].tolist()
    ignored = sorted(sharded_parameter_names(dmp))
    interface = isinstance(pool, ShardedModule), pool.unsharded_module_type is Pool, pool.qcomm_codecs_registry
    return same, stages, averaged, written, ignored, interface, pool.prefetch(ids), pool.preprocess_input([1], {"a": 2})


def test_a_module_of_ones_own_is_sharded_and_runs_its_stages() -> None:
    stages = ["input_dist", "compute", "output_dist"]
    wanted = (
        True,
        stages,
        ["over.weight", "over.bias"],
        [8.0, 7.0],
        ["pool.rows"],
        (True, True, {}),
        None,
        ([1], {"a": 2}),
    )
    assert run_ranks(2, of_a_users_module) == [wanted] * 2


class Unwritten(ShardedPool):
    """A pool that nobody writes to."""

    write_dist = ShardedModule.write_dist
    update = ShardedModule.update


def unwritten() -> tuple[list[str], str]:
    pool = Unwritten(Pool(), ShardingEnv.from_process_group(dist.group.WORLD))  # type: ignore[arg-type]
    names = list(ShardedModule.sharded_parameter_names(pool, "a"))
    return names, error_of(pool.write, 1)


def test_what_a_subclass_leaves_out_says_so() -> None:
    """All parameters count as sharded, and a write is refused."""
    error = "NotImplementedError: Unwritten is not written to: it has no write_dist"
    assert run_ranks(1, unwritten) == [(["a.rows"], error)]
    with pytest.raises(TypeError, match="abstract"):
        ShardedModule()  # type: ignore[abstract]


def test_a_context_that_keeps_nothing_refuses_what_it_is_given() -> None:
    with pytest.raises(AttributeError, match="'ids' neither"):
        NullShardedModuleContext().ids = 1


def bags_by_stages(mode: str) -> list[bool]:
    """Two batches of an nn.EmbeddingBag under way, and one that is bad on rank 1."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    whole = nn.EmbeddingBag(ROWS, DIM, mode=mode)
    sharder = EmbeddingBagSharder()
    plan = construct_module_sharding_plan(whole, {"weight": row_wise()}, sharder, world, world, "cpu")
    alone = nn.EmbeddingBag(ROWS, DIM, mode=mode, _weight=whole.weight.detach().clone())
    sharded = sharder.shard(whole, plan, ShardingEnv.from_process_group(dist.group.WORLD))  # type: ignore[arg-type]
    contexts = [sharded.create_context() for _ in range(2)]
    batches = [(torch.tensor([1, 5, 7, 2 + step + rank]), torch.tensor([0, 3])) for step in range(2)]
    sizes = [sharded.input_dist(ctx, *batch) for ctx, batch in zip(contexts, batches, strict=True)]
    arrived = [awaitable.wait().wait() for awaitable in sizes]
    outputs: list[Any] = [sharded.compute_and_output_dist(ctx, s) for ctx, s in zip(contexts, arrived, strict=True)]
    close = [torch.allclose(out.wait(), alone(*batch)) for out, batch in zip(outputs, batches, strict=True)]
    bad = sharded.input_dist(sharded.create_context(), torch.tensor([ROWS * (1 + rank) - 1]), torch.tensor([0]))
    error = error_of(bad.wait)
    names = ShardedEmbeddingBag.extend_shard_name("t") == "weight" == next(iter(sharded.sharded_parameter_names()))
    kinds = isinstance(sharded, ShardedModule) and sharded.unsharded_module_type is nn.EmbeddingBag
    return [*close, error.startswith("RefusedIndexError: rank 1"), names, kinds]


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_stages_of_bags_give_the_rows_of_a_forward(mode: str) -> None:
    assert run_ranks(2, bags_by_stages, mode) == [[True] * 5] * 2


def kinds_of_ours() -> list[bool]:
    """Of a collection and of a feature-processed one: class, class before, names of tables, and codecs."""
    from shardwise import CommType, EmbeddingBagCollectionSharder, QCommsConfig, get_qcomm_codecs_registry
    from shardwise.embeddings import PositionWeightedModule
    from shardwise.sharding.modules.nested import FeatureProcessedEmbeddingBagCollectionSharder

    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16)) or {}
    of_bags = EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)
    bags = EmbeddingBagCollection(bag_tables({"a": ROWS}), is_weighted=True)
    plan = construct_module_sharding_plan(bags, {"ta": table_wise(0)}, world_size=1, device_type="cpu")
    plain = of_bags.shard(bags, plan, env)
    processed: Any = FeatureProcessedEmbeddingBagCollection(bags, {"a": PositionWeightedModule(3)})
    around = FeatureProcessedEmbeddingBagCollectionSharder(of_bags).shard(processed, plan, env)
    checks = []
    for module, before in ((plain, EmbeddingBagCollection), (around, FeatureProcessedEmbeddingBagCollection)):
        checks += [isinstance(module, ShardedModule), module.unsharded_module_type is before]
        checks += [list(module.qcomm_codecs_registry) == list(codecs)]
    return [*checks, plain.extend_shard_name("ta") in dict(plain.named_parameters())]


def test_our_modules_say_what_they_were() -> None:
    assert run_ranks(1, kinds_of_ours) == [[True] * 7]


def test_torchrecs_names_are_served() -> None:
    package, *submodules = (
        import_module(f"shardwise.torchrec.distributed{path}") for path in ("", ".model_parallel", ".types")
    )
    assert all(module.ShardedModule is ShardedModule for module in (package, *submodules))
    assert submodules[1].NullShardedModuleContext is NullShardedModuleContext
