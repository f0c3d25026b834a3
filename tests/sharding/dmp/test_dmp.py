"""Whole models under `DistributedModelParallel`, on real gloo ranks, against one process that sees the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from model_zoo import fused
from ranks import run_ranks
from sharding_steps import local_part, local_tensors
from torch import Tensor, nn

from shardwise import (
    DLRM,
    Batch,
    CombinedOptimizer,
    DistributedModelParallel,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedOptimizerWrapper,
    KeyedTensor,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.sharding import construct_module_sharding_plan, data_parallel, table_wise

pytestmark = pytest.mark.ranks

DIM, BATCH = 8, 8
# table -> rows, and the features that look it up
TABLES = {"user": (40, ["user"]), "item": (30, ["item", "history"]), "genre": (6, ["genre"]), "day": (7, ["day"])}
ROWS = {feature: rows for rows, features in TABLES.values() for feature in features}


def ebc(*, names: tuple[str, ...] = tuple(TABLES), device: str = "cpu") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(TABLES[n][0], DIM, n, feature_names=list(TABLES[n][1])) for n in names], device=device
    )


def ec(*, names: tuple[str, ...] = ("user", "day"), device: str = "cpu") -> EmbeddingCollection:
    return EmbeddingCollection(
        [EmbeddingConfig(TABLES[n][0], DIM, n, feature_names=list(TABLES[n][1])) for n in names], device=device
    )


def batch_of(step: int, begin: int = 0, end: int = BATCH) -> Batch:
    """Samples [begin, end) of the global batch of a step."""
    dense, labels = torch.rand(BATCH, 3, generator=torch.Generator().manual_seed(step)), torch.arange(BATCH) % 2
    features = random_kjt(ROWS, BATCH, seed=step, of=range(begin, end))
    return Batch(dense[begin:end], features, labels[begin:end].float())


def share_of(step: int) -> Batch:
    """This rank's share of the global batch."""
    per_rank = BATCH // dist.get_world_size()
    return batch_of(step, dist.get_rank() * per_rank, (dist.get_rank() + 1) * per_rank)


def optimizers(model: nn.Module, fused: CombinedOptimizer) -> CombinedOptimizer:
    """The idiom of TorchRec's DLRM example."""
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    trained = {name: param for name, param in rest.items() if param.requires_grad}
    return CombinedOptimizer([fused, KeyedOptimizerWrapper(trained, partial(torch.optim.Adagrad, lr=0.05))])


class Net(nn.Module):
    """Some collections, some dense layers, and the mean squared error of their sum."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        dense = kind != "no dense layers"
        self.ebc = None if kind == "no collections" else ebc()
        # the same collection by a second path
        self.again = self.ebc if kind == "one collection twice" else None
        self.other = ebc(names=("user", "genre")) if kind == "two collections" else None
        self.ec = ec() if kind == "sequences beside pooled" else None
        self.first = nn.Linear(3, DIM) if dense else None
        self.unused = nn.Linear(2, 2) if kind == "a layer that no loss reaches" else None
        if kind == "a frozen table":
            self.ebc.embedding_bags["item"].weight.requires_grad_(False)  # type: ignore[union-attr]
        if kind == "frozen dense layers":
            self.first.requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, batch: Batch) -> Tensor:
        parts = [torch.zeros(len(batch.labels), 1)]
        for collection in (self.ebc, self.again, self.other):
            if collection is not None:
                parts.append(collection(batch.sparse_features).values())
        if self.ec is not None:
            parts += [jagged.to_padded_dense(4).flatten(1) for jagged in self.ec(batch.sparse_features).values()]
        if self.first is not None:
            parts.append(self.first(batch.dense_features).tanh())
        return ((torch.cat(parts, dim=1).sin().sum(1) - batch.labels) ** 2).mean()


KINDS = (
    "one collection", "two collections", "sequences beside pooled", "one collection twice", "no collections",
    "no dense layers", "a layer that no loss reaches", "a frozen table", "frozen dense layers",
)  # fmt: skip


def mark_tables(model: nn.Module) -> None:
    """Every table but `day` trains in the backward."""
    for name, param in model.named_parameters():
        if "embedding" in name and "day" not in name:
            apply_optimizer_in_backward(RowWiseAdagrad, [param], {"lr": 0.1})


def collections_of(model: nn.Module) -> dict[str, Any]:
    """Collections by their first path."""
    named = model.named_modules()
    return {path: module for path, module in named if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)}


def mixed_plan(model: nn.Module) -> ShardingPlan:
    """`user` and `item` on ranks of their own, the small tables on every rank: `day` without an optimizer."""
    world = dist.get_world_size()
    where: dict[str, Any] = {
        "user": table_wise(world - 1), "item": table_wise(0), "genre": data_parallel(), "day": data_parallel(),
    }  # fmt: skip
    plan = {}
    for path, module in collections_of(model).items():
        configs = (
            module.embedding_bag_configs() if isinstance(module, EmbeddingBagCollection) else module.embedding_configs()
        )
        plan[path] = construct_module_sharding_plan(module, {c.name: where[c.name] for c in configs}, world_size=world)
    return ShardingPlan(plan)


def placed(model: nn.Module) -> DistributedModelParallel:
    """The model over the ranks by the mixed plan, tables but `day` marked."""
    mark_tables(model)
    return DistributedModelParallel(model, plan=mixed_plan(model))


def whole_state(model: nn.Module, fused: CombinedOptimizer) -> dict[str, Tensor]:
    """Weights, buffers and table states that this process holds."""
    state = {name: value.detach().clone() for name, value in local_tensors(model.state_dict()).items() if value.numel()}
    for states in fused.state_dict()["state"].values():
        state.update({name: value.clone() for name, value in local_tensors(states).items()})
    return state


@cache
def alone(make: Callable[[], nn.Module], steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One process: losses, then weights and states."""
    model = make()
    mark_tables(model)
    fused = CombinedOptimizer([(path, module.fused_optimizer()) for path, module in collections_of(model).items()])
    return trained(model, fused, batch_of, steps)


def sharded(make: Callable[[], nn.Module], steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One rank of several."""
    dmp = placed(make())
    return trained(dmp, dmp.fused_optimizer, share_of, steps)


def trained(
    model: nn.Module, fused: CombinedOptimizer, batch: Callable[[int], Any], steps: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss of each step, then weights and states."""
    optimizer = optimizers(model, fused)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, whole_state(model, fused)


def loss_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def dlrm() -> nn.Module:
    torch.manual_seed(3)
    return DLRMTrain(DLRM(ebc(), 3, [16, DIM], [16, 1]))


def merged(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The state that all ranks hold together; what several hold is the same bits on each."""
    combined: dict[str, Tensor] = {}
    for state in states:
        for name, value in state.items():
            assert torch.equal(combined.setdefault(name, value), value), f"{name} differs between ranks"
    return combined


def expect_as_alone(make: Callable[[], nn.Module], world: int, steps: int) -> None:
    wanted_losses, wanted = alone(make, steps)
    ranks = run_ranks(world, sharded, make, steps)
    for step, loss in enumerate(wanted_losses):
        mean = torch.stack([losses[step] for losses, _ in ranks]).mean()
        assert abs(float(mean - loss)) <= 1e-5, f"step {step}: {float(mean)} and {float(loss)}"
    merged_state = merged([state for _, state in ranks])
    assert merged_state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (merged_state[name] - value).abs().max() <= 1e-5 * max(1.0, float(value.abs().max())), name


@pytest.mark.parametrize("world", [1, 2, 4])
def test_dlrm_over_ranks_has_the_losses_of_one_process(world: int) -> None:
    expect_as_alone(dlrm, world, 50)


def test_the_same_run_twice_gives_the_same_bits() -> None:
    first, second = (run_ranks(2, sharded, dlrm, 10) for _ in range(2))
    for (losses, state), (other_losses, other_state) in zip(first, second, strict=True):
        assert losses == other_losses
        assert all(torch.equal(value, other_state[name]) for name, value in state.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_as_in_one_process(kind: str) -> None:
    expect_as_alone(partial(Net, kind), 2, 6)


def root() -> EmbeddingBagCollection:
    torch.manual_seed(3)
    return fused(ebc(), RowWiseAdagrad)


def train_root() -> tuple[Tensor, dict[str, Tensor], list[str]]:
    model = root()
    dmp = DistributedModelParallel(model, plan=mixed_plan(model))
    # no dense parameters, no DDP
    assert dmp._dmp_wrapped_module is dmp.module
    output = dmp(share_of(0).sparse_features)
    assert isinstance(output, KeyedTensor)
    output.values().square().mean().backward()
    return output.values().detach(), whole_state(dmp, dmp.fused_optimizer), list(dmp.plan.plan)


def test_a_collection_can_be_the_model() -> None:
    model = root()
    wanted = model(batch_of(0).sparse_features).values()
    wanted.square().mean().backward()
    ranks = run_ranks(2, train_root)
    assert torch.equal(torch.cat([output for output, *_ in ranks]), wanted)
    merged_state = merged([state for _, state, _ in ranks])
    assert ranks[0][2] == [""]
    for name, value in local_tensors(model.state_dict()).items():
        assert torch.allclose(merged_state[name], value, atol=1e-6), name


def gradients() -> tuple[dict[str, Tensor], list[str], set[str]]:
    dmp = placed(Net("one collection"))
    dmp(share_of(0)).backward()
    wrapped: Any = dmp._dmp_wrapped_module
    with_gradient = {name: p.grad.clone() for name, p in dmp.named_parameters() if p.grad is not None}
    return with_gradient, [name for name, _ in dmp.named_parameters()], set(wrapped.parameters_to_ignore)


def test_dense_gradients_are_averaged_and_fused_tables_are_left_to_their_backward() -> None:
    model = Net("one collection")
    model(batch_of(0)).backward()
    for grads, names, ignored in run_ranks(2, gradients):
        assert set(grads) == {"first.weight", "first.bias", "ebc.embedding_bags.day.weight"}
        assert ignored == set(names) - set(grads)
        for name, param in model.named_parameters():
            if name in grads:
                assert torch.allclose(grads[name], param.grad, atol=1e-6), name  # type: ignore[arg-type]


def initial_state() -> tuple[dict[str, Tensor], list[str]]:
    torch.manual_seed(dist.get_rank())
    model = DLRMTrain(DLRM(ebc(device="meta"), 3, [16, DIM], [16, 1], dense_device="cpu"))
    model.extra = nn.ModuleDict({"mlp": nn.Linear(5, 4, device="meta"), "norm": nn.BatchNorm1d(4, device="meta")})
    model.extra.part = nn.Linear(5, 4, device="meta")
    # only a part is on meta: the bias is kept
    model.extra.part.bias = nn.Parameter(torch.full((4,), 7.0))
    model.extra.register_buffer("scale", torch.ones(2, device="meta"))
    with pytest.warns(UserWarning) as caught:
        dmp = placed(model)
    assert not any(t.is_meta for t in (*dmp.parameters(), *dmp.buffers()))
    state = {name: value.clone() for name, value in local_tensors(dmp.state_dict()).items() if value.numel()}
    return state, [str(warning.message) for warning in caught]


def test_what_is_on_meta_is_initialised_and_replicas_begin_equal() -> None:
    ranks = run_ranks(2, initial_state)
    merged_state = merged([{n: v for n, v in state.items() if n != "extra.scale"} for state, _ in ranks])
    for table, (rows, _) in TABLES.items():
        weight = merged_state[f"model.sparse_arch.embedding_bag_collection.embedding_bags.{table}.weight"]
        bound = math.sqrt(1 / rows)
        assert weight.shape == (rows, DIM)
        assert weight.abs().max() <= bound
        assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.25)
    for name in ("extra.mlp.weight", "extra.part.weight"):
        assert merged_state[name].abs().max() <= math.sqrt(1 / 5)
        assert merged_state[name].std() > 0.1
    assert merged_state["extra.part.bias"].tolist() == [7.0] * 4
    assert merged_state["extra.norm.running_var"].tolist() == [1.0] * 4
    for state, messages in ranks:
        assert state["extra.scale"].tolist() == [0.0, 0.0]
        assert [m for m in messages if "reset_parameters" in m] == [
            "['extra.scale'] were on meta and their modules have no reset_parameters: they are zeros"
        ]


def local_state() -> dict[str, Tensor]:
    model = Net("sequences beside pooled")
    dmp = DistributedModelParallel(model, plan=mixed_plan(model))
    return {name: value.clone() for name, value in local_tensors(dmp.state_dict()).items() if value.numel()}


@pytest.mark.filterwarnings("ignore:tables")
def test_weights_that_exist_are_kept() -> None:
    wanted = Net("sequences beside pooled").state_dict()
    merged_state = merged(run_ranks(2, local_state))
    assert merged_state.keys() == wanted.keys()
    assert all(torch.equal(merged_state[name], value) for name, value in wanted.items())


def evaluate() -> tuple[Tensor, Tensor, bool, tuple[Any, ...]]:
    """Logits of a batch twice, whether the state is as it was, and names of all there is."""
    model = dlrm()
    dmp = placed(model)
    assert dmp.module is model
    before = {name: value.clone() for name, value in local_tensors(dmp.state_dict()).items()}
    dmp.eval()
    with torch.no_grad():
        _, (_, logits, _) = dmp(share_of(0))
    with torch.inference_mode():
        _, (_, logits_again, _) = dmp(share_of(0))
    same = all(torch.equal(value, before[name]) for name, value in local_tensors(dmp.state_dict()).items())
    # and training goes on
    dmp.train()
    dmp(share_of(1))[0].backward()
    empty = [name for name, param in dmp.named_parameters() if param.numel() == 0]
    return logits, logits_again, same, (*names_of(dmp), empty, sorted(dmp.fused_optimizer.params))


def names_of(model: nn.Module) -> list[list[str]]:
    """Of parameters, of the state dict, and of buffers."""
    return [[name for name, _ in named] for named in (
        model.named_parameters(), model.state_dict().items(), model.named_buffers()
    )]  # fmt: skip


def test_evaluation_changes_nothing_agrees_with_one_process_and_all_has_the_names_of_the_unsharded_model() -> None:
    model = dlrm()
    _, (_, wanted, _) = model(batch_of(0))
    tables = "model.sparse_arch.embedding_bag_collection.embedding_bags"
    ranks = run_ranks(2, evaluate)
    all_logits = torch.cat([logits for logits, *_ in ranks])
    assert (all_logits - wanted).abs().max() <= 1e-6
    for rank, (logits, logits_again, same, (*names, empty, trained_here)) in enumerate(ranks):
        assert torch.equal(logits, logits_again)
        assert same
        assert names == names_of(model)
        own_table, peer_table = ("item", "user") if rank == 0 else ("user", "item")
        assert empty == [f"{tables}.{peer_table}.weight"]
        # those without rows here are there, empty
        assert trained_here == sorted(f"{tables}.{name}.weight" for name in (own_table, peer_table, "genre"))


def resume() -> None:
    def fresh(seed: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
        model = dlrm()
        torch.manual_seed(seed)
        for param in model.parameters():
            nn.init.normal_(param)
        dmp = placed(model)
        return dmp, optimizers(dmp, dmp.fused_optimizer)

    def train(dmp: DistributedModelParallel, optimizer: CombinedOptimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            dmp(share_of(step))[0].backward()
            optimizer.step()

    dmp, optimizer = fresh(0)
    train(dmp, optimizer, range(3))
    saved, optimizer_saved = deepcopy(dmp.state_dict()), deepcopy(optimizer.state_dict())
    train(dmp, optimizer, range(3, 6))
    loaded, loaded_optimizer = fresh(1)
    train(loaded, loaded_optimizer, range(1))
    loaded.load_state_dict(saved)
    loaded_optimizer.load_state_dict(optimizer_saved)
    train(loaded, loaded_optimizer, range(3, 6))
    wanted, loaded_state = whole_state(dmp, dmp.fused_optimizer), whole_state(loaded, loaded.fused_optimizer)
    assert wanted.keys() == loaded_state.keys()
    assert all(torch.equal(value, loaded_state[name]) for name, value in wanted.items())
    # a part of a larger dict, by TorchRec's second argument
    zeros = {f"dlrm.{name}": torch.zeros_like(value) for name, value in dlrm().state_dict().items()}
    loaded.load_state_dict({"other": torch.ones(1), **zeros}, "dlrm.")
    assert not any(value.any() for name, value in local_tensors(loaded.state_dict()).items() if name.endswith("weight"))


def test_training_resumes_from_state_dicts_bit_for_bit() -> None:
    run_ranks(2, resume)


def scheduled(world: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model: Any = fused(ebc(), lr=1.0)
    if world:
        model = DistributedModelParallel(model)
    optimizer = model.fused_optimizer if world else model.fused_optimizer()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(4):
        optimizer.zero_grad()
        batch = share_of(step) if world else batch_of(step)
        values = model(batch.sparse_features).values()
        # fixed gradients, so that every difference is the learning rate's
        values.sum().div(len(values)).backward()
        optimizer.step()
        schedule.step()
    return {name: value.clone() for name, value in local_tensors(model.state_dict()).items() if value.numel()}


def test_a_learning_rate_schedule_reaches_the_tables_of_every_rank() -> None:
    wanted, merged_state = scheduled(0), merged(run_ranks(2, scheduled, 2))
    assert merged_state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (merged_state[name] - value).abs().max() <= 1e-6, name


def test_one_process_needs_no_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"Process group is not initialized.*ShardingEnv\.from_local\(1, 0\)"):
        DistributedModelParallel(ebc())
    for device in (None, "cpu", torch.device("cpu")):
        torch.manual_seed(3)
        model = fused(ebc())
        wanted = model(batch_of(0).sparse_features).values()
        dmp = DistributedModelParallel(model, env=ShardingEnv.from_local(1, 0), device=device)
        assert torch.equal(dmp(batch_of(0).sparse_features).values(), wanted)
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        DistributedModelParallel(ebc(), env=ShardingEnv.from_local(2, 0))


def test_a_table_without_an_optimizer_is_named_in_a_warning() -> None:
    model = ebc()
    apply_optimizer_in_backward(torch.optim.SGD, [model.embedding_bags["user"].weight], {"lr": 0.1})  # type: ignore[union-attr, list-item]
    model.embedding_bags["item"].weight.requires_grad_(False)  # type: ignore[union-attr]
    fused = table_wise(0, compute_kernel="fused")
    where: dict[str, Any] = dict.fromkeys(TABLES, fused) | {"genre": data_parallel()}
    plan = ShardingPlan({"": construct_module_sharding_plan(model, where, world_size=1)})
    with pytest.warns(UserWarning, match=r"tables \['day'\] have no optimizer.*SGD at lr 0\.01"):
        dmp = DistributedModelParallel(model, env=ShardingEnv.from_local(1, 0), plan=plan)
    before = {name: value.clone() for name, value in local_tensors(dmp.state_dict()).items()}
    dmp(batch_of(0).sparse_features).values().sum().backward()
    changed = {name for name, value in local_tensors(dmp.state_dict()).items() if not torch.equal(value, before[name])}
    assert changed == {"embedding_bags.user.weight", "embedding_bags.day.weight"}
    day = "embedding_bags.day.weight"
    counts = torch.bincount(batch_of(0).sparse_features["day"].values(), minlength=7)
    assert torch.allclose(local_part(dmp.state_dict()[day]), before[day] - 0.01 * counts[:, None])
