"""Position weights and the collection that applies them, against weights written out by hand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from jagged_batches import Bags, gradient_of, kjt, upstream, weight
from kernel_inputs import DEVICES, assert_close, torch_device
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FeatureProcessedEmbeddingBagCollection,
    JaggedTensor,
    KeyedJaggedTensor,
    PositionWeightedModuleCollection,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.embeddings import (
    FeatureProcessor,
    FeatureProcessorDictWrapper,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedProcessor,
)
from shardwise.embeddings.collections.position_weights import PositionWeightedModule as OlderModule

LONGEST = {"f": 3, "g": 4, "h": 2}
BAGS: Bags = {
    "f": [[1, 2, 3], [], [4]],
    "x": [[0], [1, 2], []],
    "g": [[5, 5], [0, 1, 2, 3], []],
    "h": [[], [1], [2, 0]],
}


def ebc(device: torch.device | str = "cpu", *, weighted: bool = True) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(9, 4, "a", feature_names=["f", "h"]),
        EmbeddingBagConfig(6, 8, "b", feature_names=["h", "g"]),
    ]
    return EmbeddingBagCollection(tables, weighted, device)


def processors(kind: str, device: torch.device | str = "cpu") -> Any:
    single = {feature: PositionWeightedModule(n, device) for feature, n in LONGEST.items()}
    made: Any = single if kind == "dict" else PositionWeightedModuleCollection(LONGEST, device)
    generator = torch.Generator().manual_seed(3)
    for param in sorted_parameters(made).values():
        param.data.copy_(torch.rand(param.shape, generator=generator))
    return made


def sorted_parameters(made: Any) -> dict[str, nn.Parameter]:
    """The weights of each feature."""
    return {f: made[f].position_weight if isinstance(made, dict) else made.position_weights[f] for f in LONGEST}


def by_hand(weights: Mapping[str, Tensor], bags: Bags) -> Tensor:
    """A weight for each id: of its place, or 1."""
    parts = [weights[f][: len(bag)] if f in weights else torch.ones(len(bag)) for f, of in bags.items() for bag in of]
    return torch.cat(parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["dict", "collection"])
def test_ids_are_weighed_by_their_place_and_gradients_reach_the_weights(device: str, kind: str) -> None:
    where = torch_device(device)
    made = processors(kind, where)
    module = FeatureProcessedEmbeddingBagCollection(ebc(where), made)
    plain = ebc(where)
    plain.load_state_dict(module._embedding_bag_collection.state_dict())
    weights = sorted_parameters(made)
    reference_weights = {f: param.detach().cpu().clone().requires_grad_() for f, param in weights.items()}
    out = module(kjt(BAGS, device=where))
    want = plain(kjt(BAGS, weights=by_hand(reference_weights, BAGS).to(where), device=where))
    assert out.keys() == want.keys() == ["f", "h@a", "h@b", "g"]
    assert torch.equal(out.values(), want.values())
    grad = upstream(*want.values().shape).to(where)
    out.values().backward(grad)
    want.values().backward(grad)
    for feature, param in weights.items():
        assert_close(gradient_of(param), gradient_of(reference_weights[feature]))
    for param, other in zip(module._embedding_bag_collection.parameters(), plain.parameters(), strict=True):
        assert_close(gradient_of(param), gradient_of(other))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_a_weight_are_the_same_bits_twice(device: str) -> None:
    where = torch_device(device)
    made = processors("collection", where)
    batch = kjt({"f": [[1, 2]] * 90}, device=where)
    got = []
    for _ in range(2):
        made.zero_grad()
        made(batch).weights().backward(upstream(180).to(where))
        got.append(made.position_weights["f"].grad.clone())
    assert torch.equal(*got)


@pytest.mark.parametrize("kind", ["dict", "collection"])
def test_both_halves_are_the_whole(kind: str) -> None:
    module = FeatureProcessedEmbeddingBagCollection(ebc(), processors(kind))
    first, second = module.split()
    assert isinstance(first, FeatureProcessorsCollection)
    processed = first(kjt(BAGS))
    assert torch.equal(second(processed).values(), module(kjt(BAGS)).values())
    # a feature without a processor
    assert processed.keys() == list(BAGS)
    assert processed["x"].weights().tolist() == [1, 1, 1]


def test_state_has_torchrecs_names() -> None:
    tables = ["_embedding_bag_collection.embedding_bags.a.weight", "_embedding_bag_collection.embedding_bags.b.weight"]
    single = FeatureProcessedEmbeddingBagCollection(ebc(), processors("dict"))
    assert list(single.state_dict()) == [*tables, *(f"_feature_processors.{f}.position_weight" for f in "fgh")]
    every = FeatureProcessedEmbeddingBagCollection(ebc(), processors("collection"))
    assert list(every.state_dict()) == [*tables, *(f"_feature_processors.position_weights.{f}" for f in "fgh")]
    assert list(FeatureProcessorDictWrapper(single._feature_processors).state_dict()) == [  # type: ignore[arg-type]
        f"_feature_processors.{f}.position_weight" for f in "fgh"
    ]


@pytest.mark.parametrize("kind", ["dict", "collection"])
def test_a_bag_that_is_too_long_is_refused_by_name(kind: str) -> None:
    """Clamped, ids past the maximum would share the last weight and nobody would know."""
    module = FeatureProcessedEmbeddingBagCollection(ebc(), processors(kind))
    with pytest.raises(IndexError, match="feature 'h', sample 2: 3 ids, but there are weights for 2 positions"):
        module(kjt({**BAGS, "h": [[], [1], [2, 0, 1]]}))


def test_a_bag_that_is_too_long_for_one_module_is_refused() -> None:
    jt = JaggedTensor(torch.arange(5), lengths=torch.tensor([1, 4]))
    with pytest.raises(IndexError, match="^sample 1: 4 ids, but there are weights for 3 positions"):
        PositionWeightedModule(3)(jt)


def variable(*, indexed: bool = True) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["f", "x", "h", "g"], torch.tensor([1, 2, 3, 0, 4, 1, 2]), lengths=torch.tensor([2, 1, 1, 0, 2, 0, 1]),
        stride_per_key_per_rank=[[2], [1], [3], [1]],
        inverse_indices=(["f", "x", "h", "g"], torch.tensor([[1, 0, 1], [0, 0, 0], [2, 1, 0], [0, 0, 0]]))
        if indexed else None,
    )  # fmt: skip


FULL: Bags = {"f": [[3], [1, 2], [3]], "h": [[], [4, 1], []], "g": [[2], [2], [2]]}


@pytest.mark.parametrize("kind", ["dict", "collection"])
def test_features_may_have_batch_sizes_of_their_own(kind: str) -> None:
    """TorchRec drops the inverse indices on the way, so its lookup fails."""
    made = processors(kind)
    module = FeatureProcessedEmbeddingBagCollection(ebc(), made)
    assert torch.equal(module(variable()).values(), module(kjt(FULL)).values())
    first, _ = module.split()
    processed = first(variable(indexed=False))
    assert processed.stride_per_key() == [2, 1, 3, 1]
    bags: Bags = {"f": [[1, 2], [3]], "x": [[0]], "h": [[], [4, 1], []], "g": [[2]]}
    assert torch.equal(processed.weights(), by_hand(sorted_parameters(made), bags))


@pytest.mark.parametrize("device", DEVICES)
def test_padding_takes_no_weight(device: str) -> None:
    """Its positions go on and on, past the weights of the last feature."""
    where = torch_device(device)
    made = processors("collection", where)
    exact = kjt({f: BAGS[f] for f in "fgh"}, device=where)
    values = torch.cat([exact.values(), torch.full((50,), 10**6, device=where)])
    padded = KeyedJaggedTensor(exact.keys(), values, lengths=exact.lengths(), capacity=values.shape[0])
    out = made(padded)
    assert out.capacity() == values.shape[0]
    assert torch.equal(out.weights()[: exact.values().shape[0]], made(exact).weights())
    grads = []
    for batch in (exact, padded):
        module = FeatureProcessedEmbeddingBagCollection(ebc(where), made)
        for param in module._embedding_bag_collection.parameters():
            nn.init.constant_(param, 0.5)
        made.zero_grad()
        module(batch).values().sum().backward()
        grads.append([param.grad.clone() for param in made.parameters()])
    assert all(torch.equal(grad, other) for grad, other in zip(*grads, strict=True))


def test_no_ids_and_no_listed_feature() -> None:
    made = PositionWeightedModuleCollection({"f": 2})
    assert made(kjt({"f": [[], []]})).weights().tolist() == []
    assert made(kjt({"f": []})).weights().tolist() == []
    assert made(kjt({"y": [[1, 2]]})).weights().tolist() == [1, 1]
    assert PositionWeightedModule(2)(JaggedTensor(torch.arange(0), lengths=torch.zeros(2).int())).weights().numel() == 0


def test_weights_of_the_batch_are_replaced() -> None:
    weights = torch.full((3,), 7.0)
    made = PositionWeightedModuleCollection({"f": 3})
    assert made(kjt({"f": [[1, 2], [3]]}, weights=weights)).weights().tolist() == [1, 1, 1]
    jt = JaggedTensor(torch.arange(3), weights, lengths=torch.tensor([2, 1]))
    assert PositionWeightedModule(3)(jt).weights().tolist() == [1, 1, 1]


class Reversed(FeatureProcessor):
    """Ids of each bag from its end, all of weight 2: a processor may change values as well."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        values = torch.cat([bag.flip(0) for bag in features.to_dense()])
        return JaggedTensor(values, torch.full(values.shape, 2.0), lengths=features.lengths())


def test_a_processor_of_ones_own_may_change_values() -> None:
    module = FeatureProcessedEmbeddingBagCollection(ebc(), {**processors("dict"), "f": Reversed()})
    want = FeatureProcessedEmbeddingBagCollection(ebc(), processors("dict"))
    want.load_state_dict(module.state_dict(), strict=False)
    first, second = module.split()
    assert first(kjt(BAGS))["f"].values().tolist() == [3, 2, 1, 4]
    assert torch.equal(second(first(kjt(BAGS))).values(), module(kjt(BAGS)).values())
    table = weight(module._embedding_bag_collection, "a")
    assert_close(module(kjt(BAGS))["f"][0], 2 * table[[1, 2, 3]].sum(0))


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="give it is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(ebc(weighted=False), processors("dict"))
    without = {k: v for k, v in processors("dict").items() if k != "g"}
    with pytest.raises(ValueError, match=r"none given for \['g'\], no such feature \['y'\]"):
        FeatureProcessedEmbeddingBagCollection(ebc(), {**without, "y": PositionWeightedModule(2)})
    for kind in ("dict", "collection"):
        with pytest.raises(KeyError, match=r"features \['g', 'h'\] are not in the batch|features \['h'"):
            FeatureProcessedEmbeddingBagCollection(ebc(), processors(kind))(kjt({"f": [[1]]}))


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, None])
def test_a_maximum_that_is_no_positive_integer_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="max_feature_length must be a positive int"):
        PositionWeightedModule(bad)
    with pytest.raises(ValueError, match=r"max_feature_lengths\['f'\] must be a positive int"):
        PositionWeightedModuleCollection({"f": bad})


@pytest.mark.parametrize("name", ["a.b", "keys"])
def test_a_feature_that_cannot_name_a_parameter_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot hold this name"):
        PositionWeightedModuleCollection({name: 2})


def test_the_abstract_classes_cannot_be_made() -> None:
    for kind in (FeatureProcessor, FeatureProcessorsCollection):
        with pytest.raises(TypeError, match="abstract"):
            kind()  # type: ignore[abstract]


def test_copies_and_moves_keep_the_weights() -> None:
    made = processors("collection")
    assert made.copy("cpu") is made
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(kjt(BAGS)).weights(), made(kjt(BAGS)).weights())
    meta = PositionWeightedModuleCollection(LONGEST, "meta")
    assert meta.copy("meta").position_weights["f"].is_meta


def test_tables_train_in_the_backward_and_weights_beside_them() -> None:
    made = processors("dict")
    module = FeatureProcessedEmbeddingBagCollection(ebc(), made)
    apply_optimizer_in_backward(RowWiseAdagrad, module._embedding_bag_collection.parameters(), {"lr": 0.1})
    table = weight(module._embedding_bag_collection, "a").detach().clone()
    module(kjt(BAGS)).values().sum().backward()
    assert not torch.equal(table, weight(module._embedding_bag_collection, "a"))
    # the gradient is that of the rows before their update
    first = torch.stack([table[1], table[4], torch.zeros(4)]).sum()
    assert_close(gradient_of(made["f"].position_weight)[0], first)


def test_one_graph_gives_what_eager_does() -> None:
    torch._dynamo.reset()
    module = FeatureProcessedEmbeddingBagCollection(ebc(), processors("collection"))
    batch = kjt(BAGS)

    def look_up(values: Tensor, lengths: Tensor) -> Tensor:
        return module(KeyedJaggedTensor(list(BAGS), values, lengths=lengths)).values()  # type: ignore[no-any-return]

    out = torch.compile(look_up, backend="aot_eager", fullgraph=True)(batch.values(), batch.lengths())
    assert torch.equal(out, module(batch).values())
    out.sum().backward()
    assert all(gradient_of(param).any() for param in module.parameters())


LENGTHS = {"a": [2, 0, 3], "b": [1, 1, 0], "c": [0, 2, 1]}


def older_batch(weights: Tensor | None = None, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    lengths = torch.tensor([n for bags in LENGTHS.values() for n in bags], dtype=dtype)
    return KeyedJaggedTensor(list(LENGTHS), torch.arange(10), weights, lengths)


def positions(key: str) -> list[int]:
    return [place for length in LENGTHS[key] for place in range(length)]


def filled(maximum: dict[str, int]) -> dict[str, Tensor]:
    """1, 2, .. for the first feature, 11, 12, .. for the second."""
    return {key: torch.arange(n).float() + 10 * number + 1 for number, (key, n) in enumerate(maximum.items())}


def state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"position_weights.{key}": weight for key, weight in weights.items()}


@pytest.mark.parametrize("maximum", [{"a": 3, "b": 1, "c": 2}, {"c": 4, "a": 3}, {"b": 5}], ids=lambda m: "".join(m))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_batch_keeps_the_listed_features_and_their_weights_learn(maximum: dict[str, int], dtype: torch.dtype) -> None:
    weights, processor = filled(maximum), PositionWeightedProcessor(maximum)
    assert all(bool((w == 1).all()) for w in processor.state_dict().values())
    processor.load_state_dict(state(weights))
    given = older_batch(dtype=dtype)
    out = processor(given)
    kept = [key for key in LENGTHS if key in maximum]
    assert out.keys() == kept
    for key in kept:
        assert torch.equal(out[key].values(), given[key].values())
        assert torch.equal(out[key].lengths(), given[key].lengths())
        assert out[key].weights().tolist() == [float(weights[key][place]) for place in positions(key)]
    out.weights().sum().backward()
    for key in maximum:
        counts = torch.tensor(positions(key)).bincount(minlength=maximum[key]).float()
        assert torch.equal(gradient_of(processor.get_parameter(f"position_weights.{key}")), counts)


def test_given_weights_are_positions() -> None:
    maximum = {"a": 3, "c": 7}
    processor = PositionWeightedProcessor(maximum)
    processor.load_state_dict(state(filled(maximum)))
    given = torch.tensor([0, 2, 1, 0, 2, 5, 5, 6, 0, 3]).float()
    out = processor(older_batch(given))
    assert out.keys() == ["a", "c"] and out.weights().tolist() == [1, 3, 2, 1, 3, 17, 11, 14]
    given[8] = 7
    with pytest.raises(IndexError, match=r"feature 'c': position 7 is outside \[0, 7\)"):
        processor(older_batch(given))


def test_a_batch_without_listed_features_is_unchanged() -> None:
    given = older_batch()
    assert PositionWeightedProcessor({"z": 3})(given) is given


def test_a_dict_passes_with_the_listed_features_weighed() -> None:
    maximum = {"a": 3, "c": 2}
    module = OlderModule(maximum)
    module.load_state_dict(state(filled(maximum)))
    given = older_batch().to_dict()
    out = module(given)
    assert list(out) == list(given) and out["b"] is given["b"] and given["a"].weights_or_none() is None
    assert out["c"].weights().tolist() == [11, 12, 11] and torch.equal(out["c"].lengths(), given["c"].lengths())
    out["a"].weights().sum().backward()
    assert gradient_of(module.get_parameter("position_weights.a")).tolist() == [2, 2, 1]
    module.reset_parameters()
    assert module(given)["a"].weights().tolist() == [1] * 5


def test_longer_bags_and_missing_features_are_refused_by_name() -> None:
    older, of_batch = OlderModule({"a": 2}), PositionWeightedProcessor({"a": 2})
    for module, given in ((older, older_batch().to_dict()), (of_batch, older_batch())):
        with pytest.raises(IndexError, match="feature 'a', sample 2: 3 ids, but there are weights for 2"):
            module(given)
    with pytest.raises(KeyError, match=r"features \['z'\] are not among \['a'\]"):
        OlderModule({"z": 2})({"a": JaggedTensor(torch.arange(2), lengths=torch.tensor([2]))})
    with pytest.raises(ValueError, match="max_feature_lengths\\['a'\\]"):
        PositionWeightedProcessor({"a": 0})


def test_position_weights_are_shown_by_torchrec_s_name_too() -> None:
    """`position_weights_dict` is a plain dict there, brought up to date by hand after every move and load."""
    collection = PositionWeightedModuleCollection({"f": 3, "g": 2})
    assert list(collection.position_weights_dict) == ["f", "g"]
    assert collection.position_weights_dict["f"] is collection.position_weights["f"]
    assert "position_weights_dict" not in "".join(collection.state_dict())
    other = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))
    collection.position_weights_dict["f"] = other
    batch = KeyedJaggedTensor(["f", "g"], torch.arange(4), lengths=torch.tensor([2, 2]))
    assert collection(batch).weights().tolist() == [2.0, 3.0, 1.0, 1.0]
    moved = copy.deepcopy(collection).to(torch.float64)
    assert moved.position_weights_dict["f"].dtype == torch.float64
    collection.load_state_dict({"position_weights.f": torch.ones(3) * 5, "position_weights.g": torch.ones(2)})
    assert collection.position_weights_dict["f"].tolist() == [5.0] * 3
