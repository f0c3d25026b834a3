"""`shardwise migrate` on notebooks: code cells are one program, and what is no import stays to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("libcst")

from test_cli_migrate import json_of, run

from shardwise.migration.notebook import _Inside, is_notebook, read_notebook
from shardwise.migration.source import Unreadable, read_program

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
    found = []
    for kind, text in cells:
        for before, after in REWRITTEN.items() if kind == "code" and not text.startswith("%%bash") else ():
            text = text.replace(before, after)
        found.append((kind, text))
    return found


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
    found = [(use.cell, use.line, use.name) for use in read_notebook(json.dumps(notebook()).encode()).uses]
    assert found == [
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
    found = read_notebook(json.dumps(notebook(cells, as_lines=False)).encode())
    assert sorted({use.line for use in found.uses if use.cell == 2}) == uses
    written = [cell["source"] for cell in json.loads(found.rewritten)["cells"]]
    ours = "import shardwise.torchrec.optim as o"
    assert written == [ours, text.replace("import torchrec.optim as o", ours)]


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
    assert (
        f"{file}:cell 5:6" in result.stdout
        and "1 file: 4 names mapped, 2 that behave differently, 2 missing" in result.stdout
    )
    found = json_of(tmp_path, "--write")
    assert found["written"] == [str(file)]
    assert {"file": str(file), "cell": 7, "line": 1} in [place for one in found["names"] for place in one["places"]]
    assert json.loads(file.read_text()) == notebook(rewritten(CELLS))
    # under another name it is one too
    other = tmp_path / "intro.ipynb.txt"
    other.write_text(json.dumps(notebook()))
    assert is_notebook(other.name, other.read_bytes())
    assert json_of(other)["counts"] == found["counts"] == {"missing": 2, "differs": 2, "mapped": 4}
    bad = tmp_path / "bad.ipynb"
    bad.write_text(json.dumps(notebook([("code", "import torchrec\nif")])))
    result = run(bad, "--write")
    assert result.exit_code == 1 and f"{bad}:cell 1:2: no Python: " in result.stdout
    assert json.loads(bad.read_text()) == notebook([("code", "import torchrec\nif")])


def test_a_folder_without_a_program_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("import torchrec")
    result = run(tmp_path)
    assert result.exit_code == 1 and f"{tmp_path}: no .py or .ipynb file below it\n" in result.stdout


def test_an_empty_file_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    assert run(tmp_path).stdout == "1 file: 0 names mapped, 0 that behave differently, 0 missing\n"


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8-sig"])
def test_a_program_in_another_encoding_that_it_declares_keeps_it(encoding: str) -> None:
    name = "utf-8" if encoding == "utf-8-sig" else encoding
    text = f"# -*- coding: {name} -*-\r\nx = 'é'\r\nimport torchrec; torchrec.KeyedTensor  # ü\r\n"
    found = read_program(text.encode(encoding))
    assert [(use.name, use.line) for use in found.uses] == [("torchrec", 3), ("torchrec.KeyedTensor", 3)]
    assert found.rewritten == text.replace("import torchrec", "import shardwise.torchrec as torchrec").encode(encoding)


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
