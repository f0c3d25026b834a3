"""Exported programs give the bits of their models, at any batch size, in a process that holds nothing of training."""

from __future__ import annotations

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import run_python
from copies import same
from inference_models import CASES, DENSE, FEATURES, bags, dlrm
from test_quant_managed_collision import batch_of, trained
from torch import Tensor, nn

from shardwise.inference import (
    ModelDamaged,
    Program,
    Signature,
    export_model,
    load_program,
    quantize_inference_model,
    shard_quant_model,
)
from shardwise.inference.folder import facts_checksum, read_facts
from shardwise.inference.tracing import named_outputs

FRESH = """
import sys, torch
from shardwise.inference import load_program
program = load_program(sys.argv[1])
found = program(**torch.load(sys.argv[2]))
torch.save(found, sys.argv[3])
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("shardwise.")}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported DLRM, for tests that do not change it."""
    path = tmp_path_factory.mktemp("served") / "dlrm"
    CASES["dlrm"].export(path)
    return path


@pytest.fixture(scope="module")
def program(folder: Path) -> Program:
    return load_program(folder)


def test_batches_without_ids_and_ids_in_int32_are_served(program: Program) -> None:
    case = CASES["dlrm"]
    for batch in (case.batch(3, longest=0), {**(ids := case.batch(3)), "values": ids["values"].int()}):
        wanted = case.wanted(case.model(), {**batch, "values": batch["values"].long()})
        assert torch.equal(program(**batch)["output"], wanted["output"])


def test_a_fresh_process_serves_without_the_training_parts(folder: Path, tmp_path: Path) -> None:
    batch = CASES["dlrm"].batch(5)
    torch.save(batch, tmp_path / "batch")
    done = run_python("-c", FRESH, folder, tmp_path / "batch", tmp_path / "found")
    assert "Warning" not in done.stderr, done.stderr
    assert done.stdout.split() == ["_version", "errors", "inference", "kernels", "untrusted"]
    wanted = CASES["dlrm"].wanted(CASES["dlrm"].model(), batch)
    assert torch.equal(torch.load(tmp_path / "found")["output"], wanted["output"])


def test_threads_do_not_see_each_others_bad_ids(program: Program) -> None:
    """A fault went through a tensor that all calls shared, so a good call could raise for a bad one beside it."""
    case = CASES["dlrm"]
    good = case.batch(4)
    bad = {**good, "values": good["values"].clone().fill_(1000)}
    wanted = case.wanted(case.model(), good)["output"]

    def answer(number: int) -> Tensor | str:
        try:
            return program(**(bad if number % 2 else good))["output"]
        except IndexError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(answer, range(200)))
    assert all(isinstance(result, Tensor) and torch.equal(result, wanted) for result in answers[::2])
    assert all(isinstance(result, str) and "id 1000 is outside" in result for result in answers[1::2])


def test_the_tables_are_written_once(tmp_path: Path) -> None:
    export_model(quantize_inference_model(bags()), tmp_path / "small", signature=Signature(FEATURES))
    big = quantize_inference_model(bags(rows=20_000))
    facts = export_model(big, tmp_path / "big", signature=Signature(FEATURES))
    grown = {
        name: (tmp_path / "big" / name).stat().st_size - (tmp_path / "small" / name).stat().st_size
        for name in ("tables.safetensors", "program.pt2")
    }
    assert grown["tables.safetensors"] > 0.99 * sum(table.bytes for table in facts.tables)
    assert abs(grown["program.pt2"]) < 1000


def test_model_json_says_what_there_is(folder: Path) -> None:
    facts = read_facts(folder)
    assert facts.dense == tuple(DENSE) and not facts.weighted
    assert [(feature.name, feature.tables, feature.ids) for feature in facts.features] == [
        ("a", ("a",), 50), ("b", ("b",), 51), ("c", ("c",), 52),
    ]  # fmt: skip
    assert [(output.name, output.dtype, output.shape) for output in facts.outputs] == [
        ("output", "float32", ("batch", 1))
    ]
    table = facts.tables[0]
    assert (table.rows, table.dim, table.format, table.scale_dtype, table.pooling) == (50, 8, "int8", "float16", "mean")
    assert table.bytes == 50 * (8 + 4) and table.fp32_bytes == 50 * 32
    assert facts.versions["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"values": torch.tensor([50, 1, 1])}, IndexError, r"feature 'a' \(table 'a'\), sample 0: id 50 is outside"),
        ({"values": torch.tensor([1, 1, -1])}, IndexError, r"feature 'c' .*id -1 is outside \[0, 52\)"),
        ({"values": torch.tensor([1, 2])}, ValueError, "add up to the 2 values; they add up to 3"),
        ({"lengths": torch.tensor([[-1], [2], [2]])}, ValueError, "must not be negative.*the least is -1"),
        ({"lengths": torch.ones(2, 1, dtype=torch.int64)}, ValueError, r"lengths must be \[3, batch\]"),
        ({"values": torch.ones(3)}, TypeError, "values must be int32 or int64, got float32"),
        ({"values": torch.ones(3, 1, dtype=torch.int64)}, ValueError, "values must have one dim"),
        ({"dense": None}, ValueError, r"takes dense, of shape \[1, 2\]"),
        ({"dense": torch.zeros(2, 2)}, ValueError, r"dense must have shape \[1, 2\], got \[2, 2\]"),
        ({"dense": torch.zeros(1, 2, dtype=torch.int64)}, TypeError, "dense must be floating point, got int64"),
        ({"weights": torch.ones(3)}, ValueError, "takes no weights"),
    ],
)
def test_bad_inputs_are_named(program: Program, change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {"values": torch.ones(3, dtype=torch.int64), "lengths": torch.ones(3, 1, dtype=torch.int64)}
    with pytest.raises(error, match=message):
        program(**{**good, "dense": torch.zeros(1, 2), **change})
    # and nothing of it stays
    assert program(**good, dense=torch.zeros(1, 2))["output"].shape == (1, 1)


def test_a_failing_export_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["pooled"].export(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def broken(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("shardwise.inference.export.save_program", broken)
    with pytest.raises(OSError, match="no space left"):
        CASES["pooled"].export(tmp_path / "out", force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_there_is_replaced_only_on_demand(tmp_path: Path) -> None:
    case = CASES["pooled"]
    case.export(tmp_path / "out")
    with pytest.raises(FileExistsError, match="holds a model: pass force=True"):
        case.export(tmp_path / "out")
    CASES["two formats"].export(tmp_path / "out", force=True)
    assert {table.format for table in read_facts(tmp_path / "out").tables} == {"int8", "int4"}
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").touch()
    with pytest.raises(FileExistsError, match="thesis is there and is no exported model"):
        case.export(tmp_path / "thesis", force=True)
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


class Counts(nn.Module):
    """Gives another answer at each call, which no program can."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.calls = quantize_inference_model(bags()), itertools.count()

    def forward(self, features: Any) -> Any:
        return self.ebc(features).values() + next(self.calls)


@pytest.mark.parametrize(
    ("model", "signature", "error", "message"),
    [
        (bags, Signature(FEATURES), ValueError, "no quantized tables: quantize it with quantize_inference_model"),
        (
            lambda: shard_quant_model(quantize_inference_model(bags()), 2, "cpu", "cpu")[0], Signature(FEATURES),
            TypeError, "a sharded ShardedQuantEmbeddingBagCollection: .* export the unsharded quantized model",
        ),
        (lambda: quantize_inference_model(bags()), None, ValueError, "the inputs of the model need names"),
        (lambda: quantize_inference_model(bags()), {"features": FEATURES}, TypeError, r"must be a Signature.*got dict"),
        (lambda: quantize_inference_model(bags()), Signature(["a"]), KeyError, r"\['b', 'c'\] are not in the batch"),
        (lambda: quantize_inference_model(dlrm()), Signature(FEATURES, ["age"]), RuntimeError, "cannot be multiplied"),
        (
            lambda: quantize_inference_model(bags()), Signature(FEATURES, outputs=["x"]), ValueError,
            "has 3 outputs, .* the signature names",
        ),
        (Counts, Signature(FEATURES), RuntimeError, "differs from the model's"),
        (
            lambda: nn.ModuleList([quantize_inference_model(bags()), quantize_inference_model(bags())]),
            Signature(FEATURES), ValueError, "two tables are named 'a', in '0' and '1'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, model: Any, signature: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        export_model(model(), tmp_path / "out", signature=signature)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("features", "dense", "message"),
    [([], [], "at least one feature"), (["a", "a"], [], "features repeat 'a'"), ("ab", [], "must be a list of names")],
)
def test_signatures_are_checked(features: Any, dense: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Signature(features, dense)


def test_a_model_is_the_same_after_its_export(tmp_path: Path) -> None:
    case = CASES["two formats"]
    model = case.model()
    batch, state = case.batch(4), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = case.wanted(model, batch)
    export_model(model, tmp_path / "out", signature=case.signature)
    assert same(model.state_dict(), state) and same(case.wanted(model, batch), wanted)


def damage(folder: Path, what: str) -> None:
    name, _, how = what.partition(": ")
    path = folder / name
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-10])
    elif how == "flipped":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    else:
        facts = json.loads(path.read_text())
        exec(how, {"facts": facts})
        # what is wrong is to be found by itself
        if "sha256" not in how:
            facts["sha256"] = facts_checksum(facts)
        path.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("model.json: gone", FileNotFoundError, "is no exported model: there is no .*model.json"),
        ("model.json: cut", ModelDamaged, "model.json is no JSON"),
        ("tables.safetensors: gone", ModelDamaged, "tables.safetensors: No such file"),
        ("tables.safetensors: cut", ModelDamaged, r"tables.safetensors has \d+ bytes, it was written with \d+"),
        ("tables.safetensors: flipped", ModelDamaged, "tables.safetensors has other bytes than were written"),
        ("program.pt2: flipped", ModelDamaged, "program.pt2 has other bytes than were written"),
        ("program.pt2: gone", ModelDamaged, "program.pt2: No such file"),
        ("model.json: facts['format_version'] = 2", ModelDamaged, "format version 2, this shardwise reads up to 1"),
        ("model.json: del facts['tables']", ModelDamaged, "model.json: the file lacks 'tables'"),
        ("model.json: facts['tables'][1]['dim'] = '8'", ModelDamaged, r"'tables'\[1\]: 'dim' must be int, got str"),
        ("model.json: facts['weighted'] = 1", ModelDamaged, "'weighted' must be bool, got int"),
        ("model.json: facts['files'] = []", ModelDamaged, "lists no file 'tables.safetensors'"),
        ("model.json: facts['sha256'] = ''; facts['planes'] = []", ModelDamaged, "model.json was changed after it was"),
        ("model.json: del facts['sha256']", ModelDamaged, "model.json was changed after it was written"),
        ("model.json: facts['versions'] = 3; facts['format_version'] = 2", ModelDamaged, "format version 2"),
        ("model.json: facts['planes'][0]['name'] = 'x'", ModelDamaged, "program.pt2 has no x"),
        ("model.json: facts['planes'][0]['elements'] -= 8", ModelDamaged, r"program.pt2 takes payload_0 of .* says \["),
        ("model.json: facts['planes'][0]['dtype'] = 'load'", ModelDamaged, r"payload_0 of \[\d+\] uint8, .*\] load"),
        ("model.json: facts['planes'][0]['places'][0]['begin'] = 10**6", ModelDamaged, "a.payload does not fit"),
        ("model.json: facts['planes'][0]['places'][0]['tensor'] = 'x'", ModelDamaged, "tables.safetensors: .*x"),
    ],
)
def test_damage_is_named(folder: Path, tmp_path: Path, what: str, error: type[Exception], message: str) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    damage(broken, what)
    with pytest.raises(error, match=message):
        load_program(broken)


# it compiles C++
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiled_program_gives_the_bits_of_its_model(tmp_path: Path) -> None:
    case = CASES["dlrm"]
    model, facts = case.model(), case.export(tmp_path / "out", compiled=True)
    assert [file.name for file in facts.files][-1] == "program.aoti.pt2"
    program = load_program(tmp_path / "out", compiled=True)
    for size in (0, 1, 2, 7):
        batch = case.batch(size)
        assert torch.equal(program(**batch)["output"], case.wanted(model, batch)["output"])
    batch["values"][0] = 50
    with pytest.raises(IndexError, match=r"feature 'a' \(table 'a'\), sample 0: id 50 is outside \[0, 50\)"):
        program(**batch)


def test_what_was_not_compiled_is_not_loaded(tmp_path: Path) -> None:
    CASES["pooled"].export(tmp_path / "out")
    with pytest.raises(ModelDamaged, match="lists no file 'program.aoti.pt2'"):
        load_program(tmp_path / "out", compiled=True)


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_the_bits_of_its_model_at_any_batch_size(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, facts = case.model(), case.export(tmp_path / "out")
    program = load_program(tmp_path / "out")
    assert program.facts == facts
    assert [output.name for output in facts.outputs] == case.outputs
    for size in (0, 1, 2, 7):
        batch = case.batch(size)
        outputs = program(**batch)
        assert list(outputs) == case.outputs
        torch.testing.assert_close(outputs, case.wanted(model, batch), rtol=0, atol=0)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_ids_behind_maps_may_be_any(tmp_path: Path, pooled: bool) -> None:
    model = quantize_inference_model(trained(pooled))
    signature = Signature(["g", "f", "h"])
    facts = export_model(model, tmp_path / "out", signature=signature, call=lambda model, ids, _: model(ids)[0])
    assert [feature.ids for feature in facts.features] == [None, None, None]
    assert all(table.mapped for table in facts.tables)
    batch = batch_of(9)
    outputs = load_program(tmp_path / "out")(batch.values(), batch.lengths())
    wanted = named_outputs(model(batch)[0])
    assert all(torch.equal(outputs[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["pooled", "sequence"])
def test_a_traced_model_refuses_bad_ids(name: str) -> None:
    """A compiler left the check of ids out, since what it wrote to was read by nobody: a bad id became a row of
    zeros."""
    case = CASES[name]
    compiled: Any = torch.compile(case.model(), backend="aot_eager")
    batch = case.batch(3)
    case.wanted(compiled, batch)
    batch["values"][0] = 1000
    with pytest.raises(IndexError, match=r"id 1000 is outside \[0, 5"):
        case.wanted(compiled, batch)
