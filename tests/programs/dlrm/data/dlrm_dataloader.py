# type: ignore  # torchrec is served at run time
"""Loaders of the three stages: random batches, or the rows of numpy files in a folder."""

import os

import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DAYS,
    DEFAULT_CAT_NAMES,
    DEFAULT_INT_NAMES,
    InMemoryBinaryCriteoIterDataPipe,
)
from torchrec.datasets.random import RandomRecDataset


def get_dataloader(args, backend, stage):
    pin_memory = backend == "nccl" if args.pin_memory is None else args.pin_memory
    if args.in_memory_binary_criteo_path is None:
        batches = RandomRecDataset(
            keys=DEFAULT_CAT_NAMES,
            batch_size=args.batch_size,
            hash_size=args.num_embeddings,
            hash_sizes=args.num_embeddings_per_feature,
            manual_seed=args.seed,
            ids_per_feature=1,
            num_dense=len(DEFAULT_INT_NAMES),
        )
        return DataLoader(batches, batch_size=None, batch_sampler=None, pin_memory=pin_memory, num_workers=0)
    days = range(DAYS - 1) if stage == "train" else [DAYS - 1]
    paths = [
        [os.path.join(args.in_memory_binary_criteo_path, f"day_{day}_{kind}.npy") for day in days]
        for kind in ("dense", "sparse", "labels")
    ]
    pipe = InMemoryBinaryCriteoIterDataPipe(
        stage,
        *paths,
        batch_size=args.batch_size,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        drop_last=args.drop_last_training_batch if stage == "train" else False,
        shuffle_batches=args.shuffle_batches,
        shuffle_training_set=args.shuffle_training_set,
        shuffle_training_set_random_seed=args.seed,
        mmap_mode=args.mmap_mode,
        hashes=args.num_embeddings_per_feature or [args.num_embeddings] * CAT_FEATURE_COUNT,
    )
    return DataLoader(pipe, batch_size=None, pin_memory=pin_memory, collate_fn=lambda batch: batch)
