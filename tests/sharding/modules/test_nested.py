"""Modules around collections over ranks, feature-processed ones and towers: training, names, and faults of one rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt, share
from model_zoo import bag_tables, fused, row_tables
from ranks import error_of, run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingCollection,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    ShardingPlan,
)
from shardwise.embeddings import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from shardwise.sharding import (
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.modules.nested import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)

pytestmark = pytest.mark.ranks

ROWS = {"a": 20, "b": 11, "c": 7, "d": 5}
DIM, SAMPLES, LONGEST, STEPS = 8, 8, 4, 4
# losses of all steps, and dense parameters after them
Trained = tuple[list[float], dict[str, Tensor]]


def bags(names: Sequence[str], *, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(bag_tables({name: ROWS[name] for name in names}), weighted)


class Interact(nn.Module):
    """Any of the collections' outputs to [B, 3]."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.dense = nn.Linear(columns, 3)

    def forward(self, output: KeyedTensor | dict[str, JaggedTensor]) -> Tensor:
        if isinstance(output, dict):
            return self.dense(torch.cat([jagged.to_padded_dense(2).flatten(1) for jagged in output.values()], dim=1))
        return self.dense(output.values()).tanh()


class Net(nn.Module):
    """The mean of a loss of a nested module of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.nested = fused(towers() if kind == "towers" else processed(kind), torch.optim.Adagrad)

    def forward(self, batch: Sequence[KeyedJaggedTensor]) -> Tensor:
        output = self.nested(*batch)
        return (output if isinstance(output, Tensor) else output.values()).sin().sum(1).mean()


def processed(kind: str) -> FeatureProcessedEmbeddingBagCollection:
    """With a processor for each feature, or one for all."""
    processors: Any = PositionWeightedModuleCollection(dict.fromkeys(ROWS, LONGEST))
    if kind == "one each":
        processors = {name: PositionWeightedModule(LONGEST) for name in ROWS}
    return FeatureProcessedEmbeddingBagCollection(bags("abcd", weighted=True), processors)


def towers() -> EmbeddingTowerCollection:
    """One of each kind of embedding module."""
    positions = PositionWeightedModuleCollection({"d": 3})
    return EmbeddingTowerCollection([
        EmbeddingTower(bags("a"), Interact(DIM)),
        EmbeddingTower(bags("b", weighted=True), Interact(DIM)),
        EmbeddingTower(EmbeddingCollection(row_tables({"c": ROWS["c"]})), Interact(2 * DIM)),
        EmbeddingTower(FeatureProcessedEmbeddingBagCollection(bags("d", weighted=True), positions), Interact(DIM)),
    ])  # fmt: skip


def batch_of(kind: str, step: int, of: range | None = None, longest: int = LONGEST) -> list[KeyedJaggedTensor]:
    """Some samples of a step: one batch with a feature that nothing looks up, or what has no weights and what has."""
    if kind == "towers":
        plain = random_kjt({name: ROWS[name] for name in "dac"}, SAMPLES, seed=step, longest=2, of=of)
        return [plain, random_kjt({"b": ROWS["b"]}, SAMPLES, seed=step, longest=2, weighted=True, of=of)]
    rows = {"x": 1000, **{name: ROWS[name] for name in "dcba"}}
    return [random_kjt(rows, SAMPLES, seed=step, longest=longest, of=of)]


def wrapped(kind: str, path: str = "") -> tuple[Net, DistributedModelParallel]:
    """The model in parts over the ranks; the plan is for the module at `path`."""
    world, net = dist.get_world_size(), Net(kind)
    where = {
        "ta": row_wise(), "tb": column_wise(list(range(min(world, 2)))), "tc": data_parallel(),
        "td": table_wise(world - 1),
    }  # fmt: skip
    sharder = None
    if kind == "towers":
        where = {"ta": table_row_wise(0), "tb": table_column_wise(0), "tc": row_wise(), "td": table_wise(world - 1)}
        sharder = EmbeddingTowerCollectionSharder()
    plan = construct_module_sharding_plan(net.nested, where, sharder, world_size=world, device_type="cpu")
    sharders = [*get_default_sharders(), *([sharder] if sharder else [])]
    return net, DistributedModelParallel(net, plan=ShardingPlan({f"nested{path}": plan}), sharders=sharders)


def trained(model: nn.Module, batch: Callable[[int], Any]) -> Trained:
    """The loss of each step, and the parameters that are not fused after all of them."""
    dense = {name: param for name, param in model.named_parameters() if "dense" in name or "position" in name}
    optimizer, losses = torch.optim.SGD(dense.values(), lr=0.3), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: param.detach().clone() for name, param in dense.items()}


@cache
def alone(kind: str) -> Trained:
    return trained(Net(kind), lambda step: batch_of(kind, step))


def train_over_ranks(kind: str, how: str) -> tuple[Trained, list[str]]:
    if how == "by default":
        dmp = DistributedModelParallel(Net(kind))
        assert "nested.towers.0.embedding" in dmp.plan.plan
    else:
        net, dmp = wrapped(kind, "._embedding_bag_collection" if how == "collection inside" else "")
        wanted: type[nn.Module] = {
            ("towers", ""): ShardedEmbeddingTowerCollection,
            ("one each", "collection inside"): FeatureProcessedEmbeddingBagCollection,
        }.get((kind, how), ShardedFeatureProcessedEmbeddingBagCollection)
        assert type(net.nested) is wanted
    run = trained(dmp, lambda step: batch_of(kind, step, share(SAMPLES)))
    return run, [name for name, _ in dmp.named_parameters()]


@pytest.mark.parametrize(
    ("world", "kind", "how"),
    [
        *((world, kind, "") for world in (1, 2, 4) for kind in ("collection", "one each", "towers")),
        # with the default sharders the collections inside are sharded one by one, and that comes to the same
        (2, "towers", "by default"),
        # and a plan may name the collection inside
        (2, "one each", "collection inside"),
    ],
)
def test_nested_modules_train_as_in_one_process(world: int, kind: str, how: str) -> None:
    """Position weights' gradients come back through the exchange, so the second loss shows both."""
    wanted_losses, wanted = alone(kind)
    ranks = run_ranks(world, train_over_ranks, kind, how)
    for step, loss in enumerate(wanted_losses):
        assert abs(sum(losses[step] for (losses, _), _ in ranks) / world - loss) <= 1e-5
    for (_, dense), names in ranks:
        assert names == [name for name, _ in Net(kind).named_parameters()]
        assert dense.keys() == wanted.keys()
        for name, value in wanted.items():
            assert "position" not in name or (value - 1).abs().max() > 1e-3, "it was trained"
            assert (dense[name] - value).abs().max() <= 1e-5, name


def faults(kind: str) -> list[str]:
    """What is raised where rank 1 has a bad batch; a good one after them trains."""
    _, dmp = wrapped(kind)
    good = batch_of(kind, 0, share(SAMPLES))
    bad: list[Any] = [batch_of(kind, 1, longest=LONGEST + 3), [good[0].permute([0, 1])]]
    if kind == "towers":
        bad = [[good[0], None], [None, good[1]]]
    errors = [error_of(dmp, batch if dist.get_rank() == 1 else good) for batch in bad]
    dmp(good).backward()
    return errors


def by_stages(kind: str) -> tuple[bool, list[str], list[str]]:
    """Whether stages that are called one by one train to a forward's bits, and what a bad batch of rank 1 raises."""
    (plain, _), (net, _) = wrapped(kind), wrapped(kind)
    module: Any = net.nested

    class Staged(nn.Module):
        """Takes the place of the module's forward, with a batch that is routed and one whose sizes are under way."""

        def __init__(self) -> None:
            super().__init__()
            self.under_way: list[tuple[Any, Any]] = []

        def start(self, step: int) -> None:
            ctx = module.create_context()
            self.under_way.append((ctx, module.input_dist(ctx, *batch_of(kind, step, share(SAMPLES)))))

        def forward(self, step: int) -> Tensor:
            if not self.under_way:
                self.start(step)
            ctx, sizes = self.under_way.pop(0)
            if not any(param.requires_grad for name, param in net.named_parameters() if "position" in name):
                self.start(step + 1)
            ids = sizes.wait().wait()
            assert ctx.step is ids and module.prefetch(ids)
            output = module.compute_and_output_dist(ctx, ids)
            return (output if isinstance(output, Tensor) else output.values()).sin().sum(1).mean()

    staged = Staged()
    staged.net = net
    expected = trained(plain, lambda step: batch_of(kind, step, share(SAMPLES)))
    run = trained(staged, lambda step: step)
    same = expected[0] == run[0] and all(
        torch.equal(value, run[1][f"net.{name}"]) for name, value in expected[1].items()
    )
    for _, sizes in staged.under_way:
        sizes.wait().wait()
    good = batch_of(kind, 0, share(SAMPLES))
    bad: list[Any] = [None, good[1]] if kind == "towers" else [batch_of(kind, 1, longest=LONGEST + 3)[0]]

    def sizes_of(batch: Sequence[Any]) -> Any:
        return module.input_dist(module.create_context(), *batch)

    texts = [error_of(sizes_of(bad if dist.get_rank() == 1 else good).wait)] if dist.get_world_size() == 2 else []
    # and the next batch is a good one
    assert len(sizes_of(good).wait().wait()) == (4 if kind == "towers" else 1)
    return same, texts, sorted(module.sharded_parameter_names("m"))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["collection", "one each", "towers"])
def test_stages_one_by_one_are_the_forward(world: int, kind: str) -> None:
    for same, texts, names in run_ranks(world, by_stages, kind):
        assert same
        assert names and all(name.startswith("m.") and name.endswith(".weight") for name in names)
        pattern = "tower 0 takes features" if kind == "towers" else LONG
        assert len(texts) == world - 1 and all(re.search(pattern, text) for text in texts), texts


LONG = r"^IndexError: rank 1: feature '\w', sample \d: \d ids, but there are weights for 4 positions"
MISSING = r"^KeyError: rank 1: features \['a', 'b', 'c'\] are not in the batch"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("collection", (LONG, MISSING)),
        ("one each", (LONG, MISSING)),
        ("towers", ("^ValueError: rank 1: tower 1 takes weighted_features: give them to forward",
                    "^ValueError: rank 1: tower 0 takes features: give them to forward")),
    ],
)  # fmt: skip
def test_what_one_rank_raises_is_raised_on_all(kind: str, expected: tuple[str, str]) -> None:
    """A bag longer than the position weights raised on its rank alone, and the others waited for its ids."""
    for errors in run_ranks(2, faults, kind):
        for pattern, text in zip(expected, errors, strict=True):
            assert re.search(pattern, text), text


PAIR = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


def one_tower() -> tuple[Tensor, list[str]]:
    torch.manual_seed(5)
    tower, sharder = EmbeddingTower(bags("ab"), Interact(2 * DIM)), EmbeddingTowerSharder({"learning_rate": 0.5})
    where = apply_to_all(tower, data_parallel(), sharder)
    plan = construct_module_sharding_plan(tower, where, sharder, world_size=2, device_type="cpu")
    dmp = DistributedModelParallel(tower, plan=ShardingPlan({"": plan}), sharders=[sharder])
    assert type(dmp.module) is ShardedEmbeddingTower
    return dmp(PAIR).detach(), [name for name, _ in dmp.named_parameters()]


def test_a_tower_can_be_the_model() -> None:
    torch.manual_seed(5)
    tower = EmbeddingTower(bags("ab"), Interact(2 * DIM))
    for output, names in run_ranks(2, one_tower):
        assert torch.allclose(output, tower(PAIR))
        assert set(names) == set(tower.state_dict())


def test_what_cannot_be_sharded_in_a_tower_is_refused() -> None:
    sharder = EmbeddingTowerCollectionSharder()
    with pytest.raises(TypeError, match="EmbeddingTowerSharder: a Linear inside cannot be sharded"):
        sharder.shardable_parameters(EmbeddingTowerCollection([EmbeddingTower(nn.Linear(2, 2), nn.Identity())]))
    twins = EmbeddingTowerCollection([EmbeddingTower(bags("a"), nn.Identity()) for _ in range(2)])
    with pytest.raises(ValueError, match="tower 1: another tower has a table 'ta'"):
        sharder.shardable_parameters(twins)
    with pytest.raises(TypeError, match=re.escape("EmbeddingTowerSharder shards EmbeddingTower, got Linear")):
        EmbeddingTowerSharder().shard(nn.Linear(2, 2), {}, None)  # type: ignore[arg-type]


def test_the_sharder_takes_the_one_of_the_collection_and_its_default_optimizer() -> None:
    sharder = FeatureProcessedEmbeddingBagCollectionSharder()
    assert list(sharder.shardable_parameters(processed("collection"))) == ["ta", "tb", "tc", "td"]
    assert sharder.sharded_module_type is ShardedFeatureProcessedEmbeddingBagCollection
    with pytest.raises(ValueError, match="qcomm_codecs_registry: the ebc_sharder that is given has its own"):
        FeatureProcessedEmbeddingBagCollectionSharder(sharder._ebc_sharder, {"codecs": 1})
    with pytest.raises(TypeError, match="CollectionSharder shards FeatureProcessedEmbedding.*, got Linear"):
        sharder.shard(nn.Linear(2, 2), {}, None)  # type: ignore[arg-type]
