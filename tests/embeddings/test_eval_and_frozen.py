"""What a backward leaves alone: tables that were looked up in eval(), and those that are frozen by the time it runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from copies import same
from jagged_batches import gradient_of, kjt, weight
from ranks import run_ranks
from sharding_mixes import STRATEGIES, Mix, batch_of, build, by_lookup, environment, mix_for, shard
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import TableGroup, TableShape
from shardwise.embeddings.tables.table_layout import LookupFeature, OptimizerSpec
from shardwise.planner.layout import TableOptions

LEAVES = "looked up in eval"


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f".*{LEAVES}")
        yield


def state_of(module: Any) -> dict[str, Tensor]:
    """Tables, optimizer states and step counts, wherever they are."""
    groups = module._tables.all_groups() if hasattr(module, "_tables") else module._groups
    state = {}
    for g, group in enumerate(groups):
        for n, table in enumerate(group.tables):
            named = {"rows": group.view(n), "step": group.step, **group.state_views(n)}
            state.update({f"{g}/{table.name}/{name}": value.clone() for name, value in named.items()})
    return state


def look_up(module: Any, batch: KeyedJaggedTensor, mix: Mix) -> Tensor:
    return torch.cat([rows.flatten() for rows in by_lookup(mix, module(batch))])


def looked_up(module: Any, mix: Mix) -> tuple[KeyedJaggedTensor, Tensor]:
    """A batch, its per-id weights to be learned, and its rows."""
    batch = batch_of(mix, 0)
    if mix.weighted:
        batch.weights().requires_grad_()
    return batch, look_up(module, batch, mix)


def expect_eval_trains_nothing(module: Any, mix: Mix) -> None:
    """Forward in eval(): outputs want a gradient, and nothing comes of it; the mode is that of the forward."""
    (batch, out), before = looked_up(module.eval(), mix), state_of(module)
    assert out.requires_grad
    module.train()
    with pytest.warns(UserWarning, match=LEAVES):
        out.sum().backward()
    assert same(before, state_of(module))
    # the tables are as they were: training sees the same rows
    again, trained = looked_up(module, mix)
    assert torch.equal(trained, out)
    module.eval()
    trained.sum().backward()
    assert not same(before, state_of(module))
    if mix.weighted:
        learned = gradient_of(batch.weights())
        assert bool(learned.any()) and torch.equal(learned, gradient_of(again.weights()))
    module.train()


def expect_frozen_stays(module: Any, mix: Mix) -> None:
    """Tables are frozen between forward and backward, one by one and all of them; and thawed again."""
    names = [table.name for table in mix.tables]
    for frozen in ([names[0]], names, [names[-1]]):
        parameters = {name: module.get_parameter(f"{module._children_name}.{name}.weight") for name in names}
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        out = look_up(module, batch_of(mix, 1), mix)
        for name in frozen:
            parameters[name].requires_grad_(False)
        out.sum().backward()
        for name, parameter in parameters.items():
            moved = not torch.equal(before[name], parameter)
            assert not moved or name not in frozen, name
            assert moved or name in frozen or not parameter.numel() or dist.is_initialized(), name
        # what was frozen when it was looked up is left alone although it is thawed now
        out = look_up(module, batch_of(mix, 1), mix)
        for name in frozen:
            parameters[name].requires_grad_(True)
        if out.requires_grad:
            out.sum().backward()
        for name in frozen:
            assert torch.equal(before[name], parameters[name]), name
        out = look_up(module, batch_of(mix, 1), mix)
        out.sum().backward()
        assert any(not torch.equal(before[name], parameters[name]) for name in names) or dist.is_initialized()


def mixes(strategy: str) -> list[Mix]:
    pooled = mix_for(strategy, pooled=True, batches=(3, 3, 3, 3))
    return [pooled, replace(pooled, weighted=True), mix_for(strategy, pooled=False)]


KINDS = ["bags", "weighted bags", "sequences"]


@pytest.mark.parametrize("number", range(3), ids=KINDS)
def test_a_backward_of_eval_trains_no_table(number: int) -> None:
    """A gradient that was asked of a model in eval(), say of its inputs, moved the rows."""
    mix = mixes("table_wise")[number]
    module = build(mix, "adam")
    # tables are grouped by their optimizers now
    module.fused_optimizer()
    expect_eval_trains_nothing(module, mix)


@pytest.mark.parametrize("number", range(3), ids=KINDS)
def test_a_table_that_is_frozen_after_the_forward_is_not_trained(number: int) -> None:
    """Freezing was read by the next forward: a backward that was under way went on to train the table."""
    mix = mixes("table_wise")[number]
    expect_frozen_stays(build(mix, "rowwise_adagrad"), mix)


def sharded(number: int) -> None:
    for strategy in STRATEGIES:
        mix = mixes(strategy)[number]
        model = shard(mix, build(mix, "rowwise_adagrad").eval(), environment())
        assert not model.training
        before = state_of(model)
        out = look_up(model.eval(), batch_of(mix, 0), mix)
        calls = model.collectives
        with quietly():
            out.sum().backward()
        # nothing is exchanged for nothing
        assert model.collectives == calls and same(before, state_of(model))
        expect_frozen_stays(model.train(), mix)


def frozen_while_gradients_wait() -> None:
    """All tables are frozen between forward and backward of one of two batches whose gradients make one step."""
    for strategy in ("table_wise", "column_wise", "grid"):
        mix = mix_for(strategy, pooled=True, batches=(3, 3, 3, 3))
        mix = replace(
            mix, tables=tuple(replace(table, options=TableOptions(row_state="table")) for table in mix.tables)
        )
        trained = []
        for also in (False, True):
            model = shard(mix, build(mix, "rowwise_adagrad"), environment())
            model.fused_optimizer.accumulate_gradients()
            look_up(model, batch_of(mix, 0), mix).sum().backward()
            if also:
                out = look_up(model, batch_of(mix, 1), mix)
                parameters = [
                    model.get_parameter(f"{model._children_name}.{table.name}.weight") for table in mix.tables
                ]
                for parameter in parameters:
                    parameter.requires_grad_(False)
                out.sum().backward()
                for parameter in parameters:
                    parameter.requires_grad_(True)
            model.fused_optimizer.step()
            trained.append(state_of(model))
        assert same(*trained), strategy


@pytest.mark.ranks
def test_gradients_of_tables_that_were_frozen_after_the_forward_do_not_wait() -> None:
    """Shards of columns that share a row's state kept them, and the step trained by what other plans leave out."""
    run_ranks(2, frozen_while_gradients_wait)


def sharded_weights() -> None:
    """Gradients of per-id weights travel in eval() as they do in train()."""
    for strategy in STRATEGIES:
        mix = mixes(strategy)[1]
        model = shard(mix, build(mix, "sgd"), environment())
        before = state_of(model)
        gradients = []
        for training in (False, True):
            batch, out = looked_up(model.train(training), mix)
            with quietly():
                out.sum().backward()
            gradients.append(gradient_of(batch.weights()))
            dist.barrier()
            assert training or same(before, state_of(model))
        assert bool(gradients[0].any())
        assert torch.equal(*gradients)


@pytest.mark.ranks
@pytest.mark.parametrize("number", range(3), ids=KINDS)
def test_neither_trains_a_sharded_table(number: int) -> None:
    run_ranks(2, sharded, number)


@pytest.mark.ranks
def test_weights_learn_from_sharded_tables_in_eval() -> None:
    run_ranks(2, sharded_weights)


def one_rank_in_eval() -> str:
    mix = mixes("row_wise")[0]
    model = shard(mix, build(mix, "sgd"), environment())
    model.train(dist.get_rank() == 0)
    with torch.no_grad():
        # without gradients it makes no difference
        look_up(model, batch_of(mix, 0), mix)
    with pytest.raises(RuntimeError) as raised:
        look_up(model, batch_of(mix, 0), mix)
    return str(raised.value)


@pytest.mark.ranks
def test_ranks_that_differ_in_train_and_eval_are_told() -> None:
    what = "whether their module is in train() or eval()"
    assert run_ranks(2, one_rank_in_eval) == [f"ranks [{other}] differ from this one in {what}" for other in (1, 0)]


def test_gradients_of_eval_do_not_wait_for_a_step() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    ebc.fused_optimizer().accumulate_gradients()
    before = weight(ebc, "t").clone()
    with quietly():
        ebc.eval()(kjt({"f": [[1, 2]]})).values().sum().backward()
    ebc.fused_optimizer().step()
    assert ebc.fused_optimizer().gradient_sums() == []
    assert torch.equal(before, weight(ebc, "t"))


class Counted:
    """A store that counts leases."""

    def __init__(self) -> None:
        self.leases = 0

    def attach(self, group: TableGroup) -> None:
        pass

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, None]:
        self.leases += 1
        return ids, None

    def release(self, lease: None) -> None:
        self.leases -= 1


def test_a_lookup_of_eval_holds_no_rows() -> None:
    """Forwards of eval() whose backward never comes held the slots of a cache for good."""
    store = Counted()
    group = TableGroup(
        [TableShape("t", 5, 4)], [LookupFeature("f", 0)], dtype=torch.float32, device=torch.device("cpu"),
        optimizer=OptimizerSpec("sgd"), store=store,
    )  # fmt: skip
    torch.nn.init.ones_(group.flat)
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 2])
    for _ in range(3):
        group.pooled(ids, offsets, trains=False)
    assert store.leases == 0
    weights = torch.ones(2, requires_grad=True)
    out = group.pooled(ids, offsets, weights, trains=False)
    assert store.leases == 1
    with quietly():
        out.sum().backward()
    assert store.leases == 0 and gradient_of(weights).tolist() == [4.0, 4.0]


def leases_of_sharded() -> list[list[int]]:
    """Leases of this rank's stores after forwards of eval() without a backward, and after one with a backward."""
    counts = []
    for mix in (mixes("row_wise")[1], mixes("table_wise")[2]):
        made: list[Counted] = []

        def store(shapes: object, made: list[Counted] = made) -> Counted:
            made.append(Counted())
            return made[-1]

        model = shard(mix, build(mix, "sgd"), environment(), stores=store)
        for learned in (False, mix.weighted):
            model.eval()
            for _ in range(3):
                out = looked_up(model, mix)[1] if learned else look_up(model, batch_of(mix, 0), mix)
                if learned:
                    with quietly():
                        out.sum().backward()
            counts.append([group.leases for group in made])
        model.train()
        look_up(model, batch_of(mix, 0), mix).sum().backward()
        counts.append([group.leases for group in made])
    return counts


@pytest.mark.ranks
def test_a_sharded_lookup_of_eval_holds_no_rows() -> None:
    """A cache behind a shard was full after some forwards of eval() with gradients enabled and no backward."""
    for counts in run_ranks(2, leases_of_sharded):
        assert all(counts) and not any(any(leases) for leases in counts)


@pytest.mark.parametrize(("how", "moved"), [("not", [1, 2]), ("torch", []), ("numpy", [2, 5])])
def test_ids_that_change_before_the_backward_are_seen_by_torch_alone(how: str, moved: list[int]) -> None:
    """As the docstring of `EmbeddingBagCollection` says: what numpy writes is not noticed."""
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, "t", feature_names=["f"])])
    torch.nn.init.zeros_(weight(ebc, "t"))
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
    ids = torch.tensor([1, 2])
    out = ebc(KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([2]))).values()
    if how == "torch":
        ids[0] = 5
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    else:
        if how == "numpy":
            ids.numpy()[0] = 5
        out.sum().backward()
    assert weight(ebc, "t")[:, 0].nonzero().flatten().tolist() == moved
