"""The index of an update made in forward: the bits, steps and guard of an update that makes its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from kernel_inputs import UPDATES, assert_same_bits, torch_device
from torch import Tensor

from shardwise import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    LookupPolicy,
    PoolingType,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings.tables import lookup_autograd
from shardwise.kernels import configs
from shardwise.kernels.update import index_op, row_chunks, update

EVERYWHERE = pytest.mark.parametrize("device", UPDATES)
Collection = EmbeddingBagCollection | EmbeddingCollection
IN_FORWARD = LookupPolicy(index_in_forward=True)


def bags(policy: LookupPolicy, device: torch.device, weighted: bool = False, dtype: Any = DataType.FP32) -> Collection:
    torch.manual_seed(0)
    pooling = PoolingType.SUM if weighted else PoolingType.MEAN
    tables = [
        EmbeddingBagConfig(40, 4, "t", feature_names=["f"], pooling=pooling, data_type=dtype),
        EmbeddingBagConfig(9, 8, "u", feature_names=["g", "h"], data_type=dtype),
    ]
    return EmbeddingBagCollection(tables, weighted, device, policy=policy)


def rows(policy: LookupPolicy, device: torch.device) -> Collection:
    torch.manual_seed(0)
    return EmbeddingCollection([EmbeddingConfig(40, 4, "t", feature_names=["f", "g", "h"])], device, policy=policy)


def trained(model: Collection, optimizer: type[torch.optim.Optimizer] = RowWiseAdagrad) -> Collection:
    apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    # its groups are made anew with their optimizer
    model.fused_optimizer()
    return model


def batch(seed: int, device: torch.device, weighted: bool = False, samples: int = 9) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * samples,), generator=generator)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(ids), generator=generator).to(device) if weighted else None
    return KeyedJaggedTensor(["f", "g", "h"], ids.to(device), weights, lengths.to(device))


def values(model: Collection, kjt: KeyedJaggedTensor) -> Tensor:
    out = model(kjt)
    return out.values() if isinstance(model, EmbeddingBagCollection) else torch.cat([j.values() for j in out.values()])


def step(model: Collection, kjt: KeyedJaggedTensor) -> None:
    out = values(model, kjt)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out))


def everything(model: Collection) -> list[Tensor]:
    groups = model._groups
    return [tensor for group in groups for tensor in (group.flat, *group.states, group.step)]


def assert_same(one: Collection, other: Collection) -> None:
    for mine, theirs in zip(everything(one), everything(other), strict=True):
        assert_same_bits(mine, theirs)


MODELS: dict[str, tuple[Callable[..., Collection], bool]] = {
    "averages and sums": (bags, False),
    "weights": (lambda policy, device: bags(policy, device, weighted=True), True),
    "fp16": (lambda policy, device: bags(policy, device, dtype=DataType.FP16), False),
    "rows": (rows, False),
}


@EVERYWHERE
@pytest.mark.parametrize("kind", MODELS)
def test_training_has_the_same_bits_and_steps(device: str, kind: str) -> None:
    """Batches of one program and of several, one without ids, and two forwards before their backwards."""
    where, (make, weighted) = torch_device(device), MODELS[kind]
    optimizer = torch.optim.Adam if kind == "rows" else RowWiseAdagrad
    models = [trained(make(policy, where), optimizer) for policy in (LookupPolicy(), IN_FORWARD)]
    for model in models:
        for seed, samples in enumerate((9, 0, 65)):
            step(model, batch(seed, where, weighted, samples))
        outs = [values(model, batch(seed, where, weighted)) for seed in (7, 8)]
        for out in outs:
            out.sum().backward()
    assert_same(*models)
    assert all(group.step.item() >= 4 for group in models[1]._groups)


@EVERYWHERE
def test_a_table_that_was_frozen_after_the_forward_is_left_alone(device: str) -> None:
    where = torch_device(device)
    models = [trained(bags(policy, where)) for policy in (LookupPolicy(), IN_FORWARD)]
    for model in models:
        step(model, batch(0, where))
        out = values(model, batch(1, where))
        first = next(iter(model.parameters()))
        first.requires_grad_(False)
        before = first.detach().clone()
        out.sum().backward()
        assert_same_bits(first.detach(), before)
        step(model, batch(2, where))
    assert_same(*models)


@pytest.mark.interpreted
def test_an_index_in_forward_leaves_the_update_its_step_and_its_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward sorts nothing, counts the step, and leaves a batch out that the guard reports."""
    where, made = torch_device("interpreted"), list[str]()
    plain = row_chunks.row_chunks

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append("made")
        return plain(*args, **kwargs)

    monkeypatch.setattr(index_op, "row_chunks", noted)
    monkeypatch.setattr(update, "row_chunks", noted)
    model = trained(bags(IN_FORWARD, where))
    (group,) = model._groups
    out = values(model, batch(0, where))
    assert made == ["made"] and group.step.item() == 0
    out.sum().backward()
    assert made == ["made"] and group.step.item() == 1
    before = group.flat.clone()
    out = values(model, batch(1, where))
    group.check.guard[0] = 3
    out.sum().backward()
    assert group.step.item() == 1
    assert_same_bits(group.flat, before)


@pytest.mark.interpreted
def test_an_a_b_turns_it_on_and_off() -> None:
    where = torch_device("interpreted")
    model = trained(bags(LookupPolicy(), where))
    (group,) = model._groups
    slots, offsets = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2, 3])
    frozen = (False, False)
    arguments: tuple[Any, ...] = (group, slots, offsets, None, None)
    assert lookup_autograd.index_ahead(*arguments, pooling="mean", frozen=frozen) is None
    with configs.variant({"index.in_forward": True}):
        ahead = lookup_autograd.index_ahead(*arguments, pooling="mean", frozen=frozen)
    assert ahead is not None and ahead.tensors(frozen) and ahead.tensors((True, False)) is None


class Stream:
    """Stands in for a stream: notes what is asked of it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"event of {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for the {event}")


@pytest.mark.interpreted
def test_streams_meet_before_and_after_the_index_and_keep_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    where, log = torch_device("interpreted"), list[str]()
    here, beside = Stream("main", log), Stream("side", log)
    monkeypatch.setattr(lookup_autograd, "_current", lambda device: here)
    monkeypatch.setattr(lookup_autograd, "_beside", lambda device: beside)

    def inside(stream: Stream) -> AbstractContextManager[None]:
        log.append(f"in {stream.name}")
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: log.append(f"kept for {stream.name}"))
    model = trained(bags(LookupPolicy(bounds_check=BoundsCheckMode.IGNORE, index_in_forward=True), where))
    out = values(model, batch(0, where))
    # slots, offsets and features
    assert log == ["side waits for main", "in side", "event of side", *["kept for side"] * 3]
    log.clear()
    out.sum().backward()
    # chunks, their numbers, sources and factors
    assert log == ["main waits for the event of side", *["kept for main"] * 4]
