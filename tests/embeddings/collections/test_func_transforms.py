"""Collections under torch.func's transforms: the values and gradients of torch.nn's own lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from jagged_batches import kjt
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, vmap

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    apply_optimizer_in_backward,
)

BAGS = {"f": [[1, 2, 2], [], [4]], "g": [[0], [3, 3], [5]]}
ROWS, DIMS = {"a": 5, "b": 6}, {"a": 4, "b": 3}
Weights = dict[str, Tensor]


def collection(pooled: bool = True, weighted: bool = False) -> Any:
    torch.manual_seed(0)
    if not pooled:
        return EmbeddingCollection([EmbeddingConfig(ROWS[t], 4, t, feature_names=[f]) for t, f in zip("ab", "fg")])  # noqa: B905
    kinds = {"a": PoolingType.SUM, "b": PoolingType.SUM if weighted else PoolingType.MEAN}
    tables = [
        EmbeddingBagConfig(ROWS[t], DIMS[t], t, feature_names=[f], pooling=kinds[t])
        for t, f in zip("ab", "fg", strict=True)
    ]
    return EmbeddingBagCollection(tables, is_weighted=weighted)


def batch(weighted: bool = False) -> KeyedJaggedTensor:
    return kjt(BAGS, weights=torch.arange(1.0, 9.0) if weighted else None)


def ours(module: Any, features: KeyedJaggedTensor) -> Callable[[Weights], Tensor]:
    def run(weights: Weights) -> Tensor:
        output = functional_call(module, weights, (features,))
        return torch.cat([jt.values() for jt in output.values()]) if isinstance(output, dict) else output.values()

    return run


def torchs(module: Any, features: KeyedJaggedTensor) -> Callable[[Weights], Tensor]:
    pooled = isinstance(module, EmbeddingBagCollection)

    def run(weights: Weights) -> Tensor:
        outputs = []
        for weight, key in zip(weights.values(), "fg", strict=True):
            bag = features[key]
            mode = "mean" if key == "g" and bag.weights_or_none() is None else "sum"
            looked_up = F.embedding_bag(
                bag.values(), weight, bag.offsets(), mode=mode, per_sample_weights=bag.weights_or_none(),
                include_last_offset=True,
            ) if pooled else F.embedding(bag.values(), weight)  # fmt: skip
            outputs.append(looked_up)
        return torch.cat(outputs, 1 if pooled else 0)

    return run


@pytest.mark.parametrize(("pooled", "weighted"), [(True, False), (True, True), (False, False)])
def test_grad_jacrev_and_vmap_are_those_of_torchs_lookups(pooled: bool, weighted: bool) -> None:
    """They raised: our autograd functions have no setup_context."""
    module, features = collection(pooled, weighted), batch(weighted)
    weights = {name: param.detach() for name, param in module.named_parameters()}
    stacked = {name: torch.stack([weight, 2 * weight]) for name, weight in weights.items()}
    runs = ours(module, features), torchs(module, features)
    torch.testing.assert_close(*(grad(lambda w, run=run: run(w).square().sum())(weights) for run in runs))
    torch.testing.assert_close(*(jacrev(run)(weights) for run in runs))
    torch.testing.assert_close(*(vmap(run)(stacked) for run in runs))
    # the collection itself is as it was, and of what the batch computed nothing is a transform's
    torch.testing.assert_close(*(run(weights) for run in runs))


def test_ids_and_their_weights_may_be_what_is_transformed() -> None:
    module, features = collection(weighted=True), batch(weighted=True)
    weights = {name: param.detach() for name, param in module.named_parameters()}

    def of(run: Any, ids: Tensor, per_id: Tensor) -> Tensor:
        given = KeyedJaggedTensor(["f", "g"], ids, per_id, features.lengths())
        return run(module, given)(weights).square().sum()  # type: ignore[no-any-return]

    ids, per_id = features.values(), features.weights()
    torch.testing.assert_close(*(grad(lambda p, run=run: of(run, ids, p))(per_id) for run in (ours, torchs)))
    many = torch.stack([ids, ids.flip(0).clamp(max=4)])
    mapped = vmap(lambda one: module(KeyedJaggedTensor(["f", "g"], one, per_id, features.lengths())).values())(many)
    for own, one in zip(mapped, many, strict=True):
        wanted = module(KeyedJaggedTensor(["f", "g"], one, per_id, features.lengths())).values()
        torch.testing.assert_close(own, wanted)


def test_gradients_of_ordinary_parameters_go_through_a_transform() -> None:
    module, features = collection(), batch()
    scales = torch.tensor([1.0, 2.0])
    vmap(lambda scale: module(features).values() * scale)(scales).sum().backward()
    mapped = [param.grad for param in module.parameters()]
    again = collection()
    (3 * again(features).values()).sum().backward()
    torch.testing.assert_close(mapped, [param.grad for param in again.parameters()])


def test_forward_gradients_are_refused_and_not_zero() -> None:
    """`jvp` gave a tangent of zeros."""
    module, features = collection(), batch()
    weights = {name: param.detach() for name, param in module.named_parameters()}
    with pytest.raises(NotImplementedError, match="forward AD"):
        jvp(ours(module, features), (weights,), (weights,))


def test_tables_with_an_optimizer_in_their_backward_say_so_unless_weights_are_given() -> None:
    module, features = collection(), batch()
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    module(features)
    with pytest.raises(RuntimeError, match=r"tables \['a', 'b'\] have an optimizer .*functional_call"):
        vmap(lambda scale: module(features).values() * scale)(torch.ones(2))
    weights = {name: param.detach().clone() for name, param in module.named_parameters()}
    runs = ours(module, features), torchs(module, features)
    torch.testing.assert_close(*(grad(lambda w, run=run: run(w).square().sum())(weights) for run in runs))
