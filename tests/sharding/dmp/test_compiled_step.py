"""torch.compile of whole models over ranks: one graph forward, one backward, and the numbers of the eager step."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged_batches import kjt
from model_zoo import BAGS, MAKERS, values_of
from ranks import error_of, run_ranks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    GradientCheckMode,
    KeyedJaggedTensor,
    LookupPolicy,
    PoolingType,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.jagged.compiled.batches import kjt_for_pt2_tracing
from shardwise.sharding import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise
from shardwise.sharding.compiled import step as step_ops
from shardwise.sharding.dmp.unwrap import sharded_model_copy
from shardwise.sharding.modules.embedding_bag import EmbeddingBagSharder

pytestmark = pytest.mark.ranks

ROWS, SAMPLES, STEPS = 20, 5, 3
Batch = tuple[Tensor, KeyedJaggedTensor, Tensor]


class Net(nn.Module):
    """A DLRM in small: pooled and sequence lookups beside dense layers, and its loss."""

    def __init__(self, *, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        pooling = PoolingType.SUM if weighted else PoolingType.MEAN
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{n}", num_embeddings=ROWS, embedding_dim=64 if n == 2 else 8, feature_names=[feature],
                    pooling=pooling,
                )
                for n, feature in enumerate("abcd")
            ],
            is_weighted=weighted,
        )  # fmt: skip
        self.ec = EmbeddingCollection(
            tables=[EmbeddingConfig(name="s", num_embeddings=ROWS, embedding_dim=8, feature_names=["a", "c"])],
            need_indices=True,
        )
        self.weigh = nn.Linear(1, 1) if weighted else None
        self.dense = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.over = nn.Linear(88 + 4 + 16, 1)

    def forward(self, dense: Tensor, features: KeyedJaggedTensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        pooled = features
        if self.weigh is not None:
            weights = self.weigh(features.weights().unsqueeze(1)).squeeze(1)
            pooled = KeyedJaggedTensor(features.keys(), features.values(), weights, features.lengths())
        rows = [jt.to_padded_dense(3).sum(1) for jt in self.ec(features).values()]
        joined = torch.cat([self.dense(dense), self.ebc(pooled).values(), *rows], 1)
        logits = self.over(joined).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return loss, {"logits": logits.detach()}


PLAN = {"t0": table_wise(rank=0), "t1": row_wise(), "t2": column_wise(ranks=[0, 1]), "t3": data_parallel()}
# tables that train by their gradients, with the dense layers
DENSE = {
    "t0": table_wise(rank=0, compute_kernel="dense"), "t1": row_wise(compute_kernel="dense"),
    "t2": column_wise(ranks=[0, 1]), "t3": data_parallel(),
}  # fmt: skip


def is_fused(name: str, *, dense: bool) -> bool:
    """Whether a parameter trains in the backward."""
    return name.startswith("e") and (not dense or ".t2." in name or ".s." in name)


def model_of(plan: dict[str, Any], *, weighted: bool = False, **dmp: Any) -> DistributedModelParallel:
    net = Net(weighted=weighted)
    fused = [param for name, param in net.named_parameters() if is_fused(name, dense=plan is DENSE)]
    apply_optimizer_in_backward(torch.optim.Adagrad, fused, {"lr": 0.1})
    whole = ShardingPlan({
        "ebc": construct_module_sharding_plan(net.ebc, plan, world_size=2, local_size=2),
        "ec": construct_module_sharding_plan(net.ec, {"s": row_wise()}, world_size=2, local_size=2),
    })  # fmt: skip
    return DistributedModelParallel(net, device="cpu", plan=whole, **dmp)


def batch_of(step: int, *, weighted: bool = False) -> Batch:
    """Of this rank: other numbers of ids in each step."""
    made = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
    lengths = torch.randint(0, 4, (4 * SAMPLES,), generator=made)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=made)
    weights = torch.rand(len(ids), generator=made) if weighted else None
    labels = torch.randint(0, 2, (SAMPLES,), generator=made).float()
    return torch.rand(SAMPLES, 3, generator=made), KeyedJaggedTensor(list("abcd"), ids, weights, lengths), labels


def counted(model: nn.Module, backend: str = "aot_eager", **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter, **options), counter


def trained(call: Callable[..., Any], model: nn.Module, batches: list[Batch], *, dense: bool) -> list[Tensor]:
    """Losses and logits of each step, and what all parameters are after them."""
    own = [param for name, param in model.named_parameters() if not is_fused(name, dense=dense) and param.numel()]
    optimizer = torch.optim.SGD(own, lr=0.5)
    found = []
    for batch in batches:
        optimizer.zero_grad()
        loss, outputs = call(*batch)
        loss.backward()
        optimizer.step()
        found += [loss.detach(), outputs["logits"]]
    return found + [param.detach().clone() for param in model.parameters()]


def far(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of two lists of tensors of the same shapes."""
    assert [tensor.shape for tensor in found] == [tensor.shape for tensor in wanted]
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True) if a.numel())


def steps(dense: bool, backend: str, marked: bool) -> dict[str, Any]:
    """What a compiled model does beside the eager one, whose batches may be marked as of any number of ids."""
    plan, weighted = DENSE if dense else PLAN, dense
    batches = [batch_of(step, weighted=weighted) for step in range(STEPS)]
    eager, model = (model_of(plan, weighted=weighted) for _ in range(2))
    start = [param.detach().clone() for param in model.parameters()]
    function, counter = counted(model, backend)
    wanted = trained(eager, eager, batches, dense=dense)
    if marked:
        batches = [(x, kjt_for_pt2_tracing(features), labels) for x, features, labels in batches]
    found = trained(function, model, batches, dense=dense)
    names = [name for name, _ in model.named_parameters()]
    stays = [n for n, a, b in zip(names, start, found[2 * STEPS :], strict=True) if a.numel() and torch.equal(a, b)]
    gc.collect()
    return {
        "far": far(found, wanted), "stays": stays, "graphs": counter.frame_count,
        "breaks": dict(counters["graph_break"]), "kept": len(step_ops._kept),
        "backwards": counters["aot_autograd"]["ok"], "not": counters["aot_autograd"]["not_ok"],
    }  # fmt: skip


def several(*cases: Any) -> list[dict[str, Any]]:
    return [steps(*case) for case in cases]


def test_a_compiled_step_is_one_graph_each_way_and_has_the_bits_of_the_eager_step() -> None:
    """Tables by table, row, column and replicated; and the same trained by gradients, with weights that learn."""
    for fused, dense in run_ranks(2, several, (False, "aot_eager", False), (True, "aot_eager", True)):
        # the first batch has its number of ids, and after that any number does; with marks it does at once
        for result, graphs in ((fused, 2), (dense, 1)):
            assert result["breaks"] == {} and result["not"] == 0
            assert result["graphs"] == result["backwards"] == graphs
            assert result["stays"] == [] and result["kept"] == 0
            assert result["far"] == 0


@pytest.mark.long
def test_inductor_compiles_the_same_step_whose_dense_layers_round_otherwise() -> None:
    for (result,) in run_ranks(2, several, (False, "inductor", True), timeout=400):
        assert result["breaks"] == {} and result["graphs"] == 1 and not result["stays"]
        assert result["far"] < 1e-6


def unmarked_and_marked() -> list[Any]:
    """Batches of any number of ids, of one and of several batch sizes; and evaluation. Nothing is wrapped."""
    found: list[Any] = []
    for convert_to_vb in (False, True):
        net = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=f"t{n}", num_embeddings=9, embedding_dim=4, feature_names=[n]) for n in "ab"
            ]
        )
        torch.manual_seed(1)
        for table in net.parameters():
            nn.init.uniform_(table)
        apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        eager, model = DistributedModelParallel(copy.deepcopy(net)), DistributedModelParallel(net)
        function, counter = counted(model)
        apart = 0.0
        for number in (4, 1, 0, 7):
            ids = torch.arange(number) % 9
            lengths = torch.tensor([number, 0, 0, 0])
            batch = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)
            outputs = [eager(batch).values(), function(kjt_for_pt2_tracing(batch, convert_to_vb)).values()]
            for output in outputs:
                output.square().sum().backward()
            apart += far([outputs[1].detach()], [outputs[0].detach()])
        with torch.no_grad():
            apart += far([function(batch).values()], [eager(batch).values()])
        apart += far([p.detach() for p in model.parameters()], [p.detach() for p in eager.parameters()])
        found.append((apart, counter.frame_count, dict(counters["graph_break"])))
    return found


def test_marked_batches_compile_once_and_an_evaluation_once_more() -> None:
    for result in run_ranks(2, unmarked_and_marked):
        assert result == [(0.0, 2, {}), (0.0, 2, {})]


class Sum(nn.Module):
    """A lookup and a dense layer, of which the loss is a sum."""

    def __init__(self, **table: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a"])],
            policy=LookupPolicy(gradient_check=GradientCheckMode.RAISE),
        )
        self.over = nn.Linear(4, 1)
        apply_optimizer_in_backward(torch.optim.SGD, self.ebc.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values()).sum()


def failures() -> dict[str, Any]:
    """What is raised, what stays, and how DDP goes on."""
    rank = torch.distributed.get_rank()
    model = DistributedModelParallel(Sum(), device="cpu")
    function, _ = counted(model)
    sharded: Any = model.module.ebc
    good, bad = kjt({"a": [[1, 2], [3]]}), kjt({"a": [[1, 2], [9 if rank else 3]]})
    found: dict[str, Any] = {"bad id": error_of(function, bad)}
    loss = function(good)
    loss.backward(retain_graph=True)
    found["twice"] = error_of(loss.backward)
    # a step without a backward keeps nothing once its graph is gone
    before = len(step_ops._kept)
    loss = function(good)
    found["kept"] = len(step_ops._kept) - before
    del loss
    gc.collect()
    found["kept after"] = len(step_ops._kept) - before
    # its gradient is not finite on rank 1
    scale = torch.tensor(float("inf") if rank else 1.0)
    found["infinite"] = error_of(lambda: (function(good) * scale).backward())
    table = torch.cat([param.detach().flatten() for param in sharded.parameters()])
    function(good).backward()
    after = torch.cat([param.detach().flatten() for param in sharded.parameters()])
    found["goes on"] = bool(table.isfinite().all()) and (not table.numel() or not torch.equal(table, after))
    # as a pipeline does
    sharded.routed_ahead.append(sharded.start(good))
    found["ahead"] = error_of(function, good)
    sharded.drop(sharded.routed_ahead.popleft())
    return found


def kinds() -> dict[str, Any]:
    """Of every kind of sharded module whether three compiled steps, and what they trained, are those of a twin."""
    found: dict[str, Any] = {}
    batch = kjt(BAGS, weights=torch.arange(1.0, 8.0))
    for kind, make in MAKERS.items():
        pair = []
        for _ in range(2):
            torch.manual_seed(0)
            pair.append(DistributedModelParallel(make("cpu")))
        eager, model = pair
        function, counter = counted(model)
        apart = 0.0
        for _ in range(3):
            outputs = [values_of(call(batch)) for call in (eager, function)]
            for output in outputs:
                output.square().sum().backward()
            apart += far([outputs[1].detach()], [outputs[0].detach()])
        apart += far([p.detach() for p in model.parameters()], [p.detach() for p in eager.parameters()])
        found[kind] = apart, counter.frame_count
    return found


@pytest.mark.long
def test_every_kind_of_sharded_module_is_compiled_whole() -> None:
    """Towers, managed collision and feature processors too."""
    for found in run_ranks(2, kinds, timeout=400):
        assert found == dict.fromkeys(MAKERS, (0, 1))


class Bag(nn.Module):
    """A bag of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.bag = nn.EmbeddingBag(7, 4, mode="sum", include_last_offset=True)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        bags: Tensor = self.bag(features.values(), features.offsets())
        return bags * 2


def bags_and_copies() -> list[Any]:
    """A bag of torch's own beside the eager one; and whether a copy of a model trains tables of its own."""
    batch = kjt({"a": [[1, 2], [3]]})
    eager, model = (DistributedModelParallel(Bag(), sharders=[EmbeddingBagSharder()]) for _ in range(2))
    function, _ = counted(model)
    for call in (eager, function):
        call(batch).sum().backward()
    same = far([p.detach() for p in model.parameters()], [p.detach() for p in eager.parameters()])
    copied = eager.copy("cpu")
    with sharded_model_copy(torch.device("cpu")):
        copied = copy.deepcopy(eager)
    before = [param.detach().clone() for param in eager.parameters()]
    run = torch.compile(lambda model, batch: model(batch), fullgraph=True, backend="aot_eager")
    for each in (eager, copied, copied):
        run(each, batch).sum().backward()
    moved = [far([now.detach()], [then]) for now, then in zip(eager.parameters(), before, strict=True)]
    far_apart = [far([a.detach()], [b]) for a, b in zip(copied.parameters(), before, strict=True)]
    return [same, dict(counters["graph_break"]), max(moved), max(far_apart)]


def test_bags_of_torch_compile_and_a_copy_is_compiled_by_itself() -> None:
    found = run_ranks(2, bags_and_copies)
    assert [result[:2] for result in found] == [[0, {}], [0, {}]]
    moved, copied = (max(result[at] for result in found) for at in (2, 3))
    assert moved > 0 and copied > 1.5 * moved, "the copy trained twice, and the original once"


def test_failures_of_compiled_steps_are_those_of_eager_ones() -> None:
    for rank, found in enumerate(run_ranks(2, failures)):
        assert "rank 1" in found["bad id"] and "IndexError" in found["bad id"], found
        assert "a second backward" in found["twice"] or "second time" in found["twice"], found
        assert (found["kept"], found["kept after"]) == (1, 0), found
        assert found["infinite"].startswith("FloatingPointError: rank 1"), found
        assert found["goes on"], (rank, found)
        assert found["ahead"].startswith("RuntimeError: a pipeline sent a batch ahead"), found
