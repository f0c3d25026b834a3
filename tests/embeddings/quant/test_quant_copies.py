"""What happens to quantized collections outside of a lookup: names, loading, moving, copying, pickling.

A table is buffers and views of its group's planes at once; every test ends with a lookup that proves both.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from copies import by_pickle, by_torch_save
from jagged_batches import kjt
from quantized_tables import BAGS, MIXED, assert_looks_up_its_buffers, float_bags, mixed, quantized
from torch import Tensor, nn

from shardwise import DataType, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, quant
from shardwise.embeddings.quant import set_pruning_data
from shardwise.inference import (
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    shard_quant_model,
)


def bags(seed: int = 0) -> quant.EmbeddingBagCollection:
    torch.manual_seed(seed)
    return mixed()


def pruned() -> quant.EmbeddingBagCollection:
    ebc = set_pruning_data(float_bags(), {"a": 3, "c": torch.tensor([-1, 2, 0, -1, -1, 1, -1, -1])})
    return quantized(ebc, per_table_weight_dtype=MIXED)


def pooled(collection: nn.Module) -> Tensor:
    out: Tensor = collection(kjt(BAGS)).values()
    return out


def test_names_shapes_and_dtypes_in_the_state_dict() -> None:
    stored = {name: (value.dtype, list(value.shape)) for name, value in bags().state_dict().items()}
    assert stored == {
        "embedding_bags.a.weight": (torch.uint8, [6, 8]),
        "embedding_bags.a.weight_qscale": (torch.float16, [6, 1]),
        "embedding_bags.a.weight_qbias": (torch.float16, [6, 1]),
        "embedding_bags.b.weight": (torch.uint8, [7, 3]),
        "embedding_bags.b.weight_qscale": (torch.float16, [7, 1]),
        "embedding_bags.b.weight_qbias": (torch.float16, [7, 1]),
        "embedding_bags.c.weight": (torch.uint8, [8, 32]),
        "embedding_bags.c.weight_qscale": (torch.float32, [8, 1]),
    }
    ec = EmbeddingCollection([EmbeddingConfig(5, 4, "a")])
    assert list(quantize_inference_model(ec, quantization_dtype=torch.float16).state_dict()) == ["embeddings.a.weight"]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [bags, pruned])
def test_a_state_dict_loads_into_the_planes(make: Callable[[], quant.EmbeddingBagCollection], assign: bool) -> None:
    source = make()
    for device in ["cpu", "meta"] if assign else ["cpu"]:
        other = nn.Sequential(quant.EmbeddingBagCollection(source.embedding_bag_configs(), False, device))
        state = {f"0.{name}": value.clone() for name, value in source.state_dict().items()}
        other.load_state_dict(state, assign=assign)
        assert torch.equal(pooled(other), pooled(source))
        # the collection's own memory, not what was given
        for value in state.values():
            value.zero_()
        assert torch.equal(pooled(other), pooled(source))


def test_a_state_dict_of_another_dtype_or_shape_is_refused() -> None:
    """A float table of an int8 table's shape was copied into its payload, cut to whole numbers, without a word."""
    made, before = bags(), bags().state_dict()
    for name, value, error, message in (
        ("a.weight", torch.randn(6, 8), ValueError, "table 'a': weight is torch.uint8 here, the state dict has"),
        ("b.weight_qbias", torch.zeros(7, 1), ValueError, "or make this one with the scale_dtype of the state dict"),
        ("b.weight", torch.zeros(7, 5, dtype=torch.uint8), RuntimeError, "size mismatch"),
    ):
        with pytest.raises(error, match=message):
            made.load_state_dict({**before, f"embedding_bags.{name}": value})
    assert_looks_up_its_buffers(made, kjt(BAGS), BAGS)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_state_dict_of_rows_of_another_format_is_refused(sharded: bool) -> None:
    """Rows of fp16 were copied into a table of bf16, whose bytes have the same shape, and read as other numbers."""
    half, other = (
        quantize_inference_model(nn.Sequential(float_bags()), quantization_dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16)
    )
    if sharded:
        half, other = (shard_quant_model(model, 2, "cpu", "cpu")[0] for model in (half, other))
    state = half.state_dict()
    for given in (state, by_torch_save(state, weights_only=True)):
        before = pooled(other)
        with pytest.raises(ValueError, match="table 'a': rows are bf16 here, those of the state dict fp16"):
            other.load_state_dict(given)
        assert torch.equal(pooled(other), before)
        half.load_state_dict(given)


def test_part_of_an_assignment_onto_meta_names_the_tables_left_over() -> None:
    other = quant.EmbeddingBagCollection(bags().embedding_bag_configs(), False, "meta")
    state = {name: value for name, value in bags().state_dict().items() if ".a." in name}
    with pytest.raises(ValueError, match=r"tables \['b', 'c'\] would stay on meta"):
        other.load_state_dict(state, strict=False, assign=True)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, by_pickle, by_torch_save])
@pytest.mark.parametrize("make", [bags, pruned])
def test_copies_look_the_same_rows_up(
    make: Callable[[], quant.EmbeddingBagCollection],
    copied: Callable[[quant.EmbeddingBagCollection], quant.EmbeddingBagCollection],
) -> None:
    source = make()
    other, wanted = copied(source), pooled(source)
    assert torch.equal(pooled(other), wanted) and repr(other) == repr(source)
    assert list(other.state_dict()) == list(source.state_dict())
    other.get_submodule("embedding_bags.a").get_buffer("weight").zero_()
    # a shallow copy shares its tables, as that of any module does
    assert torch.equal(pooled(source), wanted) == (copied is not copy.copy)
    assert not torch.equal(pooled(other), wanted)


def test_a_pickle_holds_each_table_once() -> None:
    made = quantize_inference_model(EmbeddingCollection([EmbeddingConfig(1000, 64, "a")]))
    assert len(pickle.dumps(made)) < 1.1 * 1000 * 68


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.double, lambda m: m.to("cpu", torch.bfloat16)])
def test_changes_of_dtype_leave_quantized_tables_alone(change: Callable[[nn.Module], nn.Module]) -> None:
    made = bags()
    wanted = pooled(made)
    assert change(made) is made
    assert torch.equal(pooled(made), wanted)
    assert made.get_submodule("embedding_bags.c").get_buffer("weight_qscale").dtype == torch.float32
    assert_looks_up_its_buffers(made, kjt(BAGS), BAGS)
    with pytest.raises(TypeError, match="quantized tables stay int8"):
        made.type(torch.float16)


def test_meta_allocates_nothing_and_comes_to_life_on_the_cpu() -> None:
    made = bags().to("meta")
    assert made.device.type == "meta" and all(value.is_meta for value in made.state_dict().values())
    made.to_empty(device="cpu").load_state_dict(bags().state_dict())
    assert torch.equal(pooled(made), pooled(bags()))
    on_meta = pruned().to("meta")
    quant.meta_to_cpu_placement(model := nn.Sequential(on_meta, nn.Linear(2, 2)))
    assert model[0] is on_meta and on_meta.device.type == "cpu"
    assert not pooled(on_meta).any()
    config = EmbeddingBagConfig(10**12, 8, "huge", DataType.INT8)
    huge = quant.EmbeddingBagCollection([config], False, "meta")
    assert huge.get_submodule("embedding_bags.huge").get_buffer("weight").shape == (10**12, 8)


@pytest.mark.parametrize("make", [bags, pruned])
def test_rows_go_from_model_to_model_by_table(make: Callable[[], quant.EmbeddingBagCollection]) -> None:
    source = nn.Sequential(make())
    weights = get_table_to_weights_from_tbe(source)
    assert list(weights) == ["a", "b", "c"]
    assert weights["a"][0].data_ptr() == source.state_dict()["0.embedding_bags.a.weight"].data_ptr()
    other = copy.deepcopy(source)
    for value in other.buffers():
        if value.dtype == torch.uint8:
            value.zero_()
    assert not torch.equal(pooled(other), pooled(source))
    assign_weights_to_tbe(other, weights)
    assert torch.equal(pooled(other), pooled(source))
    with pytest.raises(KeyError, match=r"no weights for tables \['b'\]"):
        assign_weights_to_tbe(other, {name: weights[name] for name in "ac"})
    with pytest.raises(ValueError, match=r"tables \['a', 'b', 'c'\] are in more than one collection"):
        get_table_to_weights_from_tbe(nn.Sequential(source, other))


def test_rows_bring_a_collection_on_meta_to_life() -> None:
    source, other = bags(), bags(1).to("meta")
    assign_weights_to_tbe(other, get_table_to_weights_from_tbe(source))
    assert torch.equal(pooled(other), pooled(source))
    with pytest.raises(ValueError, match=r"tables \['a', 'c'\] are pruned: load a state dict"):
        assign_weights_to_tbe(pruned().to("meta"), get_table_to_weights_from_tbe(pruned()))


def test_half_tables_have_no_scales() -> None:
    made, other = (quantize_inference_model(float_bags(), quantization_dtype=torch.float16) for _ in range(2))
    weights = get_table_to_weights_from_tbe(made)
    assert all(scales is None for _, scales in weights.values())
    assign_weights_to_tbe(other, weights)
    assert torch.equal(pooled(other), pooled(made))
