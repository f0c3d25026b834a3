"""Features with batch sizes of their own: what comes out is what the batch written out in full gives."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from jagged_batches import Bags, draw, gradient, kjt, tables_of, upstream
from kernel_inputs import DEVICES, assert_close, torch_device
from torch import Tensor

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    KeyedJaggedTensor,
    LookupPolicy,
    PoolingType,
    RowWiseAdagrad,
)
from shardwise.embeddings.tables.variable_batch import inverse_of, pad_strides, select_rows

# samples that each feature kept, and for each which of them every sample of the full batch is
KEPT = {"f": 3, "g": 1, "h": 5}
INVERSE = {"f": [2, 0, 0, 1, 2, 2], "g": [0, 0, 0, 0, 0, 0], "h": [4, 3, 2, 1, 0, 4]}
ROWS = {"f": 9, "g": 6, "h": 5}


def kept_bags() -> Bags:
    return {feature: draw({feature: ROWS[feature]}, n, seed=n)[feature] for feature, n in KEPT.items()}


def in_full(bags: Bags) -> Bags:
    return {feature: [bags[feature][i] for i in INVERSE[feature]] for feature in bags}


def short(
    bags: Bags, *, weights: Mapping[str, Any] | None = None, indexed: bool = True, padding: int = 0,
    device: torch.device | str = "cpu", inverse: Mapping[str, list[int]] = INVERSE,
) -> KeyedJaggedTensor:  # fmt: skip
    """The batch with each feature's own batch size; `padding` values that no bag owns follow."""
    flat = [i for feature in bags.values() for bag in feature for i in bag]
    values = torch.tensor(flat + [10**6] * padding, device=device)
    return KeyedJaggedTensor(
        list(bags),
        values,
        None if weights is None else join(bags, weights, device),
        lengths=torch.tensor([len(bag) for feature in bags.values() for bag in feature], device=device),
        stride_per_key=[len(feature) for feature in bags.values()],
        inverse_indices=(list(bags), torch.tensor([inverse[f] for f in bags], device=device)) if indexed else None,
        capacity=values.shape[0] if padding else None,
    )


def join(bags: Bags, weights: Mapping[str, Any], device: torch.device | str) -> Tensor:
    return torch.tensor([w for feature in bags for bag in weights[feature] for w in bag], device=device)


def draw_weights(bags: Bags) -> dict[str, list[list[float]]]:
    generator = torch.Generator().manual_seed(7)
    return {f: [torch.rand(len(bag), generator=generator).tolist() for bag in of] for f, of in bags.items()}


# two dtypes are two groups, one of which permutes; h is looked up twice
POOLED = (
    ("a", 9, 4, ["f"], DataType.FP32, PoolingType.SUM),
    ("b", 5, 8, ["h"], DataType.FP16, PoolingType.MEAN),
    ("c", 6, 3, ["g", "h"], DataType.FP32, PoolingType.MEAN),
)


def bag_configs(names: str = "abc") -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(max(rows, 6), dim, name, dtype, list(features), pooling=pooling)
        for name, rows, dim, features, dtype, pooling in POOLED
        if name in names
    ]


def row_configs() -> list[EmbeddingConfig]:
    return [EmbeddingConfig(max(rows, 6), 4, name, dtype, list(fs)) for name, rows, _, fs, dtype, _ in POOLED]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", ["abc", "a", "ac"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_rows_and_their_gradients_are_those_of_the_full_batch(
    device: str, names: str, padding: int, weighted: bool
) -> None:
    if weighted and padding:
        pytest.skip("weights past the last bag are another test's")
    where, bags = torch_device(device), kept_bags()
    weights = draw_weights(bags) if weighted else None
    variable = EmbeddingBagCollection(bag_configs(names), weighted, where)
    full = copy.deepcopy(variable)
    whole = in_full(bags)
    full_weights = None if weights is None else join(whole, in_full(weights), where)  # type: ignore[arg-type]
    got = variable(short(bags, weights=weights, padding=padding, device=where))
    want = full(kjt(whole, weights=full_weights, device=where))
    assert got.keys() == want.keys()
    assert torch.equal(got.values(), want.values())
    grad = upstream(*want.values().shape).to(where)
    got.values().backward(grad)
    want.values().backward(grad)
    for name in names:
        assert_close(gradient(variable, name), gradient(full, name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_lengths_and_ids_of_every_feature_are_those_of_the_full_batch(device: str, padding: int) -> None:
    where, bags = torch_device(device), kept_bags()
    variable = EmbeddingCollection(row_configs(), where, need_indices=True)
    full = copy.deepcopy(variable)
    got, want = variable(short(bags, padding=padding, device=where)), full(kjt(in_full(bags), device=where))
    assert list(got) == list(want) == ["f", "h@b", "g", "h@c"]
    for name, jagged in want.items():
        assert torch.equal(got[name].values(), jagged.values())
        assert torch.equal(got[name].lengths(), jagged.lengths())
        assert torch.equal(got[name].weights(), jagged.weights())
        grad = upstream(*jagged.values().shape).to(where)
        got[name].values().backward(grad, retain_graph=True)
        jagged.values().backward(grad, retain_graph=True)
    for name in "abc":
        assert_close(gradient(variable, name), gradient(full, name))


def test_without_inverse_indices_every_feature_keeps_its_own_batch() -> None:
    bags = kept_bags()
    ec = EmbeddingCollection(row_configs(), need_indices=True)
    tables = tables_of(ec)
    out = ec(short(bags, indexed=False))
    for name, feature, table in (("f", "f", "a"), ("h@b", "h", "b"), ("g", "g", "c"), ("h@c", "h", "c")):
        ids = torch.tensor([i for bag in bags[feature] for i in bag], dtype=torch.int64)
        assert out[name].lengths().tolist() == [len(bag) for bag in bags[feature]]
        assert torch.equal(out[name].weights(), ids)
        assert torch.equal(out[name].values(), tables[table][ids].float())


@pytest.mark.parametrize("kind", [torch.optim.SGD, RowWiseAdagrad, torch.optim.Adam])
@pytest.mark.parametrize("pooled", [True, False])
def test_fused_optimizers_take_the_steps_of_the_full_batch(kind: Any, pooled: bool) -> None:
    """A sample that was left out counts as often as the full batch has it, in one step of its row."""
    bags = kept_bags()
    bag_of, row_of = FusedEmbeddingBagCollection, FusedEmbeddingCollection
    made = bag_of(bag_configs("ac"), kind, {"lr": 0.1}) if pooled else row_of(row_configs()[::2], kind, {"lr": 0.1})
    twins = [made, copy.deepcopy(made)]
    for step in range(3):
        for module, batch in zip(twins, (short(bags), kjt(in_full(bags))), strict=True):
            out = module(batch)
            values = out.values() if pooled else torch.cat([jagged.values() for jagged in out.values()])
            values.backward(upstream(*values.shape, seed=step))
    torch.testing.assert_close(twins[0].state_dict(), twins[1].state_dict(), rtol=1e-5, atol=1e-6)


def test_inverse_indices_count_where_batch_sizes_agree_too() -> None:
    """TorchRec's unsharded pooled collection expands such a batch as well; ours took it for the full one."""
    batch = KeyedJaggedTensor(
        ["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]),
        inverse_indices=(["f"], torch.tensor([[1, 0, 1]])),
    )  # fmt: skip
    full = KeyedJaggedTensor(["f"], torch.tensor([3, 1, 2, 3]), lengths=torch.tensor([1, 2, 1]))
    ebc, ec = EmbeddingBagCollection(bag_configs("a")), EmbeddingCollection(row_configs()[:1])
    assert torch.equal(ebc(batch).values(), ebc(full).values())
    assert torch.equal(ec(batch)["f"].values(), ec(full)["f"].values())
    assert ec(batch)["f"].lengths().tolist() == [1, 2, 1]


def test_different_batch_sizes_without_inverse_indices_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"one batch size .* got \[3, 1, 5\] for \['f', 'g', 'h'\]: give"):
        EmbeddingBagCollection(bag_configs())(short(kept_bags(), indexed=False))


def test_equal_batch_sizes_need_no_inverse_indices() -> None:
    batch = KeyedJaggedTensor(
        ["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]), stride_per_key_per_rank=[[1, 1]]
    )
    assert EmbeddingBagCollection(bag_configs("a"))(batch).values().shape == (2, 4)


@pytest.mark.parametrize("bad", [-1, 3])
@pytest.mark.parametrize("pooled", [True, False])
def test_an_inverse_index_outside_its_feature_is_refused_by_name(bad: int, pooled: bool) -> None:
    """Padded to the largest batch size, 3 would find an empty bag of `f`, which has 3 samples, and give zeros."""
    batch = short(kept_bags(), inverse={**INVERSE, "f": [0, 1, 2, bad, 0, 0]})
    module = EmbeddingBagCollection(bag_configs()) if pooled else EmbeddingCollection(row_configs())
    with pytest.raises(IndexError, match=rf"feature 'f', sample 3: {bad} is outside \[0, 3\)"):
        module(batch)


def test_a_bad_id_is_named_by_its_place_in_its_own_batch() -> None:
    bags = {"f": [[1], [2], [99]], "g": [[0]], "h": [[1], [], [], [2], [3]]}
    with pytest.raises(IndexError, match=r"feature 'f' \(table 'a'\).*sample 2.*99"):
        EmbeddingBagCollection(bag_configs())(short(bags))


def test_padding_moves_no_id_and_keeps_what_is_known() -> None:
    batch = short(kept_bags(), weights=draw_weights(kept_bags()), padding=0)
    padded = pad_strides(batch)
    assert (padded.stride(), padded.variable_stride_per_key()) == (5, False)
    assert padded.values() is batch.values()
    assert padded.weights() is batch.weights()
    lengths = padded.lengths().view(3, 5)
    for row, (key, n) in enumerate(KEPT.items()):
        assert lengths[row, :n].tolist() == batch[key].lengths().tolist()
        assert not lengths[row, n:].any()
    assert torch.equal(padded.inverse_indices()[1], batch.inverse_indices()[1])
    assert pad_strides(padded) is padded
    assert pad_strides(short(kept_bags(), padding=2)).capacity() == batch.values().shape[0] + 2


@pytest.mark.parametrize("strides", [[0, 2], [2, 0], [0, 0]])
def test_features_without_samples_are_padded_too(strides: list[int]) -> None:
    values = torch.arange(sum(strides))
    batch = KeyedJaggedTensor(
        ["f", "g"], values, lengths=torch.ones(sum(strides), dtype=torch.int64),
        stride_per_key_per_rank=[[n] for n in strides],
    )  # fmt: skip
    padded = pad_strides(batch)
    assert padded.stride() == max(strides)
    assert padded.length_per_key() == strides


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_batch_sizes_that_are_the_same_need_no_padding(dtype: torch.dtype) -> None:
    lengths = torch.tensor([2, 0, 1, 1], dtype=dtype)
    batch = KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=lengths, stride_per_key_per_rank=[[2], [2]])
    assert batch.variable_stride_per_key()
    padded = pad_strides(batch)
    assert (padded.stride(), padded.variable_stride_per_key()) == (2, False)
    assert padded.lengths() is batch.lengths()
    batch = KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=lengths, stride_per_key_per_rank=[[1], [3]])
    assert torch.equal(pad_strides(batch).lengths(), torch.tensor([2, 0, 0, 0, 1, 1], dtype=dtype))


def test_inverse_indices_come_in_the_order_that_is_asked_for() -> None:
    batch = short(kept_bags())
    assert inverse_of(batch, ["h", "f", "h"]).tolist() == [INVERSE["h"], INVERSE["f"], INVERSE["h"]]
    assert inverse_of(batch, []).shape == (0, 6)
    with pytest.raises(KeyError, match="features \\['x'\\] are not in the batch"):
        inverse_of(batch, ["x"])
    with pytest.raises(ValueError, match="doesn't have inverse indices"):
        inverse_of(short(kept_bags(), indexed=False), ["f"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_of_a_row_that_many_want_are_the_same_bits_twice(device: str, dtype: torch.dtype) -> None:
    where = torch_device(device)
    values = torch.randn(3, 5).to(where, dtype).requires_grad_()
    indices = torch.tensor([1] * 70 + [0, 2, 1], device=where)
    grads = []
    for _ in range(2):
        values.grad = None
        rows = select_rows(values, indices)
        assert torch.equal(rows, values[indices])
        rows.backward(upstream(73, 5).to(where, dtype))
        grads.append(values.grad)
    assert torch.equal(grads[0], grads[1])
    want = torch.zeros(3, 5, device=where).index_add(0, indices, upstream(73, 5).to(where, dtype).float())
    assert_close(grads[0], want)


def test_output_of_halves_stays_in_halves() -> None:
    ebc = EmbeddingBagCollection(bag_configs("a"), policy=LookupPolicy(output_dtype=torch.float16))
    assert ebc(short(kept_bags())).values().dtype == torch.float16


@pytest.mark.parametrize("kept", [0, 2])
def test_a_full_batch_of_no_samples(kept: int) -> None:
    batch = KeyedJaggedTensor(
        ["f"], torch.arange(kept), lengths=torch.ones(kept, dtype=torch.int64), stride_per_key=[kept],
        inverse_indices=(["f"], torch.zeros(1, 0, dtype=torch.int64)),
    )  # fmt: skip
    assert EmbeddingBagCollection(bag_configs("a"))(batch).values().shape == (0, 4)
    assert EmbeddingCollection(row_configs()[:1])(batch)["f"].values().shape == (0, 4)


def test_one_graph_gives_what_eager_does_and_refuses_what_it_refuses() -> None:
    torch._dynamo.reset()
    ebc, bags = EmbeddingBagCollection(bag_configs()), kept_bags()
    batch = short(bags)

    def look_up(values: Tensor, lengths: Tensor, inverse: Tensor) -> Tensor:
        return ebc(
            KeyedJaggedTensor(
                list(KEPT), values, lengths=lengths, stride_per_key_per_rank=[[n] for n in KEPT.values()],
                inverse_indices=(list(KEPT), inverse),
            )
        ).values()  # fmt: skip

    inverse = batch.inverse_indices()[1]
    compiled = torch.compile(look_up, backend="aot_eager", fullgraph=True)
    out = compiled(batch.values(), batch.lengths(), inverse)
    assert torch.equal(out, ebc(batch).values())
    out.sum().backward()
    assert gradient(ebc, "a").any()
    with pytest.raises(RuntimeError, match="inverse_indices are outside of their feature's batch"):
        compiled(batch.values(), batch.lengths(), torch.full_like(inverse, 4))
