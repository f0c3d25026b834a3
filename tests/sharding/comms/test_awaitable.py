"""Awaitables: they wait once, lazy ones pass for their result, and whatever looks inside them finds it."""

from __future__ import annotations

import copy
import operator
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import gradient_of
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from shardwise import KeyedTensor
from shardwise.jagged import Multistreamable
from shardwise.sharding.comms.awaitable import (
    Awaitable,
    GetItemLazyAwaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    LazyNoWait,
    NoWait,
)

NUMBERS = torch.tensor([1.0, -2.0, 3.0])


class Counted(LazyAwaitable[Any]):
    """Counts its waits; an exception as a result is raised."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result
        self.waits = 0

    def _wait_impl(self) -> Any:
        self.waits += 1
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


class Bags(Counted):
    awaited_type = KeyedTensor


class Keyed(LazyGetItemMixin[str, Tensor], Counted):
    pass


class Forgetful(LazyAwaitable[int]):
    def __init__(self) -> None:
        pass

    def _wait_impl(self) -> int:
        return self.bits + 1  # type: ignore[no-any-return]


def keyed_tensor() -> KeyedTensor:
    return KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("result", [NUMBERS, None], ids=["tensor", "None"])
def test_waiting_twice_waits_once(result: Any) -> None:
    lazy = Counted(result)
    assert lazy.wait() is lazy.wait() is result
    assert lazy.waits == 1
    assert NoWait(result).wait() is LazyNoWait(result).wait() is result


def test_a_use_of_the_result_waits_once_too() -> None:
    lazy = Counted(NUMBERS)
    assert torch.equal(lazy + 1, NUMBERS + 1) and lazy.shape == (3,)
    assert lazy.waits == 1


def test_callbacks_run_once_in_order_and_make_the_result() -> None:
    lazy = Counted(3)
    lazy.callbacks.append(lambda n: n + 1)
    lazy.callbacks.append(lambda n: n * 10)
    assert [lazy.wait(), lazy.wait(), lazy + 0] == [40, 40, 40]
    now: Awaitable[int] = NoWait(3)
    now.callbacks.append(lambda n: n + 1)
    assert [now.wait(), now.wait()] == [4, 4]


def test_a_callback_after_the_wait_is_refused() -> None:
    """It would be kept and never run."""
    lazy = Counted(3)
    lazy.wait()
    with pytest.raises(RuntimeError, match="Counted was waited for already"):
        lazy.callbacks.append(abs)


def test_an_error_is_raised_again_at_each_use() -> None:
    lazy = Counted(ValueError("rank 1 failed"))
    for use in (lazy.wait, lambda: lazy + 1, lambda: lazy.shape, lambda: str(lazy), lazy.wait):
        with pytest.raises(ValueError, match="rank 1 failed"):
            use()
    assert lazy.waits == 1


def test_an_interrupted_wait_may_be_repeated() -> None:
    lazy = Counted(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lazy.wait()
    lazy.result = 3
    assert lazy.wait() == 3


def test_a_missing_attribute_of_the_awaitable_does_not_wait_for_ever() -> None:
    """`_wait_impl` asked for `self.bits`, which the result has to have, which `_wait_impl` was to bring, ..."""
    with pytest.raises(AttributeError, match="'Forgetful' object has no attribute 'bits'"):
        Forgetful().wait()
    lazy = Counted(None)
    lazy.callbacks.append(lambda _: lazy.wait())
    with pytest.raises(RuntimeError, match="Counted waits for itself"):
        lazy.wait()


def test_forgetting_the_init_of_the_base_costs_nothing() -> None:
    lazy = Forgetful()
    lazy.bits = 7
    lazy.callbacks.append(lambda n: n * 2)
    assert lazy == 16


@pytest.mark.parametrize(
    ("names", "values", "other"),
    [
        (
            "add sub mul truediv floordiv mod pow lt ge eq ne",
            [NUMBERS, torch.tensor(7)],
            torch.tensor([2.0, 2.0, -1.0]),
        ),
        ("add sub mul truediv floordiv mod pow lt ge eq ne and_ or_ xor lshift rshift", [7, 6], 2),
    ],
    ids=["tensors", "numbers"],
)
def test_operators_of_either_side_and_of_both_use_the_result(names: str, values: list[Any], other: Any) -> None:
    for op in (getattr(operator, name) for name in names.split()):
        for value in values:
            wanted = torch.as_tensor(op(value, other))
            for a, b in ((Counted(value), other), (value, Counted(other)), (Counted(value), Counted(other))):
                assert torch.equal(torch.as_tensor(op(a, b)), wanted), op


def test_unary_operators_and_conversions_use_the_result() -> None:
    assert (-Counted(3), +Counted(3), ~Counted(3), abs(Counted(-3))) == (-3, 3, -4, 3)
    assert (int(Counted(3.5)), float(Counted(3)), complex(Counted(3)), [5, 6][Counted(1)]) == (3, 3.0, 3 + 0j, 6)
    assert torch.equal(Counted(NUMBERS) @ NUMBERS, NUMBERS @ NUMBERS)
    assert (bool(Counted(0)), bool(Counted(2))) == (False, True)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cat([x, x]),
        lambda x: torch.stack((x, NUMBERS)),
        lambda x: nn.functional.linear(x, torch.ones(2, 3)),
        lambda x: nn.Linear(3, 1, bias=False).requires_grad_(False).to(torch.float32).weight.fill_(2.0) @ x,
        lambda x: torch.add(NUMBERS, x, alpha=2),
        lambda x: torch.add(input=NUMBERS, other=x),
        lambda x: NUMBERS.clone().add_(x),
        lambda x: x.add(x),
        lambda x: x[1:],
        lambda x: nn.functional.relu(x),
        lambda x: torch.relu(x),
    ],
)
def test_torch_functions_take_a_lazy_tensor(call: Callable[[Any], Tensor]) -> None:
    assert torch.equal(call(Counted(NUMBERS)), call(NUMBERS))


def test_gradients_flow_through() -> None:
    x = NUMBERS.clone().requires_grad_()
    (torch.stack([Counted(x * 2), NUMBERS]).sum() + Counted(x) @ NUMBERS).backward()
    assert torch.equal(gradient_of(x), NUMBERS + 2)


def test_a_print_under_no_grad_keeps_the_gradient() -> None:
    """TorchRec waits in the mode of whoever uses the result first: a print under no_grad cuts off the gradients."""
    x = NUMBERS.clone().requires_grad_()

    class Later(LazyAwaitable[Tensor]):
        def _wait_impl(self) -> Tensor:
            return x * 2

    lazy, other = Later(), Later()
    with torch.no_grad():
        str(lazy)
        frozen = Later()
    with torch.inference_mode():
        assert not other.is_inference()
        inferred = Later()
    assert lazy.requires_grad and other.requires_grad and torch.is_grad_enabled()
    assert not frozen.wait().requires_grad
    assert inferred.wait().is_inference()


def test_a_keyed_tensor_on_its_way_behaves_as_one() -> None:
    lazy, plain = Bags(keyed_tensor()), keyed_tensor()
    assert [isinstance(lazy, kind) for kind in (KeyedTensor, Multistreamable, LazyAwaitable, Tensor)] == [
        True, True, True, False,
    ]  # fmt: skip
    # none of this had to wait
    assert lazy.waits == 0
    assert torch.equal(lazy.values(), plain.values())
    assert torch.equal(lazy["b"], plain["b"])
    assert lazy.keys() == ["a", "b"]
    assert str(lazy) == str(plain) == f"{lazy}"
    assert repr(lazy) == repr(plain)
    assert "to_dict" in dir(lazy)
    (both,) = KeyedTensor.regroup([lazy], [["b", "a"]])  # type: ignore[list-item]
    assert torch.equal(both, torch.cat([plain["b"], plain["a"]], 1))


@pytest.mark.parametrize("make", [keyed_tensor, lambda: keyed_tensor().to_dict()])
def test_loops_and_containers_see_the_keys(make: Callable[[], Any]) -> None:
    lazy, plain = Counted(make()), make()
    assert (list(lazy), len(lazy), "a" in lazy, "c" in lazy) == (["a", "b"], 2, True, False)
    for taken in (dict(lazy), {**lazy}, (lambda **features: features)(**lazy)):
        assert list(taken) == ["a", "b"]
        assert all(torch.equal(taken[k], plain[k]) for k in taken)


def test_assignment_reaches_the_result() -> None:
    lazy = Counted({"a": 1})
    lazy["b"] = Counted(2)
    assert lazy.wait() == {"a": 1, "b": 2}
    x = torch.zeros(3)
    x[:2] = Counted(NUMBERS[:2])
    x += Counted(NUMBERS)
    assert torch.equal(x, torch.tensor([2.0, -4.0, 3.0]))


def test_isinstance_knows_the_type_when_the_result_is_there() -> None:
    lazy = Counted(NUMBERS)
    assert not isinstance(lazy, Tensor)
    lazy.wait()
    assert isinstance(lazy, Tensor)
    assert isinstance(LazyNoWait(keyed_tensor()), KeyedTensor)
    assert type(lazy) is Counted


@pytest.mark.parametrize("take", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("cls", [Bags, LazyNoWait, Counted])
def test_copies_and_pickles_are_plain_results(take: Callable[[Any], Any], cls: type[Any]) -> None:
    """pickle refuses an object whose `__class__` is not its type, which is how isinstance is answered here."""
    lazy = cls(keyed_tensor())
    taken = take(lazy)
    assert type(taken) is KeyedTensor
    assert taken is not lazy.wait()
    assert torch.equal(taken.values(), lazy.values())


def test_awaitables_in_sets_do_not_wait() -> None:
    lazy = Counted(NUMBERS)
    assert len({lazy, Counted(NUMBERS)}) == 2
    assert lazy.waits == 0


@pytest.mark.parametrize("cls", [Bags, Keyed, LazyNoWait])
def test_tree_map_sees_the_tensors_and_gives_plain_results(cls: type[Any]) -> None:
    tree = {"out": cls(keyed_tensor()), "n": 3}
    leaves, spec = pytree.tree_flatten(tree)
    assert [type(leaf) for leaf in leaves] == [Tensor, int]
    back = pytree.tree_unflatten(leaves, spec)
    assert type(back["out"]) is KeyedTensor
    doubled = pytree.tree_map_only(Tensor, lambda t: t * 2, tree)
    assert torch.equal(doubled["out"]["b"], keyed_tensor()["b"] * 2)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    assert paths == ["['out'].result.values", "['n']"]


def test_a_key_of_a_lazy_dict_is_lazy() -> None:
    parent = Keyed({"a": NUMBERS, "b": -NUMBERS})
    a, b = parent["a"], parent["b"]
    assert isinstance(a, GetItemLazyAwaitable)
    assert parent.waits == 0
    assert torch.equal(torch.cat([a, b]), torch.cat([NUMBERS, -NUMBERS]))  # type: ignore[list-item]
    assert parent.waits == 1
    with pytest.raises(KeyError, match="c"):
        parent["c"].wait()


@pytest.mark.parametrize("cls", [Awaitable, LazyAwaitable])
def test_an_abstract_awaitable_cannot_be_made(cls: Any) -> None:
    with pytest.raises(TypeError, match="_wait_impl"):
        cls()


def test_fx_records_the_construction_from_proxies() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return LazyNoWait(x) + 1

    traced = torch.fx.symbolic_trace(Model())
    assert torch.equal(traced(NUMBERS), NUMBERS + 1)


def test_the_profiler_shows_the_wait() -> None:
    with torch.profiler.profile() as profile:
        Counted(NUMBERS).wait()
    assert any(event.key == "## Counted wait() ##" for event in profile.key_averages())


def test_a_method_of_the_result_costs_two_python_calls_and_the_first_one_five() -> None:
    lazy = Bags(keyed_tensor())
    lazy.callbacks.clear()

    def calls() -> int:
        called = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal called
            called += event == "call"

        sys.setprofile(count)
        lazy.values()
        sys.setprofile(None)
        return called

    # __getattr__ and values; at first also wait, _first_wait and _wait_impl
    assert [calls(), calls()] == [5, 2]


class Layer(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return {"out": LazyNoWait(KeyedTensor(["a"], [1], super().forward(input)))}


def gradient_under_ddp() -> Tensor:
    model = DistributedDataParallel(Layer(3, 1, bias=False), static_graph=True)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 3), dist.get_rank() + 1.0))["out"]["a"].sum().backward()
    return gradient_of(model.module.weight)


@pytest.mark.ranks
def test_ddp_with_a_static_graph_finds_the_tensors_of_lazy_outputs() -> None:
    """It hooks the output's tensors, which it looks for by pytree, to know when backward begins."""
    for gradient in run_ranks(2, gradient_under_ddp):
        assert torch.equal(gradient, torch.full((1, 3), 1.5))
