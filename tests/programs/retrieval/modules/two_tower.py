# type: ignore  # torchrec is served at run time
"""Two towers that are trained together, and a retrieval that asks an index with one and scores with the other."""

from typing import List, Optional, Tuple  # noqa: UP035  as programs of the time write it

import torch
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class TwoTower(nn.Module):
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        layer_sizes: List[int],  # noqa: UP006
        device: Optional[torch.device] = None,  # noqa: UP045
    ) -> None:
        super().__init__()
        query, candidate = embedding_bag_collection.embedding_bag_configs()
        assert query.embedding_dim == candidate.embedding_dim
        self._query_names, self._candidate_names = query.feature_names, candidate.feature_names
        self.ebc = embedding_bag_collection
        self.query_proj = MLP(in_size=query.embedding_dim, layer_sizes=layer_sizes, device=device)
        self.candidate_proj = MLP(in_size=query.embedding_dim, layer_sizes=layer_sizes, device=device)

    def forward(self, kjt: KeyedJaggedTensor) -> Tuple[torch.Tensor, torch.Tensor]:  # noqa: UP006
        pooled = self.ebc(kjt)
        query = self.query_proj(torch.cat([pooled[name] for name in self._query_names], dim=1))
        return query, self.candidate_proj(torch.cat([pooled[name] for name in self._candidate_names], dim=1))


class TwoTowerTrainTask(nn.Module):
    def __init__(self, two_tower: TwoTower) -> None:
        super().__init__()
        self.two_tower = two_tower
        self.loss_fn: nn.Module = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch):
        query, candidate = self.two_tower(batch.sparse_features)
        logits = (query * candidate).sum(dim=1).squeeze()
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class TwoTowerRetrieval(nn.Module):
    def __init__(self, index, query_ebc, candidate_ebc, layer_sizes, k, device=None):
        super().__init__()
        (query,), (candidate,) = query_ebc.embedding_bag_configs(), candidate_ebc.embedding_bag_configs()
        self.candidate_feature_names = candidate.feature_names
        self.query_ebc, self.candidate_ebc = query_ebc, candidate_ebc
        self.query_proj = MLP(in_size=query.embedding_dim, layer_sizes=layer_sizes, device=device)
        self.candidate_proj = MLP(in_size=candidate.embedding_dim, layer_sizes=layer_sizes, device=device)
        self.index, self.k = index, k

    def forward(self, query_kjt: KeyedJaggedTensor) -> torch.Tensor:
        batch_size = query_kjt.stride()
        query = self.query_proj(self.query_ebc(query_kjt).values())
        candidates = self.index.search(query, self.k)
        candidate_kjt = KeyedJaggedTensor(
            keys=self.candidate_feature_names,
            values=candidates.reshape(-1),
            lengths=torch.tensor([self.k] * batch_size),
        )
        candidate = self.candidate_proj(self.candidate_ebc(candidate_kjt).values())
        return (query * candidate).sum(dim=1).squeeze()


class ExactIndex:
    """The nearest of all by inner product, in the place of an approximate index."""

    def __init__(self):
        self.rows = None

    def add(self, rows):
        self.rows = rows

    def search(self, queries, k):
        return (queries @ self.rows.T).topk(k, dim=1).indices
