# type: ignore  # torchrec is served at run time
"""Random batches for collections, and epochs of training with an optimizer of torch's or with a fused one."""

import time

import numpy as np
import torch
from torch.utils.data.dataset import IterableDataset
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig


def get_random_dataset(
    batch_size: int, num_batches: int, num_dense_features: int, embedding_bag_configs: list[EmbeddingBagConfig]
) -> IterableDataset[Batch]:
    features = [(name, table.num_embeddings) for table in embedding_bag_configs for name in table.feature_names]
    return RandomRecDataset(
        keys=[name for name, _ in features],
        batch_size=batch_size,
        hash_sizes=[rows for _, rows in features],
        ids_per_features=[6 for _ in features],
        num_dense=num_dense_features,
        num_batches=num_batches,
        # the benchmark has none: batches of a seed are the same on both sides
        manual_seed=1,
    )


def train_one_epoch(model, optimizer, dataset, device, losses) -> float:
    start = time.perf_counter()
    for data in dataset:
        pooled = model(data.sparse_features.to(device))
        if optimizer is not None:
            optimizer.zero_grad()
        loss = torch.cat([values for _, values in pooled.to_dict().items()], dim=1).sum()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        losses.append(loss.item())
    return time.perf_counter() - start


def train(model, optimizer, dataset, device, epochs, losses) -> tuple[float, float]:
    seconds = [train_one_epoch(model, optimizer, dataset, device, losses) for _ in range(epochs)]
    return np.mean(seconds), np.std(seconds)
