"""Keys in another order than the tables while a CUDA graph is captured: nothing is read on the host or copied.

The GPU is not there: what a capture would refuse, copies between host and device and waits, is counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, apply_optimizer_in_backward
from shardwise.jagged._keys import Order, keys_of
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")
KEYS = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: that would be more launches."""
    yield


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order's numbers stay on a device for plain tensors, which those of a GPU that is not there are not."""
    tensor, kept = Order.tensor, dict[tuple[int, ...], Tensor]()

    def tensor_of(order: Order, like: Tensor) -> Tensor:
        if order.indices not in kept:
            kept[order.indices] = tensor(order, like)
        return kept[order.indices]

    plain = torch.zeros(1)
    again = keys_of(KEYS).order([2, 1]).tensor(plain)
    assert again is keys_of(KEYS).order([2, 1]).tensor(plain)
    monkeypatch.setattr(Order, "tensor", tensor_of)


def capture(monkeypatch: pytest.MonkeyPatch, now: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now)


def batch(device: torch.device | str, *, weighted: bool = False, capacity: int | None = None) -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1, 3, 1, 1, 0, 2, 1])
    n = int(lengths.sum()) if capacity is None else capacity
    ids, weights = torch.arange(n), torch.arange(n) / 7 if weighted else None
    return KeyedJaggedTensor(
        KEYS, ids.to(device), None if weights is None else weights.to(device), lengths.to(device), capacity=capacity
    )


def read(kjt: KeyedJaggedTensor) -> list[Tensor]:
    """Lengths, values and weights of the bags, on the host."""
    lengths, weights = kjt.lengths().cpu(), kjt.weights_or_none()
    end = int(lengths.sum())
    return [lengths, kjt.values().cpu()[:end], *([] if weights is None else [weights.cpu()[:end]])]


@pytest.mark.parametrize("order", [[2, 0, 1], [1], [2, 2, 0], [1, 0, 1, 2]])
@pytest.mark.parametrize(("weighted", "capacity"), [(False, None), (True, None), (True, 16)])
def test_a_captured_permute_waits_for_nothing_and_gives_the_same_bags(
    monkeypatch: pytest.MonkeyPatch, order: list[int], weighted: bool, capacity: int | None
) -> None:
    expected = read(batch("cpu", weighted=weighted, capacity=capacity).permute(order))
    with use_fake_cuda(counts := Counted()):
        held = batch(CUDA, weighted=weighted, capacity=capacity)
        # what a warm-up leaves: the order on the device, and sizes of a batch that no replay has
        held.permute(order)
        capture(monkeypatch, True)
        counts.clear()
        moved = held.permute(order)
        assert not counts.syncs and not counts.copies
        capture(monkeypatch, False)
        got = read(moved)
    assert moved.keys() == [KEYS[i] for i in order]
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))
    # of other batches as many values may be in the bags of these keys
    is_whole = sorted(order) == [0, 1, 2]
    assert moved.capacity() == (capacity if is_whole else (capacity or 11) * max(map(order.count, order)))


def test_a_collection_whose_tables_have_another_order_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A permute of keys read their sizes and copied from memory that is not pinned: a capture refuses both."""
    with use_fake_cuda(counts := Counted()):
        tables = [EmbeddingBagConfig(50, 8, f"t{k}", feature_names=[k]) for k in "cab"]
        model = EmbeddingBagCollection(tables=tables, device=CUDA)
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        held = batch(CUDA)
        for _ in range(2):
            # a warm-up outside of the capture, as torch asks for
            warm = model(held).values()
            warm.sum().backward()
        eager = model(held).values().detach().cpu()
        capture(monkeypatch, True)
        counts.clear()
        captured = model(held).values()
        captured.sum().backward()
        assert not counts.syncs and not counts.copies
        assert torch.equal(captured.detach().cpu(), eager)
        capture(monkeypatch, False)


def test_what_cannot_be_captured_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_fake_cuda(Counted()):
        held = batch(CUDA)
        varied = KeyedJaggedTensor(
            ["a", "b"], torch.arange(3).to(CUDA), lengths=torch.tensor([1, 1, 1]).to(CUDA),
            stride_per_key_per_rank=[[1], [2]],
        )  # fmt: skip
        capture(monkeypatch, True)
        with pytest.raises(RuntimeError, match="read on the host, which must not be while a CUDA graph is captured"):
            held.length_per_key()
        with pytest.raises(RuntimeError, match="batch sizes of their own .* in the order of the tables, or permute it"):
            varied.permute([1, 0])
        capture(monkeypatch, False)
        assert held.length_per_key() == [3, 5, 3]
