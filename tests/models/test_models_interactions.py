"""DeepFM and the other DLRMs, from their parts' formulas; losses of the wrappers; mistakes at construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from shardwise.models import (
    DLRM_DCN,
    DeepFM,
    DLRM_Projection,
    DLRMWrapper,
    FactorizationMachine,
    FMInteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    SimpleDeepFMNN,
    SimpleDeepFMNNWrapper,
    choose,
)

BATCH, DENSE, DIM = 4, 3, 2


def collection(dims: tuple[int, ...] = (DIM, DIM)) -> EmbeddingBagCollection:
    """Two tables; the second serves two features and averages, one of them the first table's too."""
    features = [["a"], ["b", "a"]]
    return EmbeddingBagCollection([
        EmbeddingBagConfig(
            name=f"t{t}", num_embeddings=5, embedding_dim=dim, feature_names=features[t],
            pooling=PoolingType.MEAN if t else PoolingType.SUM,
        )
        for t, dim in enumerate(dims)
    ])  # fmt: skip


@dataclass
class Input:
    """A batch as TorchRec's test models take it."""

    float_features: Tensor
    idlist_features: KeyedJaggedTensor
    label: Tensor


def batch() -> Input:
    torch.manual_seed(1)
    lengths = torch.tensor([1, 0, 2, 1, 0, 3, 1, 1])
    ids = torch.randint(0, 5, (9,))
    kjt = KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths)
    return Input(torch.randn(BATCH, DENSE), kjt, torch.tensor([0.0, 1.0, 1.0, 0.0]))


def embedded(model: nn.Module, given: Input) -> Tensor:
    """Pooled embeddings [B, F, D] in the order of tables and their features."""
    ebc: Any = model.sparse_arch
    values: Tensor = ebc.embedding_bag_collection(given.idlist_features).values()
    return values.view(BATCH, 3, DIM)


def deepfm(model: Any, given: Input) -> Tensor:
    """By hand: two dense layers, one deep layer, all pairs one by one, a linear layer and a sigmoid."""
    first, _, second, _ = model.dense_arch.model
    dense = F.relu(second(F.relu(first(given.float_features))))
    numbers = torch.cat([dense, embedded(model, given).flatten(1)], dim=1)
    deep = F.relu(model.inter_arch.deep_fm.dense_module[0](numbers))
    pairs = sum(numbers[:, i] * numbers[:, j] for i, j in combinations(range(numbers.shape[1]), 2))
    last = model.over_arch.model[0]
    return torch.sigmoid(last(torch.cat([dense, deep, torch.as_tensor(pairs)[:, None]], dim=1)))


def cross(model: Any, given: Input) -> Tensor:
    dense = model.dense_arch(given.float_features)
    together = torch.cat([dense, embedded(model, given).flatten(1)], dim=1)
    out: Tensor = model.over_arch(model.inter_arch.crossnet(together))
    return out


def projected(model: Any, given: Input) -> Tensor:
    dense = model.dense_arch(given.float_features)
    together = torch.cat([dense, embedded(model, given).flatten(1)], dim=1)
    left, right = model.inter_arch.interaction_branch1(together), model.inter_arch.interaction_branch2(together)
    # rows of p vectors, columns of a [D, q] matrix
    products = [sum(left[:, i * DIM + d] * right[:, d * 3 + j] for d in range(DIM)) for i in range(2) for j in range(3)]
    out: Tensor = model.over_arch(torch.cat([dense, torch.stack([torch.as_tensor(p) for p in products], 1)], dim=1))
    return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "deepfm": (lambda: SimpleDeepFMNN(DENSE, collection(), 6, 5), deepfm),
    "dcn": (lambda: DLRM_DCN(collection(), DENSE, [4, DIM], [5, 1], dcn_num_layers=2, dcn_low_rank_dim=3), cross),
    "projection": (lambda: DLRM_Projection(collection(), DENSE, [4, DIM], [5, 1], [7, 2 * DIM], [3 * DIM]), projected),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_are_what_their_formula_says_and_every_weight_learns(name: str) -> None:
    torch.manual_seed(0)
    model, given = MODELS[name][0](), batch()
    out = model(given.float_features, given.idlist_features)
    assert out.shape == (BATCH, 1)
    torch.testing.assert_close(out, MODELS[name][1](model, given))
    out.sum().backward()
    grads = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert all(grad is not None and bool(grad.isfinite().all()) for grad in grads.values()), grads


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "deepfm": lambda: SimpleDeepFMNNWrapper(DENSE, collection(), 6, 5),
    "dlrm": lambda: DLRMWrapper(collection(), DENSE, [4, DIM], [5, 1]),
}


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_give_the_loss_while_training(make: Callable[[], nn.Module]) -> None:
    model, given = make(), batch()
    loss, prediction = model(given)
    wanted = F.binary_cross_entropy_with_logits(prediction[:, 0], given.label)
    torch.testing.assert_close(loss, wanted)
    assert torch.equal(model.eval()(given), prediction)


def test_a_factorization_machine_adds_the_products_of_all_pairs() -> None:
    embeddings = [torch.randn(3, 2, 2), torch.randn(3, 1)]
    numbers = torch.cat([e.flatten(1) for e in embeddings], dim=1)
    wanted = torch.stack([numbers[:, i] * numbers[:, j] for i, j in combinations(range(5), 2)]).sum(0)
    torch.testing.assert_close(FactorizationMachine()(embeddings)[:, 0], wanted)
    layer = nn.Linear(5, 2)
    assert torch.equal(DeepFM(layer)(embeddings), layer(numbers))


def test_without_sparse_features_the_dense_ones_pass() -> None:
    dense, nothing = torch.randn(3, DIM), torch.empty(3, 0, DIM)
    for arch in (
        InteractionDCNArch(0, nn.Linear(1, 1)),
        InteractionProjectionArch(0, nn.Identity(), nn.Identity()),
        FMInteractionArch(2, [], 1),
    ):
        assert arch(dense, nothing) is dense


def test_empty_batches_pass() -> None:
    kjt = KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.empty(0, dtype=torch.int64), torch.empty(0).long())
    for make, _ in MODELS.values():
        assert make()(torch.empty(0, DENSE), kjt).shape == (0, 1)


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="interaction_branch2_layer_sizes must be a multiple of .* 2, got \\[3\\]"):
        DLRM_Projection(collection(), DENSE, [DIM], [5, 1], [DIM], [3])
    with pytest.raises(ValueError, match="one embedding_dim, got {'t0': 2, 't1': 3}"):
        SimpleDeepFMNN(DENSE, collection((2, 3)), 6, 5)


def test_choose_counts() -> None:
    assert [choose(5, k) for k in range(-1, 7)] == [0, 1, 5, 10, 10, 5, 1, 0]


def test_dense_layers_go_where_they_are_told() -> None:
    model = DLRM_DCN(collection(), DENSE, [DIM], [5, 1], 1, 1, dense_device="meta")
    assert {p.device.type for n, p in model.named_parameters() if "embedding_bag" not in n} == {"meta"}
