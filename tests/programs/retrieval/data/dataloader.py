# type: ignore  # torchrec is served at run time
"""Random pairs of a user and a movie."""

from torch.utils.data import DataLoader
from torchrec.datasets.movielens import DEFAULT_RATINGS_COLUMN_NAMES
from torchrec.datasets.random import RandomRecDataset


def get_dataloader(batch_size, num_embeddings, pin_memory=False, num_workers=0, seed=None):
    pairs = RandomRecDataset(
        keys=DEFAULT_RATINGS_COLUMN_NAMES[:2],
        batch_size=batch_size,
        hash_size=num_embeddings,
        ids_per_feature=1,
        num_dense=0,
        manual_seed=seed,
    )
    return DataLoader(pairs, batch_size=None, batch_sampler=None, pin_memory=pin_memory, num_workers=num_workers)
