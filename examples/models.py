"""Models around embedding tables: cross networks, DeepFM and the DLRMs on random batches.

    python examples/models.py

Every model takes a few steps on the same batches and must fit their labels, which are random, better than a coin; the
parts are then called by themselves.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from shardwise import DLRM, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from shardwise.data import RandomRecDataset, idx_split_train_val, rand_split_train_val
from shardwise.embeddings import PositionWeightedProcessor
from shardwise.embeddings.collections.position_weights import PositionWeightedModule
from shardwise.models import (
    DLRM_DCN,
    CrossNet,
    DeepFM,
    DLRM_Projection,
    DLRM_Transformer,
    DLRMWrapper,
    FactorizationMachine,
    FMInteractionArch,
    InteractionDCNArch,
    InteractionProjectionArch,
    InteractionTransformerArch,
    LazyModuleExtensionMixin,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    SimpleDeepFMNN,
    SimpleDeepFMNNWrapper,
    VectorCrossNet,
    choose,
    lazy_apply,
)

DENSE, DIM, KEYS = 4, 8, ["user", "item", "tag"]


def tables() -> EmbeddingBagCollection:
    """A table of 50 rows for each key."""
    return EmbeddingBagCollection([
        EmbeddingBagConfig(name=f"t_{key}", num_embeddings=50, embedding_dim=DIM, feature_names=[key]) for key in KEYS
    ])  # fmt: skip


class LazyScale(LazyModuleExtensionMixin, nn.Module):  # type: ignore[misc]
    """Multiplies each column; learns from the first input how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, input: Tensor) -> None:
        self.weight.materialize((input.shape[1],))
        nn.init.ones_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight


def two(module: nn.Module) -> None:
    """Sets every weight to 2."""
    nn.init.constant_(module.get_parameter("weight"), 2.0)


def train(name: str, model: nn.Module, wrapped: bool = False) -> None:
    """Some steps of Adam on two batches that come again and again."""
    batches = RandomRecDataset(
        KEYS, 16, hash_size=50, num_dense=DENSE, manual_seed=0, num_batches=60, num_generated_batches=2
    )
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.02), []
    for batch in batches:
        optimizer.zero_grad()
        labels = batch.labels.float()
        if wrapped:
            given = SimpleNamespace(
                float_features=batch.dense_features, idlist_features=batch.sparse_features, label=labels
            )
            loss, _ = model(given)
        else:
            out = model(batch.dense_features, batch.sparse_features).squeeze(1)
            # DeepFM gives probabilities, the others logits
            criterion = nn.BCELoss() if isinstance(model, SimpleDeepFMNN) else nn.BCEWithLogitsLoss()
            loss = criterion(out, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def main() -> None:
    torch.manual_seed(0)
    layers = ([16, DIM], [16, 1])
    train("DLRM", DLRM(tables(), DENSE, *layers))
    train("DLRM_DCN", DLRM_DCN(tables(), DENSE, *layers, dcn_num_layers=2, dcn_low_rank_dim=4))
    train("DLRM_Projection", DLRM_Projection(tables(), DENSE, *layers, [16, 2 * DIM], [16, 3 * DIM]))
    train("DLRM_Transformer", DLRM_Transformer(tables(), DENSE, *layers, nhead=4, ntransformer_layers=1))
    train("SimpleDeepFMNN", SimpleDeepFMNN(DENSE, tables(), 16, 8))
    train("DLRMWrapper", DLRMWrapper(tables(), DENSE, *layers), wrapped=True)
    train("SimpleDeepFMNNWrapper", SimpleDeepFMNNWrapper(DENSE, tables(), 16, 8), wrapped=True)

    # the parts by themselves: x [B, N] in, [B, N] out
    x = torch.randn(5, 4 * DIM)
    for net in (
        CrossNet(4 * DIM, 2),
        LowRankCrossNet(4 * DIM, 2, low_rank=4),
        VectorCrossNet(4 * DIM, 2),
        LowRankMixtureCrossNet(4 * DIM, 2, num_experts=3, low_rank=4),
    ):
        print(f"{type(net).__name__}: {tuple(net(x).shape)}")
    dense, sparse = torch.randn(5, DIM), torch.randn(5, 3, DIM)
    crossed = InteractionDCNArch(3, CrossNet(4 * DIM, 1))(dense, sparse)
    projected = InteractionProjectionArch(3, nn.Linear(4 * DIM, 2 * DIM), nn.Linear(4 * DIM, DIM))(dense, sparse)
    attended = InteractionTransformerArch(3, DIM, nhead=4, ntransformer_layers=1)(dense, sparse)
    columns = ", ".join(str(found.shape[1]) for found in (crossed, projected, attended))
    print(f"interactions: {columns} columns; pairs of 4: {choose(4, 2)}")
    deep, pairs = DeepFM(nn.Linear(4 * DIM, 6))([dense, sparse]), FactorizationMachine()([dense, sparse])
    kjt = KeyedJaggedTensor(keys=KEYS, values=torch.arange(6), lengths=torch.tensor([1, 1, 2, 0, 1, 1]))
    fm = FMInteractionArch(4 * DIM, KEYS, 6)(dense[:2], tables()(kjt))
    print(f"DeepFM: {tuple(deep.shape)}, pairs {tuple(pairs.shape)}, together {tuple(fm.shape)}")

    # ids weighed by their place in the bag
    weighed = PositionWeightedProcessor({"item": 3})(kjt)
    also = PositionWeightedModule({"item": 3})(kjt.to_dict())
    print(f"weights of {weighed.keys()}: {weighed.weights().tolist()}, {also['item'].weights().tolist()}")

    # an initialisation that waits for the shapes
    scale = lazy_apply(LazyScale(), two)
    before, after = scale(x), scale(x)
    print(f"lazily: {torch.equal(before, x)}, {torch.equal(after, 2 * x)}")

    numbers = list(range(1000))
    by_number, by_chance = idx_split_train_val(numbers, 0.9), rand_split_train_val(numbers, 0.9)
    sizes = [[len(list(part)) for part in parts] for parts in (by_number, by_chance)]
    print(f"train and validate: {sizes[0]}, {sum(sizes[1])}")


if __name__ == "__main__":
    main()
