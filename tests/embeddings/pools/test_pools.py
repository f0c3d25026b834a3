"""`TensorPool` and `KeyedJaggedTensorPool` beside a dict of rows, and beside what TorchRec printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shardwise import KeyedJaggedTensor
from shardwise.embeddings.pools import (
    KeyedJaggedTensorPool,
    ObjectPool,
    TensorJaggedIndexSelectLookup,
    TensorLookup,
    TensorPool,
    deterministic_dedup,
)
from shardwise.jagged import JaggedTensor

CPU = torch.device("cpu")
LENGTHS = {"a": 2, "b": 3}


def tensor_pool(**other: Any) -> TensorPool:
    return TensorPool(6, 2, torch.float32, CPU, **other)


def kjt_pool(weighted: bool = True) -> KeyedJaggedTensorPool:
    return KeyedJaggedTensorPool(5, LENGTHS, is_weighted=weighted, device=CPU)


def batch_of(lengths: list[int], keys: tuple[str, ...] = ("c", "b", "a")) -> KeyedJaggedTensor:
    values = torch.arange(1, sum(lengths) + 1)
    return KeyedJaggedTensor(list(keys), values, values / 2, torch.tensor(lengths))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_last_of_equal_ids_stays_as_in_torchrec(dtype: torch.dtype) -> None:
    """The numbers are TorchRec 1.8.0's."""
    pool = tensor_pool()
    pool.update(torch.tensor([1, 4, 1], dtype=dtype), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    expected = torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, 0.0]])
    assert_close(pool(torch.tensor([4, 1, 0], dtype=dtype)), expected, rtol=0, atol=0)
    assert list(pool.state_dict()) == ["_pool"]


def test_ragged_rows_come_out_by_the_pools_keys_as_in_torchrec() -> None:
    """The numbers are TorchRec 1.8.0's: a batch whose keys stand in another order, one of them not the pool's.

    Weights are those of its state: there a weighted pool cannot be looked up.
    """
    pool = kjt_pool()
    pool.update(torch.tensor([3, 1, 3]), batch_of([1, 0, 0, 2, 0, 3, 1, 2, 0]))
    found = pool(torch.tensor([1, 3, 0, 3]))
    assert found.keys() == ["a", "b"]
    assert found.lengths().tolist() == [2, 0, 0, 0, 0, 3, 0, 3]
    assert found.lengths().dtype is torch.int32
    assert found.values().tolist() == [8, 9, 4, 5, 6, 4, 5, 6]
    assert found.weights().tolist() == [4.0, 4.5, 2.0, 2.5, 3.0, 2.0, 2.5, 3.0]
    state = pool.state_dict()
    assert list(state) == ["values", "key_lengths", "weights"]
    assert state["values"].tolist() == [[0] * 5, [8, 9, 0, 0, 0], [0] * 5, [4, 5, 6, 0, 0], [0] * 5]
    assert state["key_lengths"].tolist() == [[0, 0], [2, 0], [0, 0], [0, 3], [0, 0]]
    other = kjt_pool()
    other.load_state_dict(state)
    assert_close(other(torch.tensor([3])).values(), torch.tensor([4, 5, 6]))


def test_many_updates_leave_what_a_dict_of_rows_has() -> None:
    draw = torch.Generator().manual_seed(3)
    pool = KeyedJaggedTensorPool(9, {"x": 1, "y": 4, "z": 2}, torch.float64, device=CPU)
    rows: dict[int, list[list[float]]] = {id: [[], [], []] for id in range(9)}
    for _ in range(20):
        ids = torch.randint(9, (int(torch.randint(5, (1,), generator=draw)),), generator=draw)
        lengths = torch.stack([torch.randint(most + 1, (ids.numel(),), generator=draw) for most in (1, 4, 2)])
        values = torch.rand(int(lengths.sum()), generator=draw, dtype=torch.float64)
        batch = KeyedJaggedTensor(["x", "y", "z"], values, lengths=lengths.flatten(), stride=ids.numel())
        pool.update(ids, batch)
        bags = [batch[key].to_dense() for key in ("x", "y", "z")]
        for number, id in enumerate(ids.tolist()):
            rows[id] = [of_key[number].tolist() for of_key in bags]
        asked = torch.randint(9, (6,), generator=draw)
        found = pool.lookup(asked)
        for number, key in enumerate(["x", "y", "z"]):
            bags_found = [bag.tolist() for bag in found[key].to_dense()]
            assert bags_found == [rows[id][number] for id in asked.tolist()]


IDS, ROWS = torch.tensor([1, 2]), torch.ones(2, 2)
REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "an id beyond the pool": (lambda: tensor_pool().lookup(torch.tensor([6])), IndexError, r"6 is not in \[0, 6\)"),
    "a negative id": (lambda: kjt_pool().lookup(torch.tensor([-1])), IndexError, "-1 is not in"),
    "ids of floats": (lambda: tensor_pool().lookup(torch.tensor([1.0])), TypeError, "int32 or int64"),
    "ids of two dimensions": (lambda: tensor_pool().lookup(IDS[None]), ValueError, r"shape \[n\]"),
    "too wide a row": (lambda: tensor_pool().update(IDS, torch.ones(2, 3)), AssertionError, r"must be \[2, 2\]"),
    "rows of another dtype": (lambda: tensor_pool().update(IDS, ROWS.double()), TypeError, "torch.float64"),
    "fewer rows than ids": (lambda: tensor_pool().update(IDS, ROWS[:1]), ValueError, r"must be \[2, 2\]"),
    "loaded values of another size": (lambda: tensor_pool(loaded_values=ROWS), ValueError, r"must be \[6, 2\]"),
    "a pool without rows": (lambda: TensorPool(0, 2, torch.float32), ValueError, "pool_size must be positive"),
    "a pool on meta": (lambda: TensorPool(6, 2, torch.float32).lookup(IDS), ValueError, "on meta"),
    "a row that is too long": (
        lambda: kjt_pool().update(IDS, batch_of([0, 0, 0, 0, 3, 0])), AssertionError, "'a' has 3 values",
    ),
    "a missing key": (lambda: kjt_pool().update(IDS, batch_of([1, 1], ("a",))), ValueError, r"lack \['b'\]"),
    "no weights": (
        lambda: kjt_pool().update(IDS, KeyedJaggedTensor(["a", "b"], IDS, lengths=torch.tensor([1, 1, 0, 0]))),
        TypeError, "needs weights",
    ),
    "values of another dtype": (
        lambda: kjt_pool(False).update(IDS, KeyedJaggedTensor(["a", "b"], ROWS[0], lengths=torch.tensor([1, 1, 0, 0]))),
        TypeError, "torch.float32",
    ),
    "no batch": (lambda: kjt_pool().update(IDS, ROWS), TypeError, "got Tensor"),  # type: ignore[arg-type]
    "fewer rows in a batch": (lambda: kjt_pool().update(IDS[:1], batch_of([1] * 6)), ValueError, "each of 1 ids"),
    "no features": (lambda: KeyedJaggedTensorPool(5, {}), ValueError, "feature_max_lengths"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_a_pool_is_refused(what: str) -> None:
    call, error, text = REFUSED[what]
    with pytest.raises(error, match=text):
        call()


def test_a_refused_update_writes_nothing() -> None:
    pool = tensor_pool(loaded_values=torch.arange(12.0).view(6, 2))
    before = pool.pool.clone()
    with pytest.raises(IndexError):
        pool.update(torch.tensor([0, 6]), ROWS)
    assert_close(pool.pool, before, rtol=0, atol=0)


def test_host_memory_is_warned_of_by_name() -> None:
    with pytest.warns(UserWarning, match="TensorPool: enable_uvm=True has no effect"):
        pool = tensor_pool(enable_uvm=True)
    pool.update(IDS, ROWS)
    assert_close(pool.lookup(IDS), ROWS)


def test_lookups_keep_rows_by_number() -> None:
    """What pools over devices have on each of them: no keys, bags row by row."""
    rows = TensorLookup(4, 2, torch.float32, CPU)
    rows.update(torch.tensor([2, 2]), torch.tensor([[1.0, 1.0], [7.0, 8.0]]))
    assert rows(torch.tensor([2, 0])).tolist() == [[7.0, 8.0], [0.0, 0.0]]
    rows.set_state(torch.ones(4, 2))
    assert dict(rows.states_to_register())["_pool"].tolist() == torch.ones(4, 2).tolist()
    bags = TensorJaggedIndexSelectLookup(4, torch.int64, LENGTHS, False, CPU)
    bags.update(torch.tensor([3, 1]), JaggedTensor(torch.tensor([5, 6, 7]), lengths=torch.tensor([1, 2, 0, 0])))
    found = bags(torch.tensor([1, 3]))
    assert (found.lengths().tolist(), found.values().tolist()) == ([0, 0, 1, 2], [5, 6, 7])


def test_deterministic_dedup_finds_where_each_id_came_last() -> None:
    unique, last = deterministic_dedup(torch.tensor([5, 1, 5, 1, 9]))
    assert (unique.tolist(), last.tolist()) == ([1, 5, 9], [3, 2, 4])


def test_a_pool_of_ones_own_has_the_interface() -> None:
    class Doubled(ObjectPool[Tensor]):
        pool_size = 3  # type: ignore[assignment]

        def lookup(self, ids: Tensor) -> Tensor:
            return 2 * ids

        def update(self, ids: Tensor, values: Tensor) -> None:
            raise NotImplementedError

    assert Doubled()(torch.tensor([1, 2])).tolist() == [2, 4]
    with pytest.raises(TypeError, match="abstract"):
        ObjectPool()  # type: ignore[abstract]


def test_a_trace_has_a_pool_as_one_node() -> None:
    pool = tensor_pool(loaded_values=torch.arange(12.0).view(6, 2))
    traced = torch.fx.symbolic_trace(torch.nn.Sequential(pool))
    assert_close(traced(IDS), pool(IDS))
