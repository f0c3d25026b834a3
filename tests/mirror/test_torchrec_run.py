"""`python -m shardwise.torchrec`: programs of TorchRec's run as python would run them, its four tutorials as they are.

Takes most of a minute: the programs start processes as users do, which import torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT, run_python, without_gloo

from shardwise.sharding.testing.environment import get_free_port

SCRIPT = """
import sys
from fbgemm_gpu.split_embedding_configs import EmbOptimType
import torchrec
from torchrec.distributed.model_parallel import DistributedModelParallel

def child(answers):
    import torchrec.sparse.jagged_tensor as jagged
    answers.put((__name__, jagged.KeyedJaggedTensor.__module__, EmbOptimType.__module__, sys.argv[1:]))

if __name__ == "__main__":
    import multiprocessing
    print(__file__, __spec__, sys.argv, sys.path[0], torchrec.__version__)
    context = multiprocessing.get_context(sys.argv[1])
    answers = context.Queue()
    process = context.Process(target=child, args=(answers,))
    process.start()
    print(*answers.get(timeout=100))
    process.join()
    sys.exit(7 + process.exitcode)
"""


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "shardwise.torchrec", *arguments, folder=folder, status=None)


@pytest.mark.parametrize("start", ["spawn", pytest.param("forkserver", marks=pytest.mark.full)])
def test_a_script_and_its_children_are_served(tmp_path: Path, start: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = run(script, start, "--epochs", "2", folder=tmp_path)
    assert result.returncode == 7, result.stderr
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{script} None ['{script}', '{start}', '--epochs', '2'] {tmp_path} 1.8.0+shardwise.")
    modules = "shardwise.jagged.keyed_jagged_tensor shardwise.embeddings.optim.fbgemm_types"
    assert second == f"__mp_main__ {modules} ['{start}', '--epochs', '2']"


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such.py"], "can't open file 'no/such.py': there is no such file"),
        ([""], "can't open file '': there is no such file"),
        (["."], "can't find '__main__' module in '.'"),
        (["-m", "no_such_module"], "No module named no_such_module"),
        (["-m", "json"], "'json' is a package and cannot be directly executed"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments, folder=tmp_path)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert result.stderr.startswith("python -m shardwise.torchrec: ")
    assert message in result.stderr


@pytest.mark.full
def test_other_subprocesses_are_served(tmp_path: Path) -> None:
    code = "import torchrec.optim; print(torchrec.optim.RowWiseAdagrad.__module__)"
    script = tmp_path / "launch.py"
    script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}], check=True)")
    result = run(script, folder=tmp_path)
    assert result.stdout.strip() == "shardwise.embeddings.optim.optimizers", result.stderr


def test_a_module_runs_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "job.py").write_text("import sys, torchrec\nprint(__name__, __package__, *sys.argv[1:])")
    # a checkout of TorchRec in the working folder
    (tmp_path / "torchrec").mkdir()
    (tmp_path / "torchrec" / "__init__.py").write_text("raise SystemExit('the real one')")
    result = run("-m", "package.job", "a", "-b", folder=tmp_path)
    assert result.stdout.strip() == "__main__ package a -b", result.stderr


def test_a_program_that_installs_the_names_by_itself_runs_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    lines = (
        "import shardwise.torchrec",
        "shardwise.torchrec.install()",
        "import torchrec",
        "print(torchrec.KeyedTensor)",
    )
    script.write_text("\n".join(lines))
    result = run(script, folder=tmp_path)
    assert "shardwise.jagged" in result.stdout, result.stderr


def test_an_error_has_the_traceback_of_the_script_alone(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torchrec\ndef f():\n    raise KeyError('boom')\nf()\n")
    result = run(script, folder=tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith('Traceback (most recent call last):\n  File "' + str(script))
    assert "runpy" not in result.stderr and result.stderr.endswith("KeyError: 'boom'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python -m shardwise.torchrec script.py"),
        (["--help"], "usage: python -m shardwise.torchrec script.py"),
        (["-m"], "usage: python -m shardwise.torchrec script.py"),
    ],
)
def test_a_command_that_names_nothing_says_so(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run(*arguments, folder=tmp_path)
    assert result.returncode == 2 and message in result.stderr


def test_the_example_of_a_migration_trains_quantizes_and_traces(tmp_path: Path) -> None:
    graph, rows, missing = run_python(ROOT / "examples" / "migration.py", folder=tmp_path).stdout.splitlines()
    assert graph == "graph: ['placeholder', 'call_module', 'output']" and rows == "same rows: True"
    assert missing.endswith("no counterpart of torchrec.optim.RowWiseAdaGrad; nearest: torchrec.optim.RowWiseAdagrad")


PROGRAMS = Path(__file__).with_name("tutorials")
LARGE, SMALL = ["large_table_0", "large_table_1"], ["small_table_0", "small_table_1"]


def run_tutorial(program: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    port = get_free_port()
    result = run_python(
        "-m", "shardwise.torchrec", PROGRAMS / f"{program}.py", *arguments,
        folder=folder, MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    result.stdout = without_gloo(result.stdout)
    return result


def rows_of(printed: str, header: str) -> list[list[str]]:
    """The first table of `printed` whose header line begins with these columns."""
    lines = printed.splitlines()
    start = next(n for n, line in enumerate(lines) if re.sub(r"\s+", " ", line.strip()).startswith(header))
    body = lines[start + 2 :]
    end = next(n for n, line in enumerate(body) if "|" not in line)
    return [[cell.strip() for cell in line.split("|")] for line in body[:end]]


def test_the_introduction_prints_its_model_plan_batch_and_rows(tmp_path: Path) -> None:
    result = run_tutorial("introduction", folder=tmp_path)
    out = result.stdout
    assert out.startswith("DistributedModelParallel(\n  (_dmp_wrapped_module): ShardedEmbeddingBagCollection(\n")
    assert rows_of(out, "param | sharding type") == [
        ["product_table", "table_wise", "fused", "[0]"],
        ["user_table", "table_wise", "fused", "[0]"],
    ]
    assert [row[2] for row in rows_of(out, "param | shard offsets")] == ["[4096, 64]"] * 2
    batch = 'KeyedJaggedTensor({\n    "product": [[101, 202], [], [303]],\n    "user": [[404], [505], [606]]\n})'
    assert batch in out
    # the second sample has no product
    assert re.search(r'KeyedTensor\(\{\n    "product": \[\[[-0-9.e, ]+\], \[(0\.0, ){63}0\.0\], \[', out)
    assert "keys: ['product', 'user'] equal to the sums by hand" in out
    # asked for cuda, on a machine without it
    assert result.stderr.count("there is no CUDA here, so all runs on the CPU") == 1


@pytest.mark.full
def test_the_introduction_by_module_paths_trains_the_rows_it_looked_up(tmp_path: Path) -> None:
    out = run_tutorial("introduction_by_path", folder=tmp_path).stdout
    assert [row[1] for row in rows_of(out, "param | sharding type")] == ["table_wise"] * 2
    assert "product_table moved rows [101, 202, 303]\nuser_table moved rows []\n" in out


@pytest.mark.full
@pytest.mark.parametrize(
    ("sharding_type", "kernel", "cuts"),
    [
        ("TABLE_WISE", "fused", {"large": ["[4096, 64]"], "small": ["[1024, 64]"]}),
        ("ROW_WISE", "fused", {"large": ["[2048, 64]"] * 2, "small": ["[512, 64]"] * 2}),
        ("COLUMN_WISE", "fused", {"large": ["[4096, 32]"] * 2, "small": ["[1024, 32]"] * 2}),
        ("DATA_PARALLEL", "dense", {}),
    ],
)
def test_the_sharding_tutorial_prints_the_plan_of_each_type(
    sharding_type: str, kernel: str, cuts: dict[str, list[str]], tmp_path: Path
) -> None:
    out = run_tutorial("sharding", sharding_type, folder=tmp_path).stdout
    tables = rows_of(out, "param | sharding type")
    assert [row[:3] for row in tables] == [[name, sharding_type.lower(), kernel] for name in [*LARGE, *SMALL]]
    whole = sharding_type == "TABLE_WISE"
    # two large and two small tables: one of each on every rank
    assert [row[3] for row in tables] == (["[0]", "[1]"] * 2 if whole else ["[0, 1]"] * 4)
    if cuts:
        shards = rows_of(out, "param | shard offsets")
        assert {name: [row[2] for row in shards if row[0] == name] for name in [*LARGE, *SMALL]} == {
            name: cuts[name.split("_")[0]] for name in [*LARGE, *SMALL]
        }
        places = {row[3] for row in shards}
        assert places == {"rank:0/cuda:0", "rank:1/cuda:1"}
    for rank in (0, 1):
        assert f"rank:{rank},sharding plan: " in out
        assert f"rank:{rank},answers are those of the unsharded tables" in out


@pytest.mark.full
def test_the_announcements_snippet_plans_shards_quantizes_and_serves(tmp_path: Path) -> None:
    out = run_tutorial("announcement", folder=tmp_path).stdout
    assert 'KeyedJaggedTensor({\n    "user": [[1], [2, 3]],\n    "item": [[5], [6]]\n})' in out
    assert "unsharded: KeyedTensor ['user', 'item']" in out
    assert {row[3] for row in rows_of(out, "param | sharding type")} == {"[0]", "[1]"}
    assert "QuantizedEmbeddingBagCollection(" in out
    assert "sharded and quantized: ['user', 'item'] off by less than 0.01: True" in out
