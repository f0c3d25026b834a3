"""Tuned configs are found by kernel, dtype, class of D, class of length, device and Triton; no file breaks a lookup."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.kernels import _op, configs, use_configs
from shardwise.kernels._op import gather_tile
from shardwise.kernels.update.update import update_tile

HERE = torch.device("cpu")
OWN, OTHER, FAR = ("NVIDIA H200", "sm_90"), ("NVIDIA H100", "sm_90"), ("NVIDIA A100", "sm_80")
TILE = {"rows": 2, "columns": 128, "warps": 2}


@pytest.fixture(autouse=True)
def no_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(configs, "FOLDER", tmp_path / "none")
    monkeypatch.setattr(_op, "TUNED", None)
    monkeypatch.setattr(configs, "identity", lambda device: OWN)
    monkeypatch.setattr(configs, "triton_version", lambda: "3.7.1")
    configs.forget()
    yield
    use_configs()


def entry(config: Any = TILE, **key: Any) -> dict[str, Any]:
    usual = {"kernel": "pooled_lookup", "dtype": "fp32", "dim": 128, "length": 32, "triton": "3.7.1"}
    return {**usual, **key, "config": config}


def written(path: Path, *entries: dict[str, Any], of: tuple[str, str] = OWN, **more: Any) -> Path:
    content = {"shardwise_tuned": 1, "device": of[0], "architecture": of[1], "entries": entries, **more}
    path.write_text(json.dumps(content))
    return path


def launch_config(
    length: int = 32, dim: int = 128, dtype: torch.dtype = torch.float32, kernel: str = "pooled_lookup"
) -> Any:
    rows = torch.empty(0, dtype=dtype)
    return configs.gather_tile(kernel, rows, dim, min(dim & -dim, 16 // rows.itemsize), length)


HEURISTIC = gather_tile(128, 4, 4)


def test_without_a_file_the_heuristic_serves() -> None:
    assert launch_config() == HEURISTIC != (2, 128, 2)


@pytest.mark.parametrize(
    ("key", "asked", "used"),
    [
        ({}, {}, True),
        ({}, {"length": 128}, True),
        ({}, {"length": 8}, True),
        ({}, {"length": 256}, False),
        ({}, {"dim": 100}, True),  # of the same class, and its rows move by whole vectors
        ({}, {"dim": 101}, False),
        ({}, {"dim": 64}, False),
        ({}, {"dtype": torch.float16}, False),
        ({}, {"kernel": "gather"}, False),
        ({"triton": "3.6.0"}, {}, False),
    ],
    ids=str,
)
def test_an_entry_is_for_its_key(key: dict[str, Any], asked: dict[str, Any], used: bool, tmp_path: Path) -> None:
    use_configs(written(tmp_path / "a.json", entry(**key)))
    assert (launch_config(**asked) == (2, 128, 2)) == used


def test_this_device_comes_before_its_architecture_and_the_same_length_before_the_nearest(tmp_path: Path) -> None:
    rows = {name: {**TILE, "rows": n} for n, name in ((1, "far"), (2, "other"), (4, "near"), (8, "exact"))}
    written(tmp_path / "a.json", entry(rows["far"]), of=FAR)
    use_configs(tmp_path)
    assert launch_config() == HEURISTIC
    for number, (name, key, device) in enumerate(
        [("other", {}, OTHER), ("near", {"length": 64}, OWN), ("exact", {}, OWN)]
    ):
        written(tmp_path / f"b{number}.json", entry(rows[name], **key), of=device)
        configs.forget()
        assert launch_config()[0] == rows[name]["rows"], name


def test_an_empty_config_stands_for_the_heuristic(tmp_path: Path) -> None:
    """What was tuned to no avail must not be taken from a device like this one instead."""
    written(tmp_path / "a.json", entry({}))
    written(tmp_path / "b.json", entry(), of=OTHER)
    use_configs(tmp_path)
    assert launch_config() == HEURISTIC


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", "{}", '{"shardwise_tuned": 2}', '{"shardwise_tuned": 1, "device": 3}',
        '{"shardwise_tuned": 1, "device": "a", "architecture": "b", "entries": {}}',
        *(
            json.dumps({"shardwise_tuned": 1, "device": OWN[0], "architecture": OWN[1], "entries": [tuned_entry]})
            for tuned_entry in (
                entry({**TILE, "rows": 3}), entry({**TILE, "rows": 1 << 20}), entry({**TILE, "rows": True}),
                entry({"rows": 2}), entry({**TILE, "chunks": 2}), entry([]), entry(kernel="softmax"), entry(dim=100),
                entry({"chunks": 2}, kernel="update"), entry(length=0), entry(triton=None), {},
            )
        ),
        json.dumps({
            "shardwise_tuned": 1, "device": "a", "architecture": "cpu",
            "cpu": [{"setting": "update_tasks", "threads": 2, "value": 0}],
        }),
        json.dumps({
            "shardwise_tuned": 1, "device": "a", "architecture": "cpu",
            "cpu": [{"setting": "speed", "threads": 2, "value": 1}],
        }),
    ],
)  # fmt: skip
def test_a_file_that_is_no_good_is_warned_of_once_and_left_out(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    written(tmp_path / "good.json", entry(dim=64, kernel="gather"))
    use_configs(tmp_path)
    with pytest.warns(UserWarning, match=r"the tuned configs of .*bad.json are not used: ") as caught:
        assert launch_config() == HEURISTIC
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch_config(dim=64) == gather_tile(64, 4, 4)
        assert launch_config(dim=64, kernel="gather") == (2, 128, 2)


def test_a_path_that_is_not_there_is_refused_and_one_of_the_environment_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError, match="no file or folder of tuned configs at "):
        use_configs(tmp_path / "mystery.json")
    monkeypatch.setattr(_op, "TUNED", str(tmp_path / "mystery.json"))
    configs.forget()
    with pytest.warns(UserWarning, match="no tuned configs at "):
        assert launch_config() == HEURISTIC
    monkeypatch.setattr(_op, "TUNED", str(written(tmp_path / "there.json", entry())))
    configs.forget()
    assert launch_config() == (2, 128, 2)


@pytest.mark.parametrize(
    ("dim", "chunks", "scaled"),
    [
        (128, 1, (1, 128, 1)), (128, 16, (16, 128, 16)), (64, 2, (2, 64, 1)), (64, 1, (8, 64, 4)),
        # a row that 2 warps share stays with as many
        (256, 1, (1, 256, 2)), (512, 2, (2, 512, 8)), (1024, 2, (1, 1024, 4)), (127, 1, (4, 128, 4)),
    ],
)  # fmt: skip
def test_an_update_takes_only_chunks_that_leave_a_rows_columns_to_the_same_threads(
    dim: int, chunks: int, scaled: tuple[int, int, int]
) -> None:
    heuristic, align = update_tile(dim), min(dim & -dim, 4)
    with configs.forced({"update sgd": {"chunks": chunks, "programs": 512}}):
        chosen_tile = configs.update_tile("sgd", heuristic, 2112, torch.float32, align, HERE)
        assert chosen_tile == (*scaled, 512)
        assert configs.update_tile("adam", heuristic, 2112, torch.float32, align, HERE) == (*heuristic, 2112)


def test_settings_of_the_cpu_path_are_those_of_this_cpu_and_number_of_threads(tmp_path: Path) -> None:
    threads, name = torch.get_num_threads(), configs.cpu_name()
    cpu = [{"setting": "update_tasks", "threads": threads, "value": 1000}]
    cpu += [{"setting": "update_long", "threads": threads + 1, "value": 1000}]
    written(tmp_path / "a.json", of=(name, "cpu"), cpu=cpu)
    elsewhere = [{"setting": "lookup_short", "threads": threads, "value": 7}]
    written(tmp_path / "b.json", of=("another CPU", "cpu"), cpu=elsewhere)
    use_configs(tmp_path)
    settings = [configs.cpu(setting, 5) for setting in ("update_tasks", "update_long", "lookup_short")]
    assert settings == [1000, 5, 5]


def test_names_of_files_come_from_names_of_devices() -> None:
    assert configs.slug("NVIDIA H200") == "nvidia_h200"
    assert configs.slug("AMD EPYC 9B14 (96-Core)") == "amd_epyc_9b14_96_core"


@pytest.mark.parametrize(("ids", "bags", "expected"), [(0, 0, 1), (0, 8, 1), (8, 8, 1), (9, 8, 2), (160, 8, 32)])
def test_the_class_of_a_mean_length_is_the_power_of_two_that_it_fits_in(ids: int, bags: int, expected: int) -> None:
    assert configs.length_class(ids, bags) == expected


def test_a_variant_forces_settings_of_launches_and_forgets_what_was_planned_by_others() -> None:
    planned: list[bool] = []
    configs.forgotten(lambda: planned.append(True))
    tile = update_tile(128)
    with configs.variant({"update.programs": 1056}):
        assert len(planned) == 1
        with configs.variant({"update.tile": (8, 4)}):
            assert configs.update_tile("sgd", tile, 2112, torch.float32, 4, HERE) == (8, 128, 4, 1056)
            assert configs.settings_read() == {"update.programs", "update.tile"}
        assert configs.update_tile("sgd", tile, 2112, torch.float32, 4, HERE) == (*tile, 1056)
        assert configs.setting("update.prefetch", True) and not configs.setting("index.in_forward", False)
    assert len(planned) == 4
    assert configs.update_tile("sgd", tile, 2112, torch.float32, 4, HERE) == (*tile, 2112)
    for settings, error in (
        ({"update.tiles": (8, 4)}, "unknown setting 'update.tiles'"),
        ({"update.prefetch": 1}, "'update.prefetch' must be a bool, got 1"),
    ):
        with pytest.raises(ValueError, match=error), configs.variant(settings):
            pass
