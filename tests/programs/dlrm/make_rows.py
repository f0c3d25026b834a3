"""1,008 rows like Criteo's, 42 of each of its 24 days, as numpy files in a folder: dense, sparse, labels."""

import sys
from pathlib import Path

import numpy as np

DAYS, ROWS = 24, 42


def make_rows(folder):
    random = np.random.RandomState(7)
    for day in range(DAYS):
        dense = np.log1p(random.poisson(3, (ROWS, 13))).astype(np.float32)
        sparse = (random.pareto(1.2, (ROWS, 26)) * 11).astype(np.int32)
        # clicks that the features tell something about
        labels = (dense[:, :1] + sparse[:, :1] % 2 + random.rand(ROWS, 1) > 2.2).astype(np.int32)
        for kind, rows in (("dense", dense), ("sparse", sparse), ("labels", labels)):
            np.save(Path(folder) / f"day_{day}_{kind}.npy", rows)


if __name__ == "__main__":
    make_rows(sys.argv[1])
