"""Keyed, combined, wrapped, semi-synchronous and fused optimizers: states that are saved, settings that reach them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from copies import by_pickle, same
from jagged_batches import draw, kjt, tables_of, upstream
from torch import Tensor, nn

from shardwise.embeddings import (
    LAMB,
    CombinedOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmptyFusedOptimizer,
    FusedEmbeddingBagCollection,
    FusedOptimizer,
    FusedOptimizerModule,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    LarsSGD,
    OptimizerWrapper,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    SemisyncOptimizer,
    WarmupOptimizer,
    apply_optimizer_in_backward,
)

FACTORIES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "rowwise adagrad": lambda p: RowWiseAdagrad(p, lr=0.1),
}


def linear(seed: int = 1) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(3, 2)


def wrap(module: nn.Module, kind: str = "adam") -> KeyedOptimizerWrapper:
    return KeyedOptimizerWrapper(dict(module.named_parameters()), FACTORIES[kind])


def fused(kind: Any = torch.optim.Adam, **settings: Any) -> FusedEmbeddingBagCollection:
    torch.manual_seed(0)
    table = EmbeddingBagConfig(6, 4, "a", feature_names=["f"])
    return FusedEmbeddingBagCollection([table], kind, {"lr": 0.5, **settings})


def train(module: nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        module(upstream(4, 3, seed=step)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", FACTORIES)
def test_init_state_makes_the_states_and_leaves_the_weights(kind: str) -> None:
    """With decoupled weight decay TorchRec's step of zeros moves the weights."""
    module = linear()
    optimizer, before = wrap(module, kind), copy.deepcopy(module.state_dict())
    optimizer.init_state()
    assert same(module.state_dict(), before)
    layout = {name: set(values) for name, values in optimizer.state_dict()["state"].items()}
    other = wrap(linear(), kind)
    other.params["weight"].grad, other.params["bias"].grad = torch.ones(2, 3), torch.ones(2)
    other.step()
    assert layout == {name: set(values) for name, values in other.state_dict()["state"].items()}
    assert all(param.grad is not None and not param.grad.any() for param in optimizer.params.values())


def test_init_state_gives_sparse_gradients_where_asked() -> None:
    params = {"dense": nn.Parameter(torch.ones(2, 3)), "sparse": nn.Parameter(torch.ones(1, 4))}
    fixed = nn.Parameter(torch.ones(2), requires_grad=False)
    inner = KeyedOptimizerWrapper({**params, "fixed": fixed}, lambda p: torch.optim.SGD(p, lr=0.1))
    CombinedOptimizer([("x", inner)]).init_state({"x.sparse"})
    grads = {name: param.grad for name, param in params.items()}
    assert grads["dense"] is not None and not grads["dense"].is_sparse
    assert grads["sparse"] is not None and grads["sparse"].is_sparse
    assert fixed.grad is None


def test_init_state_makes_no_gradient_of_a_table() -> None:
    """A gradient of zeros for every table is as much memory as the tables themselves."""
    ebc = fused()
    CombinedOptimizer([("ebc", ebc.fused_optimizer())]).init_state()
    assert all(param.grad is None for param in ebc.parameters())


def test_param_groups_are_saved_unless_told_otherwise() -> None:
    module = linear()
    optimizer = wrap(module)
    train(module, optimizer, range(2))
    assert set(optimizer.state_dict()) == {"state", "param_groups"}
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.save_param_groups(False)
    assert set(optimizer.state_dict()) == {"state"}
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.save_param_groups(True)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_combined_optimizers_agree_on_saving_groups() -> None:
    first, second = wrap(linear()), wrap(linear())
    first.save_param_groups(False)
    with pytest.raises(ValueError, match=r"agree on save_param_groups, got \[False, True\]"):
        CombinedOptimizer([("x", first), ("y", second)])
    first.save_param_groups(True)
    outer = OptimizerWrapper(CombinedOptimizer([("x", first), ("y", second)]))
    outer.save_param_groups(False)
    assert all(set(part.state_dict()) == {"state"} for part in (first, second, outer))


class Running:
    """A state that saves and loads itself."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def nested() -> tuple[KeyedOptimizer, nn.Parameter]:
    param = nn.Parameter(torch.ones(2))
    state = {"n": 1.0, "sum": torch.zeros(2), "inner": {"sum": torch.zeros(3), "n": 2, "own": Running()}}
    groups = [{"params": [param], "lr": 1.0, "betas": [0.5, 0.6]}]
    return KeyedOptimizer({"w": param}, {param: state}, groups), param


def test_states_may_be_nested_and_may_save_themselves() -> None:
    """A dict among the states was replaced by the loaded one: whoever held the tensors in it held stale ones."""
    optimizer, param = nested()
    held = optimizer.state[param]["inner"]["sum"]
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["state"]["w"]["inner"]["own"] == {"total": 0.0}
    saved["state"]["w"].update(n=5.0, sum=torch.ones(2))
    saved["state"]["w"]["inner"].update(n=7, sum=torch.ones(3), own={"total": 3.0})
    saved["param_groups"][0]["lr"] = 4.0
    optimizer.load_state_dict(saved)
    assert same(optimizer.state_dict(), saved)
    assert optimizer.state[param]["inner"]["sum"] is held
    saved["param_groups"][0]["betas"].append(0.7)
    assert optimizer.param_groups[0]["betas"] == [0.5, 0.6]
    saved["state"]["w"]["inner"]["sum"] = torch.ones(4)
    with pytest.raises(ValueError, match=r"w.inner: state sum has shape \(3,\), loaded \(4,\)"):
        optimizer.load_state_dict(saved)


def test_a_number_fits_a_tensor_of_one_element() -> None:
    """Checkpoints of old torch versions hold the step as a number: AttributeError, a float has no shape."""
    module = linear()
    optimizer = wrap(module)
    train(module, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"]["weight"]["step"] = 7.0
    optimizer.load_state_dict(saved)
    assert optimizer.state[module.weight]["step"].item() == 7.0
    saved["state"]["weight"]["exp_avg"] = 7.0
    with pytest.raises(ValueError, match=r"weight: state exp_avg is a tensor of shape \(2, 3\), loaded 7.0"):
        optimizer.load_state_dict(saved)


def test_a_state_of_something_else_than_a_parameter_is_refused() -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"The following keys are not: \['momentum'\]"):
        KeyedOptimizer({"w": param}, {param: {}, "momentum": {}}, [])


class Listening(KeyedOptimizerWrapper):
    loads = 0

    def post_load_state_dict(self) -> None:
        self.loads += 1


def test_whoever_derives_is_told_after_a_load() -> None:
    listening = Listening(dict(linear().named_parameters()), FACTORIES["adam"])
    outer = OptimizerWrapper(CombinedOptimizer([("x", listening)]))
    outer.load_state_dict(outer.state_dict())
    assert listening.loads == 1


def test_a_load_that_one_part_refuses_changes_no_part() -> None:
    """Parts were loaded one by one: the first had the new states when the second refused its own."""
    modules = [linear(), linear()]
    parts = [wrap(module) for module in modules]
    combined = CombinedOptimizer([("x", parts[0]), ("y", parts[1])])
    for module, part in zip(modules, parts, strict=True):
        train(module, part, range(2))
    before, saved = copy.deepcopy(combined.state_dict()), copy.deepcopy(combined.state_dict())
    saved["state"]["x.weight"]["exp_avg"].fill_(9.0)
    saved["state"]["y.weight"]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=r"weight: state exp_avg has shape \(2, 3\), loaded \(7,\)"):
        combined.load_state_dict(saved)
    assert same(combined.state_dict(), before)


@pytest.mark.parametrize("pack", [copy.deepcopy, by_pickle])
def test_a_copied_optimizer_is_whole(pack: Any) -> None:
    """Its parameters' names were left behind: AttributeError at the first `state_dict` of the copy."""
    module = linear()
    optimizer = OptimizerWrapper(CombinedOptimizer([("x", wrap(module))]))
    train(module, optimizer, range(2))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    other = pack(optimizer)
    assert same(other.state_dict(), optimizer.state_dict())
    for param in other.params.values():
        param.grad = torch.ones_like(param)
    other.step()
    assert not same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_the_factory_gets_the_dict_if_asked() -> None:
    got: list[Any] = []

    def factory(params: Any) -> torch.optim.Optimizer:
        got.append(params)
        return torch.optim.SGD(params.values(), lr=0.1)

    params = dict(linear().named_parameters())
    optimizer = KeyedOptimizerWrapper(params, factory, pass_params_dict=True)
    assert got == [params] and list(optimizer.params) == ["weight", "bias"]


PREFIXES = [("w", "x", "x.w"), ("", "x", "x"), ("w", "", "w"), ("", "", "")]


@pytest.mark.parametrize("name, key, whole", PREFIXES)
def test_prefixes_join_with_a_dot(name: str, key: str, whole: str) -> None:
    assert CombinedOptimizer.prepend_opt_key(name, key) == whole


def test_parameters_and_groups_are_those_of_the_parts_now() -> None:
    """A combined optimizer kept the tables' parameters of its construction, `.half()` makes others."""
    ebc = fused(torch.optim.SGD)
    combined = CombinedOptimizer([("ebc", ebc.fused_optimizer()), wrap(linear())])
    ebc.half()
    combined.state_dict()
    assert combined.params["ebc.embedding_bags.a.weight"].dtype == torch.float16
    assert [prefix for prefix, _ in combined.optimizers] == ["ebc", ""]
    assert len(combined.param_groups) == 2 and "ebc: " in repr(OptimizerWrapper(combined))


class Told(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.heard: list[Any] = []

    def set_optimizer_step(self, step: int) -> None:
        self.heard.append(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        self.heard.append(params_dict)


def test_steps_and_hyper_parameters_are_passed_on() -> None:
    ebc, wrapped = fused(), KeyedOptimizerWrapper(dict(linear().named_parameters()), Told)
    outer = OptimizerWrapper(CombinedOptimizer([("ebc", ebc.fused_optimizer()), wrapped]))
    outer.set_optimizer_step(5)
    outer.update_hyper_parameters({"lr": 0.25})
    inner: Any = wrapped._optimizer
    assert inner.heard == [5, {"lr": 0.25}]
    state = ebc.fused_optimizer().state_dict()
    assert state["state"]["embedding_bags.a.weight"]["a.step"].tolist() == [5]
    assert state["param_groups"][0]["lr"] == 0.25 and ebc._groups[0].lr == 0.25
    with pytest.raises(ValueError, match=r"only lr can be changed later, got \['eps'\]"):
        outer.update_hyper_parameters({"lr": 1.0, "eps": 1.0})
    with pytest.warns(UserWarning, match="Adam has no set_optimizer_step: it stays as it is"):
        CombinedOptimizer([wrap(linear())]).set_optimizer_step(3)


class WithoutRate(torch.optim.Optimizer):
    """Steps by its own setting, and its zero_grad takes no argument."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"pace": 0.5})

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["pace"] * param.grad)


AROUND: dict[str, Callable[[KeyedOptimizerWrapper], KeyedOptimizer]] = {
    "alone": lambda keyed: keyed,
    "combined": lambda keyed: CombinedOptimizer([("x", keyed)]),
    "wrapped": OptimizerWrapper,
    "warm-up": lambda keyed: WarmupOptimizer(keyed, [], lr_param="pace", lr=0.5),
    "clipped": lambda keyed: GradientClippingOptimizer(keyed, GradientClipping.NORM, max_gradient=100.0),
}


@pytest.mark.parametrize("around", AROUND)
def test_optimizers_without_a_rate_are_wrapped_as_any_other(around: str) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = AROUND[around](KeyedOptimizerWrapper({"p": param}, WithoutRate))
    optimizer.save_param_groups(True)
    for step in range(1, 3):
        param.grad = torch.ones(3)
        optimizer.step()
        assert param.tolist() == [1 - 0.5 * step] * 3
        optimizer.zero_grad()
        assert param.grad is None
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["pace"] for group in optimizer.param_groups] == [0.5]


@pytest.mark.parametrize("around", ["alone", "combined", "wrapped", "clipped"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_is_the_wrapped_optimizers_own_whatever_is_asked(around: str, to_none: bool) -> None:
    """As in TorchRec: programs call zero_grad(set_to_none=False), and gradients are None all the same."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    AROUND[around](KeyedOptimizerWrapper({"p": param}, FACTORIES["sgd"])).zero_grad(set_to_none=to_none)
    assert param.grad is None


SPELLINGS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tuple of groups": lambda p, q: ({"params": [p]}, {"params": [q]}),
    "tuples of parameters": lambda p, q: [{"params": (p,)}, {"params": (q,)}],
    "a tensor": lambda p, q: [{"params": p}, {"params": q}],
    "pairs": lambda p, q: [{"params": [("p", p)]}, {"params": (("q", q),)}],
    "iterators": lambda p, q: [{"params": iter([p])}, {"params": (each for each in [q])}],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_groups_are_spelled_as_torch_takes_them(spelling: str) -> None:
    """A keyed optimizer over a tensor in the place of a list had no parameters, and said nothing."""
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    by_factory = KeyedOptimizerWrapper({"p": p, "q": q}, lambda _: torch.optim.SGD(SPELLINGS[spelling](p, q), lr=0.5))
    direct = KeyedOptimizer({"p": p, "q": q}, {}, SPELLINGS[spelling](p, q))
    for optimizer in (by_factory, direct):
        optimizer.save_param_groups(True)
        groups = optimizer.state_dict()["param_groups"]
        assert [group["params"] for group in groups] == [["p"], ["q"]]
        for kind in (tuple, list):
            optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": kind(groups)})
    with pytest.raises(TypeError, match="a parameter group is a dict with 'params', got Parameter"):
        KeyedOptimizer({"p": p}, {}, [p])  # type: ignore[list-item]


def test_an_optimizer_of_nothing_is_an_ordinary_one() -> None:
    assert isinstance(EmptyFusedOptimizer(), FusedOptimizer)
    for empty in (EmptyFusedOptimizer(), KeyedOptimizerWrapper({}, FACTORIES["sgd"])):
        empty.zero_grad()
        empty.step()
        combined = CombinedOptimizer([("x", empty)])
        combined.step()
        assert combined.state_dict() == {"state": {}, "param_groups": ()}


def test_modules_with_a_fused_optimizer_are_told_apart() -> None:
    class Mine(nn.Module, FusedOptimizerModule):
        @property
        def fused_optimizer(self) -> KeyedOptimizer:
            return EmptyFusedOptimizer()

    assert isinstance(Mine(), FusedOptimizerModule) and isinstance(fused(), FusedOptimizerModule)
    assert not isinstance(linear(), FusedOptimizerModule)


# TorchRec's class, whose own `step` raises; what stands for it here; the fused settings that go with it
IN_BACKWARD: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "Adagrad": (torch.optim.Adagrad, {"eps": 1e-6, "initial_accumulator_value": 0.5}),
    "Adam": (torch.optim.Adam, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}),
    "LarsSGD": (LarsSGD, {"momentum": 0.5, "eta": 0.01}),
    "LAMB": (LAMB, {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6}),
    "PartialRowWiseAdam": (PartialRowWiseAdam, {"beta1": 0.8, "eps": 1e-6}),
    "PartialRowWiseLAMB": (PartialRowWiseLAMB, {"beta2": 0.9, "eps": 1e-6}),
}


@pytest.mark.parametrize("name", IN_BACKWARD)
def test_fused_settings_go_with_every_class_that_torchrec_has_for_them(name: str) -> None:
    """`gradient_clipping` cuts what reaches the table: a gradient of 100 trains as one of 0.5 does."""
    kind, settings = IN_BACKWARD[name]
    common = {"learning_rate": 0.1, "weight_decay": 0.01, **settings}

    def after(scale: float, **more: Any) -> Tensor:
        torch.manual_seed(0)
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, "a", feature_names=["f"])])
        before = tables_of(ebc)["a"].clone()
        apply_optimizer_in_backward(kind, ebc.parameters(), {**common, **more})
        for row in (1, 3):
            ebc(kjt({"f": [[row], [0]]})).values().mul(scale).sum().backward()
        weight = tables_of(ebc)["a"].clone()
        assert not torch.equal(weight[:2], before[:2]) and torch.equal(weight[4:], before[4:])
        return weight

    cut = after(100.0, gradient_clipping=True, max_gradient=0.5)
    assert torch.equal(cut, after(0.5))


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_wrapped_optimizer_steps_schedules_and_resumes(kind: str) -> None:
    """A fresh Adam has no state yet; loading one used to be refused, so a run could not be resumed."""
    module, plain, resumed = linear(), linear(), linear()
    wrapped, again = wrap(module, kind), wrap(resumed, kind)
    schedule = torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.5)
    bare = FACTORIES[kind](list(plain.parameters()))
    train(module, wrapped, range(2))
    train(plain, bare, range(2))
    schedule.step()
    bare.param_groups[0]["lr"] = 0.05
    saved = copy.deepcopy((module.state_dict(), wrapped.state_dict()))
    assert set(saved[1]["state"]) <= {"weight", "bias"}
    train(plain, bare, range(2, 4))

    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, range(2, 4))
    assert same(resumed.state_dict(), plain.state_dict())
    with pytest.raises(NotImplementedError, match="fixed"):
        again.add_param_group({"params": []})


class Counting(torch.optim.SGD):
    """An optimizer with a state that is no tensor."""

    @staticmethod
    def of(params: Any) -> Counting:
        return Counting(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
        return super().step(closure)


def test_states_that_are_no_tensors_are_loaded_too() -> None:
    module = linear()
    wrapped = KeyedOptimizerWrapper(dict(module.named_parameters()), Counting.of)
    train(module, wrapped, range(3))
    saved = copy.deepcopy(wrapped.state_dict())
    train(module, wrapped, range(2))
    wrapped.load_state_dict(saved)
    assert wrapped.state[module.weight]["seen"] == 3


Whole = tuple[nn.Linear, FusedEmbeddingBagCollection, CombinedOptimizer]


def combined() -> Whole:
    module, ebc = linear(), fused(torch.optim.Adam)
    return module, ebc, CombinedOptimizer([("sparse", ebc.fused_optimizer()), ("", wrap(module))])


def train_both(whole: Whole, steps: range) -> None:
    module, ebc, optimizer = whole
    for step in steps:
        ebc(kjt(draw({"f": 6}, 3, seed=step))).values().square().sum().backward()
        train(module, optimizer, range(step, step + 1))


def test_combined_optimizers_are_steered_saved_and_loaded_as_one() -> None:
    whole, resumed = combined(), combined()
    train_both(whole, range(2))
    for group in whole[2].param_groups:
        group["lr"] = 0.25
    whole[2].step()
    saved = copy.deepcopy([part.state_dict() for part in whole])
    assert set(saved[2]["state"]) == {"sparse.embedding_bags.a.weight", "weight", "bias"}
    train_both(whole, range(2, 4))
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    train_both(resumed, range(2, 4))
    assert same(resumed[0].state_dict(), whole[0].state_dict()) and same(tables_of(resumed[1]), tables_of(whole[1]))
    assert set(whole[2].params) == set(saved[2]["state"])
    assert [prefix for prefix, _ in whole[2].optimizers] == ["sparse", ""]
    with pytest.raises(ValueError, match="unexpected \\['other'\\]"):
        resumed[2].load_state_dict({"state": {**saved[2]["state"], "other": {}}})


def test_combined_optimizers_must_not_share_a_name() -> None:
    first, second = wrap(linear()), wrap(linear())
    CombinedOptimizer([("x", first), ("y", second)])
    with pytest.raises(ValueError, match="Duplicate param key weight: two combined optimizers"):
        CombinedOptimizer([first, second])


COUNTS = {"__semisync_local_step_counter__", "__semisync_global_step_counter__"}


class Outer(torch.optim.Optimizer):
    """Keeps a slow copy, moves it half of the way to the weights, and puts it in their place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()

    def global_step(self, count: Tensor, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            assert p.grad is None
            slow = self.state[p]["slow"]
            p.copy_(slow.add_(p - slow, alpha=self.param_groups[0]["lr"]))


def semi_sync(seed: int = 1) -> tuple[nn.Linear, SemisyncOptimizer]:
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    params = dict(module.named_parameters())
    local = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p, lr=0.1))
    return module, SemisyncOptimizer(params.values(), local, KeyedOptimizerWrapper(params, Outer), num_local_steps=3)


def test_every_third_step_is_followed_by_a_global_one() -> None:
    (module, optimizer), (plain, _) = semi_sync(), semi_sync()
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    slow = [p.detach().clone() for p in plain.parameters()]
    for step in range(8):
        train(module, optimizer, range(step, step + 1))
        train(plain, adam, range(step, step + 1))
        if step in (2, 5):
            with torch.no_grad():
                for p, q in zip(plain.parameters(), slow, strict=True):
                    p.copy_(q.add_(p - q, alpha=0.5))
        assert torch.equal(module.weight, plain.weight) and torch.equal(module.bias, plain.bias)


def test_states_of_both_are_saved_by_parameter() -> None:
    """The layout is TorchRec's."""
    module, optimizer = semi_sync()
    train(module, optimizer, range(4))
    state = optimizer.state_dict()["state"]
    local = {"semi_sync_local_step", "semi_sync_local_exp_avg", "semi_sync_local_exp_avg_sq"}
    assert {name: set(values) for name, values in state.items()} == {
        name: {*local, "semi_sync_global_slow", *COUNTS} for name in ("weight", "bias")
    }
    assert [state["bias"][name].item() for name in sorted(COUNTS)] == [1, 4]
    assert set(optimizer.params) == {"weight", "bias", *COUNTS} and len(optimizer.param_groups) == 2


@pytest.mark.parametrize("groups", [True, False])
def test_a_run_resumed_between_global_steps_has_the_same_bits(groups: bool) -> None:
    whole, optimizer = semi_sync()
    optimizer.save_param_groups(groups)
    train(whole, optimizer, range(4))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, range(4, 8))
    resumed, again = semi_sync(seed=5)
    again.save_param_groups(groups)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, range(4, 8))
    assert same(resumed.state_dict(), whole.state_dict())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    module, optimizer = semi_sync()
    train(module, optimizer, range(4))
    before = copy.deepcopy(optimizer.state_dict())

    def refused(message: str, change: Any) -> None:
        saved = copy.deepcopy(before)
        saved["state"]["weight"]["semi_sync_local_exp_avg"].fill_(9.0)
        change(saved)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert same(optimizer.state_dict()["state"], before["state"])

    refused(r"unexpected parameters \['x'\]", lambda d: d["state"].update(x={}))
    refused("counts of steps .* are missing", lambda d: [v.pop(k) for v in d["state"].values() for k in COUNTS])
    refused(r"weight differ: missing \['slow'\]", lambda d: d["state"]["weight"].pop("semi_sync_global_slow"))
    refused("saved are 1 param_groups, here are 2", lambda d: d.update(param_groups=d["param_groups"][:1]))


def test_what_it_cannot_do_is_refused() -> None:
    params = dict(nn.Linear(3, 2).named_parameters())
    local = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p))
    outer = KeyedOptimizerWrapper(params, Outer)
    with pytest.raises(TypeError, match="Adam has no global_step"):
        SemisyncOptimizer(params.values(), local, KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p)))
    with pytest.raises(ValueError, match="num_local_steps must be positive, got 0"):
        SemisyncOptimizer(params.values(), local, outer, 0)
    with pytest.raises(ValueError, match="offload_global_model and non_blocking are not offered"):
        SemisyncOptimizer(params.values(), local, outer, offload_global_model=True)
    with pytest.raises(ValueError, match="global_params are 1 tensors, not the 2 of the global optimizer"):
        SemisyncOptimizer([params["weight"]], local, outer)
    with pytest.raises(ValueError, match="both optimizers hold a parameter 'weight', but not the same one"):
        others = dict(nn.Linear(3, 2).named_parameters())
        SemisyncOptimizer(params.values(), KeyedOptimizerWrapper(others, lambda p: torch.optim.Adam(p)), outer)
    with pytest.warns(UserWarning, match="semi_sync_worker_shard_group is not used"):
        SemisyncOptimizer([{"params": list(params.values())}], local, outer, 2, object())


def test_copied_scheduled_and_initialised_like_any_keyed_optimizer() -> None:
    module, optimizer = semi_sync()
    optimizer.init_state()
    assert optimizer.state_dict()["state"]["weight"]["__semisync_local_step_counter__"].item() == 0
    outer: KeyedOptimizer = WarmupOptimizer(optimizer, [], lr=0.25)
    train(module, outer, range(3))
    other = copy.deepcopy(outer)
    assert other.state_dict()["state"]["__warmup"]["warmup"].tolist() == [3, 0]
    assert {group["lr"] for group in other.param_groups} == {0.25}
    for param in other.params.values():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    other.step()
    assert other.state_dict()["state"]["bias"]["__semisync_local_step_counter__"].item() == 4
    assert outer.state_dict()["state"]["bias"]["__semisync_local_step_counter__"].item() == 3


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("around", [lambda both: both, lambda both: OptimizerWrapper(CombinedOptimizer([("", both)]))])
def test_a_grad_scaler_is_warned_of_only_where_the_backward_trains_tables(
    around: Callable[[KeyedOptimizer], KeyedOptimizer], waits: bool
) -> None:
    ebc, over = fused(), linear()
    tables = ebc.fused_optimizer()
    assert isinstance(tables, FusedOptimizer)
    tables.accumulate_gradients(waits)
    scaler = torch.amp.GradScaler("cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for optimizer in (wrap(over), around(CombinedOptimizer([tables, wrap(over)]))):
            scaler.scale(over(torch.ones(3)).sum()).backward()
            scaler.step(optimizer)
    warned = ["gradients times the scale" in str(each.message) for each in caught]
    assert warned == ([] if waits else [True])
    assert all(each.filename == __file__ for each in caught)
