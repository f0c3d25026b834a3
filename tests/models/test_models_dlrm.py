"""DLRM against a twin made of torch.nn.EmbeddingBag and torch.nn.Linear alone, in values and in training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkout import REAL_DATA
from torch import Tensor, nn

from shardwise import (
    DLRM,
    Batch,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.data import ClickFeature, Clicks, MovieLens, Source
from shardwise.models import DenseArch, InteractionArch, OverArch, SparseArch, auc, normalized_entropy

DATA = REAL_DATA / "ml_latest_small"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ml_latest_small below $SHARDWISE_DATA or ../shared/data")


class Twin(nn.Module):
    """The same model in plain torch: one nn.EmbeddingBag a table, dot products pair by pair, logits [B]."""

    def __init__(self, tables: Sequence[EmbeddingBagConfig], dense: int, bottom: list[int], top: list[int]) -> None:
        super().__init__()
        self.tables = list(tables)
        self.weights = nn.ModuleDict()
        for table in tables:
            bound = table.num_embeddings**-0.5
            mode = "mean" if table.pooling == PoolingType.MEAN else "sum"
            weights = nn.EmbeddingBag(table.num_embeddings, table.embedding_dim, mode=mode)
            nn.init.uniform_(weights.weight, -bound, bound)
            self.weights[table.name] = weights
        features = sum(len(table.feature_names) for table in tables)
        crossed = bottom[-1] + features * (features + 1) // 2
        self.bottom = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise([dense, *bottom]))
        self.top = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise([crossed, *top]))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.dense_features
        for layer in self.bottom:
            x = F.relu(layer(x))
        bags = batch.sparse_features.to_dict()
        vectors = [x]
        for table in self.tables:
            for feature in table.feature_names:
                bag = bags[feature]
                # nn.EmbeddingBag wants the starts of the bags only
                vectors.append(self.weights[table.name](bag.values(), bag.offsets()[:-1]))
        dots = [(a * b).sum(1, keepdim=True) for a, b in itertools.combinations(vectors, 2)]
        x = torch.cat([x, *dots], dim=1)
        for layer in self.top[:-1]:
            x = F.relu(layer(x))
        return self.top[-1](x).squeeze(1)

    def copy_from(self, model: DLRM) -> Twin:
        """Takes the weights of an unsharded model."""
        homes = {
            "weights": "sparse_arch.embedding_bag_collection.embedding_bags.{}",
            "bottom": "dense_arch.model._mlp.{}._linear",
            "top": "over_arch.model.0._mlp.{}._linear",
        }
        model_state, own_state = model.state_dict(), {}
        for key in self.state_dict():
            part, place, name = key.split(".")
            last = part == "top" and place == str(len(self.top) - 1)
            own_state[key] = model_state[f"{'over_arch.model.1' if last else homes[part].format(place)}.{name}"]
        self.load_state_dict(own_state)
        return self


def tables_of(source: Source, dim: int) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t_{name}", embedding_dim=dim, num_embeddings=rows, feature_names=[name], pooling=PoolingType.MEAN
        )
        for name, rows in source.feature_rows.items()
    ]


def train_twin(
    twin: Twin, source: Source, *, epochs: int, batch_size: int, lr: float, eps: float = 1e-10
) -> list[tuple[float, float]]:
    """Adagrad on everything; (test AUC, normalized entropy) after each epoch."""
    optimizer = torch.optim.Adagrad(twin.parameters(), lr=lr, eps=eps)
    reached = []
    for epoch in range(epochs):
        for batch in source.train(batch_size, epoch=epoch):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(twin(batch), batch.labels).backward()
            optimizer.step()
        with torch.no_grad():
            scored = [(twin(batch), batch.labels) for batch in source.evaluate(batch_size)]
        logits, labels = (torch.cat(parts) for parts in zip(*scored, strict=True))
        reached.append((auc(logits, labels), normalized_entropy(logits, labels)))
    return reached


def config(name: str, features: list[str], rows: int = 10, dim: int = 4, **kwargs: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=features, **kwargs)


SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
CASES = [
    pytest.param([config("t", ["a"])], id="one feature"),
    pytest.param([config("t1", ["a"], pooling=SUM), config("t2", ["b", "c"], 7, pooling=MEAN)], id="two tables"),
    pytest.param([config("t1", ["c"]), config("t2", ["a"])], id="another order, extra key"),
    pytest.param([config("t1", ["a", "b"]), config("t2", ["b", "c"])], id="shared feature"),
]


def batch(samples: int = 6) -> Batch:
    lengths = torch.randint(0, 4, (3 * samples,))
    sparse = KeyedJaggedTensor(["a", "b", "c"], torch.randint(0, 7, (int(lengths.sum()),)), lengths=lengths)
    return Batch(torch.randn(samples, 3), sparse, torch.randint(0, 2, (samples,)))


@pytest.mark.parametrize("tables", CASES)
@pytest.mark.parametrize("samples", [6, 1, 0])
def test_logits_and_gradients_are_the_twins(tables: list[EmbeddingBagConfig], samples: int) -> None:
    model = DLRM(EmbeddingBagCollection(tables=tables), 3, [5, 4], [6, 3, 1])
    twin = Twin(tables, 3, [5, 4], [6, 3, 1]).copy_from(model)
    given, upstream = batch(samples), torch.randn(samples)
    logits, expected = model(given.dense_features, given.sparse_features), twin(given)
    assert logits.shape == (samples, 1)
    torch.testing.assert_close(logits.squeeze(1), expected)
    (logits.squeeze(1) * upstream).sum().backward()
    (expected * upstream).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for table in tables:
        key = f"sparse_arch.embedding_bag_collection.embedding_bags.{table.name}.weight"
        torch.testing.assert_close(gradients[key], twin.weights[table.name].weight.grad)
    torch.testing.assert_close(gradients["dense_arch.model._mlp.0._linear.weight"], twin.bottom[0].weight.grad)
    torch.testing.assert_close(gradients["over_arch.model.1.bias"], twin.top[-1].bias.grad)


def test_state_keys_are_torchrecs() -> None:
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=[config("t", ["a"])]), 3, [5, 4], [6, 1]))
    assert list(model.state_dict()) == [
        "model.sparse_arch.embedding_bag_collection.embedding_bags.t.weight",
        "model.dense_arch.model._mlp.0._linear.weight",
        "model.dense_arch.model._mlp.0._linear.bias",
        "model.dense_arch.model._mlp.1._linear.weight",
        "model.dense_arch.model._mlp.1._linear.bias",
        "model.over_arch.model.0._mlp.0._linear.weight",
        "model.over_arch.model.0._mlp.0._linear.bias",
        "model.over_arch.model.1.weight",
        "model.over_arch.model.1.bias",
    ]


def test_a_feature_of_two_tables_counts_once_for_each() -> None:
    """TorchRec's SparseArch raises KeyError: it looks for `b` where the collection answers `b@t1` and `b@t2`."""
    arch = SparseArch(EmbeddingBagCollection(tables=[config("t1", ["a", "b"]), config("t2", ["b"])]))
    assert arch.sparse_feature_names == ["a", "b@t1", "b@t2"]
    assert (arch.F, arch.D) == (3, 4)
    given = batch().sparse_features
    pooled = arch.embedding_bag_collection(given).to_dict()
    embedded = arch(given)
    for place, name in enumerate(arch.sparse_feature_names):
        torch.testing.assert_close(embedded[:, place], pooled[name])


def test_interaction_is_every_pair_once_row_by_row() -> None:
    dense, sparse = torch.randn(2, 3), torch.randn(2, 2, 3)
    interactions = InteractionArch(2)(dense, sparse)
    a, b = sparse[:, 0], sparse[:, 1]
    pairs = torch.stack([(dense * a).sum(1), (dense * b).sum(1), (a * b).sum(1)], dim=1)
    torch.testing.assert_close(interactions, torch.cat([dense, pairs], dim=1))
    assert InteractionArch(0)(dense, torch.empty(2, 0, 3)) is dense
    assert InteractionArch(2).state_dict() == {}


def test_training_returns_the_loss_and_what_it_was_made_of() -> None:
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=[config("t", ["a"])]), 3, [4], [6, 1]))
    given = batch()
    loss, (detached, logits, labels) = model(given)
    p = logits.sigmoid()
    expected = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad and not detached.requires_grad and not logits.requires_grad
    assert torch.equal(labels, given.labels)
    assert logits.shape == (6,)


def test_meta_tables_and_a_dense_device_allocate_nothing() -> None:
    model = DLRM(EmbeddingBagCollection(device="meta", tables=[config("t", ["a"], 10**9)]), 3, [4], [6, 1], "meta")
    tensors = [*model.parameters(), *model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DLRM(ebc(4), 3, [5], [6, 1]), r"dimension \(4\) .* the last of dense_arch_layer_sizes .* got \[5\]"),
        (lambda: DLRM(ebc(4), 3, [], [6, 1]), r"the last of dense_arch_layer_sizes .* got \[\]"),
        (lambda: DLRM(ebc(4), 3, [4], [1]), r"layer_sizes needs at least two, got \[1\]"),
        (lambda: OverArch(3, []), "at least two"),
        (lambda: DenseArch(0, [4]), "in_size must be positive, got 0"),
        (lambda: SparseArch(ebc(4, 8)), r"the same dimension, got \{'t0': 4, 't1': 8\}"),
        (lambda: SparseArch(ebc()), r"has no tables; .* DenseArch, InteractionArch\(0\)"),
    ],
)
def test_layers_that_do_not_fit_are_refused(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def ebc(*dims: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=[config(f"t{n}", [f"f{n}"], dim=dim) for n, dim in enumerate(dims)])


def test_a_model_learns_the_planted_signal() -> None:
    features = [ClickFeature("user", 200), ClickFeature("words", 100, min_ids=0, max_ids=6)]
    source = Clicks(0, features=features, dense=4, train_samples=16_384, evaluate_samples=4096)
    tables = tables_of(source, 8)
    model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), 4, [16, 8], [16, 1]))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    def score() -> float:
        with torch.no_grad():
            parts = [model(batch)[1] for batch in source.evaluate(1024)]
        return auc(torch.cat([logits for _, logits, _ in parts]), torch.cat([labels for _, _, labels in parts]))

    before = score()
    for epoch in range(2):
        for given in source.train(256, epoch=epoch):
            optimizer.zero_grad()
            model(given)[0].backward()
            optimizer.step()
    after = score()
    assert before < after - 0.1
    assert source.bayes_auc() - 0.05 < after < source.bayes_auc() + 0.02


def test_fused_adagrad_and_a_dense_optimizer_train_what_the_twin_trains() -> None:
    features = [ClickFeature("user", 300), ClickFeature("words", 100, min_ids=0, max_ids=6)]
    source = Clicks(0, features=features, dense=4, train_samples=4096, evaluate_samples=1024)
    assert_same_training(source, dim=8, bottom=[16, 8], top=[16, 1], epochs=2)


@needs_data
def test_fused_adagrad_trains_the_twin_on_movielens() -> None:
    """With a tiny eps a first gradient of 1e-9 is a whole step of lr, in the direction of its rounding."""
    assert_same_training(MovieLens(DATA), dim=32, bottom=[64, 32], top=[16, 1], epochs=1, eps=1e-2)


def assert_same_training(
    source: Source, *, dim: int, bottom: list[int], top: list[int], epochs: int, eps: float = 1e-8
) -> None:
    tables, lr = tables_of(source, dim), 0.02
    collection = EmbeddingBagCollection(tables=tables)
    model = DLRM(collection, len(source.dense_names), bottom, top)
    twin = Twin(tables, len(source.dense_names), bottom, top).copy_from(model)
    apply_optimizer_in_backward(torch.optim.Adagrad, collection.parameters(), {"lr": lr, "eps": eps})
    dense = torch.optim.Adagrad(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=lr, eps=eps)
    for epoch in range(epochs):
        for given in source.train(512, epoch=epoch):
            dense.zero_grad()
            DLRMTrain(model)(given)[0].backward()
            dense.step()
    train_twin(twin, source, epochs=epochs, batch_size=512, lr=lr, eps=eps)
    with torch.no_grad():
        for given in source.evaluate(512):
            logits = model(given.dense_features, given.sparse_features).squeeze(1)
            torch.testing.assert_close(logits, twin(given), rtol=1e-4, atol=1e-4)


@needs_data
def test_plain_torch_reaches_an_auc_of_79_on_movielens() -> None:
    """What the sharded models are measured by: the twin, the example's architecture and its settings."""
    source = MovieLens(DATA)
    twin = Twin(tables_of(source, 32), len(source.dense_names), [64, 32], [16, 1])
    reached = train_twin(twin, source, epochs=1, batch_size=512, lr=0.02)
    assert reached[-1][0] > 0.79
    assert reached[-1][1] < 0.80
