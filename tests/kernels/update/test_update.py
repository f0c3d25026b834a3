"""The fused update: every rule against the oracle and torch.optim, the guard, odd gradients.

Takes a minute, interpreted or not: each rule meets each case, one of 100,000 ids on one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import oracle
import pytest
import torch
import torch.nn.functional as nnf
from kernel_inputs import (
    CASES,
    KINDS,
    RULES,
    TOLERANCE,
    UPDATES,
    Case,
    Inputs,
    Optimizer,
    assert_close,
    assert_same_bits,
    full_if,
    inputs,
    optimizer,
    per_device,
    torch_device,
    update_args,
    upstream,
)

from shardwise.kernels import (
    RULES as DEFINED,
    fused_update,
)
from shardwise.kernels.update.update import fused_update_ref


def used(rule: str, batch: Inputs, *, decay: str = "none", lr: float = 0.1) -> Optimizer:
    """An optimizer that has already taken three steps: random states."""
    state = optimizer(rule, batch, decay=decay, lr=lr)
    generator = torch.Generator().manual_seed(2)
    for tensor in state.states:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.1)
    state.step.fill_(3)
    return state


# what the interpreter takes each rule on
FEW = ("mixed dims", "shared table", "fp16 table")


def repeats(device: str, case: Case, rule: str) -> bool:
    """Whether this rule on this case says nothing of a kernel that others do not say."""
    return rule not in KINDS and (case.slow or (device == "interpreted" and case.name not in FEW))


PAIRS = [
    pytest.param(
        *pair.values, rule, id=f"{pair.id}-{rule}",
        marks=[*pair.marks, *full_if(repeats(*pair.values, rule=rule))],
    )
    for pair in per_device(CASES, UPDATES) for rule in RULES
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("device", "case", "rule"), PAIRS)
def test_an_update_matches_the_oracle_and_its_reference(device: str, case: Case, rule: str) -> None:
    batch = inputs(case, torch_device(device))
    grad, state = upstream(batch), used(rule, batch)
    reference, weights_ref = state.copied(), batch.weights.clone()
    before = [table.cpu().clone() for table in batch.tables()]
    expected = dense_twins(batch, state)

    fused_update(*update_args(batch.weights, state, grad, batch))
    dense, touched = oracle.gradients(before, case.features, batch.bags, grad, batch.scales)
    for t, twin in enumerate(expected):
        twin.step(dense[t], touched[t])
        assert_close(batch.tables()[t], twin.table)
        assert_same_bits(batch.tables()[t][~touched[t]], before[t][~touched[t]])
        for (name, kind), tensor in zip(DEFINED[rule].states.items(), state.states, strict=True):
            own = batch.row_states(tensor)[t][:, None] if kind == "row" else batch.tables(tensor)[t]
            assert_close(own, twin.states[name], 1e-5)
    assert state.step.item() == 4
    if not case.slow:
        fused_update_ref(*update_args(weights_ref, reference, grad, batch))
        # the reference adds one row after another
        assert_close(batch.weights, weights_ref, max(1e-5, TOLERANCE[case.dtype]))
        assert reference.step.item() == 4
        assert_close(state.states, reference.states, 1e-5)


def dense_twins(batch: Inputs, state: Optimizer) -> list[oracle.Dense]:
    """The oracle's tables with the states and the step count of `state`."""
    twins = []
    for t, table in enumerate(batch.tables()):
        twin = oracle.Dense(table, state.rule, state.by_name, state.decay)
        twin.steps = int(state.step)
        for (name, kind), tensor in zip(DEFINED[state.rule].states.items(), state.states, strict=True):
            own = batch.row_states(tensor)[t][:, None] if kind == "row" else batch.tables(tensor)[t]
            twin.states[name] = own.cpu().double()
        twins.append(twin)
    return twins


@pytest.mark.parametrize("device", UPDATES)
@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_update_adds_the_gradient_of_each_id(device: str, rule: str) -> None:
    case = Case("sequence", tables=((9, 8), (4, 8)), features=((0, False), (1, False), (0, False)), lengths=(0, 9))
    batch = inputs(case, torch_device(device))
    grad = torch.randn(batch.indices.numel(), 8, generator=torch.Generator().manual_seed(1)).to(batch.weights.device)
    state = used(rule, batch)
    expected, before = dense_twins(batch, state), [table.cpu().clone() for table in batch.tables()]
    reference, weights_ref = state.copied(), batch.weights.clone()
    fused_update(*update_args(batch.weights, state, grad, batch, "sequence"))
    fused_update_ref(*update_args(weights_ref, reference, grad, batch, "sequence"))
    # one id a sample turns a sequence into a sum
    bags = [[[i] for bag in feature for i in bag] for feature in batch.bags]
    parts = grad.split([len(feature) for feature in bags])
    for t, twin in enumerate(expected):
        own = [f for f, (table, _) in enumerate(case.features) if table == t]
        results = [oracle.gradients([before[t]], [(0, False)], [bags[f]], parts[f]) for f in own]
        twin.step(sum((g[0] for g, _ in results), torch.zeros(())), torch.stack([hit[0] for _, hit in results]).any(0))
        assert_close(batch.tables()[t], twin.table)
    assert_close(batch.weights, weights_ref)


STEPS = {"cpu": 100, "numba": 100, "cuda": 100, "interpreted": 8}
TRAINED = Case("trained", tables=((12, 8), (5, 3)), features=((0, False), (1, False), (0, False)), batch=6)
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=0.1),
    "adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.1, eps=1e-6),
    "adam": lambda tables: torch.optim.Adam(tables, lr=0.1, betas=(0.9, 0.99), eps=1e-6),
    "sparse adam": lambda tables: torch.optim.SparseAdam(tables, lr=0.1, betas=(0.9, 0.99), eps=1e-8),
}


@pytest.mark.parametrize("device", UPDATES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_torch_optim(device: str, name: str) -> None:
    """Adam is compared where every row is hit in every step, SparseAdam where it is not."""
    rule = name.split()[-1]
    batch = inputs(TRAINED, torch_device(device))
    state = optimizer(rule, batch, eps=1e-8 if name == "sparse adam" else 1e-6)
    tables = [torch.nn.Parameter(table.detach().clone()) for table in batch.tables()]
    torch_optimizer = OPTIMIZERS[name](tables)
    for step in range(STEPS[device]):
        now = batch.batch_of(step)
        if name == "adam":
            now = hitting_every_row(now)
        grad = upstream(now, seed=step)
        fused_update(*update_args(batch.weights, state, grad, now))
        torch_optimizer.zero_grad()
        columns = []
        for f, (t, _) in enumerate(TRAINED.features):
            offsets = now.offsets[f * TRAINED.batch : (f + 1) * TRAINED.batch + 1]
            ids = now.indices[int(offsets[0]) : int(offsets[-1])]
            columns.append(
                nnf.embedding_bag(
                    ids, tables[t], offsets - offsets[0], mode="sum", include_last_offset=True,
                    sparse=name == "sparse adam",
                )
            )  # fmt: skip
        torch.cat(columns, dim=1).backward(grad)
        torch_optimizer.step()
    assert_close(batch.tables(), tables, 1e-5)


def hitting_every_row(batch: Inputs) -> Inputs:
    """Append to each feature's last bag every row of its table."""
    pieces, ends = [], []
    for f, (t, _) in enumerate(batch.case.features):
        offsets = batch.offsets[f * batch.case.batch : (f + 1) * batch.case.batch + 1]
        rows = torch.arange(batch.case.tables[t][0], device=offsets.device)
        pieces += [batch.indices[int(offsets[0]) : int(offsets[-1])], rows]
        lengths = offsets.diff()
        lengths[-1] += len(rows)
        ends.append(lengths)
    lengths = torch.cat(ends)
    return replace(batch, indices=torch.cat(pieces), offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("slot", [0, 1], ids=["bad id", "bad offset"])
@pytest.mark.parametrize("device", UPDATES)
def test_a_guard_that_reports_a_bad_batch_leaves_everything_untouched(device: str, slot: int, rule: str) -> None:
    """The torch path used to look at the guard for the step alone, and updated rows and states."""
    batch = inputs(next(case for case in CASES if case.name == "mixed dims"), torch_device(device))
    for apply in (fused_update, fused_update_ref):
        state = used(rule, batch)
        state.guard[slot] = 3
        before, weights = state.copied(), batch.weights.clone()
        apply(*update_args(batch.weights, state, upstream(batch), batch))
        assert_same_bits(batch.weights, weights)
        assert_same_bits(state.step, before.step)
        assert_same_bits(state.states, before.states)


@pytest.mark.parametrize("name", ["batch 0", "all features empty"])
@pytest.mark.parametrize("device", UPDATES)
def test_an_empty_batch_advances_the_step_and_nothing_else(device: str, name: str, rule: str) -> None:
    """As torch.optim counts a step whose gradients are all zero."""
    batch = inputs(next(case for case in CASES if case.name == name), torch_device(device))
    state = used(rule, batch)
    before, weights = state.copied(), batch.weights.clone()
    fused_update(*update_args(batch.weights, state, upstream(batch), batch))
    assert_same_bits(batch.weights, weights)
    assert state.step.item() == before.step.item() + 1
    assert_same_bits(state.states, before.states)


@pytest.mark.parametrize("device", UPDATES)
def test_ids_outside_their_table_change_no_row(device: str, rule: str) -> None:
    case = Case("bad", tables=((6, 4), (6, 4)), features=((0, False), (1, False)), batch=2)
    batch = replace(inputs(case), indices=torch.tensor([1, 6, -1, 2**40]), offsets=torch.tensor([0, 2, 3, 3, 4]))
    batch = batch.to(torch_device(device))
    before, state = batch.weights.clone(), used(rule, batch)
    fused_update(*update_args(batch.weights, state, upstream(batch), batch))
    changed = [(table != old).any(1).tolist() for table, old in zip(batch.tables(), batch.tables(before), strict=True)]
    assert changed == [[False, True, False, False, False, False], [False] * 6]


@pytest.mark.parametrize("device", UPDATES)
def test_many_hits_of_one_row_add_up_exactly(device: str) -> None:
    hits = 100_000 if device != "interpreted" else 2_000
    batch = inputs(Case("ones", batch=hits, lengths=(1, 1), ids="hot"), torch_device(device))
    batch.weights.zero_()
    grad = torch.ones(hits, 8, device=batch.weights.device)
    fused_update(*update_args(batch.weights, optimizer("sgd", batch, lr=1.0), grad, batch))
    assert batch.tables()[0][0].tolist() == [-float(hits)] * 8
    assert (batch.tables()[0][1:] == 0).all()


@pytest.mark.parametrize("device", UPDATES)
def test_gradients_may_be_expanded_shifted_or_of_low_precision(device: str) -> None:
    batch = inputs(next(case for case in CASES if case.name == "mixed dims"), torch_device(device))
    plain = upstream(batch)
    shifted = torch.empty(plain.numel() + 1, device=plain.device)[1:].view(plain.shape).copy_(plain)
    expanded = plain[:1].expand_as(plain)
    half = plain.bfloat16()
    for grad, same in (
        (shifted, plain),
        (expanded, expanded.clone()),
        (half, half.float()),
        (plain.T.clone().T, plain),
    ):
        got, expected = batch.weights.clone(), batch.weights.clone()
        fused_update(*update_args(got, used("adam", batch), grad, batch))
        fused_update(*update_args(expected, used("adam", batch), same, batch))
        assert_same_bits(got, expected)


def test_an_unknown_rule_and_missing_states_are_refused() -> None:
    batch = inputs(CASES[0])
    state = optimizer("adam", batch)
    for rule, message in (
        ("tiger", "unknown optimizer rule 'tiger': expected one of gradient, sgd, momentum_sgd"),
        ("sgd", "optimizer rule 'sgd' has 0 states, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_update(*update_args(batch.weights, replace(state, rule=rule), upstream(batch), batch))
