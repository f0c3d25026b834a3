# type: ignore  # torchrec is served at run time
"""Ratings predicted by a DLRM and by two towers of plain, unsharded collections under torch's own Adam: with the names
and calls of TorchRec's prediction examples, in words of our own. Trains, saves, loads, and predicts."""

import argparse
import os
import tempfile
from typing import Dict, Optional  # noqa: UP035

import torch
from known_weights import print_losses, set_known_weights
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SIZES = {"user_id": 100, "item_id": 60, "user_category": 10, "item_category": 20}
DIM = 16


class Ratings(Dataset):
    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.ids = {name: torch.randint(0, rows, (samples,), generator=generator) for name, rows in SIZES.items()}
        self.dense_features = torch.rand(samples, 4, generator=generator)
        self.ratings = ((self.ids["user_id"] + self.ids["item_id"]) % 6).float()

    def __len__(self) -> int:
        return len(self.ratings)

    def __getitem__(self, idx: int) -> Dict[str, torch.Tensor]:  # noqa: UP006
        sample = {name: ids[idx] for name, ids in self.ids.items()}
        return {**sample, "dense_features": self.dense_features[idx], "rating": self.ratings[idx]}


def kjt_of(batch, names) -> KeyedJaggedTensor:
    lengths = torch.ones(len(names) * len(batch[names[0]]), dtype=torch.int32)
    return KeyedJaggedTensor(keys=list(names), values=torch.cat([batch[name] for name in names]), lengths=lengths)


def collection(*names) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=SIZES[name], feature_names=[name])
        for name in names
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))


class TorchRecDLRM(nn.Module):
    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        dim = embedding_bag_collection.embedding_bag_configs()[0].embedding_dim
        count = len(embedding_bag_collection.embedding_bag_configs()) + 1
        self.dense_arch = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, dim), nn.ReLU())
        self.over_arch = nn.Sequential(nn.Linear(dim + count * (count - 1) // 2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch) -> torch.Tensor:
        dense = self.dense_arch(batch["dense_features"])
        sparse = self.embedding_bag_collection(kjt_of(batch, [*SIZES]))
        vectors = [dense] + [sparse[key] for key in [*sparse.keys()]]
        products = [
            torch.sum(vectors[i] * vectors[j], dim=1, keepdim=True)
            for i in range(len(vectors))
            for j in range(i + 1, len(vectors))
        ]
        return self.over_arch(torch.cat([dense, *products], dim=1))


class TwoTowerModel(nn.Module):
    def __init__(self, user_ebc: EmbeddingBagCollection, item_ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.user_ebc, self.item_ebc = user_ebc, item_ebc
        self.user_tower = MLP(in_size=DIM, layer_sizes=[32, 16])
        self.item_tower = MLP(in_size=DIM, layer_sizes=[32, 16])

    def vector(self, ebc, tower, kjt: Optional[KeyedJaggedTensor]) -> torch.Tensor:  # noqa: UP045
        names = [config.feature_names[0] for config in ebc.embedding_bag_configs()]
        pooled = ebc(kjt)
        return tower(torch.cat([pooled[name] for name in names], dim=1))

    def forward(self, batch) -> torch.Tensor:
        user = self.vector(self.user_ebc, self.user_tower, kjt_of(batch, ["user_id"]))
        item = self.vector(self.item_ebc, self.item_tower, kjt_of(batch, ["item_id"]))
        return torch.sum(user * item, dim=1, keepdim=True)


class RatingWrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.sigmoid = model, nn.Sigmoid()

    def forward(self, batch) -> torch.Tensor:
        return self.sigmoid(self.model(batch).squeeze()) * 5.0


def make(kind: str) -> RatingWrapper:
    if kind == "dlrm":
        return RatingWrapper(TorchRecDLRM(collection(*SIZES)))
    return RatingWrapper(TwoTowerModel(collection("user_id"), collection("item_id")))


def train(kind: str, epochs: int):
    loader = DataLoader(Ratings(512), batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(5))
    model = make(kind).to(torch.device("cpu"))
    set_known_weights(model)
    criterion = nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-5)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model.train()
    losses = []
    for _ in range(epochs):
        for batch in loader:
            loss = criterion(model(batch), batch["rating"])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    return model, losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    losses, predictions = [], []
    for kind in ("dlrm", "two_tower"):
        model, more = train(kind, args.epochs)
        losses += more
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, f"{kind}.pth")
            torch.save({"model_state_dict": model.state_dict(), "config": {"embedding_dim": DIM}}, path)
            loaded = make(kind)
            loaded.load_state_dict(torch.load(path)["model_state_dict"])
        loaded.eval()
        with torch.no_grad():
            predictions += loaded(next(iter(DataLoader(Ratings(16), batch_size=8)))).tolist()
    print_losses(losses=losses, predictions=predictions)


if __name__ == "__main__":
    main()
