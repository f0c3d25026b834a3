"""`shardwise kernels autotune`: what it writes, keeps, refuses and resumes; no candidate changes a bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result
from torch import Tensor

from shardwise import cli
from shardwise.cli import tune as cli_tune
from shardwise.kernels import _op, configs, use_configs
from shardwise.perf.suite.workloads import Workload, equal
from shardwise.perf.tune import tuner, tuner_cpu, tuner_inputs
from shardwise.perf.tune.candidates import KERNELS, QUANTIZED, candidates
from shardwise.perf.tune.tuner_inputs import jobs_of


@pytest.fixture(autouse=True)
def no_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(configs, "FOLDER", tmp_path / "own")
    monkeypatch.setattr(_op, "TUNED", None)
    configs.forget()
    yield
    use_configs()


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.commands(), ["kernels", "autotune", *map(str, arguments)])


def test_on_a_cpu_settings_are_tuned_written_and_found_again(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "mine.json"
    result = run("--device", "cpu", "--small", "--kernel", "lookup_", "--out", out)
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert (content["device"], content["architecture"]) == (configs.cpu_name(), "cpu")
    values = {entry["setting"]: entry["value"] for entry in content["cpu"]}
    assert values and all(name.startswith("lookup_") for name in values)
    assert all(entry["threads"] == torch.get_num_threads() and entry["us"]["best"] > 0 for entry in content["cpu"])
    assert all(name in result.output for name in values)
    use_configs(out)
    assert {name: configs.cpu(name, -1) for name in values} == values


def test_a_second_run_keeps_what_is_there_unless_told_again(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    assert run("--device", "cpu", "--small", "--kernel", "lookup_", "--out", out).exit_code == 0
    content = json.loads(out.read_text())
    kept = len(content["cpu"])
    content["cpu"].append({"setting": "lookup_short", "threads": 999, "value": 3})
    content["cpu"][0]["us"]["best"] = -1.0
    out.write_text(json.dumps(content))
    result = run("--device", "cpu", "--small", "--kernel", "lookup_", "--out", out)
    assert "0 entries" in result.output
    assert json.loads(out.read_text()) == content
    result = run("--device", "cpu", "--small", "--kernel", "lookup_", "--out", out, "--again")
    assert f"{kept} entries" in result.output
    after = json.loads(out.read_text())["cpu"]
    assert len(after) == kept + 1 and content["cpu"][-1] in after
    assert all(entry.get("us", {"best": 1})["best"] > 0 for entry in after)


def test_ctrl_c_keeps_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, tune = tmp_path / "mine.json", tuner_cpu.tune
    names: list[str] = []

    def tune_once(setting: str, *arguments: Any, **options: Any) -> Any:
        if names:
            raise KeyboardInterrupt
        names.append(setting)
        return tune(setting, *arguments, **options)

    monkeypatch.setattr(tuner_cpu, "tune", tune_once)
    result = run("--device", "cpu", "--small", "--out", out)
    assert result.exit_code == 0 and "1 entries until Ctrl-C" in result.output
    assert [entry["setting"] for entry in json.loads(out.read_text())["cpu"]] == names


def test_a_used_up_budget_ends_the_run_and_half_an_entry_is_not_written(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    result = run("--device", "cpu", "--small", "--out", out, "--budget", "0.000001s")
    assert result.exit_code == 0 and "0 entries until the budget" in result.output
    assert not out.exists() and list(tmp_path.iterdir()) == []


def test_a_value_that_changes_bits_is_dropped_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = tuner_cpu._look_up

    def spoiled(batch: Any) -> Tensor:
        """A lookup that depends on a setting."""
        return look_up(batch) + configs.cpu("update_long", 80)

    monkeypatch.setattr(tuner_cpu, "_look_up", spoiled)
    result = run("--device", "cpu", "--small", "--kernel", "update_long")
    assert "update_long: 160 gives other bits than 80" in result.output
    assert "heuristic" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtypes", "fp31"], "unknown dtype 'fp31': did you mean 'fp32'?"),
        (["--dtypes", "x"], "unknown dtype 'x': expected one of fp32, fp16, bf16, int8"),
        (["--device", "cpu", "--dtypes", "int8"], "unknown dtype 'int8'"),
        (["--dims", "64,0"], "'64,0' must be positive whole numbers"),
        (["--lengths", "-1"], "'-1' must be positive whole numbers"),
        (["--budget", "soon"], "'soon' is no time"),
        (["--kernel", "matmul"], "no entry has 'matmul' in its name"),
        (["--device", "cpu", "--kernel", "matmul"], "no setting has 'matmul' in its name"),
        (["--batch", "8"], "--batch belongs to --workload"),
        (["--workload", __file__, "--dims", "8"], "leave --dims and --lengths out"),
        (["--workload", __file__], "Invalid value for --workload"),
        (["--device", "cpu", "--small", "--out", f"{__file__}/mine.json"], "nothing can be written to "),
        (["--device", "cpu", "--small", "--out", __file__], "no JSON"),
    ],
)
def test_bad_arguments_are_told_before_anything_is_timed(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.skipif(_op.INTERPRETED or torch.cuda.is_available(), reason="kernels can run")
def test_without_a_gpu_kernels_are_not_timed() -> None:
    result = run()
    assert result.exit_code == 2
    assert ("no CUDA device" if _op.HAS_TRITON else "triton is not installed") in " ".join(result.output.split())


def test_a_file_of_another_device_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    out.write_text(json.dumps({"shardwise_tuned": 1, "device": "Abacus", "architecture": "wood"}))
    result = run("--device", "cpu", "--small", "--out", out)
    assert result.exit_code == 2 and "holds configs of Abacus" in " ".join(result.output.split())


def test_a_dry_run_lists_entries_and_candidates_without_a_gpu() -> None:
    result = run("--dry-run", "--dims", "128", "--lengths", "1,20", "--dtypes", "fp32", "--kernel", "pooled_lookup")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == [f"pooled_lookup fp32 D=128 L={n}" for n in (1, 32)]
    assert "rows=2 columns=128 warps=2" in lines[0]
    assert lines[-1].startswith("2 entries, ")


TABLES = [
    {"name": "a", "num_embeddings": 100, "embedding_dim": 100, "pooling_factor": 30},
    {"name": "b", "num_embeddings": 100, "embedding_dim": 128, "pooling_factor": 10.5},
    {"name": "c", "num_embeddings": 100, "embedding_dim": 16},
]


def test_a_workload_gives_the_keys_that_its_launches_look_up(tmp_path: Path) -> None:
    """A launch has the tables of one class of dims, and is classed by the mean length of all bags of the call."""
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"title": "any", "tables": TABLES}))
    result = run("--dry-run", "--workload", path, "--dtypes", "fp32", "--kernel", "pooled_lookup")
    assert [line.split(":")[0] for line in result.output.splitlines()[:-1]] == [
        "pooled_lookup fp32 D=16 L=16", "pooled_lookup fp32 D=128 L=16",
    ]  # fmt: skip
    wide = tuner_inputs.read_workload(path, 32, small=False)[1]
    assert (wide.rows, wide.dim, wide.batch, wide.lengths, wide.fixed) == ((100, 100), 128, 32, (30, 10.5), False)


def test_tables_of_a_workload_are_cut_to_fit_the_cpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner_cpu, "MEMORY", 2 * 4 * 8 * 1000)
    shapes = tuner_cpu.shapes_of([Workload("", (10**12, 10), 8, 2, (1.0, 1.0))] * 2, ["fp32"])
    assert max(tensor.numel() for shape in shapes for tensor in shape.result()) <= 8 * 1000


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({**TABLES[0], "embedding_dim": 0}, "table 0: embedding_dim must be a positive number, got 0"),
        ({"name": "a"}, "table 0: num_embeddings must be a positive number, got None"),
        (None, "expected an object with a list of tables"),
    ],
)
def test_a_workload_that_is_no_good_is_refused(table: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    path.write_text(json.dumps({"tables": [table] if table else []}))
    result = run("--dry-run", "--workload", path)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


@pytest.mark.interpreted
def test_keys_of_jobs_are_those_that_launches_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that no launch asks for would be tuned in vain."""
    asked: set[tuple[Any, ...]] = set()

    def tuned_entry(kernel: str, dtype: Any, width: int, length: int, device: torch.device) -> None:
        asked.add((kernel, configs.dtype_name(dtype), width, length))

    tuned_entry.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(configs, "_found", tuned_entry)
    jobs = jobs_of([equal("", 2, 30, 16, 4, 3)], ["fp32", "fp16", "int8", "int4"])
    assert {job.key.kernel for job in jobs} == set(KERNELS)
    for job in jobs:
        tuner_inputs.make(job, "cpu").calls[0]()
        key = job.key
        assert (key.kernel, key.dtype, key.dim, key.length) in asked


def small_jobs(kernel: str) -> list[tuner_inputs.Job]:
    dtype = "int8" if kernel in QUANTIZED else "fp32"
    # an update has no candidates of chunks at fewer columns, and lookups none of wider blocks
    shape = Workload("", (40, 1), 64, 3, (2.0, 12.0))
    return [job for job in jobs_of([shape], [dtype]) if job.key.kernel == kernel]


@pytest.mark.interpreted
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_candidate_changes_a_bit(kernel: str) -> None:
    (job,) = small_jobs(kernel)
    tried = candidates(kernel, job.key.dtype, job.key.dim)
    kept, dropped = tuner.same_results(job, "cpu", tried)
    assert len(kept) == len(tried) > 2 and dropped == []


@pytest.mark.interpreted
def test_a_candidate_that_changes_bits_or_fails_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = small_jobs("pooled_lookup")
    make = tuner.make

    def spoiled(job: tuner_inputs.Job, device: str) -> tuner_inputs.Inputs:
        inputs = make(job, device)

        def result() -> list[Tensor]:
            rows, _, warps = configs.gather_tile("pooled_lookup", torch.empty(0), 64, 4)
            if rows == 16:
                raise RuntimeError("PassManager::run failed")
            return [inputs.result()[0] + (warps == 1)]

        return tuner_inputs.Inputs(inputs.calls, result)

    monkeypatch.setattr(tuner, "make", spoiled)
    tried = [{"rows": rows, "columns": 64, "warps": warps} for rows, warps in ((2, 1), (4, 2), (16, 8))]
    kept, dropped = tuner.same_results(job, "cpu", tried)
    assert kept == [tried[1]]
    assert "rows=2 columns=64 warps=1 gives other bits than the heuristic" in dropped[0]
    assert "rows=16 columns=64 warps=8 fails: RuntimeError: PassManager::run failed" in dropped[1]


@pytest.mark.interpreted
def test_kernels_are_tuned_in_the_interpreter_and_lookups_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the smallest tile counts as the fastest."""
    monkeypatch.setattr(tuner, "times_us", lambda *_: [float(configs.gather_tile("gather", torch.empty(0), 16, 4)[0])])
    out = tmp_path / "mine.json"
    result = run("--small", "--out", out, "--dtypes", "fp32", "--kernel", "gather", "--lengths", "3")
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(out.read_text())["entries"]
    assert (entry["kernel"], entry["dtype"], entry["dim"], entry["length"]) == ("gather", "fp32", 16, 1)
    heuristic = configs.gather_tile("gather", torch.empty(0), 16, 4)
    use_configs(out)
    tuned = configs.gather_tile("gather", torch.empty(0), 16, 4)
    assert entry["config"] == dict(zip(("rows", "columns", "warps"), tuned, strict=True))
    assert tuned[0] < heuristic[0] and entry["us"] == {"default": heuristic[0], "best": tuned[0]}
    assert "0 entries" in run("--small", "--out", out, "--dtypes", "fp32", "--kernel", "gather").output


def test_an_entry_that_fails_is_told_of_and_the_next_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [*small_jobs("pooled_lookup"), *small_jobs("gather")]

    def failing(job: tuner_inputs.Job, *_: Any, **__: Any) -> tuner.Found:
        if job.key.kernel == "pooled_lookup":
            raise RuntimeError("an illegal\ninstruction")
        return tuner.Found(str(job.key), {}, 2.0, 1.0)

    monkeypatch.setattr(tuner, "tune", failing)
    file = tuner.File(tmp_path / "mine.json", "a GPU", "sm_90")
    outcomes = list(tuner.tune_all(jobs, "cpu", file=file, repeats=1, rounds=1, seconds=60))
    assert [outcome.failed for outcome in outcomes] == [True, False] and outcomes[1].ratio == 2.0
    assert outcomes[0].dropped == (f"{jobs[0]}: not tuned: RuntimeError: an illegal instruction",)
    assert [entry["kernel"] for entry in json.loads(file.path.read_text())["entries"]] == ["gather"]


@pytest.mark.parametrize(("failing", "status"), [(1, 0), (2, 1)])
def test_the_command_ends_badly_where_every_entry_failed(
    failing: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    nan = float("nan")
    results = [tuner.Found("bad", {}, nan, nan, ("bad: not tuned: RuntimeError: no",))] * failing
    results += [tuner.Found("good", {}, 2.0, 1.0)] * (2 - failing)
    ended = 0
    try:
        cli_tune._report(results, None, as_json=False)
    except SystemExit as error:
        ended = error.code  # type: ignore[assignment]
    assert ended == status
    printed = capsys.readouterr().out
    assert f"{2 - failing} entries until" in printed and f", {failing} failed; " in printed
    assert "bad: not tuned: RuntimeError: no" in printed


@pytest.mark.gpu
def test_a_kernel_is_tuned_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    result = run("--small", "--out", out, "--dtypes", "fp32", "--kernel", "update sgd")
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["device"] == torch.cuda.get_device_name() and len(content["entries"]) == 1
    assert "gives other bits" not in result.output
