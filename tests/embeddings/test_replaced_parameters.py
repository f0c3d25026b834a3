"""Weights that others put in a table's place: new parameters of a model made on meta, tensors of a functional call."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from copies import by_pickle, by_torch_save
from jagged_batches import kjt, pooled, tables_of, weight
from kernel_inputs import assert_close
from model_zoo import BAGS, MAKERS, bags, configs, fused_bags, give_memory, values_of
from torch import Tensor, nn
from torch.func import functional_call

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
    apply_optimizer_in_backward,
)
from shardwise.inference import quantize_inference_model


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    dense = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(steps):
        outputs.append(values_of(model(kjt(BAGS))))
        outputs[-1].square().sum().backward()
        outputs += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        dense.step()
        dense.zero_grad()
    return outputs


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_made_on_meta_gets_its_memory_from_outside(name: str) -> None:
    model, plain = MAKERS[name]("meta"), MAKERS[name]("cpu")
    model.apply(give_memory)
    held = list(model.parameters())
    plain.load_state_dict(model.state_dict())
    copies = [copy.deepcopy(model), by_pickle(model), by_torch_save(model)]
    outputs = train(plain)
    assert outputs and all(equal(train(each), outputs) for each in (model, *copies))
    assert all(equal(list(each.parameters()), list(plain.parameters())) for each in (model, *copies))
    # the objects that a program may have given to its optimizer
    assert all(param is before for param, before in zip(model.parameters(), held, strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_empty_memory_is_filled_by_a_state_dict(name: str) -> None:
    model, plain = MAKERS[name]("meta").to_empty(device="cpu"), MAKERS[name]("cpu")
    model.load_state_dict(plain.state_dict())
    assert equal(train(model), train(plain))


@pytest.mark.parametrize("make", [bags, fused_bags])
@pytest.mark.parametrize("how", ["attribute", "setattr", "_parameters"])
def test_a_parameter_in_the_place_of_a_weight_is_looked_up_and_trained(
    make: Callable[[], EmbeddingBagCollection], how: str
) -> None:
    ebc, plain = make(), make()
    plain.load_state_dict(ebc.state_dict())
    for each in (ebc, plain):
        train(each, 1)
    before, rows = weight(ebc, "b"), torch.arange(24.0).view(6, 4)
    old, given = before.detach().clone(), nn.Parameter(rows.clone())
    child: Any = ebc.get_submodule("embedding_bags.b")
    if how == "attribute":
        child.weight = given
    elif how == "setattr":
        setattr(child, "weight", given)  # noqa: B010
    else:
        child._parameters["weight"] = given
    with torch.no_grad():
        weight(plain, "b").copy_(rows)
    assert equal(train(ebc), train(plain))
    assert weight(ebc, "b") is given and torch.equal(given, weight(plain, "b"))
    # what was there before is not written to
    assert torch.equal(before, old)
    if isinstance(ebc, FusedEmbeddingBagCollection):
        states = [each.fused_optimizer().state_dict()["state"] for each in (ebc, plain)]
        assert all(torch.equal(states[0][n][k], v) for n, of in states[1].items() for k, v in of.items())


def test_an_optimizer_applied_before_stays_with_the_table() -> None:
    """Marks are attributes of the parameter that was replaced."""
    ebc, plain = bags("meta"), bags()
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    ebc.apply(give_memory)
    plain.load_state_dict(ebc.state_dict())
    apply_optimizer_in_backward(torch.optim.SGD, plain.parameters(), {"lr": 0.5})
    assert equal(train(ebc), train(plain)) and equal(list(ebc.parameters()), list(plain.parameters()))


def test_an_optimizer_that_was_asked_for_on_meta_steers_the_tables_that_came() -> None:
    ebc = FusedEmbeddingBagCollection(configs()[:2], torch.optim.SGD, {"lr": 0.1}, device="meta")
    optimizer = ebc.fused_optimizer()
    ebc.apply(give_memory)
    before = tables_of(ebc)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    train(ebc)
    assert all(torch.equal(rows, before[name]) for name, rows in tables_of(ebc).items())
    assert all(param is optimizer.params[name] for name, param in ebc.named_parameters())


def test_a_parameter_of_another_dtype_keeps_it() -> None:
    ebc = fused_bags()
    rows = torch.arange(20.0).view(5, 4)
    child: Any = ebc.get_submodule("embedding_bags.a")
    child.weight = nn.Parameter(rows.to(torch.bfloat16))
    with torch.no_grad():
        looked_up = ebc(kjt(BAGS)).values()
    assert looked_up.dtype == torch.float32
    assert_close(looked_up, pooled(configs(), {name: t.float() for name, t in tables_of(ebc).items()}, BAGS))
    assert [param.dtype for param in ebc.parameters()] == [torch.bfloat16, torch.float32, torch.float16]
    train(ebc)
    assert weight(ebc, "a").dtype == torch.bfloat16 and not torch.equal(weight(ebc, "a").float(), rows)


@pytest.mark.parametrize("make", [bags, fused_bags])
@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.requires_grad_])
def test_a_functional_call_looks_up_what_it_is_given(
    make: Callable[[], EmbeddingBagCollection], kind: Callable[[Tensor], Tensor]
) -> None:
    ebc, plain = make(), bags()
    before = {name: param.detach().clone() for name, param in ebc.named_parameters()}
    given = {name: kind(torch.randn_like(rows)) for name, rows in before.items()}
    plain.load_state_dict(given)
    output, wanted = functional_call(ebc, given, (kjt(BAGS),)).values(), plain(kjt(BAGS)).values()
    assert torch.equal(output, wanted)
    if not isinstance(ebc, FusedEmbeddingBagCollection) or kind is not nn.Parameter:
        output.square().sum().backward()
        wanted.square().sum().backward()
        assert all(torch.equal(given[name].grad, param.grad) for name, param in plain.named_parameters())  # type: ignore[arg-type]
    assert torch.equal(ebc(kjt(BAGS)).values(), functional_call(ebc, before, (kjt(BAGS),)).values())
    assert all(torch.equal(param, before[name]) for name, param in ebc.named_parameters())


def test_a_functional_call_needs_no_memory_of_the_module() -> None:
    plain = bags()
    given = {name: param.detach() for name, param in plain.named_parameters()}
    assert torch.equal(functional_call(bags("meta"), given, (kjt(BAGS),)).values(), plain(kjt(BAGS)).values())


def test_weights_that_are_functions_of_others_feed_their_gradients() -> None:
    """A weight that a network computes, which is no parameter and has a history."""
    ebc, scale = bags(), torch.tensor(2.0, requires_grad=True)
    given = {name: param.detach() * scale for name, param in ebc.named_parameters()}
    functional_call(ebc, given, (kjt(BAGS),)).values().sum().backward()
    assert scale.grad is not None
    assert_close(scale.grad, ebc(kjt(BAGS)).values().sum(), 1e-3)


def test_one_parameter_for_two_tables_gets_the_gradients_of_both() -> None:
    tables = [EmbeddingBagConfig(6, 4, name, feature_names=[feature]) for name, feature in zip("ab", "fg", strict=True)]
    ebc = EmbeddingBagCollection(tables)
    for name in "ab":
        ebc.get_submodule(f"embedding_bags.{name}").weight = weight(ebc, "a")
    ebc(kjt(BAGS)).values().sum().backward()
    hits = [len([i for bag in (*BAGS["f"], *BAGS["g"]) for i in bag if i == row]) for row in range(6)]
    assert weight(ebc, "a").grad is not None
    assert weight(ebc, "a").grad[:, 0].tolist() == hits  # type: ignore[index]
    with pytest.raises(ValueError, match=r"tables \['a', 'b'\]: their weight is no parameter of their own"):
        copy.deepcopy(ebc)


def test_an_assigned_state_dict_goes_to_the_parameters_that_took_their_place() -> None:
    ebc, source = bags("meta"), bags()
    ebc.apply(give_memory)
    held = dict(ebc.named_parameters())
    ebc.load_state_dict({name: value.clone() for name, value in source.state_dict().items()}, assign=True)
    assert torch.equal(ebc(kjt(BAGS)).values(), source(kjt(BAGS)).values())
    assert all(param is held[name] for name, param in ebc.named_parameters())


def test_what_cannot_take_a_weights_place_is_named() -> None:
    ebc, child = bags("meta"), "embedding_bags.a"
    ebc.get_submodule(child).weight = nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"tables \['a'\] on cpu and \['b'\] on meta: give all weights"):
        ebc(kjt(BAGS))
    ebc = bags()
    ebc.get_submodule(child).weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"table 'a': its weight must be \[5, 4\], got \[4, 4\]"):
        ebc(kjt(BAGS))
    ebc = fused_bags()
    for param in ebc.get_submodule("embedding_bags").children():
        param.weight = nn.Parameter(torch.zeros(param.weight.shape, dtype=torch.float64))  # type: ignore[arg-type,union-attr]
    with pytest.raises(ValueError, match="cannot become torch.float64"):
        ebc(kjt(BAGS))


def test_quantized_tables_take_over_buffers_in_the_place_of_their_own() -> None:
    """They went on with the old rows, or on meta with none."""
    served: Any = quantize_inference_model(bags())
    made = type(served)(served.embedding_bag_configs(), served.is_weighted(), torch.device("meta"))
    made.apply(give_memory)
    made.load_state_dict(served.state_dict())
    assert torch.equal(made(kjt(BAGS)).values(), served(kjt(BAGS)).values())
    made.embedding_bags.a.weight = torch.zeros_like(made.embedding_bags.a.weight)
    rows = made(kjt(BAGS)).values()
    assert torch.equal(rows[:, 4:], served(kjt(BAGS)).values()[:, 4:])
    # all numbers of a row are its bias
    assert bool((rows[:, :4] == rows[:, :1]).all())


def test_threads_follow_what_was_done_to_the_parameters_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    features = kjt(BAGS)
    plain, model = bags(), bags()
    plain.load_state_dict(model.state_dict())
    expected = values_of(plain(features))
    apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters())[:1], {"lr": 0.1})
    grouping, begun, others = type(model)._group, threading.Event(), []

    def slowly(collection: EmbeddingBagCollection, *arguments: Any) -> None:
        # a thread that looks up while this one has no groups yet
        others.append(threads.submit(lambda: values_of(model(features))))
        begun.wait(0.2)
        grouping(collection, *arguments)

    monkeypatch.setattr(type(model), "_group", slowly)
    with ThreadPoolExecutor(2) as threads:
        assert torch.equal(values_of(model(features)), expected)
        assert torch.equal(others[0].result(), expected)
    assert len(others) == 1
