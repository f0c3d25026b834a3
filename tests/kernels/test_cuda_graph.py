"""A step recorded once as a CUDA graph serves batches of every size: buffers of a fixed capacity, nothing waits.

Without a GPU the recorded step is called again instead: buffers, padding and what is compared are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_inputs import (
    UPDATES,
    Case,
    Inputs,
    assert_same_bits,
    inputs,
    optimizer,
    update_args,
    upstream,
)
from torch import Tensor

from shardwise import KeyedJaggedTensor
from shardwise.embeddings.tables import id_check
from shardwise.embeddings.tables.id_check import PendingCheck, raise_replayed
from shardwise.kernels import check_ids, fused_update, is_clean, new_guard, pooled_lookup
from shardwise.perf.gpu_scripts import gpu_ops
from shardwise.perf.gpu_scripts.gpu_sizes import SMALL

CAPACITY = 160
TABLES = Case(
    "captured", tables=((12, 8), (5, 3)), features=((0, False), (1, True), (0, False)), batch=6, lengths=(0, 8),
    weighted=True,
)  # fmt: skip


def fill(batch: Inputs, ids: Tensor, offsets: Tensor, scale: Tensor) -> None:
    """Put a batch into buffers of the capacity; what is left of the batch before becomes padding."""
    n = batch.indices.shape[0]
    assert batch.per_id_weights is not None
    ids[n:], scale[n:] = -1, float("nan")
    ids[:n], scale[:n] = batch.indices, batch.per_id_weights
    offsets.copy_(batch.offsets)


def recorded(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """The step as the replay of a graph; on a CPU the step itself."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("device", UPDATES)
def test_a_recorded_step_trains_on_batches_of_any_size(where: torch.device, rule: str) -> None:
    batch = inputs(TABLES, where)
    weights, state = batch.weights, optimizer(rule, batch)
    eager_weights, eager = weights.clone(), state.copied()
    first, first_state = weights.clone(), state.copied()
    ids = torch.zeros(CAPACITY, dtype=torch.int64, device=where)
    scale, offsets = torch.zeros(CAPACITY, device=where), batch.offsets.clone()
    grad, out = upstream(batch).clone(), torch.zeros_like(upstream(batch))
    static = (batch.features, batch.dims, batch.segments)

    def step() -> None:
        check_ids(ids, offsets, batch.features, state.guard, names=batch.names, padded=True)
        out.copy_(pooled_lookup(weights, ids, offsets, scale, *static, batch.pooling))
        fused_update(
            weights, state.states, state.step, grad, ids, offsets, scale, *static, rule, state.hyper, state.guard,
            batch.pooling,
        )  # fmt: skip

    fill(batch, ids, offsets, scale)
    replay = recorded(step, where)
    # what the recording itself may have trained
    weights.copy_(first)
    state.step.copy_(first_state.step)
    for current, initial in zip(state.states, first_state.states, strict=True):
        current.copy_(initial)
    sizes = set()
    for seed in range(5):
        now = batch.batch_of(seed)
        sizes.add(now.indices.shape[0])
        fill(now, ids, offsets, scale)
        grad.copy_(upstream(now, seed=seed))
        # a scheduler's new rate reaches a recorded step
        for hyper in (state.hyper, eager.hyper):
            hyper[0] = 0.1 / (1 + seed)
        replay()
        expected = pooled_lookup(eager_weights, *now.lookup[1:])
        fused_update(*update_args(eager_weights, eager, upstream(now, seed=seed), now))
        assert_same_bits(out, expected)
        assert_same_bits(weights, eager_weights)
        assert_same_bits(state.states, eager.states)
    assert len(sizes) > 1 and is_clean(state.guard) and state.step.item() == 5


@pytest.mark.parametrize(
    ("place", "error"), [(0, IndexError), (1, ValueError), (2, FloatingPointError)], ids=["id", "offset", "gradient"]
)
def test_what_replays_left_in_the_guard_is_raised_and_cleared(place: int, error: type[Exception]) -> None:
    guard = new_guard()
    raise_replayed(guard, ["a", "b"])
    guard[place] = 3
    with pytest.raises(error, match="replayed with a batch that is bad, and tables a, b stayed as they were"):
        raise_replayed(guard, ["a", "b"])
    assert is_clean(guard)


@pytest.mark.gpu
def test_a_collection_trains_in_a_captured_graph_and_a_bad_replay_raises_at_check() -> None:
    where = torch.device("cuda")
    report = gpu_ops.graph_capture("cuda", SMALL)
    assert report["captured"]
    model = gpu_ops._collection("cuda")
    batch = gpu_ops._batch(0, "cuda")
    ids = batch.values().clone()
    held = KeyedJaggedTensor(batch.keys(), ids, lengths=batch.lengths(), offsets=batch.offsets())

    def step() -> None:
        model(held).values().sum().backward()

    replay = recorded(step, where)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids[2] = 10**6
    replay()
    with pytest.raises(IndexError, match="replayed"):
        model.check()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


class HostRead(PendingCheck):
    """Without a device: what is sent is there at once, and reads are counted."""

    waits = 0

    def __init__(self, guard: Tensor) -> None:
        self.guard = guard

    def send(self, ids: Tensor, offsets: Tensor) -> PendingCheck:
        self._host = self.guard.clone()
        return self

    def is_raised(self) -> bool:
        return not is_clean(self._host)


def test_after_a_capture_an_eager_step_does_not_wait_for_what_replays_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each eager step after a capture waited for the device, for good, to read what replays may have left."""
    monkeypatch.setattr(id_check, "PendingCheck", HostRead)
    waits: list[Tensor] = []
    raising = raise_replayed
    monkeypatch.setattr(id_check, "raise_replayed", lambda guard, tables: (waits.append(guard), raising(guard, tables)))
    guard, replays = new_guard(), id_check.Replays()
    for _ in range(3):
        replays.raise_found(guard, ["a"], waits=False)
    assert not waits
    # a replay leaves something: the step after it sends that, the one after that raises it
    guard[0] = 3
    replays.raise_found(guard, ["a"], waits=False)
    with pytest.raises(IndexError, match="replayed with a batch that is bad"):
        replays.raise_found(guard, ["a"], waits=False)
    assert is_clean(guard) and len(waits) == 1
    replays.raise_found(guard, ["a"], waits=False)
    replays.raise_found(guard, ["a"], waits=False)
    # who asks waits, and is told at once
    guard[1] = 3
    with pytest.raises(ValueError, match="replayed"):
        replays.raise_found(guard, ["a"], waits=True)
    # another guard, as tables have it that were moved, is read for itself
    guard[2] = 3
    replays.raise_found(guard, ["a"], waits=False)
    moved = new_guard()
    with pytest.raises(FloatingPointError, match="replayed"):
        replays.raise_found(guard, ["a"], waits=False)
    for _ in range(3):
        replays.raise_found(moved, ["a"], waits=False)


@pytest.mark.gpu
def test_a_bad_second_batch_stops_the_update_of_the_first_until_it_is_raised() -> None:
    """Two lookups before a backward share the step's guard: neither trains, and the error says which id it was."""
    model, batch = gpu_ops._collection("cuda"), gpu_ops._batch(0, "cuda")
    ids = batch.values().clone()
    ids[2] = 10**6
    bad = KeyedJaggedTensor(batch.keys(), ids, lengths=batch.lengths())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = model(batch).values().sum()
    model(bad)
    first.backward()
    with pytest.raises(IndexError, match="id 1000000 is outside"):
        model.check()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model(batch).values().sum().backward()
    model.check()
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.gpu
def test_a_batch_with_its_keys_in_another_order_is_captured() -> None:
    where = torch.device("cuda")
    eager, captured = gpu_ops._collection("cuda"), gpu_ops._collection("cuda")
    ordered = gpu_ops._batch(0, "cuda")

    def batch_of(seed: int) -> KeyedJaggedTensor:
        now = gpu_ops._ids(seed, ordered.lengths()).to(where)
        return KeyedJaggedTensor(ordered.keys(), now, lengths=ordered.lengths()).permute([2, 0, 3, 1])

    batch = batch_of(0)
    ids, out = batch.values().clone(), torch.zeros_like(eager(batch).values().detach())
    held = KeyedJaggedTensor(batch.keys(), ids, lengths=batch.lengths(), offsets=batch.offsets())

    def step() -> None:
        out.copy_(captured(held).values().detach())

    replay = recorded(step, where)
    for seed in range(3):
        ids.copy_(batch_of(seed).values())
        replay()
        assert_same_bits(out, eager(KeyedJaggedTensor(batch.keys(), ids.clone(), lengths=batch.lengths())).values())
