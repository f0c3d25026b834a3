"""`shardwise migrate`: programs, notebooks and folders; what it prints, as text and JSON, and writes."""

from __future__ import annotations

import pytest

pytest.importorskip("click")
pytest.importorskip("libcst")

import json
import os
from pathlib import Path
from typing import Any

import pytest
from checkout import run_python
from click.testing import CliRunner, Result

from shardwise import cli
from shardwise._version import how_to_install
from shardwise.migration.differences import differences
from shardwise.migration.notebook import _Inside, is_notebook, read_notebook
from shardwise.migration.source import Unreadable, read_program

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


# what the rows about Topology say
TOPOLOGY = next(row for row in differences() if row.names == ("Topology",))
LEGEND = (
    "What TorchRec does and shardwise does otherwise (numbers: results differ in value; error: one raises or refuses "
    "where the other does not, or does it otherwise; looks: names, types, texts, logs or the plan differ). "
)
# of one file
SUMMARY = "1 file read, {0} names of TorchRec: {0} work, 0 differ, 0 missing; {1} imports to rewrite"


def words_of(printed: str) -> list[str]:
    """Its lines with single blanks, so that no test depends on widths."""
    return [" ".join(line.split()) for line in printed.splitlines()]


def test_the_report_has_a_line_for_each_name_each_difference_and_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    result = run(written(tmp_path, good=GOOD, lacking=LACKING, other="import torch\n"))
    assert result.exit_code == 1 and result.stderr == ""
    assert words_of(result.stdout) == [
        "status TorchRec here where",
        "missing torchrec.distributed.planner.Topologie nearest: torchrec.distributed.planner.Topology "
        f"{tmp_path}/lacking.py:1",
        f"looks torchrec.distributed.planner.Topology shardwise.Topology {tmp_path}/lacking.py:3",
        f"works torchrec shardwise.torchrec {tmp_path}/good.py:2",
        f"works torchrec.Pipelineable shardwise.Pipelineable {tmp_path}/good.py:4",
        f"works torchrec.distributed.planner shardwise.torchrec.distributed.planner {tmp_path}/lacking.py:2",
        f"works torchrec.optim.SGD torch.optim.SGD {tmp_path}/good.py:1",
        "",
        f"{LEGEND}--verbose says what shardwise does instead.",
        "",
        "looks A `Topology` assumes 32 GiB on every GPU (Topology)",
        "",
        "file names work differ missing imports",
        f"{tmp_path}/good.py 3 3 0 0 2",
        f"{tmp_path}/lacking.py 3 1 1 1 2",
        "",
        "3 files read, 6 names of TorchRec: 4 work, 1 differ (1 looks), 1 missing; 4 imports to rewrite",
    ]


def test_a_verbose_report_says_what_we_do_and_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    text = "import torchrec\ntorchrec.distributed.planner.Topology\n" * 6
    many = {f"p{number}": text for number in range(6)}
    short, long = (words_of(run(written(tmp_path, **many), *more).stdout) for more in ([], ["--verbose"]))
    assert [f"{tmp_path}/p3.py:2, 4, 6, 8 and 2 more", "and 2 more files"] == short[4:6]
    assert f"{tmp_path}/p5.py:2, 4, 6, 8, 10, 12" in long
    sentence = "looks A `Topology` assumes 32 GiB on every GPU (Topology)"
    assert short[short.index(sentence) + 1] == ""
    assert long[long.index(sentence) :][1:4] == [
        f"Here: {TOPOLOGY.shardwise}", f"Why: {TOPOLOGY.why} (docs/reference/differences.md#sharding)", "",
    ]  # fmt: skip


def test_status_is_0_when_nothing_is_missing(tmp_path: Path) -> None:
    result = run(written(tmp_path, good=GOOD) / "good.py")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        0,
        SUMMARY.format(3, 2),
    )
    nothing = run(written(tmp_path, none="import torch\n") / "none.py")
    assert (nothing.exit_code, nothing.stdout) == (0, SUMMARY.format(0, 0) + "\n")


def test_json_has_all_of_it(tmp_path: Path) -> None:
    report = json_of(written(tmp_path, lacking=LACKING))
    place = str(tmp_path / "lacking.py")
    counts = {"works": 1, "differs": 1, "missing": 1, "imports": 2, "numbers": 0, "error": 0, "looks": 1}
    assert report == {
        "counts": {"files": 1, "names": 3, **counts},
        "files": [{"file": place, "names": 3, **counts}],
        "names": [
            {
                "name": "torchrec.distributed.planner.Topologie", "status": "missing", "word": None, "ours": None,
                "hint": "nearest: torchrec.distributed.planner.Topology", "differences": [],
                "places": [{"file": place, "line": 1}],
            },
            {
                "name": "torchrec.distributed.planner.Topology", "status": "differs", "word": "looks",
                "ours": "shardwise.Topology", "hint": None, "places": [{"file": place, "line": 3}],
                "differences": [{
                    "word": "looks", "torchrec": TOPOLOGY.torchrec, "shardwise": TOPOLOGY.shardwise,
                    "why": TOPOLOGY.why, "link": "docs/reference/differences.md#sharding",
                }],
            },
            {
                "name": "torchrec.distributed.planner", "status": "works", "word": None, "hint": None,
                "ours": "shardwise.torchrec.distributed.planner", "places": [{"file": place, "line": 2}],
                "differences": [],
            },
        ],
        "problems": [],
        "written": [],
    }  # fmt: skip


def test_a_file_that_is_no_python_does_not_stop_the_others(tmp_path: Path) -> None:
    written(tmp_path, bad="import torchrec\nif x:\ny = 3\n", good=GOOD)
    (tmp_path / "old.py").write_bytes(b"import torchrec\n# caf\xe9\n")
    result = run(tmp_path, "--write")
    assert result.exit_code == 2
    assert f"{tmp_path}/bad.py:3: no Python: expected an indented block" in result.stderr
    assert f"{tmp_path}/old.py:2: not UTF-8: byte 0xe9\n" in result.stderr
    assert "1 file read (2 with a problem), 3 names of TorchRec: 3 work" in result.stdout
    assert "2 imports rewritten\n" in result.stdout
    assert "shardwise" in (tmp_path / "good.py").read_text()
    assert (tmp_path / "old.py").read_bytes() == b"import torchrec\n# caf\xe9\n"


def test_a_folder_is_its_programs_but_not_its_environments(tmp_path: Path) -> None:
    for name in ("deep/er", ".hidden", "env/lib", "__pycache__"):
        written((tmp_path / name), **{}).mkdir(parents=True)
        written(tmp_path / name, one=GOOD)
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "deep" / "notes.txt").write_text(GOOD)
    os.symlink(tmp_path, tmp_path / "deep" / "loop")
    report = json_of(tmp_path, tmp_path / "deep" / "er" / "one.py")
    assert report["counts"]["files"] == 2
    assert {place["file"] for entry in report["names"] for place in entry["places"]} == {
        str(tmp_path / "deep/er/one.py"), str(tmp_path / "__pycache__/one.py"),
    }  # fmt: skip


def test_write_changes_the_imports_once(tmp_path: Path) -> None:
    file = written(tmp_path, good=GOOD, other="import torch\n") / "good.py"
    file.chmod(0o755)
    os.symlink(file, tmp_path / "link.py")
    before = (tmp_path / "other.py").stat().st_mtime_ns
    report = json_of(tmp_path, "--write")
    assert report["written"] == [str(file)]
    assert file.read_text() == GOOD.replace("from torchrec", "from shardwise.torchrec").replace(
        "import torchrec", "import shardwise.torchrec as torchrec"
    )
    assert file.stat().st_mode & 0o777 == 0o755 and (tmp_path / "link.py").is_symlink()
    assert (tmp_path / "other.py").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.py", "link.py", "other.py"]
    again = json_of(tmp_path, "--write")
    assert again["written"] == [] and again["counts"] == {**report["counts"], "imports": 0}


def test_what_is_missing_stays_missing_after_a_rewrite(tmp_path: Path) -> None:
    file = written(tmp_path, lacking=LACKING) / "lacking.py"
    assert run(file, "--write").exit_code == 1
    counts = json_of(file)["counts"]
    assert (counts["missing"], counts["differs"], counts["works"], counts["imports"]) == (1, 1, 1, 0)


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, good=GOOD) / "good.py"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    result = run(file, "--write")
    assert result.exit_code == 2 and f"{file}: No space left on device\n" in result.stderr
    assert result.stdout.endswith("2 imports to rewrite\n")
    assert file.read_text() == GOOD and [*tmp_path.iterdir()] == [file]


def test_without_libcst_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.cli.migrate.find_spec", lambda _: None)
    result = run(written(tmp_path, good=GOOD))
    assert result.exit_code == 2
    assert f"Error: migrate reads programs with libcst: {how_to_install('migrate')}\n" in result.stderr


# prints what is loaded after a command, or after its options were completed
LOADED = """
import json, sys
import click
from click.shell_completion import ShellComplete
from shardwise.cli.migrate import add_migrate
commands = click.Group("shardwise")
add_migrate(commands)
if sys.argv[1] == "complete":
    found = ShellComplete(commands, {}, "shardwise", "_X").get_completions(["migrate"], "--")
    assert "--write" in [item.value for item in found], found
else:
    try:
        commands(sys.argv[1:])
    except SystemExit as ended:
        assert ended.code == 0
print("\\n" + json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [(["complete"], set()), (["migrate", "--help"], set()), (["migrate", "FILE"], {"libcst", "rich"})],
)
def test_help_and_completion_load_no_library_and_a_report_loads_no_torch(
    arguments: list[str], allowed: set[str], tmp_path: Path
) -> None:
    """A report loaded torch to ask whether two classes were one: 2 s of processor time for a file of ten lines."""
    file = written(tmp_path, good=GOOD) / "good.py"
    printed = run_python(
        "-c", LOADED, *(str(file) if argument == "FILE" else argument for argument in arguments)
    ).stdout
    loaded = {*json.loads(printed.splitlines()[-1])}
    assert loaded & {"torch", "numpy", "rich", "libcst", "numba", "scipy", "triton"} <= allowed


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
    return run_python("-c", code, *(f"{name}.py" for name in PROGRAMS), folder=folder).stdout


# what a cell of IPython's may have around Python
MAGIC = """\
%%time
%matplotlib inline
!pip install torchrec==1.8.0 \\
    --no-deps torchrec
torchrec?
import torchrec.optim as o  # ü
files = !ls torchrec
if files:
    %cd /content
    !echo {files}
else:
    from torchrec.optim import SGD
size = (7
  %files)
text = '''
!from torchrec import kept
'''"""
CELLS: list[tuple[str, str]] = [
    ("markdown", "# import torchrec\nis what it says"),
    ("code", "import torch\nimport torchrec\n"),
    ("code", "%%bash\nfor x in a; do import torchrec; done"),
    ("code", ""),
    ("code", MAGIC),
    ("code", "%%writefile train.py\nfrom torchrec.distributed.planner import Topologie, Topology\ntorchrec = 1"),
    ("code", "ebc = torchrec.EmbeddingBagCollection\n\n\ntorch.ops.fbgemm.mystery(o.Adam)"),
    ("raw", "import torchrec"),
]
REWRITTEN = {
    "import torchrec\n": "import shardwise.torchrec as torchrec\n",
    "import torchrec.optim as o": "import shardwise.torchrec.optim as o",
    "    from torchrec.optim import SGD": "    from shardwise.torchrec.optim import SGD",
    "from torchrec.distributed.planner import Topologie, Topology": (
        "from shardwise import Topology\nfrom shardwise.torchrec.distributed.planner import Topologie"
    ),
}


def notebook(cells: list[tuple[str, str]] = CELLS, *, as_lines: bool = True, **more: Any) -> dict[str, Any]:
    made = []
    for kind, text in cells:
        lines = text.splitlines(keepends=True)
        outputs = {"execution_count": None, "outputs": [{"text": "import torchrec ü"}]} if kind == "code" else {}
        made.append({"cell_type": kind, "metadata": {"x": "\u2028"}, **outputs, "source": lines if as_lines else text})
    return {
        "cells": made,
        "metadata": {"kernelspec": {"language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
        **more,
    }


def rewritten(cells: list[tuple[str, str]]) -> list[tuple[str, str]]:
    rewritten_cells = []
    for kind, text in cells:
        for before, after in REWRITTEN.items() if kind == "code" and not text.startswith("%%bash") else ():
            text = text.replace(before, after)
        rewritten_cells.append((kind, text))
    return rewritten_cells


FORMS: list[dict[str, Any]] = [
    {"indent": 1, "ensure_ascii": False}, {"indent": None, "separators": (",", ":")}, {"indent": "\t"},
    {"indent": 2, "sort_keys": True},
]  # fmt: skip


@pytest.mark.parametrize("as_lines", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_imports_of_cells_are_rewritten_and_no_other_byte(form: dict[str, Any], as_lines: bool) -> None:
    """A notebook's JSON is an expression of Python, so it was read as a program without a single name.

    The report said "0 names mapped, 0 missing" with status 0, and --write changed nothing.
    """
    before = json.dumps(notebook(as_lines=as_lines), **form) + "\n"
    wanted = json.dumps(notebook(rewritten(CELLS), as_lines=as_lines), **form) + "\n"
    assert read_notebook(before.encode()).rewritten.decode() == wanted
    assert read_notebook(wanted.encode()).rewritten.decode() == wanted


def test_a_use_has_its_cell_and_the_line_in_it() -> None:
    uses = [(use.cell, use.line, use.name) for use in read_notebook(json.dumps(notebook()).encode()).uses]
    assert uses == [
        (2, 2, "torchrec"),
        (5, 6, "torchrec.optim"),
        (5, 12, "torchrec.optim.SGD"),
        (6, 2, "torchrec.distributed.planner.Topologie"),
        (6, 2, "torchrec.distributed.planner.Topology"),
        (7, 1, "torchrec.EmbeddingBagCollection"),
        (7, 4, "torch.ops.fbgemm.mystery"),
        (7, 4, "torchrec.optim.Adam"),
    ]


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("'loss=%f' % o.SGD", [1]),
        ("d['a'], x.y = %time 3\no.SGD", [2]),
        ("o.SGD\ro.SGD", [1, 2]),
        ("!ls \\\r\n  %x\r\no.SGD\r\n", [3]),
        ("# c \\\n!ls\no.SGD", [3]),
        ("x = 'a' \\\n  %o.SGD", [2]),
        ("x = '''it's (\n!o.SGD\n''' # '''\n!o.SGD\no.SGD", [5]),
        ("%%px --local\no.SGD", [2]),
        ("%%wandb\n!ls\no.SGD", [3]),
        ("%%conda\ninstall o.SGD", []),
        ("%%writefile requirements.txt\no.SGD", []),
        ("  %%time\no.SGD", [2]),
        ("%%script python3\nimport torchrec.optim as o\no.SGD", [2, 3]),
        ("%%writefile 'train.py'\nimport torchrec.optim as o", [2]),
        ("%time x = o.SGD\nif x:\n  %timeit -n 10 -r3 o.SGD(x)", [1, 3]),
        ("%timeit for x in o: o.SGD", []),
        ("%prun -s cumulative o.SGD()", []),
        ("pip install o\nconda install o\no.SGD", [3]),
        ("pip = 1\npip is o.SGD", [2]),
    ],
)
def test_what_ipython_runs_as_python_is_read(text: str, uses: list[int]) -> None:
    """A cell under %%px was skipped without a word, and "loss=%f" % loss made its notebook no Python.

    A lone carriage return ended the whole command with an IndexError.
    """
    cells = [("code", "import torchrec.optim as o"), ("code", text)]
    parsed = read_notebook(json.dumps(notebook(cells, as_lines=False)).encode())
    assert sorted({use.line for use in parsed.uses if use.cell == 2}) == uses
    written = [cell["source"] for cell in json.loads(parsed.rewritten)["cells"]]
    own_import = "import shardwise.torchrec.optim as o"
    assert written == [own_import, text.replace("import torchrec.optim as o", own_import)]


def test_many_commands_in_a_cell_are_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command had all lines before it read again: 2,000 of them took 26 s."""
    read = 0
    once = _Inside.read

    def counted(self: _Inside, line: str) -> None:
        nonlocal read
        read += 1
        once(self, line)

    monkeypatch.setattr(_Inside, "read", counted)
    text = "import torchrec\n" + "!ls\nx = 1\n" * 200 + "s = '''\n" + "!ls\n" * 200 + "'''"
    assert len(read_notebook(json.dumps(notebook([("code", text)])).encode()).uses) == 1
    # all but the 200 commands
    assert read == len(text.split("\n")) - 200


def test_a_line_keeps_its_escapes_where_it_does_not_change() -> None:
    lines = b'[ "x = \'\\u00fc\\/\'\\n" ,\r\n "import torchrec" ]'
    source = b'{"cells": [{"cell_type": "code", "source": ' + lines + b' }], "nbformat": 4}'
    assert read_notebook(source).rewritten == source.replace(b'"import', b'"import shardwise.torchrec as', 1)


@pytest.mark.parametrize(
    ("source", "line", "cell", "message"),
    [
        (b"", 1, None, "no notebook: Expecting value"),
        (b"import torchrec", 1, None, "no notebook: Expecting value"),
        (b'{"cells":\n [}', 2, None, "no notebook: Expecting value"),
        (b"[" * 100_000, 1, None, "no notebook: nested too deeply"),
        (b"[1]", 1, None, "no notebook with cells"),
        (b'{"cells": [], "x": ' + b"1" * 5000 + b"}", 1, None, "no notebook: Exceeds the limit"),
        (b'{"worksheets": [], "nbformat": 3}', 1, None, "no notebook with cells of format 3: `jupyter nbconvert"),
        (b'{"cells": [{"cell_type": "code", "source": 3}]}', 1, 1, "source of a cell is no text"),
        (b'{"cells": [{"cell_type": "code", "source": "x = \'\\ud800\'"}]}', 1, 1, r"not UTF-8: '\ud800'"),
        (b'{"cells":\n\xe9}', 2, None, "not UTF-8: byte 0xe9"),
        (json.dumps(notebook([("code", "x"), ("code", "a = 1\nb = (")])).encode(), 2, 2, "no Python"),
        (json.dumps(notebook(metadata={"language_info": {"name": "R"}})).encode(), 1, None, "is R, not Python"),
    ],
)  # fmt: skip
def test_what_is_no_notebook_of_python_is_said(source: bytes, line: int, cell: int | None, message: str) -> None:
    with pytest.raises(Unreadable) as error:
        read_notebook(source)
    assert message in str(error.value) and (error.value.line, error.value.cell) == (line, cell)


def test_the_command_reads_and_writes_notebooks_in_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "intro.ipynb"
    (file.parent / ".ipynb_checkpoints").mkdir(parents=True)
    (file.parent / ".ipynb_checkpoints" / "intro-checkpoint.ipynb").write_text("no notebook")
    file.write_text(json.dumps(notebook()))
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "cell 5:6" in result.stdout
    assert "1 file read, 8 names of TorchRec: 4 work, 2 differ (1 numbers, 1 looks), 2 missing;" in result.stdout
    report = json_of(tmp_path, "--write")
    assert report["written"] == [str(file)]
    assert {"file": str(file), "cell": 7, "line": 1} in [
        place for entry in report["names"] for place in entry["places"]
    ]
    assert json.loads(file.read_text()) == notebook(rewritten(CELLS))
    # under another name it is one too
    other = tmp_path / "intro.ipynb.txt"
    other.write_text(json.dumps(notebook()))
    assert is_notebook(other.name, other.read_bytes())
    assert json_of(other)["counts"] == report["counts"]
    assert [report["counts"][what] for what in ("missing", "differs", "works", "imports")] == [2, 2, 4, 4]
    bad = tmp_path / "bad.ipynb"
    bad.write_text(json.dumps(notebook([("code", "import torchrec\nif")])))
    result = run(bad, "--write")
    assert result.exit_code == 2 and f"{bad}:cell 1:2: no Python: " in result.stderr
    assert json.loads(bad.read_text()) == notebook([("code", "import torchrec\nif")])


def test_a_folder_without_a_program_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("import torchrec")
    result = run(tmp_path)
    assert result.exit_code == 2 and result.stderr == f"{tmp_path}: no .py or .ipynb file below it\n"


def test_an_empty_file_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    assert run(tmp_path).stdout == SUMMARY.format(0, 0) + "\n"


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8-sig"])
def test_a_program_in_another_encoding_that_it_declares_keeps_it(encoding: str) -> None:
    name = "utf-8" if encoding == "utf-8-sig" else encoding
    text = f"# -*- coding: {name} -*-\r\nx = 'é'\r\nimport torchrec; torchrec.KeyedTensor  # ü\r\n"
    program = read_program(text.encode(encoding))
    assert [(use.name, use.line) for use in program.uses] == [("torchrec", 3), ("torchrec.KeyedTensor", 3)]
    assert program.rewritten == text.replace("import torchrec", "import shardwise.torchrec as torchrec").encode(
        encoding
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import torchrec # é".encode("utf-16"), "not UTF-8: byte 0xff"),
        (b"# coding: latin-17\nimport torchrec\n", "no Python: "),
        (b"\x7fELF\x02\x00\x00", "no Python: "),
        (b"# coding: ascii\nx = '\xe9'", "not ascii, which it declares"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_text_of_python_is_said(source: bytes, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        read_program(source)
