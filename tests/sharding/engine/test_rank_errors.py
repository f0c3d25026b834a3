"""Bad input and disagreement between ranks: every rank raises in that step, nothing is written, the next step works.

Not covered, because no exchange can see it: a rank that never calls forward (its loader raised, it ran out of batches)
leaves the others waiting until the process group's timeout. The same holds for a rank under `no_grad` in the one step
in which DistributedDataParallel regroups its buckets, the third: DDP itself then waits for that rank before forward.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import kjt as kjt_of
from model_zoo import fused
from ranks import error_of, run_ranks
from sharding_mixes import same_tensors
from sharding_steps import local_tensors
from torch import Tensor, nn

from shardwise import (
    BoundsCheckMode,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    JaggedTensor,
    KeyedJaggedTensor,
    LookupPolicy,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
)
from shardwise.sharding import construct_module_sharding_plan, data_parallel, table_wise

pytestmark = pytest.mark.ranks

ROWS = {"f1": 40, "f2": 30, "f3": 9, "f4": 7}
INT64_MIN = torch.iinfo(torch.int64).min


def tables() -> list[EmbeddingBagConfig]:
    """Tables t1 .. t4, each looked up by its feature."""
    return [EmbeddingBagConfig(rows, 4, f"t{f[1]}", feature_names=[f]) for f, rows in ROWS.items()]


def plan_for(collection: Any, path: str = "ebc") -> ShardingPlan:
    """t1 and t2 on a rank each, the others on every rank."""
    where: dict[str, Any] = {"t1": table_wise(0), "t2": table_wise(1), "t3": data_parallel(), "t4": data_parallel()}
    return ShardingPlan({path: construct_module_sharding_plan(collection, where, world_size=dist.get_world_size())})


class Net(nn.Module):
    """A weighted or plain collection and a dense layer; `t4` trains by its gradient."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ebc = EmbeddingBagCollection(tables(), weighted)
        fused_tables = [param for name, param in self.ebc.named_parameters() if "t4" not in name]
        apply_optimizer_in_backward(RowWiseAdagrad, fused_tables, {"lr": 0.1})
        self.dense = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        # a sum over a fixed number of samples, so that an empty batch has a loss
        return self.dense(self.ebc(features).values()).square().sum() / 6


def build(*, weighted: bool = False) -> DistributedModelParallel:
    model = Net(weighted)
    return DistributedModelParallel(model, plan=plan_for(model.ebc))


def batch_of(step: int, samples: int = 3, *, rank: int | None = None) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    lengths = torch.full((4, samples), 2)
    ids = torch.cat([torch.randint(0, rows, (2 * samples,), generator=generator) for rows in ROWS.values()])
    return KeyedJaggedTensor(list(ROWS), ids, torch.rand(len(ids), generator=generator), lengths.flatten())


def with_values(kjt: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(kjt.keys(), values, kjt.weights(), kjt.lengths())


def with_id(value: int, position: int = 9) -> Callable[[KeyedJaggedTensor], Any]:
    """One id replaced; position 9 is f2's fourth, in sample 1."""
    return lambda kjt: with_values(kjt, kjt.values().index_fill(0, torch.tensor([position]), value))


def cast(dtype: torch.dtype) -> Callable[[KeyedJaggedTensor], Any]:
    return lambda kjt: with_values(kjt, kjt.values().to(dtype))


def of(keys: list[str], lengths: list[int], ids: int) -> Callable[[KeyedJaggedTensor], Any]:
    return lambda _: KeyedJaggedTensor(keys, torch.zeros(ids, dtype=torch.int64), None, torch.tensor(lengths))


F2 = r"rank 1: feature 'f2' \(table 't2'\), sample 1: id"
FAULTS: dict[str, tuple[Callable[[KeyedJaggedTensor], Any], str, str]] = {
    "id past the end": (with_id(30), "RefusedIndexError", rf"^{F2} 30 is outside \[0, 30\)$"),
    "negative id": (with_id(-1), "RefusedIndexError", rf"^{F2} -1 is outside \[0, 30\)$"),
    "smallest id": (with_id(INT64_MIN), "RefusedIndexError", rf"^{F2} {INT64_MIN} is outside"),
    "id that int32 would wrap": (with_id(2**32 + 3), "RefusedIndexError", rf"^{F2} {2**32 + 3} is outside"),
    "id of a replicated table": (
        with_id(9, 12),
        "RefusedIndexError",
        r"^rank 1: feature 'f3' \(table 't3'\), sample 0: id 9",
    ),
    "id of a dense replica": (
        with_id(7, 23),
        "RefusedIndexError",
        r"^rank 1: feature 'f4' \(table 't4'\), sample 2: id 7",
    ),
    "missing feature": (of(["f1", "f3"], [1, 1], 2), "KeyError", r"^rank 1: features \['f2', 'f4'\] are not in the"),
    "float ids": (cast(torch.float32), "TypeError", r"^rank 1: feature ids must be int32 or int64, got float32$"),
    "bool ids": (cast(torch.bool), "TypeError", r"^rank 1: feature ids must be int32 or int64, got bool$"),
    "short ids": (cast(torch.int16), "TypeError", r"^rank 1: feature ids must be int32 or int64, got int16$"),
    "lengths that do not add up": (of(list(ROWS), [1, 1, 1, 2], 4), "ValueError", r"^rank 1: .*\b5\b.*\b4\b"),
    "offsets that decrease": (
        lambda kjt: KeyedJaggedTensor(list(ROWS), kjt.values()[:4], offsets=torch.tensor([0, 3, 2, 3, 4])),
        "ValueError",
        r"^rank 1: feature 'f2' \(table 't2'\), sample 0: offsets must not decrease, got 3 and then 2",
    ),
    "no batch at all": (lambda _: None, "TypeError", r"^rank 1: a sharded collection takes a KeyedJaggedTensor, got N"),
    "a long message": (of(["\N{SNOWMAN}" * 400], [1], 1), "KeyError", r"^rank 1: features \['f1', 'f2', 'f3', 'f4'\]"),
}


def look_up_shared() -> list[str]:
    """What a lookup of ids that one of two tables of a feature has raises, in both orders of the tables."""
    errors = []
    for names in (("large", "small"), ("small", "large")):
        rows = {"large": 40, "small": 9}
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(rows[n], 4, n, feature_names=["f"]) for n in names])
        where: dict[str, Any] = {"large": table_wise(0), "small": table_wise(1)}
        plan = construct_module_sharding_plan(ebc, where, world_size=dist.get_world_size())
        model = DistributedModelParallel(ebc, plan=ShardingPlan({"": plan}))
        ids = torch.tensor([3, 12 * dist.get_rank()])
        errors.append(error_of(model, KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([1, 1]))))
    return errors


def test_ids_of_a_shared_feature_are_those_of_its_smallest_table() -> None:
    message = "RefusedIndexError: rank 1: feature 'f' (table 'small'), sample 1: id 12 is outside [0, 9)"
    assert run_ranks(2, look_up_shared) == [[message] * 2] * 2


def state_of(dmp: DistributedModelParallel) -> dict[str, Tensor]:
    state = {name: value.detach().clone() for name, value in local_tensors(dmp.state_dict()).items()}
    for states in dmp.fused_optimizer.state_dict()["state"].values():
        state.update({name: value.clone() for name, value in local_tensors(states).items()})
    return state


def train(
    fault: str | None, bad_steps: tuple[int, ...], bad_ranks: tuple[int, ...]
) -> tuple[list[str], dict[str, Tensor]]:
    """Five good steps and, before some of them, one in which some ranks' batch is bad."""
    dmp = build()
    optimizer = torch.optim.SGD([p for n, p in dmp.named_parameters() if "dense" in n or "t4" in n], lr=0.1)
    errors = []
    for step in range(5):
        optimizer.zero_grad()
        if fault is not None and step in bad_steps:
            before, kjt = state_of(dmp), batch_of(50 + step)
            bad = FAULTS[fault][0](kjt) if dist.get_rank() in bad_ranks else kjt
            errors.append(error_of(dmp, bad))
            assert same_tensors(before, state_of(dmp))
        dmp(batch_of(step)).backward()
        optimizer.step()
    return errors, state_of(dmp)


def train_with_each() -> dict[str | None, tuple[list[str], dict[str, Tensor]]]:
    return {fault: train(fault, (0, 3), (1,)) for fault in (None, *FAULTS)}


@pytest.fixture(scope="module")
def trained() -> list[dict[str | None, tuple[list[str], dict[str, Tensor]]]]:
    return run_ranks(2, train_with_each)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_batch_of_one_rank_raises_on_all_and_leaves_no_trace(
    fault: str, trained: list[dict[str | None, tuple[list[str], dict[str, Tensor]]]]
) -> None:
    _, kind, message = FAULTS[fault]
    for of_rank in trained:
        errors, state = of_rank[fault]
        assert len(errors) == 2
        for text in errors:
            assert re.search(f"^{kind}: {message.removeprefix('^')}", text), text
        assert same_tensors(state, of_rank[None][1])


def test_the_first_of_several_bad_ranks_is_named_on_all() -> None:
    for errors, _ in run_ranks(3, train, "id past the end", (1,), (1, 2)):
        assert errors == ["RefusedIndexError: rank 1: feature 'f2' (table 't2'), sample 1: id 30 is outside [0, 30)"]


def missing_weights() -> None:
    dmp = build(weighted=True)
    good = batch_of(0)
    bad = KeyedJaggedTensor(good.keys(), good.values(), lengths=good.lengths())
    learned = KeyedJaggedTensor(good.keys(), good.values(), good.weights().requires_grad_(), good.lengths())
    differ = f"^ranks .{1 - dist.get_rank()}. differ from this one in whether per-id weights have gradients"
    missing = "^rank 1: .*must carry per-id weights"
    for kjt, kind, message in ((bad, ValueError, missing), (learned, RuntimeError, differ)):
        with pytest.raises(kind, match=message):
            dmp(kjt if dist.get_rank() == 1 else batch_of(0))
    dmp(batch_of(1))


def test_wrong_weights_of_one_rank_raise_on_all() -> None:
    run_ranks(2, missing_weights)


def without_gradients() -> list[list[str]]:
    """What is raised where rank 1 has no gradients in one of five steps: of the first, the second and the last."""
    errors: list[list[str]] = []
    for step_of_fault in (0, 1, 4):
        dmp = build()
        errors.append([])
        for step in range(5):
            with torch.set_grad_enabled(not (step == step_of_fault and dist.get_rank() == 1)):
                message = error_of(lambda dmp=dmp, step=step: dmp(batch_of(step)).backward())  # type: ignore[misc]
            errors[-1] += [message] if message else []
    return errors


def test_a_rank_without_gradients_among_others_is_refused() -> None:
    for rank, errors in enumerate(run_ranks(2, without_gradients)):
        message = f"RuntimeError: ranks [{1 - rank}] differ from this one in whether gradients are enabled"
        assert errors == [[message]] * 3


def dense_in_backward() -> str:
    model = Net()
    apply_optimizer_in_backward(torch.optim.SGD, model.dense.parameters(), {"lr": 0.1})
    return error_of(DistributedModelParallel, model, plan=plan_for(model.ebc))


def test_a_dense_layer_cannot_step_before_its_gradient_is_averaged() -> None:
    """The first forward failed with "module 'torch.distributed' has no attribute 'optim'", from inside DDP."""
    for message in run_ranks(2, dense_in_backward):
        prefix = "ValueError: rank 0: dense parameters ['dense.weight', 'dense.bias'] have an optimizer in the backward"
        assert message.startswith(prefix)


def uneven(samples: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    dmp = build()
    alone = Net()
    optimizers = [torch.optim.SGD([p for n, p in m.named_parameters() if "dense" in n], lr=0.1) for m in (dmp, alone)]
    for step in range(3):
        dmp(batch_of(step, samples[rank])).backward()
        # the mean over ranks of a sum over samples
        parts = [batch_of(step, n, rank=r) for r, n in enumerate(samples)]
        ids, lengths = (
            torch.cat([get(kjt[key]) for key in ROWS for kjt in parts])
            for get in (JaggedTensor.values, JaggedTensor.lengths)
        )
        (alone(KeyedJaggedTensor(list(ROWS), ids, lengths=lengths)) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return state_of(dmp), dict(alone.state_dict())


@pytest.mark.parametrize("samples", [(4, 0), (0, 0), (5, 1)])
def test_empty_and_uneven_batches_train_as_their_union(samples: tuple[int, ...]) -> None:
    for state, wanted in run_ranks(2, uneven, samples):
        for name, value in wanted.items():
            if state[name].numel() and "t4" not in name:
                assert (state[name] - value).abs().max() <= 1e-5, name
                assert not state[name].isnan().any()


def degenerate() -> None:
    none = DistributedModelParallel(EmbeddingBagCollection([]))
    assert none(KeyedJaggedTensor.empty()).values().shape == (0, 0)
    batch = batch_of(0)
    assert none(batch).values().shape == (3, 0)
    assert DistributedModelParallel(EmbeddingCollection([]))(batch) == {}
    with pytest.raises(KeyError, match="rank 0: features"):
        build()(KeyedJaggedTensor.empty())


def test_zero_tables_and_zero_features_are_ordinary_sizes() -> None:
    run_ranks(2, degenerate)


def reordered() -> Tensor:
    dmp, kjt = build(), batch_of(0)
    if dist.get_rank() == 1:
        extra = kjt_of({"x": [[0]] * 3}, weights=torch.ones(3))
        kjt = KeyedJaggedTensor.concat([extra, kjt.permute([3, 1, 0, 2])])
    module: Any = dmp.module
    return module.ebc(kjt).values().detach()


def test_features_in_another_order_on_one_rank_are_told_apart_by_name() -> None:
    alone = Net().ebc
    for rank, values in enumerate(run_ranks(2, reordered)):
        assert torch.equal(values, alone(batch_of(0, rank=rank)).values())


def with_outside_ids(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    for position, bad in ((3, -1), (9, 2**32 + 3), (12, 9), (23, 7)):
        kjt = with_id(bad, position)(kjt)
    return kjt


def lookup(mode: BoundsCheckMode) -> tuple[Tensor, list[str]]:
    torch.manual_seed(3)
    model = fused(EmbeddingBagCollection(tables(), policy=LookupPolicy(mode)))
    dmp = DistributedModelParallel(model, plan=plan_for(model, ""))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = dmp(with_outside_ids(batch_of(0))).values()
        values.sum().backward()
    return values.detach(), [str(warning.message) for warning in caught]


@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE])
def test_ids_that_may_be_outside_count_as_no_id_on_every_rank(mode: BoundsCheckMode) -> None:
    torch.manual_seed(3)
    alone = EmbeddingBagCollection(tables(), policy=LookupPolicy(BoundsCheckMode.IGNORE))
    for rank, (values, messages) in enumerate(run_ranks(2, lookup, mode)):
        assert torch.equal(values, alone(with_outside_ids(batch_of(0, rank=rank))).values())
        assert len([m for m in messages if "counts as no id" in m]) == (mode is BoundsCheckMode.WARNING)


def test_float_ids_are_refused_even_where_bounds_are_not_checked() -> None:
    """Ids travel as int32, so a float id was cut to another row when nothing looked at it before."""
    model = fused(EmbeddingBagCollection(tables(), policy=LookupPolicy(BoundsCheckMode.IGNORE)))
    dmp = DistributedModelParallel(model, env=ShardingEnv.from_local(1, 0))
    kjt = KeyedJaggedTensor(list(ROWS), torch.full((4,), 1.7), lengths=torch.ones(4, dtype=torch.int64))
    with pytest.raises(TypeError, match="feature ids must be int32 or int64, got float32"):
        dmp(kjt)
