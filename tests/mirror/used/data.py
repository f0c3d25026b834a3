# type: ignore  # torchrec is served at run time
"""Criteo's and MovieLens's files, arrays made of them, streams parted in two, and ranks of a test."""

import io
import tempfile
import unittest
from pathlib import Path

import numpy as np
import torch
from torchrec.datasets.criteo import (
    CAT_FEATURE_COUNT,
    DAYS,
    DEFAULT_CAT_NAMES,
    DEFAULT_INT_NAMES,
    INT_FEATURE_COUNT,
    BinaryCriteoUtils,
    InMemoryBinaryCriteoIterDataPipe,
    criteo_kaggle,
    criteo_terabyte,
)
from torchrec.datasets.movielens import DEFAULT_RATINGS_COLUMN_NAMES, movielens_20m, movielens_25m
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.scripts.npy_preproc_criteo import main as preprocess
from torchrec.datasets.utils import PATH_MANAGER_KEY, Batch, idx_split_train_val, rand_split_train_val
from torchrec.distributed.test_utils.multi_process import MultiProcessTestBase
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.test_utils import get_free_port, skip_if_asan

folder = Path(tempfile.mkdtemp())
assert (INT_FEATURE_COUNT, CAT_FEATURE_COUNT, DAYS, PATH_MANAGER_KEY) == (13, 26, 24, "torchrec")
assert DEFAULT_INT_NAMES[-1] == "int_12" and DEFAULT_CAT_NAMES[-1] == "cat_25"

# two days of Criteo's logs
for day in range(2):
    lines = [
        "\t".join([str(row % 2), *map(str, range(day, day + 13)), *(f"{row + n:08x}" for n in range(26))])
        for row in range(4)
    ]
    (folder / f"day_{day}").write_text("\n".join(lines) + "\n")
paths = [str(folder / f"day_{day}") for day in range(2)]
rows = list(criteo_terabyte(paths))
assert len(rows) == 8 and rows[4]["int_0"] == 1 and rows[3]["cat_1"] == "00000004" and rows[1]["label"] == 1
(folder / "kaggle").write_text((folder / "day_0").read_text())
assert [row["label"] for row in criteo_kaggle(str(folder / "kaggle"))] == [0, 1, 0, 1]

# as arrays, and batches of them for two ranks
arrays = folder / "arrays"
(folder / "kaggle").unlink()
preprocess(["--input_dir", str(folder), "--output_dir", str(arrays)])
shape = BinaryCriteoUtils.get_shape_from_npy(str(arrays / "day_0_dense.npy"))
assert tuple(shape) == (4, 13)
parts = [[str(arrays / f"day_{day}_{part}.npy") for day in range(2)] for part in ("dense", "sparse", "labels")]
seen = 0
for rank in range(2):
    stage = InMemoryBinaryCriteoIterDataPipe("train", *parts, batch_size=2, rank=rank, world_size=2, hashes=[100] * 26)
    for batch in stage:
        assert isinstance(batch, Batch) and batch.sparse_features.keys() == DEFAULT_CAT_NAMES
        seen += len(batch.labels)
assert seen == 8 and np.load(parts[2][0]).sum() == 2

# ratings
assert DEFAULT_RATINGS_COLUMN_NAMES[0] == "userId"
for reader, name in ((movielens_20m, "ml-20m"), (movielens_25m, "ml-25m")):
    (folder / name).mkdir()
    (folder / name / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,4\n5,6,0.5,8\n")
    ratings = list(reader(str(folder / name)))
    assert [rating["rating"] for rating in ratings] == [3.5, 0.5] and ratings[1]["movieId"] == 6

# a stream parted in two
train, val = idx_split_train_val(range(100), 0.7)
assert (len(list(train)), len(list(val))) == (70, 30)
train, val = rand_split_train_val(list(range(100)), 0.7, random_seed=1)
assert sorted([*train, *val]) == list(range(100))
batches = RandomRecDataset(["f"], 2, hash_size=5, num_generated_batches=1, num_batches=3)
assert [batch.dense_features.shape[0] for batch in batches] == [2, 2, 2]

tables = EmbeddingBagCollection(
    tables=[EmbeddingBagConfig(4, 4, "a", feature_names=["f", "g"]), EmbeddingBagConfig(4, 4, "b", feature_names=["f"])]
)
assert get_embedding_names_by_table(tables.embedding_bag_configs()) == [["f@a", "g"], ["f@b"]]


# a test of ranks, as programs write them
class Ranks(MultiProcessTestBase):
    """Runs in processes of its own."""

    @skip_if_asan
    def test_ranks(self) -> None:
        assert 0 < get_free_port() < 1 << 16


result = unittest.TextTestRunner(stream=io.StringIO()).run(Ranks("test_ranks"))
assert result.testsRun == 1 and result.wasSuccessful() and torch.ones(1).item() == 1
