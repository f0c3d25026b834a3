"""`shardwise migrate`: what it prints, what it writes, how it ends, and that rewritten programs run unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

pytest.importorskip("click")
pytest.importorskip("libcst")

from click.testing import CliRunner, Result

from shardwise import cli
from shardwise._version import how_to_install

GOOD = "from torchrec.optim import SGD  # the rule\nimport torchrec\n\nprint(torchrec.Pipelineable)\n"
LACKING = "from torchrec.distributed.planner import Topologie\nimport torchrec.distributed.planner as p\np.Topology\n"

# written for TorchRec; what each prints
PROGRAMS = {
    "chains": """
import torch
import torchrec
table = torchrec.EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, pooling=torchrec.PoolingType.SUM,
    feature_names=["f"], init_fn=lambda weight: weight.fill_(0.5))
ebc = torchrec.EmbeddingBagCollection(device="cpu", tables=[table])
mb = torchrec.KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
print(torchrec.__version__, torchrec.distributed.__doc__)
print(mb, ebc(mb).values().tolist(), torchrec.optim.RowWiseAdagrad.__name__)
""",
    "names": """
import torch
from torchrec import EmbeddingCollection, JaggedTensor, KeyedJaggedTensor, optim
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig, data_type_to_dtype
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import (
    KeyedTensor,  # not used
    kjt_is_equal,
)
ec = EmbeddingCollection(tables=[EmbeddingConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"],
    init_fn=lambda weight: weight.fill_(2.0))])
apply_optimizer_in_backward(optim.SGD, ec.parameters(), {"lr": 0.5})
kjt = KeyedJaggedTensor.from_jt_dict({"f": JaggedTensor(values=torch.tensor([3, 3]), lengths=torch.tensor([1, 1]))})
ec(kjt)["f"].values().sum().backward()
print(ec(kjt)["f"].values().tolist(), kjt_is_equal(kjt, kjt), data_type_to_dtype(DataType.FP16))
""",
    "planning": """
import torchrec
import torchrec.distributed as trd
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology, types as planner_types
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingType
try:
    import torchrec.mystery
except ImportError:
    print("without mystery")
tables = [torchrec.EmbeddingBagConfig(name=f"t{n}", num_embeddings=4096, embedding_dim=64) for n in range(2)]
constraints = {"t0": planner_types.ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])}
planner = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cuda"), constraints=constraints)
ebc = torchrec.EmbeddingBagCollection(device="meta", tables=tables)
plan = planner.plan(ebc, [EmbeddingBagCollectionSharder()])
print(plan.plan[""]["t0"], trd.ModuleSharder is ModuleSharder, EmbeddingComputeKernel.FUSED.value)
""",
}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.commands(), ["migrate", *map(str, arguments)])


def json_of(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def written(folder: Path, **programs: str) -> Path:
    for name, source in programs.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def test_the_report_has_a_line_for_each_name(tmp_path: Path) -> None:
    result = run(written(tmp_path, good=GOOD, lacking=LACKING))
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert result.exit_code == 1
    assert lines == [
        "TorchRec status here where",
        "torchrec.distributed.planner.Topologie missing nearest: torchrec.distributed.planner.Topology "
        f"{tmp_path}/lacking.py:1",
        f"torchrec.distributed.planner.Topology differs shardwise.Topology {tmp_path}/lacking.py:3",
        f"torchrec mapped shardwise.torchrec {tmp_path}/good.py:2",
        f"torchrec.Pipelineable mapped shardwise.Pipelineable {tmp_path}/good.py:4",
        f"torchrec.distributed.planner mapped shardwise.torchrec.distributed.planner {tmp_path}/lacking.py:2",
        f"torchrec.optim.SGD mapped torch.optim.SGD {tmp_path}/good.py:1",
        "",
        "What differs:",
        "docs/differences.md#sharding: A `Topology` assumes 32 GiB ... (Topology)",
        "",
        "2 files: 4 names mapped, 1 that behave differently, 1 missing",
    ]


def test_status_is_0_when_nothing_is_missing(tmp_path: Path) -> None:
    result = run(written(tmp_path, good=GOOD) / "good.py")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        0, "1 file: 3 names mapped, 0 that behave differently, 0 missing",
    )  # fmt: skip
    nothing = run(written(tmp_path, none="import torch\n") / "none.py")
    assert (nothing.exit_code, nothing.stdout) == (0, "1 file: 0 names mapped, 0 that behave differently, 0 missing\n")


def test_json_has_all_of_it(tmp_path: Path) -> None:
    found = json_of(written(tmp_path, lacking=LACKING))
    place = str(tmp_path / "lacking.py")
    assert found == {
        "files": 1,
        "counts": {"missing": 1, "differs": 1, "mapped": 1},
        "names": [
            {
                "name": "torchrec.distributed.planner.Topologie", "status": "missing", "ours": None,
                "hint": "nearest: torchrec.distributed.planner.Topology", "differences": [],
                "places": [{"file": place, "line": 1}],
            },
            {
                "name": "torchrec.distributed.planner.Topology", "status": "differs", "ours": "shardwise.Topology",
                "hint": None, "places": [{"file": place, "line": 3}],
                "differences": [{"link": "docs/differences.md#sharding", "row": "A `Topology` assumes 32 GiB"}],
            },
            {
                "name": "torchrec.distributed.planner", "status": "mapped", "hint": None, "differences": [],
                "ours": "shardwise.torchrec.distributed.planner", "places": [{"file": place, "line": 2}],
            },
        ],
        "problems": [],
        "written": [],
    }  # fmt: skip


def test_a_file_that_is_no_python_does_not_stop_the_others(tmp_path: Path) -> None:
    written(tmp_path, bad="import torchrec\nif x:\ny = 3\n", good=GOOD)
    (tmp_path / "old.py").write_bytes(b"import torchrec\n# caf\xe9\n")
    result = run(tmp_path, "--write")
    assert result.exit_code == 1
    assert f"{tmp_path}/bad.py:3: no Python: expected an indented block" in result.stdout
    assert f"{tmp_path}/old.py:2: not UTF-8: byte 0xe9\n" in result.stdout
    assert "3 files (2 with a problem): 3 names mapped" in result.stdout
    assert "shardwise" in (tmp_path / "good.py").read_text()
    assert (tmp_path / "old.py").read_bytes() == b"import torchrec\n# caf\xe9\n"


def test_a_folder_is_its_programs_but_not_its_environments(tmp_path: Path) -> None:
    for name in ("deep/er", ".hidden", "env/lib", "__pycache__"):
        written((tmp_path / name), **{}).mkdir(parents=True)
        written(tmp_path / name, one=GOOD)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "deep" / "notes.txt").write_text(GOOD)
    os.symlink(tmp_path, tmp_path / "deep" / "loop")
    found = json_of(tmp_path, tmp_path / "deep" / "er" / "one.py")
    assert found["files"] == 2
    assert {place["file"] for one in found["names"] for place in one["places"]} == {
        str(tmp_path / "deep/er/one.py"), str(tmp_path / "__pycache__/one.py"),
    }  # fmt: skip


def test_write_changes_the_imports_once(tmp_path: Path) -> None:
    file = written(tmp_path, good=GOOD, other="import torch\n") / "good.py"
    file.chmod(0o755)
    os.symlink(file, tmp_path / "link.py")
    before = (tmp_path / "other.py").stat().st_mtime_ns
    found = json_of(tmp_path, "--write")
    assert found["written"] == [str(file)]
    assert file.read_text() == GOOD.replace("from torchrec", "from shardwise.torchrec").replace(
        "import torchrec", "import shardwise.torchrec as torchrec"
    )
    assert file.stat().st_mode & 0o777 == 0o755 and (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "other.py").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.py", "link.py", "other.py"]
    again = json_of(tmp_path, "--write")
    assert again["written"] == [] and again["counts"] == found["counts"]


def test_what_is_missing_stays_missing_after_a_rewrite(tmp_path: Path) -> None:
    file = written(tmp_path, lacking=LACKING) / "lacking.py"
    assert run(file, "--write").exit_code == 1
    assert json_of(file)["counts"] == {"missing": 1, "differs": 1, "mapped": 1}


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, good=GOOD) / "good.py"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = run(file, "--write")
    assert result.exit_code == 1 and f"{file}: No space left on device\n" in result.stdout
    assert file.read_text() == GOOD and [*tmp_path.iterdir()] == [file]


def test_without_libcst_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.cli.migrate.find_spec", lambda _: None)
    result = run(written(tmp_path, good=GOOD))
    assert result.exit_code == 1
    assert result.stderr == f"Error: migrate reads programs with libcst: {how_to_install('migrate')}\n"


@pytest.mark.full
def test_rewritten_programs_print_what_the_unchanged_ones_do(tmp_path: Path) -> None:
    unchanged, rewritten = tmp_path / "unchanged", tmp_path / "rewritten"
    for folder in (unchanged, rewritten):
        folder.mkdir()
        written(folder, **PROGRAMS)
    run(rewritten, "--write")
    text = "".join(file.read_text() for file in rewritten.iterdir())
    assert "import torchrec\n" not in text and "from torchrec" not in text
    install = "import shardwise.torchrec; shardwise.torchrec.install()"
    outputs = [printed_by(unchanged, install), printed_by(rewritten, "")]
    assert outputs[0] == outputs[1] and outputs[0].count("--- ") == len(PROGRAMS)


def printed_by(folder: Path, first: str) -> str:
    """What the programs of a folder print, one after the other in one process."""
    code = f"{first}\nimport runpy, sys\nfor file in sys.argv[1:]: print('---', file); runpy.run_path(file)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *(f"{name}.py" for name in PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout
