"""The command line: what it prints, as text and JSON, how it ends, and what it says where it cannot run."""

from __future__ import annotations

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from checkout import run_python
from click.testing import CliRunner, Result

from shardwise import DataType, __version__, cli
from shardwise._version import how_to_install
from shardwise.cli import kernels as cli_kernels
from shardwise.cli.output import require_writable
from shardwise.cli.plan import dtype, share, size
from shardwise.kernels import _op
from shardwise.perf.compile import (
    cases as launched,
    checked,
    compiled,
    tuning_space,
)
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.compiled import Report
from shardwise.planner.constants_measured import CARDS
from shardwise.planner.plan.explanation import explain
from shardwise.planner.plan.plan_files import load_planned

GOOD = Report(40, 0, 0, 0, {("load", 16): 4, ("store", 16): 1}, (), (), 1.9, 2, True)
NEEDS_CASES = pytest.mark.skipif(
    not _op.HAS_TRITON or _op.INTERPRETED, reason="cases are noted from kernels that Triton could compile"
)


@cache
def noted() -> tuple[list[Case], list[Case]]:
    """What each command notes anew, for seconds."""
    return _cases(), [*_tuned_cases()]


_cases, _tuned_cases = launched.cases, tuning_space.tuned_cases


@pytest.fixture(autouse=True)
def _noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "cases", lambda: noted()[0])
    monkeypatch.setattr(tuning_space, "tuned_cases", lambda: noted()[1])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), arguments)


def compiled_as(found: Report | str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Case, str]]:
    """Put `found` in place of every report; returns what there was to compile."""
    asked: list[tuple[Case, str]] = []

    def compile_all(tasks: Sequence[tuple[Case, str]], jobs: int) -> Iterator[tuple[int, Report | str]]:
        asked.extend(tasks)
        # as they finish, not as they began
        yield from ((place, found) for place in reversed(range(len(tasks))))

    monkeypatch.setattr(compiled, "compile_all", compile_all)
    return asked


def test_a_place_that_cannot_be_written_is_told_before_and_a_file_there_is_kept(tmp_path: Path) -> None:
    require_writable(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").write_text("kept")
    require_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"
    for path in (tmp_path / "no folder" / "a.json", tmp_path):
        with pytest.raises(click.UsageError, match="cannot be written"):
            require_writable(path)


@pytest.mark.parametrize("command", [
    ["kernels", "run", "--json"], ["plan", "calibrate", "--out"], ["perf", "counts", "--json"],
    ["perf", "counts", "--update", "--baseline"],
])  # fmt: skip
def test_a_file_that_cannot_be_written_is_said_before_the_work(command: list[str], tmp_path: Path) -> None:
    result = run(*command, str(tmp_path / "missing" / "found.json"))
    assert result.exit_code == 2 and "found.json cannot be written: No such file" in result.output, result.output
    assert "Traceback" not in result.output and not result.stdout


@NEEDS_CASES
def test_kept_promises_end_with_status_0_and_a_line_for_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = compiled_as(GOOD, monkeypatch)
    result = run("kernels", "check", "--target", "sm_80", "--target", "sm_90", "--kernel", "pooled_lookup D=128 fp32 w")
    assert result.exit_code == 0, result.output
    names = ["pooled_lookup D=128 fp32 weighted", "quantized_pooled_lookup D=128 fp32 weighted"]
    assert [(case.name, target) for case, target in asked] == [(n, t) for n in names for t in ("sm_80", "sm_90")]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [
        "pooled_lookup",
        "D=128",
        "fp32",
        "weighted",
        "sm_80",
        "40",
        "0",
        "0",
        "0",
        "1.9",
        "2",
        "4x16",
        "1x16",
    ] in rows
    assert result.stdout.rstrip().endswith("every promise is kept")


@NEEDS_CASES
def test_typical_kernels_are_a_row_each_of_a_table_of_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table in FACTS.md was of another compiler's kernels: nothing printed it again."""
    asked = compiled_as(GOOD, monkeypatch)
    result = run("kernels", "registers", "--target", "sm_80", "--target", "sm_90")
    assert result.exit_code == 0, result.output
    assert [(case.name, target) for case, target in asked] == list(product(compiled.TYPICAL, ("sm_80", "sm_90")))
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert rows[0].split("|")[1:5] == [" case ", " sm_80 ", " sm_90 ", " spilled on sm_90 "]
    assert rows[2] == "| pooled_lookup D=128 fp32 | 40 | 40 | 0 | 0 | 0 | 1.9 | 2 | 4x16 | 1x16 |"
    assert len(rows) == 2 + len(compiled.TYPICAL)


@NEEDS_CASES
def test_a_broken_promise_ends_with_status_1_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_as(Report(65, 8, 0, 0, {("load", 4): 16, ("store", 16): 1}, (), ()), monkeypatch)
    result = run("kernels", "check", "--target", "sm_90", "--kernel", "pooled_lookup D=128 fp32 w")
    assert result.exit_code == 1
    name = "pooled_lookup D=128 fp32 weighted on sm_90"
    assert f"{name}: spills 8 bytes, promised 0" in result.stdout
    assert f"{name}: takes 65 registers, promised at most 64" in result.stdout
    assert f"{name}: loads 0 bytes of rows by 16 bytes at a time, promised 64" in result.stdout
    # the lookup of quantized rows may take more registers
    assert result.stdout.rstrip().endswith("5 broken promises")


@NEEDS_CASES
def test_a_crash_of_the_compiler_ends_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_as("the compiler failed: OSError: disk full", monkeypatch)
    result = run("kernels", "check", "--kernel", "gather D=128 fp32 sh")
    assert result.exit_code == 1
    for target in compiled.WHOLE:
        assert f"gather D=128 fp32 shifted on {target}: the compiler failed: OSError: disk full" in result.stdout


@NEEDS_CASES
def test_a_filter_that_leaves_nothing_is_an_error() -> None:
    result = run("kernels", "check", "--kernel", "matmul")
    assert result.exit_code == 2
    assert "no case has 'matmul' in its name" in result.output


@NEEDS_CASES
def test_a_whole_check_records_what_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One spill on another version of Triton, and what had passed in half an hour was forgotten."""
    written: list[set[str]] = []
    monkeypatch.setattr(checked, "record", lambda passed, version: written.append({*passed}))
    compiled_as("the compiler failed", monkeypatch)
    part = run("kernels", "check", "--record", "--kernel", "gather")
    assert part.exit_code == 2 and "--record is for a check of all kernels" in part.output
    assert run("kernels", "check", "--record").exit_code == 1 and written.pop() == set()
    # what `_check` returns breaks a promise
    everything = {checked.group(case) for case in (*launched.cases(), *tuning_space.tuned_cases())}
    monkeypatch.setattr(
        cli_kernels, "_check", lambda cases, *_: [case for case in cases if case.name.startswith("update sgd")]
    )
    assert run("kernels", "check", "--record").exit_code == 1
    assert written.pop() == everything - {"update sgd"} and "gather" in everything
    monkeypatch.setattr(checked, "changed", lambda cases, table, version: [])
    nothing = run("kernels", "check", "--changed", "--record")
    assert nothing.exit_code == 0 and "every kernel passed on triton" in nothing.output and len(written) == 1
    one = run("kernels", "check", "--changed", "--kernel", "gather D=128")
    assert one.exit_code == 0 and "every kernel with 'gather D=128' in its name passed on triton" in one.output
    # it said that every kernel passed
    assert run("kernels", "check", "--changed", "--kernel", "matmul").exit_code == 2


@NEEDS_CASES
def test_a_damaged_table_ends_a_check_before_it_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def damaged() -> dict[str, dict[str, str]]:
        (tmp_path / "checked.json").touch()
        return read(tmp_path / "checked.json")

    read = checked.read_table
    monkeypatch.setattr(checked, "read_table", damaged)
    monkeypatch.setattr(cli_kernels, "_check", lambda *asked: pytest.fail("nothing was to be compiled"))
    for option in ("--record", "--changed"):
        result = run("kernels", "check", option)
        assert result.exit_code == 1 and "checked.json is no table of kernels" in result.output


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("HAS_TRITON", False, "triton is not installed"), ("INTERPRETED", True, "TRITON_INTERPRET is set")],
)
def test_a_check_that_cannot_compile_says_why(
    name: str, value: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_op, "HAS_TRITON", True)
    monkeypatch.setattr(_op, "INTERPRETED", False)
    monkeypatch.setattr(_op, name, value)
    result = run("kernels", "check")
    assert result.exit_code == 2
    assert message in result.output


def test_without_click_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda library: None if library == "click" else object())
    with pytest.raises(SystemExit, match=re.escape(f"the command line needs click: {how_to_install('cli')}")):
        cli.main()


def test_the_module_runs_the_command() -> None:
    assert run_python("-m", "shardwise", "--version").stdout == f"shardwise, version {__version__}\n"


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


def test_a_plan_is_printed_as_explain_has_it_with_all_that_decided_it(tables: Path, tmp_path: Path) -> None:
    rules = tmp_path / "c.toml"
    rules.write_text('[item]\nsharding_types = ["row_wise"]\n[t1]\nranks = [3]\n')
    out = tmp_path / "plan.json"
    result = run_plan(
        "--tables", tables, "--world-size", 4, "--hosts", 2, "--hbm", "80GiB", "--batch-size", 1024,
        "--constraints", rules, "--reserve", "10GiB", "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    plan = load_planned(out)
    assert result.stdout == f"{explain(plan)}\n"
    assert plan.topology.hbm == [70 * 2**30] * 4 and plan.topology.local_world_size == 2 and plan.batch_size == 1024
    kinds = {table.name: (choice.sharding_type, starts) for table, choice, starts in plan.placed()}
    assert kinds["item"][0] == "row_wise" and kinds["t1"] == ("table_wise", (3,))
    for told in (str(tables), "10 GiB of each GPU's memory", str(rules), "RowWiseAdagrad where tables do not say"):
        assert told in result.stdout
    assert {table.optimizer for table in plan.tables} == {"RowWiseAdagrad"}


def test_json_is_what_the_file_has(tables: Path, tmp_path: Path) -> None:
    arguments = ("--tables", tables, "--world-size", 2, "--device", "cpu", "--ddr", "16GB", "--cost", "torchrec")
    result = run_plan(*arguments, "--json", "--out", tmp_path / "p.json")
    said, written = json.loads(result.stdout), json.loads((tmp_path / "p.json").read_text())
    assert said == written
    assert said["about"]["topology"]["ddr_bytes"] == [16 * 10**9] * 2 and said["about"]["cost"]["name"] == "torchrec"
    assert said["plan"][""]["t0"]["sharding_type"] in ("table_wise", "data_parallel", "row_wise", "column_wise")


def test_calibrated_constants_decide_the_prices(tables: Path, tmp_path: Path) -> None:
    CARDS["cpu"].constants.with_(row_gb_s=0.01).save(tmp_path / "k.json")
    arguments = ("--tables", tables, "--world-size", 2, "--device", "cpu", "--json")
    usual, slow = run_plan(*arguments), run_plan(*arguments, "--constants", tmp_path / "k.json")
    times = [json.loads(one.stdout)["about"]["predicted"]["step_ms"] for one in (usual, slow)]
    assert times[1] > 5 * times[0]
    assert str(tmp_path / "k.json") in json.loads(slow.stdout)["about"]["settings"]["constants"]


def test_a_report_is_written(tables: Path, made: Path, tmp_path: Path) -> None:
    for number, arguments in enumerate((("--tables", tables, "--world-size", 2, "--card", "h200"), ("explain", made))):
        html = tmp_path / f"{number}.html"
        assert run_plan(*arguments, "--html", html).exit_code == 0
        text = html.read_text()
        assert text.startswith("<!DOCTYPE html>") and "<svg" in text and "user" in text


def test_a_file_is_explained_as_the_plan_was(made: Path) -> None:
    assert run_plan("explain", made).stdout == f"{explain(load_planned(made))}\n"
    assert run_plan("explain", made, "--tables", 1).stdout == f"{explain(load_planned(made), tables=1)}\n"
    assert json.loads(run_plan("explain", made, "--json").stdout) == json.loads(made.read_text())


def test_diff_ends_with_status_1_where_there_is_a_difference(made: Path, tables: Path, tmp_path: Path) -> None:
    same = run_plan("diff", made, made)
    assert same.exit_code == 0
    run_plan("--tables", tables, "--world-size", 2, "--card", "h100", "--out", tmp_path / "b.json")
    other = run_plan("diff", made, tmp_path / "b.json")
    assert other.exit_code == 1 and "tables placed otherwise" in other.stdout
    found = json.loads(run_plan("diff", made, tmp_path / "b.json", "--json").stdout)
    assert [len(one) for one in (found["step_ms"], found["bound_ms"])] == [2, 2] and found["tables"]


def test_plans_that_say_nothing_about_themselves_are_compared_by_their_shards(made: Path, tmp_path: Path) -> None:
    said = json.loads(made.read_text())
    del said["about"]
    bare, other = tmp_path / "bare.json", tmp_path / "other.json"
    bare.write_text(json.dumps(said))
    del said["plan"][""]["t2"]
    other.write_text(json.dumps(said))
    assert run_plan("diff", made, bare).stdout == "no difference\n"
    result = run_plan("diff", bare, other)
    assert result.exit_code == 1 and result.stdout.startswith("t2: ") and "is not there" in result.stdout
    refused = run_plan("explain", bare)
    assert refused.exit_code == 2 and "says nothing about how it was made" in refused.stderr


def test_of_a_plan_that_has_only_words_these_are_shown(made: Path) -> None:
    said = json.loads(made.read_text())
    assert said["about"]["explanation"] == explain(load_planned(made))
    said["about"] = {"explanation": "because"}
    made.write_text(json.dumps(said))
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
    assert lines["step ms"] == [f"{one.solution.time_ms:,.3f}" for one in (before, after)]
    assert {table.name: table.data_type for table in after.tables}["user"] == DataType.FP16
    assert after.topology.card == "a100-80" and after.topology.hbm[0] == pytest.approx(0.85 * 79 * 2**30, rel=1e-6)
    assert after.settings["what if"] == "8 ranks on 1 hosts, fp16 for user, cards a100-80, batches of 100"
    said = json.loads(run_plan("whatif", made, *changes, "--json").stdout)
    assert said["before"]["step_ms"] == before.solution.time_ms and said["after"]["step_ms"] == after.solution.time_ms


def test_what_does_not_fit_ends_with_status_1_and_advice(tables: Path, made: Path) -> None:
    for arguments in (("--tables", tables, "--world-size", 1, "--hbm", "3GiB"), ("whatif", made, "--hbm", "600MiB")):
        result = run_plan(*arguments)
        assert result.exit_code == 1 and result.stdout == ""
        assert result.stderr.startswith("Error: Unable to find a plan for this model because of insufficient storage.")
        assert "Each of these would fit" in result.stderr
        said = json.loads(run_plan(*arguments, "--json").stdout)
        assert said["error_type"] == "insufficient_storage" and said["suggestions"]


def wrong(*arguments: str, tables: str = "tables.json") -> list[str]:
    return ["--tables", tables, "--world-size", "2", *arguments]


def on_h100(*arguments: str, tables: str = "tables.json") -> list[str]:
    return wrong("--card", "h100", *arguments, tables=tables)


WRONG = {
    "nothing": ([], "say what to plan: --tables FILE --world-size N"),
    "no memory": (wrong(), "say how much memory a GPU has: --card h100, or --hbm 80GiB"),
    "hosts": (on_h100("--hosts", "3"), "2 ranks do not divide among 3 hosts"),
    "a GPU's memory on a CPU": (wrong("--device", "cpu", "--hbm", "1GB"), "--hbm and --card are of GPUs"),
    "a size": (wrong("--hbm", "80Gi"), "'80Gi' is no size: write 80GiB (of 1024^3 bytes), 80GB (of 10^9), or bytes"),
    "a share": (wrong("--hbm", "8GB", "--reserve", "115%"), "'115%' is no part of memory"),
    "too much reserved": (wrong("--hbm", "8GiB", "--reserve", "9GiB"), "is more than the 8 GiB of a GPU"),
    "a card": (wrong("--card", "h900"), "'h900' is not one of"),
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
        "No such file or directory: 'no/where.json'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_a_line_with_status_2(
    case: str, made: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('[{"name": "a", "embedding_dim": 4}]')
    Path("other.toml").write_text("[itme]\nnot_on = [0]\n")
    arguments, text = WRONG[case]
    result = run_plan(*arguments)
    assert result.exit_code == 2, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ") and text in last
    assert "Traceback" not in result.stderr and result.stdout == ""


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
