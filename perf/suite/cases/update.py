"""Cases of the suite: the fused backward and update of each rule, alone and with the lookup before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardwise.kernels import RULES, check_ids, new_guard
from shardwise.kernels.update.update import fused_update_ref
from shardwise.perf.suite.batches import (
    Batch,
    compacted,
    distinct_rows,
    first_samples,
    lookup_bytes,
    optimizer,
    update_bytes,
)
from shardwise.perf.suite.case import (
    Call,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.cases.lookup import (
    CUDA,
    EVERY,
    FULL,
    batches_of,
    mean,
)
from shardwise.perf.suite.peers import (
    LR,
    TOLERANCES,
    assert_close,
    bags_of,
    fbgemm_tables,
    peer_calls,
    stepped,
    torch_lookup,
    torch_optimizer,
)
from shardwise.perf.suite.workloads import (
    DCNV2,
    EBC,
    FBGEMM_DEFAULT,
    HOT,
    PRODUCTION,
    WORKLOADS,
    Workload,
)

FLOOR = "distinct rows there and back with their states, a gradient row and 96 bytes of sorting for each id"
# ids that the reference, a loop over them, is given
CHECKED_IDS = 600


# sums in another order are a little apart; a rule that divides by their size makes much of it where they are near 0
_APART = 1e-3


def _start(rule: str) -> float:
    """The initial value of states: of Adagrad's sums not 0, by whose root the first step would divide."""
    return 0.1 if RULES[rule].accumulator else 0.0


def _assert_same_rows(
    batch: Batch, own_call: Call, peers: dict[str, Sequence[Call]], notes: dict[str, object], tolerance: float
) -> None:
    """Each side's call leaves the same rows behind, from the same rows before; a peer that cannot is left out."""
    rows, table = distinct_rows(batch), batch.weights.view(-1, batch.dims[0])
    before = table[rows]
    own_call()
    updated = table[rows]
    table[rows] = before
    assert not torch.equal(updated, before), "no row was updated"
    for name in list(peers):
        try:
            peers[name][0]()
        except RuntimeError as error:
            notes[f"no {name}"] = str(error)[:200]
            del peers[name]
        else:
            assert_close(updated, table[rows], tolerance, name)
        table[rows] = before


def _assert_reference(batch: Batch, rule: str, tolerance: float) -> None:
    """Ours and the reference agree on the bags of the first samples, over a copy of their rows."""
    samples = max(1, CHECKED_IDS * batch.grad.shape[0] // max(batch.ids, 1))
    own = compacted(first_samples(batch, samples))
    copy = replace(own, weights=own.weights.clone())
    own_state, reference = (optimizer(rule, batch_of_side, lr=LR, start=_start(rule)) for batch_of_side in (own, copy))
    own_state.update(own)
    reference.update(copy, by=fused_update_ref)
    assert_close(own.weights, copy.weights, tolerance, f"the reference of {rule}")
    for got, want in zip(own_state.states, reference.states, strict=True):
        assert_close(got, want, 1e-5, f"a state of the reference of {rule}")


def _elements(rule: str, setting: Setting) -> float:
    """Numbers that all sides together keep for each number of a table."""
    return RULES[rule].kinds.count("element") * (1 + len(setting.peers & {"torch", "fbgemm"}))


def _make(setting: Setting, workload: Workload, rule: str, *, whole: bool) -> Ready:
    """The backward with its update, where peers go back again and again through a forward that was done before.

    `whole`: checks of ids and the lookup too: what a training step does with the tables.
    """
    batches, notes = batches_of(setting, workload, _elements(rule, setting))
    state, tolerance = optimizer(rule, batches[0], lr=LR, start=_start(rule)), TOLERANCES[workload.dtype]
    names, guard = [f"f{f}" for f in range(len(batches[0].dims))], new_guard(setting.device)

    def whole_step(b: Batch) -> None:
        check_ids(b.indices, b.offsets, b.features, guard, names=names)
        b.lookup()
        state.update(b)

    def back(out: Tensor, b: Batch) -> None:
        torch.autograd.backward(out, b.grad.to(out.dtype), retain_graph=not whole)

    def of_peer(forwards: Sequence[Callable[[], Tensor]], after: Call = lambda: None) -> Sequence[Call]:
        def run(forward: Callable[[], Tensor], b: Batch) -> None:
            back(forward(), b)
            after()

        made = forwards if whole else [partial(_itself, forward()) for forward in forwards]
        return [partial(run, forward, b) for forward, b in zip(made, batches, strict=True)]

    def of_fbgemm() -> Sequence[Call]:
        tables = fbgemm_tables(batches[0], rule=rule, start=_start(rule))
        return of_peer([partial(tables, b.indices, b.offsets) for b in batches])

    def of_torch() -> Sequence[Call]:
        bags = bags_of(batches[0])
        after = stepped(torch_optimizer(rule, bags, start=_start(rule)))
        return of_peer([torch_lookup(bags, b) for b in batches], after)

    calls = [partial(whole_step if whole else state.update, b) for b in batches]
    # no call before they are compared: rows and states must be as at the first step
    peers, trouble = peer_calls(setting, {"fbgemm": of_fbgemm, "torch": of_torch}, call=False)
    notes |= trouble

    def check() -> None:
        _assert_reference(batches[0], rule, tolerance)
        divides = bool(RULES[rule].kinds) and not RULES[rule].accumulator
        _assert_same_rows(batches[0], calls[0], peers, notes, max(tolerance, _APART) if divides else tolerance)

    moved = mean([update_bytes(b, rule) + (lookup_bytes(b) if whole else 0) for b in batches])
    return Ready(calls, check, moved, f"ids in the lookup; {FLOOR}" if whole else FLOOR, peers, notes=notes)


def _itself(out: Tensor) -> Tensor:
    return out


_ON_CPU = (EBC[128], DCNV2, HOT)
# torch's optimizers take some tenths of a second for a step of these
_SLOW = ("adagrad", "adam")
_RULES = [rule for rule in RULES if rule != "gradient" and ":" not in rule]

CASES: Sequence[Case] = (
    *(
        Case(
            f"fused_update, {rule}, {FBGEMM_DEFAULT.name}", "update",
            partial(_make, workload=FBGEMM_DEFAULT, rule=rule, whole=False),
            EVERY if rule in ("sgd", "rowwise_adagrad", "adam") else CUDA, slow=rule in _SLOW,
        )
        for rule in _RULES
    ),
    *(
        Case(
            f"fused_update, {rule}, {workload.name}", "update",
            partial(_make, workload=workload, rule=rule, whole=False),
            EVERY if rule == "rowwise_adagrad" and workload in _ON_CPU
            else FULL if workload in (EBC[64], EBC[32]) else CUDA,
        )
        for rule in ("sgd", "rowwise_adagrad")
        for workload in WORKLOADS
        if workload != FBGEMM_DEFAULT
    ),
    *(
        Case(
            f"lookup and update, {rule}, {workload.name}", "update",
            partial(_make, workload=workload, rule=rule, whole=True),
            CUDA if workload == PRODUCTION or rule == "adam" else EVERY, slow=rule in _SLOW,
        )
        for workload, rules in (
            (FBGEMM_DEFAULT, ("sgd", "adagrad", "rowwise_adagrad", "adam")),
            (EBC[128], ("sgd", "rowwise_adagrad")),
            (PRODUCTION, ("rowwise_adagrad",)),
        )
        for rule in rules
    ),
)  # fmt: skip
