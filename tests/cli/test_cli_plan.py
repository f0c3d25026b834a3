"""`shardwise plan`: what it prints, as text and JSON, how it ends, and what it says of bad input."""

from __future__ import annotations

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

import json
from pathlib import Path
from typing import Any

import click
from checkout import run_python
from click.testing import CliRunner, Result

from shardwise import DataType, ShardingPlan, cli
from shardwise.cli.plan_request import dtype, share, size
from shardwise.planner.constants_measured import CARDS
from shardwise.planner.plan.explanation import explain
from shardwise.planner.plan.plan_files import load_planned

TABLES = [
    {"name": "user", "num_embeddings": 4_000_000, "embedding_dim": 128, "pooling_factor": 2},
    {
        "name": "item",
        "num_embeddings": 2_000_000,
        "embedding_dim": 128,
        "features": ["a", "b"],
        "feature_pooling": [9, 1],
    },
    *({"name": f"t{n}", "num_embeddings": 50_000, "embedding_dim": 64} for n in range(5)),
]


def run_plan(*arguments: str | Path | int) -> Result:
    return CliRunner().invoke(cli.commands(), ["plan", *map(str, arguments)])


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"set": "ours", "tables": TABLES}))
    return path


@pytest.fixture
def made(tables: Path, tmp_path: Path) -> Path:
    """The file of a plan."""
    result = run_plan(
        "--tables", tables, "--world-size", 4, "--hosts", 2, "--card", "h100", "--out", tmp_path / "plan.json"
    )
    assert result.exit_code == 0, result.output
    return tmp_path / "plan.json"


def test_verbose_prints_what_explain_has_with_all_that_decided_it(tables: Path, tmp_path: Path) -> None:
    rules = tmp_path / "c.toml"
    rules.write_text('[item]\nsharding_types = ["row_wise"]\n[t1]\nranks = [3]\n')
    out = tmp_path / "plan.json"
    result = run_plan(
        "--tables", tables, "--world-size", 4, "--hosts", 2, "--hbm", "80GiB", "--batch-size", 1024,
        "--constraints", rules, "--reserve", "10GiB", "--out", out, "--verbose",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    plan = load_planned(out)
    assert result.stdout == f"{explain(plan, width=160)}\n"
    assert plan.topology.hbm == [70 * 2**30] * 4 and plan.topology.local_world_size == 2 and plan.batch_size == 1024
    kinds = {table.name: (choice.sharding_type, starts) for table, choice, starts in plan.placed()}
    assert kinds["item"][0] == "row_wise" and kinds["t1"] == ("table_wise", (3,))
    for phrase in (str(tables), "10 GiB of each GPU's memory", str(rules), "RowWiseAdagrad where tables do not say"):
        assert phrase in result.stdout
    assert {table.optimizer for table in plan.tables} == {"RowWiseAdagrad"}


def test_json_is_what_the_file_has(tables: Path, tmp_path: Path) -> None:
    arguments = ("--tables", tables, "--world-size", 2, "--device", "cpu", "--ddr", "16GB", "--cost", "torchrec")
    result = run_plan(*arguments, "--json", "--out", tmp_path / "p.json")
    printed, written = json.loads(result.stdout), json.loads((tmp_path / "p.json").read_text())
    assert printed == written
    assert (
        printed["about"]["topology"]["ddr_bytes"] == [16 * 10**9] * 2 and printed["about"]["cost"]["name"] == "torchrec"
    )
    assert printed["plan"][""]["t0"]["sharding_type"] in ("table_wise", "data_parallel", "row_wise", "column_wise")


def test_calibrated_constants_decide_the_prices(tables: Path, tmp_path: Path) -> None:
    CARDS["cpu"].constants.with_(row_gb_s=0.01).save(tmp_path / "k.json")
    arguments = ("--tables", tables, "--world-size", 2, "--device", "cpu", "--json")
    usual, slow = run_plan(*arguments), run_plan(*arguments, "--constants", tmp_path / "k.json")
    times = [json.loads(answer.stdout)["about"]["predicted"]["step_ms"] for answer in (usual, slow)]
    assert times[1] > 5 * times[0]
    assert str(tmp_path / "k.json") in json.loads(slow.stdout)["about"]["settings"]["constants"]


def test_a_report_is_written(tables: Path, made: Path, tmp_path: Path) -> None:
    for number, arguments in enumerate((("--tables", tables, "--world-size", 2, "--card", "h200"), ("explain", made))):
        html = tmp_path / f"{number}.html"
        assert run_plan(*arguments, "--html", html).exit_code == 0
        text = html.read_text()
        assert text.startswith("<!DOCTYPE html>") and "<svg" in text and "user" in text


def test_a_file_is_explained_as_the_plan_was(made: Path, tables: Path) -> None:
    whole = load_planned(made)
    assert run_plan("explain", made, "--verbose").stdout == f"{explain(whole, width=160)}\n"
    assert run_plan("explain", made, "--tables", 1).stdout == f"{explain(whole, tables=1, width=160)}\n"
    first = run_plan("--tables", tables, "--world-size", 4, "--hosts", 2, "--card", "h100").stdout
    assert run_plan("explain", made).stdout == first
    assert json.loads(run_plan("explain", made, "--json").stdout) == json.loads(made.read_text())


def test_diff_ends_with_status_1_where_there_is_a_difference(made: Path, tables: Path, tmp_path: Path) -> None:
    same = run_plan("diff", made, made)
    assert same.exit_code == 0
    run_plan("--tables", tables, "--world-size", 2, "--card", "h100", "--out", tmp_path / "b.json")
    other = run_plan("diff", made, tmp_path / "b.json")
    assert other.exit_code == 1 and "tables placed otherwise" in other.stdout
    difference = json.loads(run_plan("diff", made, tmp_path / "b.json", "--json").stdout)
    assert [len(pair) for pair in (difference["step_ms"], difference["bound_ms"])] == [2, 2] and difference["tables"]


def test_plans_that_say_nothing_about_themselves_are_compared_by_their_shards(made: Path, tmp_path: Path) -> None:
    document = json.loads(made.read_text())
    del document["about"]
    bare, other = tmp_path / "bare.json", tmp_path / "other.json"
    bare.write_text(json.dumps(document))
    del document["plan"][""]["t2"]
    other.write_text(json.dumps(document))
    assert run_plan("diff", made, bare).stdout == "no difference\n"
    result = run_plan("diff", bare, other)
    names, row = (line.split(maxsplit=2) for line in result.stdout.splitlines())
    assert result.exit_code == 1 and names == ["table", "before", "after"]
    assert row[0] == "t2" and row[2].endswith("is not there")
    refused = run_plan("explain", bare)
    assert refused.exit_code == 2 and "says nothing about how it was made" in refused.stderr


def test_of_a_plan_that_has_only_words_these_are_shown(made: Path) -> None:
    document = json.loads(made.read_text())
    assert document["about"]["explanation"] == explain(load_planned(made))
    document["about"] = {"explanation": "because"}
    made.write_text(json.dumps(document))
    assert run_plan("explain", made).stdout == "because\n"
    assert run_plan("explain", made, "--json").exit_code == 2


def test_whatif_plans_again_and_shows_both(made: Path, tmp_path: Path) -> None:
    out = tmp_path / "after.json"
    changes = ("--world-size", 8, "--hosts", 1, "--dtype", "fp16:user", "--card", "a100-80", "--batch-size", 100)
    result = run_plan("whatif", made, *changes, "--out", out)
    assert result.exit_code == 0, result.output
    before, after = load_planned(made), load_planned(out)
    lines = {line[:26].strip(): line[26:].split() for line in result.stdout.splitlines()[1:10]}
    assert (
        lines["ranks"] == ["4", "8"] and lines["hosts"] == ["2", "1"] and lines["samples of a rank"] == ["512", "100"]
    )
    assert lines["step ms"] == [f"{planned.solution.time_ms:,.3f}" for planned in (before, after)]
    assert {table.name: table.data_type for table in after.tables}["user"] == DataType.FP16
    assert after.topology.card == "a100-80" and after.topology.hbm[0] == pytest.approx(0.85 * 79 * 2**30, rel=1e-6)
    assert after.settings["what if"] == "8 ranks on 1 hosts, fp16 for user, cards a100-80, batches of 100"
    comparison = json.loads(run_plan("whatif", made, *changes, "--json").stdout)
    assert (
        comparison["before"]["step_ms"] == before.solution.time_ms
        and comparison["after"]["step_ms"] == after.solution.time_ms
    )


def test_what_does_not_fit_ends_with_status_1_and_advice(tables: Path, made: Path) -> None:
    for arguments in (("--tables", tables, "--world-size", 1, "--hbm", "3GiB"), ("whatif", made, "--hbm", "600MiB")):
        result = run_plan(*arguments)
        assert result.exit_code == 1 and result.stdout == ""
        assert result.stderr.startswith("Error: Unable to find a plan for this model because of insufficient storage.")
        assert "Each of these would fit" in result.stderr
        error_data = json.loads(run_plan(*arguments, "--json").stdout)
        assert error_data["error_type"] == "insufficient_storage" and error_data["suggestions"]


def wrong(*arguments: str, tables: str = "tables.json") -> list[str]:
    return ["--tables", tables, "--world-size", "2", *arguments]


def on_h100(*arguments: str, tables: str = "tables.json") -> list[str]:
    return wrong("--card", "h100", *arguments, tables=tables)


WRONG = {
    "nothing": ([], "say what to plan: --tables FILE or --model FILE.py:FACTORY, and --world-size N"),
    "no memory": (wrong(), "say how much memory a GPU has: --card h100, or --hbm 80GiB"),
    "hosts": (on_h100("--hosts", "3"), "2 ranks do not divide among 3 hosts"),
    "a GPU's memory on a CPU": (wrong("--device", "cpu", "--hbm", "1GB"), "--hbm and --card are of GPUs"),
    "a size": (wrong("--hbm", "80Gi"), "'80Gi' is no size: write 80GiB (of 1024^3 bytes), 80GB (of 10^9), or bytes"),
    "a share": (wrong("--hbm", "8GB", "--reserve", "115%"), "'115%' is no part of memory"),
    "too much reserved": (wrong("--hbm", "8GiB", "--reserve", "9GiB"), "is more than the 8 GiB of a GPU"),
    "a card": (wrong("--card", "h900"), "card 'h900' is unknown: did you mean 'h"),
    "a card that comes in kinds": (wrong("--card", "A100"), "card 'A100' is unknown: say which, a100-80, a100-40, "),
    "a card without kernels": (wrong("--card", "v100-32"), "card 'v100-32' has no kernels compiled for it"),
    "an optimizer": (on_h100("--optimizer", "RowwiseAdagrat"), "unknown: did you mean 'RowWiseAdagrad'?"),
    "an optimizer of another plan": (["whatif", "plan.json", "--optimizer", "Foo"], "optimizer 'Foo' is unknown: SGD,"),
    "no number of seconds": (on_h100("--seconds", "nan"), "'nan' is no finite number"),
    "endless seconds": (["whatif", "plan.json", "--seconds", "inf"], "'inf' is no finite number"),
    "no memory at all": (wrong("--hbm", "0"), "'0' leaves no room for tables"),
    "more memory than there is": (wrong("--hbm", "9999999TiB"), "is more than any machine has"),
    "too many ranks": (["--tables", "tables.json", "--world-size", "100000"], "100000 is not in the range"),
    "no samples": (on_h100("--batch-size", "0"), "0 is not in the range"),
    "tables twice": (on_h100("--model", "m.py:make"), "--tables and --model both say what to plan"),
    "constants of the other model": (
        on_h100("--constants", "tables.json", "--cost", "torchrec"),
        "--constants are of --cost shardwise",
    ),
    "too many columns": (on_h100(tables="wide.json"), "embedding_dim must be 131,072 at most, got 1,000"),
    "an optimizer in a file": (on_h100(tables="adm.json"), "adm.json: table 'a': optimizer 'Adm' is unknown: did you"),
    "a plan whose numbers are none": (["explain", "words.json"], "step_ms must be a number, got 'soon'"),
    "a file that is not there": (wrong(tables="x.json"), "'x.json' does not exist"),
    "a file that is no plan": (["explain", "tables.json"], "tables.json: no plan: expected an object with"),
    "bad tables": (
        ["--tables", "bad.json", "--world-size", "2", "--card", "h100"],
        "bad.json: table 'a': num_embeddings is",
    ),
    "bad constraints": (
        on_h100("--constraints", "bad.json"),
        "bad.json: constraints must be an object",
    ),
    "a table that there is not": (on_h100("--constraints", "other.toml"), "did you mean 'item'?"),
    "constants that are none": (
        on_h100("--constants", "tables.json"),
        "tables.json: these are no constants",
    ),
    "no change": (["whatif", "plan.json"], "say what changes: --world-size, --hosts, --dtype"),
    "a dtype": (["whatif", "plan.json", "--dtype", "fp7"], "a dtype must be one of FP32, FP16"),
    "a dtype of no table": (
        ["whatif", "plan.json", "--dtype", "fp16:usr"],
        "there is no table 'usr': did you mean 'user'?",
    ),
    "a plan into no folder": (
        on_h100("--out", "no/where.json"),
        "no/where.json cannot be written: No such file or directory",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_a_line_with_status_2(
    case: str, made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('[{"name": "a", "embedding_dim": 4}]')
    Path("wide.json").write_text('[{"name": "a", "num_embeddings": 9, "embedding_dim": 1000000000000}]')
    Path("adm.json").write_text('[{"name": "a", "num_embeddings": 9, "embedding_dim": 4, "optimizer": "Adm"}]')
    read = json.loads(made.read_text())
    read["about"]["predicted"]["step_ms"] = "soon"
    Path("words.json").write_text(json.dumps(read))
    Path("other.toml").write_text("[itme]\nnot_on = [0]\n")
    arguments, text = WRONG[case]
    result = run_plan(*arguments)
    assert result.exit_code == 2, result.output
    first = result.stderr.splitlines()[0]
    assert first.startswith("Error: ") and text in first
    assert "Traceback" not in result.stderr and result.stdout == ""


MODEL = """
import torch
from shardwise import (
    EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, RowWiseAdagrad,
    apply_optimizer_in_backward,
)

class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection([
            EmbeddingBagConfig(2_000_000_000, 64, "user", feature_names=["u"]),
            EmbeddingBagConfig(100, 32, "shop", feature_names=["s", "t"]),
        ])
        self.seq = EmbeddingCollection([EmbeddingConfig(1000, 16, "word", feature_names=["w"])])
        self.over = torch.nn.Linear(4, 1)

def make():
    print("a file may print")
    return Two()

def fused():
    model = Two()
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    return model, None

def dense(): return torch.nn.Linear(2, 2)
def number(): return 3
def fails(): raise KeyError("oh")
def leaves(): raise SystemExit(7)
def reads(): return float(torch.ones(2).sum())
def wants(manifest): return Two()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model_for_plan.py"
    path.write_text(MODEL)
    return path


def test_a_model_is_planned_without_its_memory(model: Path, tmp_path: Path) -> None:
    """Its tables take 512 GB: they are made on the meta device, and the plan names the modules that have them."""
    asked = ("--world-size", 8, "--card", "H200", "--json")
    result = run_plan("--model", f"{model}:make", *asked, "--out", tmp_path / "plan.json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert {name: sorted(shardings) for name, shardings in document["plan"].items()} == {
        "bags": ["shop", "user"],
        "seq": ["word"],
    }
    assert "a file may print" in result.stderr
    by_name = {table["name"]: table for table in document["about"]["tables"]}
    assert by_name["shop"]["features"] == ["s", "t"] and by_name["word"]["pooled"] is False
    assert [table["optimizer"] for table in by_name.values()] == ["SGD"] * 3
    # without an optimizer in the backward a replica would train otherwise: its module does not offer it, nor whatif
    assert all(
        "data_parallel" not in constraint["sharding_types"] for constraint in document["about"]["constraints"].values()
    )
    assert run_plan("whatif", tmp_path / "plan.json", "--world-size", 16).exit_code == 0
    assert [*ShardingPlan.load(tmp_path / "plan.json").plan] == ["bags", "seq"]


def test_the_optimizer_of_a_model_is_its_own(model: Path) -> None:
    def optimizers(*arguments: str) -> set[str]:
        result = run_plan("--world-size", 16, "--card", "h200", "--json", *arguments)
        assert result.exit_code == 0, result.output
        return {table.get("optimizer", "") for table in json.loads(result.stdout)["about"]["tables"]}

    assert optimizers("--model", f"{model}:fused") == optimizers("--model", f"{model}:fused", "--optimizer", "adam")
    assert optimizers("--model", f"{model}:fused") == {"RowWiseAdagrad"}
    assert optimizers("--model", f"{model}:make", "--optimizer", "adam") == {"Adam"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mkae", "has no function mkae: did you mean 'make'?"),
        ("dense", "Linear has no tables: none of its modules is an EmbeddingBagCollection"),
        ("number", "returned int: it must return a model"),
        ("fails", "KeyError: 'oh' ("),
        ("leaves", "SystemExit: 7 ("),
        ("reads", "a model is made on the meta device here, where tensors have no values"),
        ("wants", "takes manifest, and is called with nothing here"),
    ],
)
def test_a_factory_that_is_no_good_is_a_line(name: str, text: str, model: Path) -> None:
    result = run_plan("--model", f"{model}:{name}", "--world-size", 2, "--card", "h100")
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert result.exit_code == 2 and result.stdout == "" and len(errors) == 1 and text in errors[0]


def test_a_quantized_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "served_model.py").write_text(
        "import torch\nfrom shardwise import EmbeddingBagConfig\n"
        "from shardwise.embeddings.quant import EmbeddingBagCollection\n"
        "class Served(EmbeddingBagCollection):\n    def __init__(self): torch.nn.Module.__init__(self)\n"
        "def make(): return torch.nn.ModuleDict({'ebc': Served()})\n"
    )
    result = run_plan("--model", f"{tmp_path / 'served_model.py'}:make", "--world-size", 2, "--card", "h100")
    assert result.exit_code == 2 and "module 'ebc' is quantized (Served)" in result.stderr


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("1.5 gib", 3 * 2**29), ("512MiB", 2**29), ("12", 12), ("2TB", 2e12)],
)
def test_sizes_say_whether_a_unit_is_a_power_of_two(text: str, bytes_: int) -> None:
    assert size(text) == bytes_


def test_shares_and_dtypes_are_read() -> None:
    assert (share("15%"), share("0%"), share("2GiB")) == (0.15, 0.0, 2**31)
    assert (dtype("fp16"), dtype("BF16:a:b")) == ((DataType.FP16, None), (DataType.BF16, "a:b"))
    with pytest.raises(click.BadParameter, match="write 80GiB"):
        size("eighty")


def test_calibrate_writes_what_it_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from shardwise.sharding.calibration import calibrate as module

    asked: dict[str, Any] = {}

    def measured(world_size: int, device: str, *, out: Path, progress: Any, **more: Any) -> Any:
        asked.update(world_size=world_size, device=device, **more)
        progress(1, 2)
        CARDS["cpu"].constants.save(out)
        return CARDS["cpu"].constants

    monkeypatch.setattr(module, "calibrate", measured)
    result = run_plan("calibrate", "--world-size", 3, "--seconds", 5, "--out", tmp_path / "k.json")
    assert result.exit_code == 0, result.output
    assert asked == {"world_size": 3, "device": "cpu", "seconds": 5.0, "threads": 1}
    assert "row_gb_s        3" in result.stdout
    assert json.loads((tmp_path / "k.json").read_text()) == CARDS["cpu"].constants.to_json()


def test_the_command_runs_as_a_process(tables: Path) -> None:
    done = run_python("-m", "shardwise", "plan", "--tables", tables, "--world-size", 2, "--card", "h100")
    assert done.stdout.startswith("Plan: 7 tables on 2 ranks")
