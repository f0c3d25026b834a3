"""What happens to tables outside of a step: names, loading, moving, copying, freezing, other optimizers.

A table is a parameter and a view of its group's flat buffer at once; every test ends with a lookup that proves both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from copies import by_pickle, by_torch_save, same
from jagged_batches import gradient, kjt, pooled, tables_of, weight
from kernel_inputs import assert_close
from model_zoo import fused as in_backward
from torch import Tensor, nn

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    RowWiseAdagrad,
)

BAGS = {"f": [[1, 2], [], [4]], "g": [[0], [3, 3], [1]]}


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(5, 4, "a", feature_names=["f"]),
        EmbeddingBagConfig(6, 4, "b", feature_names=["g"]),
        EmbeddingBagConfig(7, 3, "c", feature_names=["f"]),
    ]


def bags(device: str = "cpu") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(configs(), device=device)


def fused(optimizer: Any = RowWiseAdagrad, device: str = "cpu") -> FusedEmbeddingBagCollection:
    return FusedEmbeddingBagCollection(configs(), optimizer, {"lr": 0.1}, device=device)


def assert_looks_up_its_parameters(ebc: EmbeddingBagCollection) -> None:
    with torch.no_grad():
        assert_close(ebc(kjt(BAGS)).values(), pooled(configs(), tables_of(ebc), BAGS))
    for group, tables in ebc._grouped():
        for number, t in enumerate(tables):
            assert ebc._table_parameters()[t].data_ptr() == group.view(number).data_ptr()
            assert ebc._table_parameters()[t] is group.parameters[number]


def train(ebc: EmbeddingBagCollection, steps: int = 1) -> None:
    for step in range(steps):
        (ebc(kjt(BAGS)).values() * (step + 1)).sum().backward()


def test_names_in_the_state_dict() -> None:
    assert list(bags().state_dict()) == [f"embedding_bags.{name}.weight" for name in "abc"]
    assert list(fused().state_dict()) == list(bags().state_dict())
    assert [name for name, _ in bags().named_parameters()] == list(bags().state_dict())
    ec = EmbeddingCollection([EmbeddingConfig(5, 4, "a"), EmbeddingConfig(5, 4, "b")])
    assert list(ec.state_dict()) == ["embeddings.a.weight", "embeddings.b.weight"]


def test_a_state_dict_loads_into_the_buffer() -> None:
    source, target = bags(), bags()
    target.load_state_dict(source.state_dict())
    assert same(tables_of(target), tables_of(source))
    assert_looks_up_its_parameters(target)
    with pytest.raises(RuntimeError, match="size mismatch"):
        target.load_state_dict({**source.state_dict(), "embedding_bags.a.weight": torch.zeros(4, 4)})


@pytest.mark.parametrize("make", [bags, fused])
def test_assigned_tables_are_copied_into_the_buffer(make: Callable[[], EmbeddingBagCollection]) -> None:
    """load_state_dict(assign=True) put other tensors in the parameters' place;
    lookups and updates went on with the old rows, state_dict showed the new ones."""
    ebc, before = make(), bags()
    names = dict(ebc.named_parameters())
    ebc.load_state_dict({name: value.clone() for name, value in before.state_dict().items()}, assign=True)
    assert_looks_up_its_parameters(ebc)
    assert torch.equal(tables_of(ebc)["b"], tables_of(before)["b"])
    # the parameters that an optimizer may hold already
    assert all(param is names[name] for name, param in ebc.named_parameters())
    train(ebc)
    assert torch.equal(tables_of(ebc)["b"], tables_of(before)["b"]) == (make is bags)


@pytest.mark.parametrize("make", [bags, fused])
def test_assigned_tables_outlive_data_that_was_set_before(make: Callable[[], EmbeddingBagCollection]) -> None:
    """No batch was looked up since, and the next lookup brought the older rows back."""
    ebc, before = make(), bags()
    weight(ebc, "b").data = torch.zeros_like(weight(ebc, "b"))
    ebc.load_state_dict({name: value.clone() for name, value in before.state_dict().items()}, assign=True)
    assert_looks_up_its_parameters(ebc)
    assert torch.equal(tables_of(ebc)["b"], tables_of(before)["b"])


def test_assignment_fills_a_collection_on_meta() -> None:
    ebc, source = in_backward(bags(device="meta"), lr=1.0), bags()
    nn.Sequential(ebc).load_state_dict({f"0.{name}": value for name, value in source.state_dict().items()}, assign=True)
    assert_looks_up_its_parameters(ebc)
    assert_close(ebc(kjt(BAGS)).values(), source(kjt(BAGS)).values())
    train(ebc)
    assert not torch.equal(tables_of(ebc)["a"], tables_of(source)["a"])


def test_part_of_an_assignment_onto_meta_names_the_tables_left_over() -> None:
    with pytest.raises(ValueError, match=r"tables \['b', 'c'\] would stay on meta"):
        bags(device="meta").load_state_dict({"embedding_bags.a.weight": torch.zeros(5, 4)}, strict=False, assign=True)


def test_data_set_from_outside_is_taken_into_the_buffer() -> None:
    """`weight.data = pretrained` is how many load a table; lookups went on with the old rows."""
    ebc, pretrained = fused(), torch.arange(20.0).view(5, 4)
    weight(ebc, "a").data = pretrained.clone()
    assert_looks_up_its_parameters(ebc)
    assert torch.equal(tables_of(ebc)["a"], pretrained)
    weight(ebc, "a").data = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"table 'a': its weight must be \[5, 4\], got \[4, 4\]"):
        ebc(kjt(BAGS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_and_bfloat16_keep_parameters_views_and_states(dtype: torch.dtype) -> None:
    ebc = fused()
    train(ebc)
    params, before = list(ebc.parameters()), tables_of(ebc)
    states = {k: v.clone() for s in ebc.fused_optimizer().state_dict()["state"].values() for k, v in s.items()}
    assert ebc.to(dtype) is ebc
    assert all(parameter is param for parameter, param in zip(ebc.parameters(), params, strict=True))
    assert all(param.dtype == dtype for param in params)
    assert torch.equal(tables_of(ebc)["a"], before["a"].to(dtype))
    for values in ebc.fused_optimizer().state_dict()["state"].values():
        for name, value in values.items():
            if name.endswith(".step"):
                # rows of half precision are rounded by it
                assert value.tolist() == [1]
            else:
                assert value.dtype == torch.float32 and torch.equal(value, states[name])
    assert_looks_up_its_parameters(ebc)
    train(ebc)
    assert_looks_up_its_parameters(ebc)
    assert not torch.equal(tables_of(ebc)["a"], before["a"].to(dtype))
    ebc.float()
    assert_looks_up_its_parameters(ebc)


def test_tables_do_not_become_float64() -> None:
    with pytest.raises(ValueError, match="tables a, b, c: cannot become torch.float64"):
        bags().double()


def test_gradients_move_with_their_tables() -> None:
    ebc = bags()
    train(ebc)
    expected = gradient(ebc, "a")
    assert torch.equal(gradient(ebc.half(), "a"), expected.half())


@pytest.mark.parametrize("make", [bags, fused])
def test_meta_then_to_empty_then_reset_parameters(make: Callable[..., EmbeddingBagCollection]) -> None:
    ebc = make(device="meta")
    optimizer = ebc.fused_optimizer()
    ebc.reset_parameters()
    assert all(param.is_meta for param in ebc.parameters())
    nn.Sequential(ebc).to_empty(device="cpu")
    ebc.reset_parameters()
    assert ebc.device == torch.device("cpu")
    assert all(0 < param.abs().max() <= 5**-0.5 for param in ebc.parameters())
    assert_looks_up_its_parameters(ebc)
    train(ebc)
    if make is fused:
        # the optimizer made while the tables were on meta follows them
        assert optimizer is ebc.fused_optimizer()
        for values in optimizer.state_dict()["state"].values():
            assert all(value.device.type == "cpu" and value.sum() > 0 for value in values.values())


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch_save])


@COPIES
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adam, RowWiseAdagrad])
def test_a_copy_goes_on_as_the_original_would_have(copied: Callable[[Any], Any], optimizer: Any) -> None:
    original = bags() if optimizer is None else fused(optimizer)
    train(original, 3)
    copy_of = copied(nn.Sequential(original))[0]
    assert_looks_up_its_parameters(copy_of)
    before = tables_of(original)
    train(copy_of, 2)
    assert same(tables_of(original), before)
    weight(original, "a").grad = None
    train(original, 2)
    assert same(tables_of(copy_of), tables_of(original))
    if optimizer is None:
        assert torch.equal(gradient(copy_of, "a"), gradient(original, "a"))
    else:
        assert copy_of.fused_optimizer() is not original.fused_optimizer()


@COPIES
def test_a_copy_made_before_the_first_batch_keeps_the_optimizer(copied: Callable[[Any], Any]) -> None:
    """Optimizers take effect at the first lookup; a copy made before that lost them and silently trained nothing."""
    original = in_backward(bags(), lr=1.0)
    copy_of, before = copied(original), tables_of(original)
    train(copy_of)
    assert weight(copy_of, "a").grad is None
    assert_close(tables_of(copy_of)["a"][1], before["a"][1] - 1)
    assert torch.equal(tables_of(original)["a"], before["a"])


@COPIES
def test_a_copy_keeps_frozen_tables_frozen(copied: Callable[[Any], Any]) -> None:
    original = fused()
    weight(original, "a").requires_grad_(False)
    copy_of = copied(original)
    assert not weight(copy_of, "a").requires_grad
    train(copy_of)
    assert torch.equal(tables_of(copy_of)["a"], tables_of(original)["a"])
    assert not torch.equal(tables_of(copy_of)["b"], tables_of(original)["b"])


def test_a_shallow_copy_leaves_the_original_trainable() -> None:
    """copy.copy made new parameters and gave them the shared buffer: the original's got no more gradients."""
    ebc = bags()
    shallow = copy.copy(ebc)
    train(ebc)
    assert weight(ebc, "a").grad is not None
    assert weight(shallow, "a") is weight(ebc, "a")


class WithProjection(EmbeddingBagCollection):
    """A collection that a user extended."""

    def __init__(self) -> None:
        super().__init__(configs())
        self.projection = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(1))


def test_what_a_subclass_adds_moves_and_copies_too() -> None:
    """`_apply` moved the tables only: a subclass's layers stayed fp32, or on the old device."""
    module = WithProjection().bfloat16()
    assert {value.dtype for value in module.state_dict().values()} == {torch.bfloat16}
    assert_looks_up_its_parameters(module)
    copied = copy.deepcopy(module)
    assert list(copied.state_dict()) == list(module.state_dict())
    assert torch.equal(copied.projection.weight, module.projection.weight)


def a_frozen() -> EmbeddingBagCollection:
    ebc = bags()
    weight(ebc, "a").requires_grad_(False)
    return ebc


def test_a_frozen_table_is_not_trained_whatever_was_applied_to_it() -> None:
    ebc = in_backward(a_frozen(), lr=1.0)
    before = tables_of(ebc)
    train(ebc)
    assert torch.equal(tables_of(ebc)["a"], before["a"])
    assert_close(tables_of(ebc)["b"][0], before["b"][0] - 1)
    # and without any optimizer it gets no gradient
    plain = a_frozen()
    train(plain)
    assert weight(plain, "a").grad is None and weight(plain, "b").grad is not None


def test_freezing_and_thawing_take_effect_at_the_next_lookup() -> None:
    """requires_grad was read once, at the first lookup: a table frozen later went on being trained."""
    ebc, twin = fused(torch.optim.Adagrad), fused(torch.optim.Adagrad)
    twin.load_state_dict(ebc.state_dict())
    train(ebc)
    train(twin)
    weight(ebc, "b").requires_grad_(False)
    before = tables_of(ebc)
    train(ebc)
    assert torch.equal(tables_of(ebc)["b"], before["b"])
    assert not torch.equal(tables_of(ebc)["a"], before["a"])
    weight(ebc, "b").requires_grad_(True)
    train(ebc)
    train(twin)
    # its states were kept: the second step that it takes is the second that the twin takes
    assert torch.equal(tables_of(ebc)["b"], tables_of(twin)["b"])
    ebc.requires_grad_(False)
    assert not ebc(kjt(BAGS)).values().requires_grad


def test_a_table_thawed_after_its_optimizer_was_applied_is_trained() -> None:
    ebc = in_backward(a_frozen(), lr=1.0)
    train(ebc)
    before = tables_of(ebc)
    weight(ebc, "a").requires_grad_(True)
    train(ebc)
    assert_close(tables_of(ebc)["a"][1], before["a"][1] - 1)
    assert weight(ebc, "a").grad is None


DENSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "rowwise adagrad": lambda params: RowWiseAdagrad(params, lr=0.1),
}


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE.keys())
def test_any_optimizer_trains_tables_that_have_none(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    ebc = bags()
    tables: dict[str, Tensor] = {name: nn.Parameter(table) for name, table in tables_of(ebc).items()}
    optimizer_of_module, optimizer_of_tables = make(ebc.parameters()), make(tables.values())
    for step in range(5):
        for optimizer, out in (
            (optimizer_of_module, ebc(kjt(BAGS)).values()),
            (optimizer_of_tables, pooled(configs(), tables, BAGS)),
        ):
            optimizer.zero_grad()
            (out.square() * (step + 1)).sum().backward()
            optimizer.step()
    for name, table in tables.items():
        assert_close(tables_of(ebc)[name], table, 1e-5)
    assert_looks_up_its_parameters(ebc)


def test_tables_of_one_dtype_share_a_buffer_and_others_do_not() -> None:
    ebc = EmbeddingBagCollection([*configs(), EmbeddingBagConfig(5, 4, "d", DataType.FP16, ["g"])])
    storages = {name: param.untyped_storage().data_ptr() for name, param in ebc.named_parameters()}
    assert len({storages[f"embedding_bags.{name}.weight"] for name in "abc"}) == 1
    assert len(set(storages.values())) == 2
