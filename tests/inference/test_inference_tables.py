"""Tables of an exported model, read by numpy alone, give what the quantized collections give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkout import run_python
from inference_models import CASES, FEATURES, bags
from test_inference_export import damage

from shardwise.inference import (
    ModelDamaged,
    Signature,
    Table,
    export_model,
    load_program,
    quantize_inference_model,
    read_tables,
    set_pruning_data,
)
from shardwise.inference.tracing import find_tables
from shardwise.kernels import ROW_FORMATS, dequantize_rows

DTYPES = {
    "int8": torch.int8, "int4": torch.quint4x2, "int2": torch.quint2x4, "fp8": torch.float8_e4m3fn,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
}  # fmt: skip


def test_every_row_format_is_read() -> None:
    assert set(DTYPES) == set(ROW_FORMATS)


@pytest.fixture(scope="module", params=DTYPES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A quantized collection of one format, weighted, and its folder."""
    model = quantize_inference_model(bags(is_weighted=True), quantization_dtype=DTYPES[request.param])
    folder = tmp_path_factory.mktemp("tables") / "out"
    export_model(model, folder, signature=Signature(FEATURES, weighted=True))
    return model, folder


def test_rows_are_those_that_torch_makes(exported: tuple[Any, Path]) -> None:
    model, folder = exported
    tables = read_tables(folder)
    assert list(tables) == FEATURES
    for group in find_tables(model):
        for number, table in enumerate(group.tables.tables):
            payload, scales = group.tables.payload_of(number), group.tables.scales_of(number)
            wanted = dequantize_rows(payload, scales, table.dim, table.format).numpy()
            np.testing.assert_array_max_ulp(tables[table.name].rows(np.arange(table.rows)), wanted, maxulp=1)


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_those_of_the_program(exported: tuple[Any, Path], weighted: bool) -> None:
    _, folder = exported
    batch = CASES["weighted"].batch(6)
    if not weighted:
        batch["weights"] = torch.ones_like(batch["weights"])
    outputs, tables = load_program(folder)(**batch), read_tables(folder)
    begin = 0
    for name, lengths in zip(FEATURES, batch["lengths"], strict=True):
        end = begin + int(lengths.sum())
        offsets = np.concatenate([[0], np.cumsum(lengths.numpy())])
        ids, weights = batch["values"][begin:end].tolist(), batch["weights"][begin:end].numpy()
        looked_up = tables[name].pooled(ids, offsets, weights) if weighted else tables[name].pooled(ids, offsets)
        np.testing.assert_allclose(looked_up, outputs[name].numpy(), rtol=1e-6, atol=1e-6)
        begin = end


def test_pruned_ids_are_rows_of_zeros(tmp_path: Path) -> None:
    model = bags()
    set_pruning_data(model, {"b": 30})
    quantized = quantize_inference_model(model)
    facts = export_model(quantized, tmp_path / "out", signature=Signature(FEATURES))
    pruned = next(table for table in facts.tables if table.name == "b")
    assert (pruned.rows, pruned.ids, pruned.pruned) == (30, 51, True)
    ids = list(range(51))
    batch = {"values": torch.tensor(ids), "lengths": torch.stack([torch.full((51,), n) for n in (0, 1, 0)])}
    wanted, outputs = CASES["pooled"].wanted(quantized, batch), load_program(tmp_path / "out")(**batch)
    assert torch.equal(outputs["b"], wanted["b"])
    table = read_tables(tmp_path / "out")["b"]
    np.testing.assert_array_max_ulp(table.rows(ids), wanted["b"].numpy(), maxulp=1)
    assert int((table.rows(ids) == 0).all(1).sum()) == 21


def test_torch_is_not_needed(exported: tuple[Any, Path]) -> None:
    code = (
        "import sys; from shardwise.inference import read_tables;"
        f" print(read_tables({str(exported[1])!r})['a'].rows([3]).shape, 'torch' in sys.modules)"
    )
    assert run_python("-c", code).stdout == "(1, 8) False\n"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Table]:
    folder = tmp_path_factory.mktemp("tables") / "out"
    CASES["sequence"].export(folder)
    return read_tables(folder)


def test_no_ids_are_no_rows(tables: dict[str, Table]) -> None:
    assert tables["a"].rows([]).shape == (0, 8)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, 50], IndexError, r"table 'a', place 1: id 50 is outside \[0, 50\)"),
        ([-1], IndexError, "id -1 is outside"),
        ([1.0], TypeError, "ids must be a list of integers, got float64"),
        ([[1]], TypeError, "got int64, 2-D"),
        ([True], TypeError, "got bool"),
    ],
)
def test_bad_ids_are_named(tables: dict[str, Table], ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tables["a"].rows(ids)


def test_sequence_tables_do_not_pool(tables: dict[str, Table]) -> None:
    with pytest.raises(ValueError, match=r"keeps the rows of a sample apart: use rows\(ids\)"):
        tables["a"].pooled([1], [0, 1])


@pytest.mark.parametrize(
    ("offsets", "weights"), [([0, 1], None), ([1, 2], None), ([0, 2, 1, 2], None), ([], None), ([0, 2], [1.0])]
)
def test_bad_bags_are_refused(exported: tuple[Any, Path], offsets: Any, weights: Any) -> None:
    with pytest.raises(ValueError, match="table 'a': "):
        read_tables(exported[1])["a"].pooled([1, 2], offsets, weights)


def test_offsets_of_another_dtype_name_their_table(exported: tuple[Any, Path]) -> None:
    with pytest.raises(TypeError, match="table 'a': offsets must be integers, got float64"):
        read_tables(exported[1])["a"].pooled([1, 2], [0, 0.5, 2])


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("tables.safetensors: gone", "tables.safetensors: No such file"),
        ("tables.safetensors: cut", "tables.safetensors has"),
        ("tables.safetensors: flipped", "tables.safetensors has other bytes"),
        ("model.json: facts['format_version'] = 9", "format version 9"),
        ("model.json: facts['tables'][0]['format'] = 'int3'", "tables.safetensors: .* format 'int3'"),
        ("model.json: facts['tables'][0]['rows'] = 49", r"a.payload is not uint8 \[49"),
    ],
)
def test_damage_is_named(tmp_path: Path, what: str, message: str) -> None:
    CASES["pooled"].export(tmp_path / "out")
    damage(tmp_path / "out", what)
    with pytest.raises(ModelDamaged, match=message):
        read_tables(tmp_path / "out")
