"""`python -m shardwise.torchrec`: a script of TorchRec's runs as python would run it, and so do its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

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


def run(*arguments: object, folder: Path, input: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwise.torchrec", *map(str, arguments)]
    root = str(ROOT)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=folder, env=env, input=input)


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
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
    ("arguments", "said"),
    [
        (["no/such.py"], "can't open file 'no/such.py': there is no such file"),
        ([""], "can't open file '': there is no such file"),
        (["."], "can't find '__main__' module in '.'"),
        (["-m", "no_such_module"], "No module named no_such_module"),
        (["-m", "json"], "'json' is a package and cannot be directly executed"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = run(*arguments, folder=tmp_path)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
    assert result.stderr.startswith("python -m shardwise.torchrec: ")
    assert said in result.stderr


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
    root = ROOT
    command = [sys.executable, str(root / "examples" / "migration.py")]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    graph, rows, missing = result.stdout.splitlines()
    assert graph == "graph: ['placeholder', 'call_module', 'output']" and rows == "same rows: True"
    assert missing.endswith("no counterpart of torchrec.optim.RowWiseAdaGrad; nearest: torchrec.optim.RowWiseAdagrad")
