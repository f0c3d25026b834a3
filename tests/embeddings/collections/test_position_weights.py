"""The older position weights: by a loop over ids; what is dropped, what passes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.embeddings import PositionWeightedProcessor
from shardwise.embeddings.collections.position_weights import PositionWeightedModule
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

LENGTHS = {"a": [2, 0, 3], "b": [1, 1, 0], "c": [0, 2, 1]}


def batch(weights: Tensor | None = None, *, int32: bool = False) -> KeyedJaggedTensor:
    ids, lengths = torch.arange(10), torch.tensor([n for bags in LENGTHS.values() for n in bags])
    if int32:
        lengths = lengths.int()
    return KeyedJaggedTensor(keys=list(LENGTHS), values=ids, weights=weights, lengths=lengths)


def positions(key: str) -> list[int]:
    return [place for length in LENGTHS[key] for place in range(length)]


def filled(maximum: dict[str, int]) -> dict[str, Tensor]:
    """1, 2, .. for the first feature, 11, 12, .. for the second."""
    return {key: torch.arange(n).float() + 10 * number + 1 for number, (key, n) in enumerate(maximum.items())}


def state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"position_weights.{key}": weight for key, weight in weights.items()}


def gradient(module: nn.Module, key: str) -> Tensor:
    grad = module.get_parameter(f"position_weights.{key}").grad
    assert grad is not None
    return grad


@pytest.mark.parametrize("maximum", [{"a": 3, "b": 1, "c": 2}, {"c": 4, "a": 3}, {"b": 5}], ids=lambda m: "".join(m))
@pytest.mark.parametrize("int32", [False, True])
def test_a_batch_keeps_the_listed_features_and_their_weights_learn(maximum: dict[str, int], int32: bool) -> None:
    weights, processor = filled(maximum), PositionWeightedProcessor(maximum)
    assert all(bool((w == 1).all()) for w in processor.state_dict().values())
    processor.load_state_dict(state(weights))
    given = batch(int32=int32)
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
        assert torch.equal(gradient(processor, key), counts)


def test_given_weights_are_positions() -> None:
    maximum = {"a": 3, "c": 7}
    processor = PositionWeightedProcessor(maximum)
    processor.load_state_dict(state(filled(maximum)))
    given = torch.tensor([0, 2, 1, 0, 2, 5, 5, 6, 0, 3]).float()
    out = processor(batch(given))
    assert out.keys() == ["a", "c"] and out.weights().tolist() == [1, 3, 2, 1, 3, 17, 11, 14]
    given[8] = 7
    with pytest.raises(IndexError, match=r"feature 'c': position 7 is outside \[0, 7\)"):
        processor(batch(given))


def test_a_batch_without_listed_features_is_unchanged() -> None:
    given = batch()
    assert PositionWeightedProcessor({"z": 3})(given) is given


def test_a_dict_passes_with_the_listed_features_weighed() -> None:
    maximum = {"a": 3, "c": 2}
    module = PositionWeightedModule(maximum)
    module.load_state_dict(state(filled(maximum)))
    given = batch().to_dict()
    out = module(given)
    assert list(out) == list(given) and out["b"] is given["b"] and given["a"].weights_or_none() is None
    assert out["c"].weights().tolist() == [11, 12, 11] and torch.equal(out["c"].lengths(), given["c"].lengths())
    out["a"].weights().sum().backward()
    assert gradient(module, "a").tolist() == [2, 2, 1]
    module.reset_parameters()
    assert module(given)["a"].weights().tolist() == [1] * 5


def test_longer_bags_and_missing_features_are_refused_by_name() -> None:
    older, of_batch = PositionWeightedModule({"a": 2}), PositionWeightedProcessor({"a": 2})
    for module, given in ((older, batch().to_dict()), (of_batch, batch())):
        with pytest.raises(IndexError, match="feature 'a', sample 2: 3 ids, but there are weights for 2"):
            module(given)
    with pytest.raises(KeyError, match=r"features \['z'\] are not among \['a'\]"):
        PositionWeightedModule({"z": 2})({"a": JaggedTensor(torch.arange(2), lengths=torch.tensor([2]))})
    with pytest.raises(ValueError, match="max_feature_lengths\\['a'\\]"):
        PositionWeightedProcessor({"a": 0})
