"""TorchRec's three scripts that prepare Criteo's files, each a `main` of command line arguments.

    SCRIPTS="python -m shardwise.torchrec -m torchrec.datasets.scripts"
    $SCRIPTS.npy_preproc_criteo --input_dir tsv --output_dir npy
    $SCRIPTS.contiguous_preproc_criteo --input_dir npy --output_dir ids --frequency_threshold 3
    $SCRIPTS.shuffle_preproc_criteo --input_dir_labels_and_dense npy --input_dir_sparse ids --output_dir_shuffled mixed

Folders that are written to are made. Days are those of the terabyte logs: 24.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from ..criteo import DAYS
from ..criteo_arrays import BinaryCriteoUtils

# files of each dataset, and what begins the names of theirs
_FILES = {
    "criteo_1tb": {f"day_{day}": f"day_{day}" for day in range(DAYS)},
    "criteo_kaggle": {"train.txt": "train", "test.txt": "test"},
}


def npy_arguments(argv: Sequence[str]) -> Namespace:
    """Of `npy_main`."""
    parser = ArgumentParser(description="Criteo's text files to numpy files: dense, sparse and labels of each.")
    parser.add_argument("--input_dir", required=True, help="has day_0 to day_23, or train.txt and test.txt")
    parser.add_argument("--output_dir", required=True, help="gets day_0_dense.npy, day_0_sparse.npy, ...")
    parser.add_argument("--dataset_name", choices=list(_FILES), default="criteo_1tb")
    return parser.parse_args(argv)


def npy_main(argv: Sequence[str]) -> None:
    """Convert the files that are there.

    Raises:
        FileNotFoundError: none is.
    """
    args = npy_arguments(argv)
    files = _FILES[args.dataset_name]
    found = [name for name in files if os.path.exists(os.path.join(args.input_dir, name))]
    if not found:
        raise FileNotFoundError(f"{args.input_dir} has none of {args.dataset_name}'s files: {', '.join(files)}")
    if len(found) < len(files):
        print(f"not there, left out: {', '.join(name for name in files if name not in found)}")
    os.makedirs(args.output_dir, exist_ok=True)
    for name in found:
        outputs = [os.path.join(args.output_dir, f"{files[name]}_{kind}.npy") for kind in ("dense", "sparse", "labels")]
        dense, sparse, labels = outputs
        BinaryCriteoUtils.tsv_to_npys(os.path.join(args.input_dir, name), dense, sparse, labels, args.dataset_name)
        print(f"{name}: wrote {', '.join(outputs)}")


def contiguous_arguments(argv: Sequence[str]) -> Namespace:
    """Of `contiguous_main`."""
    parser = ArgumentParser(description="Ids of Criteo's sparse numpy files, renumbered without gaps.")
    parser.add_argument("--input_dir", required=True, help="has day_0_sparse.npy to day_23_sparse.npy")
    parser.add_argument("--output_dir", required=True, help="gets day_0_sparse_contig_freq.npy, ...")
    parser.add_argument("--frequency_threshold", type=int, default=0, help="ids seen less often become 1; 0: none does")
    return parser.parse_args(argv)


def contiguous_main(argv: Sequence[str]) -> None:
    """Renumber the ids of all days together.

    Raises:
        FileNotFoundError: a day is not there.
    """
    args = contiguous_arguments(argv)
    paths = _days(args.input_dir, "sparse", DAYS)
    os.makedirs(args.output_dir, exist_ok=True)
    BinaryCriteoUtils.sparse_to_contiguous(paths, args.output_dir, frequency_threshold=args.frequency_threshold)
    print(f"{len(paths)} files renumbered into {args.output_dir}")


def shuffle_arguments(argv: Sequence[str]) -> Namespace:
    """Of `shuffle_main`."""
    parser = ArgumentParser(description="Rows of Criteo's numpy files, mixed over all days but the last.")
    parser.add_argument("--input_dir_labels_and_dense", required=True, help="has day_0_labels.npy, ...")
    parser.add_argument("--input_dir_sparse", required=True, help="has day_0_sparse.npy, ...")
    parser.add_argument("--output_dir_full_set", help="gets full.npy, all rows before they are mixed")
    parser.add_argument("--output_dir_shuffled", required=True, help="gets files of the same names")
    parser.add_argument("--random_seed", type=int, default=0)
    return parser.parse_args(argv)


def shuffle_main(argv: Sequence[str]) -> None:
    """Mix the rows of all days but the last.

    Raises:
        FileNotFoundError: a day is not there.
    """
    args = shuffle_arguments(argv)
    labels = _days(args.input_dir_labels_and_dense, "labels", DAYS - 1)
    for folder in filter(None, (args.output_dir_shuffled, args.output_dir_full_set)):
        os.makedirs(folder, exist_ok=True)
    BinaryCriteoUtils.shuffle(
        args.input_dir_labels_and_dense,
        args.input_dir_sparse,
        args.output_dir_shuffled,
        {day: BinaryCriteoUtils.get_shape_from_npy(path)[0] for day, path in enumerate(labels)},
        args.output_dir_full_set,
        days=DAYS,
        random_seed=args.random_seed,
    )
    print(f"{len(labels)} days mixed into {args.output_dir_shuffled}")


def _days(folder: str, kind: str, days: int) -> list[str]:
    """The files of the first `days` days."""
    paths = [os.path.join(folder, f"day_{day}_{kind}.npy") for day in range(days)]
    if missing := [os.path.basename(path) for path in paths if not os.path.exists(path)]:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    return paths
