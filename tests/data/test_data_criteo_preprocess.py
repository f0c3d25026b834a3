"""Criteo's text files as numpy files, renumbered and mixed: the values that TorchRec 1.8's own utilities give."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkout import golden, run_python

from shardwise.data.criteo_arrays import BinaryCriteoUtils, InMemoryBinaryCriteoIterDataPipe
from shardwise.data.torchrec.criteo_scripts import contiguous_main, npy_main, shuffle_main

RECORDED = golden("criteo_preprocess")
KINDS = ("dense", "sparse", "labels")


def criteo_line(day: int, number: int, *, labelled: bool = True) -> str:
    """A line without its end; a fifth of the integers and some categories are missing."""
    seed = day * 7 + number
    integers = ["" if (seed + c) % 5 == 0 else str((seed * (c + 3)) % 40 - 2) for c in range(13)]
    ids = [(seed % 3 + 1) * 0x1234567 * (c % 4) % 2**32 for c in range(26)]
    categories = ["" if (seed * c) % 11 == 3 else f"{number:08x}" for c, number in enumerate(ids)]
    return "\t".join([*([str(seed % 2)] if labelled else []), *integers, *categories])


def write_criteo(folder: Path, days: int, rows: Callable[[int], int]) -> list[str]:
    """Files day_0, day_1, ... of `rows(day)` lines; their paths."""
    paths = [folder / f"day_{day}" for day in range(days)]
    for day, path in enumerate(paths):
        path.write_text("".join(criteo_line(day, number) + "\n" for number in range(rows(day))))
    return [str(path) for path in paths]


def shown(array: Any) -> list[Any]:
    """Type, shape and checksum; integers under the logarithms, whose last bit is the machine's."""
    if array.dtype == np.float32:
        integers = np.rint(np.exp(array[:, :13]))
        array = np.concatenate([integers, array[:, 13:]], 1).astype(np.int32 if array.shape[1] == 13 else np.int64)
    return [str(array.dtype), list(array.shape), zlib.crc32(np.ascontiguousarray(array).tobytes())]


def convert(folder: Path, days: int = 3) -> None:
    for day, path in enumerate(write_criteo(folder, days, lambda day: 4 + day)):
        BinaryCriteoUtils.tsv_to_npys(path, *[str(folder / f"day_{day}_{kind}.npy") for kind in KINDS])


def test_text_becomes_the_arrays_that_torchrec_makes_of_it(tmp_path: Path) -> None:
    convert(tmp_path)
    arrays = [np.load(tmp_path / f"day_{day}_{kind}.npy") for day in range(3) for kind in KINDS]
    assert arrays[0].dtype == np.float32 and [shown(array) for array in arrays] == RECORDED["npys"]
    np.testing.assert_allclose(arrays[0][0], RECORDED["dense"], rtol=1e-6)
    # Kaggle's test set has no labels, whatever the folder's name
    test = tmp_path / "test.txt"
    test.write_text("".join(criteo_line(0, number, labelled=False) + "\n" for number in range(3)))
    outputs = [str(tmp_path / f"test_{kind}.npy") for kind in KINDS]
    BinaryCriteoUtils.tsv_to_npys(str(test), *outputs, dataset_name="criteo_kaggle")
    assert [shown(np.load(path)) for path in outputs] == RECORDED["kaggle test"]
    assert np.load(outputs[2]).tolist() == [[-1]] * 3


@pytest.mark.parametrize("threshold", [0, 3])
def test_ids_are_renumbered_as_by_torchrec(threshold: int, tmp_path: Path) -> None:
    convert(tmp_path)
    out = tmp_path / "contiguous"
    out.mkdir()
    paths = [str(tmp_path / f"day_{day}_sparse.npy") for day in range(3)]
    BinaryCriteoUtils.sparse_to_contiguous(paths, str(out), threshold, output_file_suffix=".npy")
    arrays = [np.load(out / f"day_{day}_sparse.npy") for day in range(3)]
    assert [shown(array) for array in arrays] == RECORDED[f"contiguous {threshold}"]
    if threshold:
        assert arrays[1][:2].tolist() == RECORDED["ids"]
        # a column's ids have no gap, over all files together
        ids = np.concatenate(arrays)[:, 4]
        assert sorted({*ids.tolist(), 1}) == list(range(1, ids.max() + 1))


def test_rows_are_mixed_in_torchrecs_order(tmp_path: Path) -> None:
    convert(tmp_path)
    for name in ("contiguous", "mixed", "full"):
        (tmp_path / name).mkdir()
    paths = [str(tmp_path / f"day_{day}_sparse.npy") for day in range(3)]
    BinaryCriteoUtils.sparse_to_contiguous(paths, str(tmp_path / "contiguous"), 0, output_file_suffix=".npy")

    def mix(rows_per_day: dict[int, int]) -> None:
        ids, mixed, full = (str(tmp_path / name) for name in ("contiguous", "mixed", "full"))
        BinaryCriteoUtils.shuffle(str(tmp_path), ids, mixed, rows_per_day, full, days=3, random_seed=5)

    # rows of the last day, which is copied, count for nothing: TorchRec mixes as many rows of zeros in
    for rows in ({0: 4, 1: 5}, {0: 4, 1: 5, 2: 6}):
        mix(rows)
        mixed = [np.load(tmp_path / "mixed" / f"day_{day}_{kind}.npy") for day in range(3) for kind in KINDS]
        assert [shown(array) for array in mixed] == RECORDED["mixed"]
        assert mixed[2][:, 0].tolist() == RECORDED["order"]
        assert shown(np.load(tmp_path / "full" / "full.npy")) == RECORDED["full"]
    with pytest.raises(ValueError, match=r"day_1_dense.npy has shape \(5, 13\), but rows_per_day and"):
        mix({0: 4, 1: 6})


def test_ids_above_2_to_the_24_stay_exact_when_rows_are_mixed(tmp_path: Path) -> None:
    """TorchRec keeps the rows as fp32 while it mixes them: ids of hashed categories came out rounded."""
    (tmp_path / "mixed").mkdir()
    ids = np.full((2, 26), 2**24 + 1)
    for day, sparse in enumerate((ids, ids + 2**32)):
        arrays = (np.zeros((2, 13), np.float32), sparse, np.zeros((2, 1), np.int32))
        for kind, array in zip(KINDS, arrays, strict=True):
            np.save(tmp_path / f"day_{day}_{kind}.npy", array)
    day, out = str(tmp_path), str(tmp_path / "mixed")
    BinaryCriteoUtils.shuffle(day, day, out, {0: 2}, out, days=2)
    mixed = np.load(tmp_path / "mixed" / "day_0_sparse.npy")
    assert mixed.dtype == np.int32 and (mixed == 2**24 + 1).all()
    full = np.load(tmp_path / "mixed" / "full.npy")
    assert full.dtype == np.float64 and (full[:, 13:39] == 2**24 + 1).all()
    # a category may have a minus: this one wrapped around in 32 bits
    np.save(tmp_path / "day_0_sparse.npy", ids - 2**40)
    BinaryCriteoUtils.shuffle(day, day, out, {0: 2}, days=2)
    assert (np.load(tmp_path / "mixed" / "day_0_sparse.npy") == 2**24 + 1 - 2**40).all()


def test_what_cannot_be_prepared_is_refused_by_its_place(tmp_path: Path) -> None:
    [path] = write_criteo(tmp_path, 1, lambda _: 2)
    outputs = [str(tmp_path / f"{kind}.npy") for kind in KINDS]

    def convert_line(text: str, dataset: str = "criteo_1tb") -> None:
        Path(path).write_text(criteo_line(0, 0) + "\n" + text)
        BinaryCriteoUtils.tsv_to_npys(path, *outputs, dataset_name=dataset)

    with pytest.raises(ValueError, match="day_0:2: invalid literal for int"):
        convert_line(criteo_line(0, 1).replace("\t", "\tx", 2))
    with pytest.raises(ValueError, match="day_0:2: 3 columns with the label, expected 40"):
        convert_line("1\t2\t3\n")
    with pytest.raises(ValueError, match="day_0:2: an integer needs more than 32 bits: 4294967296"):
        convert_line(f"{2**32}{criteo_line(0, 1)[1:]}\n")
    with pytest.raises(ValueError, match="dataset_name must be one of criteo_1tb, criteo_kaggle, got 'kaggle'"):
        convert_line("", "kaggle")
    Path(path).write_text("")
    with pytest.raises(ValueError, match="day_0: no lines"):
        BinaryCriteoUtils.tsv_to_npys(path, *outputs)
    np.save(outputs[0], np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError, match=r"need 26 columns, the array has shape \(2, 3\)"):
        BinaryCriteoUtils.sparse_to_contiguous([outputs[0]], str(tmp_path))
    with pytest.raises(ValueError, match="different names, got dense, dense"):
        BinaryCriteoUtils.sparse_to_contiguous([outputs[0], outputs[0]], str(tmp_path))


LINE = "\t".join(["1", *["5"] * 13, *["a"] * 26]) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # the first raised csv.Error, the others OverflowError
        (LINE + "1\t" + "7" * 200_000 + "\n", "day_0:2: field larger than field limit"),
        (LINE + LINE[:-2] + "8000000000000000\n", "day_0:2: a category needs more than 64 bits: 8000000000000000"),
        (LINE + LINE[:-2] + "f" * 5000 + "\n", r"day_0:2: a category needs more than 64 bits: f+ \.\.\. \(5,0"),
        # rows were counted, not lines
        (LINE[:-2] + '"a\n"\n' + LINE + "bad\n", "day_0:4: 1 columns with the label"),
        (LINE[:-2] + '"a\n"\n' + LINE[:-2] + '"a\n' + LINE * 9, "day_0:3: invalid literal"),
        (LINE * 2 + LINE[:-2] + "\xff\n", "day_0: not UTF-8, in line [123] or after it: 'utf-8' codec"),
    ],
    ids=["long field", "64 bits", "long category", "quoted line end", "open quote", "not UTF-8"],
)
def test_every_line_that_cannot_be_read_is_a_value_error_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "day_0").write_bytes(text.encode("latin-1"))
    dense, sparse, labels = (tmp_path / f"{kind}.npy" for kind in KINDS)
    with pytest.raises(ValueError, match=message):
        BinaryCriteoUtils.tsv_to_npys(tmp_path / "day_0", dense, sparse, labels)


def test_integers_further_apart_than_32_bits_have_their_logarithms(tmp_path: Path) -> None:
    """The difference to the least wrapped around in 32 bits: its logarithm was NaN, with a warning of numpy's."""
    integers = [-(2**31 - 1), 2**31 - 1, *[-1] * 11]
    (tmp_path / "day_0").write_text("\t".join(["1", *map(str, integers), *["a"] * 26]) + "\n")
    dense, sparse, labels = (tmp_path / f"{kind}.npy" for kind in KINDS)
    BinaryCriteoUtils.tsv_to_npys(tmp_path / "day_0", dense, sparse, labels)
    np.testing.assert_allclose(np.load(dense)[0, :3], np.log([2.0, 2.0**32, 2.0**31]), rtol=1e-6)


def test_the_three_scripts_lead_from_text_to_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = text, arrays, ids, mixed = [str(tmp_path / name) for name in ("text", "arrays", "ids", "mixed")]
    Path(text).mkdir()
    write_criteo(Path(text), 24, lambda _: 2)
    # the first as programs call it, by TorchRec's name
    script = ["-m", "shardwise.torchrec", "-m", "torchrec.datasets.scripts.npy_preproc_criteo"]
    done = run_python(*script, "--input_dir", text, "--output_dir", arrays)
    assert done.returncode == 0 and "day_23: wrote" in done.stdout, done.stderr
    contiguous_main(["--input_dir", arrays, "--output_dir", ids, "--frequency_threshold", "3"])
    for day in range(24):
        Path(ids, f"day_{day}_sparse_contig_freq.npy").rename(Path(ids, f"day_{day}_sparse.npy"))
    shuffle_main(["--input_dir_labels_and_dense", arrays, "--input_dir_sparse", ids, "--output_dir_shuffled", mixed])
    printed = capsys.readouterr().out
    assert f"24 files renumbered into {ids}" in printed and f"23 days mixed into {mixed}" in printed
    paths = [[f"{mixed}/day_{day}_{kind}.npy" for day in range(23)] for kind in KINDS]
    batches = list(InMemoryBinaryCriteoIterDataPipe("train", *paths, batch_size=23, rank=0, world_size=1))
    labels = np.concatenate([np.load(f"{arrays}/day_{day}_labels.npy") for day in range(23)])
    assert [batch.batch_size for batch in batches] == [23, 23]
    assert sum(int(batch.labels.sum()) for batch in batches) == labels.sum() > 0
    # a day that is missing is said, before anything is read
    Path(ids, "day_7_sparse.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks day_7_sparse\.npy"):
        contiguous_main(["--input_dir", ids, "--output_dir", ids])
    with pytest.raises(FileNotFoundError, match="has none of criteo_kaggle's files: train.txt, test.txt"):
        npy_main(["--input_dir", folders[0], "--output_dir", arrays, "--dataset_name", "criteo_kaggle"])


def test_a_program_that_uses_iopath_has_its_handlers_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs register handlers with the path manager of `PATH_MANAGER_KEY`; their paths were opened as they are."""

    class PathManager:
        def open(self, path: str, mode: str = "r", **more: Any) -> Any:
            return open(path.replace("data://", f"{tmp_path}/"), mode, **more)

        def get_local_path(self, path: str) -> str:
            return path.replace("data://", f"{tmp_path}/")

    class PathManagerFactory:
        def get(self, key: str) -> PathManager:
            assert key == "torchrec"
            return PathManager()

    iopath = ModuleType("iopath.common.file_io")
    iopath.PathManagerFactory = PathManagerFactory  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "iopath.common.file_io", iopath)
    write_criteo(tmp_path, 1, lambda _: 3)
    outputs = [f"data://day_0_{kind}.npy" for kind in KINDS]
    BinaryCriteoUtils.tsv_to_npys("data://day_0", *outputs)
    assert BinaryCriteoUtils.get_shape_from_npy(outputs[1]) == (3, 26)
    assert BinaryCriteoUtils.load_npy_range(outputs[2], 1, 2).tolist() == [[1], [0]]
    pipe = InMemoryBinaryCriteoIterDataPipe("train", *[[path] for path in outputs], batch_size=3, rank=0, world_size=1)
    assert next(iter(pipe)).labels.tolist() == [0, 1, 0]
