# type: ignore  # torchrec is served at run time
"""One id a feature becomes several: the id, and those that a table of fixed random ids has for it."""

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class RestartableMap:
    def __init__(self, function, source):
        self.function, self.source = function, source

    def __iter__(self):
        return map(self.function, self.source)

    def __len__(self):
        return len(self.source)


class Multihot:
    def __init__(self, sizes, rows, distribution):
        random = np.random.RandomState(0)
        self.sizes, self.tables = sizes, []
        for count, size in zip(rows, sizes, strict=True):
            shape = (count, size - 1)
            if distribution == "uniform":
                more = random.randint(0, count, size=shape)
            else:
                more = random.pareto(a=0.25, size=shape).astype(np.int32) % count
            self.tables.append(torch.from_numpy(np.concatenate((np.arange(count)[:, None], more), axis=1)).int())

    def convert_to_multi_hot(self, batch: Batch) -> Batch:
        size = len(batch.dense_features)
        # programs read the fields of the batch by their private names
        ids = batch.sparse_features._values.reshape(-1, size)
        values = torch.cat(
            [
                torch.nn.functional.embedding(column.int(), table).reshape(-1)
                for column, table in zip(ids, self.tables, strict=True)
            ]
        )
        lengths = torch.tensor(self.sizes, dtype=torch.int32).repeat_interleave(size)
        offsets = torch.cumsum(torch.cat((torch.tensor([0]), lengths)), dim=0)
        features = KeyedJaggedTensor.from_offsets_sync(keys=batch.sparse_features._keys, values=values, offsets=offsets)
        return Batch(dense_features=batch.dense_features, sparse_features=features, labels=batch.labels)
