"""What a collection does with gradients that are not finite, its output dtype, and rows behind a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged_batches import kjt, upstream
from kernel_inputs import assert_close
from torch import Tensor

from shardwise import (
    FTRL,
    LAMB,
    BoundsCheckMode,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    GradientCheckMode,
    KeyedJaggedTensor,
    LarsSGD,
    LookupPolicy,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import (
    LookupFeature,
    OptimizerSpec,
    TableGroup,
    TableShape,
)
from shardwise.embeddings.tables import id_check
from shardwise.embeddings.tables.id_check import PendingCheck
from shardwise.kernels import capturing, is_clean

BATCH = kjt({"f": [[1], [2]], "g": [[3], [4]]})


def bags(gradient_check: GradientCheckMode = GradientCheckMode.IGNORE, **policy: Any) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(10, 4, "t", feature_names=["f"]), EmbeddingBagConfig(9, 3, "u", feature_names=["g"])]
    return EmbeddingBagCollection(tables, policy=LookupPolicy(gradient_check=gradient_check, **policy))


def everything_of(ebc: EmbeddingBagCollection) -> list[Tensor]:
    state = ebc.fused_optimizer().state_dict()["state"]
    return [p.detach().clone() for p in ebc.parameters()] + [
        s.clone() for states in state.values() for s in states.values()
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_28_a_gradient_that_is_not_finite_raises_or_is_left_out(bad: float) -> None:
    """Fault 28. Raised, it names table, feature, sample and column; either way nothing of the step is written."""
    for mode in (GradientCheckMode.RAISE, GradientCheckMode.SKIP):
        ebc = bags(mode)
        apply_optimizer_in_backward(torch.optim.Adam, ebc.parameters(), {"lr": 0.1})
        ebc(BATCH).values().sum().backward()
        before, grad = everything_of(ebc), torch.ones(2, 7)
        grad[1, 5] = bad
        out = ebc(BATCH).values()
        if mode is GradientCheckMode.RAISE:
            message = rf"feature 'g' \(table 'u'\), sample 1: its gradient is {bad} in column 1; nothing changed"
            with pytest.raises(FloatingPointError, match=message):
                out.backward(grad)
        else:
            out.backward(grad)
        assert all(torch.equal(a, b) for a, b in zip(everything_of(ebc), before, strict=True))
        ebc(BATCH).values().sum().backward()
        assert not torch.equal(everything_of(ebc)[0], before[0])


def test_28_the_gradient_of_a_sequence_is_named_by_its_id() -> None:
    ec = EmbeddingCollection(
        [EmbeddingConfig(10, 4, "t", feature_names=["f"])], policy=LookupPolicy(gradient_check=GradientCheckMode.RAISE)
    )
    apply_optimizer_in_backward(torch.optim.SGD, ec.parameters(), {"lr": 0.1})
    rows = ec(kjt({"f": [[1, 2]]}))["f"].values()
    grad = torch.ones(2, 4)
    grad[1, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="feature 'f'"):
        rows.backward(grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_comes_in_the_dtype_that_was_asked_for(dtype: torch.dtype) -> None:
    narrow, wide = bags(output_dtype=dtype), bags()
    for ebc in (narrow, wide):
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    got, expected = narrow(BATCH).values(), wide(BATCH).values()
    assert got.dtype == dtype and torch.equal(got, expected.to(dtype))
    # gradients of 1 are exact in every dtype
    got.sum().backward()
    expected.sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(everything_of(narrow), everything_of(wide), strict=True))


WRONG: Any = "raise"
PARAM = torch.nn.Parameter(torch.ones(2, 2))
PARAM.grad = torch.ones(2, 2).to_sparse()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LookupPolicy(gradient_check=WRONG), TypeError, "gradient_check must be a GradientCheckMode"),
        (
            lambda: LookupPolicy(output_dtype=torch.int8),
            ValueError,
            "output_dtype must be float32, float16 or bfloat16, got torch.int8",
        ),
        (lambda: EmbeddingBagCollection([], policy=WRONG), TypeError, "policy must be a LookupPolicy, got 'raise'"),
        (lambda: LAMB([PARAM], speed=1.0), ValueError, "LAMB does not take speed: expected some of weight_decay, lr"),
        (lambda: LAMB([PARAM], lr=-1), ValueError, "LAMB: lr must not be negative, got -1"),
        (lambda: LAMB([PARAM]).step(), RuntimeError, "LAMB takes dense gradients"),
    ],
    ids=["mode", "dtype", "no policy", "no setting", "rate", "sparse"],
)
def test_policies_and_rules_refuse_what_they_do_not_know(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


class TwoTiers:
    """Rows of one table in a host dictionary, a few of them at a time in the slots of a group."""

    def __init__(self, rows: Tensor) -> None:
        self.host: dict[int, list[Tensor]] = {row: [value.clone()] for row, value in enumerate(rows)}
        self.slot_of: dict[int, int] = {}
        self.leased = 0

    def attach(self, group: TableGroup) -> None:
        self.group = group
        for values in self.host.values():
            values += [torch.zeros_like(view[0]) for view in self._views()[1:]]

    def _views(self) -> list[Tensor]:
        views = self.group.state_views(0)
        return [self.group.view(0), *(view for name, view in views.items() if name != "step")]

    @torch.no_grad()
    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, int]:
        assert self.leased == 0
        wanted = sorted(set(ids.tolist()))
        views = self._views()
        assert len(wanted) <= len(views[0])
        self.write_back()
        self.slot_of = {row: slot for slot, row in enumerate(reversed(wanted))}
        for row, slot in self.slot_of.items():
            for view, value in zip(views, self.host[row], strict=True):
                view[slot] = value
        self.leased += 1
        return torch.tensor([self.slot_of[row] for row in ids.tolist()]), self.leased

    def write_back(self) -> None:
        for row, slot in self.slot_of.items():
            self.host[row] = [view[slot].clone() for view in self._views()]

    def release(self, lease: int) -> None:
        assert lease == 1
        self.leased = 0


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam", "partial_rowwise_lamb"])
def test_a_table_behind_a_store_trains_to_the_same_bits(rule: str) -> None:
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    spec, device = OptimizerSpec(rule, lr=0.1), torch.device("cpu")
    features = [LookupFeature("f", 0)]
    whole = TableGroup([TableShape("t", 40, 4)], features, dtype=torch.float32, device=device, optimizer=spec)
    whole.view(0).copy_(rows)
    store = TwoTiers(rows)
    tiered = TableGroup(
        [TableShape("t", 40, 4, slots=6)], features, dtype=torch.float32, device=device, optimizer=spec, store=store
    )
    store.attach(tiered)
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        pick = torch.randint(0, 40, (6,), generator=generator)
        ids, grad = pick[torch.randint(0, 6, (50,), generator=generator)], torch.randn(10, 4, generator=generator)
        offsets = torch.arange(0, 51, 5)
        for group in (whole, tiered):
            group.check(ids, offsets)
        plain_output, tiered_output = whole.pooled(ids, offsets), tiered.pooled(ids, offsets)
        assert torch.equal(plain_output, tiered_output)
        plain_output.backward(grad)
        tiered_output.backward(grad)
    store.write_back()
    for number, expected in enumerate([whole.view(0), *(v for k, v in whole.state_views(0).items() if k != "step")]):
        assert torch.equal(torch.stack([store.host[row][number] for row in range(40)]), expected)
    with torch.no_grad():
        tiered.pooled(torch.tensor([39]), torch.tensor([0, 1]))
    assert store.leased == 0
    with pytest.raises(IndexError, match=r"id 40 is outside \[0, 40\)"):
        tiered.check(torch.tensor([40]), torch.tensor([0, 1]))


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}),
    (PartialRowWiseAdam, {"lr": 0.1, "weight_decay": 0.1}),
    (LAMB, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    (PartialRowWiseLAMB, {"lr": 0.1}),
    (LarsSGD, {"lr": 1.0, "eta": 0.1}),
    (FTRL, {"lr": 0.1, "l1": 0.01}),
]


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS, ids=[f"{kind.__name__} {s}" for kind, s in OPTIMIZERS])
@pytest.mark.parametrize("hits", [1, 2])
def test_twenty_fused_steps_equal_the_optimizer_of_any_parameter(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], hits: int
) -> None:
    """Where every row is hit, once or often, torch's optimizers and our rules step tables as they step parameters."""
    fused, plain = bags(), bags()
    apply_optimizer_in_backward(kind, fused.parameters(), settings)
    optimizer = kind(plain.parameters(), **settings)  # type: ignore[call-arg]
    ids = torch.arange(9).repeat(hits)
    whole = KeyedJaggedTensor(
        ["f", "g"], torch.cat([ids, torch.tensor([9]), ids]), lengths=torch.tensor([6, 9 * hits - 5, 5, 9 * hits - 5])
    )
    for step in range(20):
        grad = upstream(2, 7, seed=step)
        fused(whole).values().backward(grad)
        optimizer.zero_grad()
        plain(whole).values().backward(grad)
        optimizer.step()
    for actual, reference in zip(fused.parameters(), plain.parameters(), strict=True):
        assert_close(actual, reference, 1e-5)


class HostGuard(PendingCheck):
    """Without a device: what is sent is there at once."""

    def __init__(self, guard: Tensor) -> None:
        self.guard = guard

    def send(self, ids: Tensor, offsets: Tensor) -> HostGuard:
        self.ids, self.offsets, self._host = ids, offsets, self.guard.clone()
        return self

    def is_raised(self) -> bool:
        return not is_clean(self._host)


def test_28_a_build_for_cuda_without_a_device_is_not_asked_whether_it_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked that, torch 2.15 raises where the driver is missing or too old: the build, not a device, decided to ask."""

    def refuse() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    assert not capturing()


def test_28_a_gradient_raises_though_nobody_checks_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA the check of ids tells of it too; where there is none, the next lookup still does, and trains again."""
    monkeypatch.setattr(id_check, "PendingCheck", HostGuard)
    ebc = bags(GradientCheckMode.RAISE, bounds_check=BoundsCheckMode.IGNORE)
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    ebc(BATCH)
    group, ids, offsets = ebc._groups[0], torch.tensor([1]), torch.tensor([0, 1, 1])
    for _ in range(3):
        group.check._watch_gradients(ids, offsets)
    group.check.guard[2] = 5
    group.check._watch_gradients(ids, offsets)
    with pytest.raises(FloatingPointError, match="a gradient of tables t, u was not finite; no table was updated"):
        group.check._watch_gradients(ids, offsets)
    assert is_clean(group.check.guard)
    group.check._watch_gradients(ids, offsets)
    group.check.raise_pending()
