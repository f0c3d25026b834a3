"""Names of TorchRec that public programs import: each is found by its path and used by a program of tests/mirror/used.

`used_names.json` has them by module; "" stands for the module itself. The programs import them as those of others do,
assert what comes out, and run here on the alias. Takes 40 s.
"""

from __future__ import annotations

import ast
import json
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from checkout import SHARED

from shardwise import torchrec as names

HERE = Path(__file__).parent
USED: dict[str, list[str]] = json.loads((HERE / "used_names.json").read_text())
PROGRAMS = sorted((HERE / "used").glob("*.py"))
# features that come later, each with an issue of its own: metrics, hashed ids and caches
LATER = ("torchrec.metrics", "torchrec.modules.hash_mc", "torchrec.distributed.embedding_dim_bucketer")
REFERENCE = SHARED / "reference" / "torchrec_names.md"


@pytest.fixture
def alias() -> Iterator[None]:
    names.install()
    yield
    names.uninstall()


def imported(program: Path) -> Iterator[tuple[str, str, str]]:
    """Module and name of each import of TorchRec's, and what the program calls it; "" is the module itself."""
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchrec"):
            for alias in node.names:
                yield node.module, alias.name, alias.asname or alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torchrec"):
                    yield alias.name, "", alias.asname or alias.name


def uses(program: Path) -> set[tuple[str, str]]:
    """What `program` imports of TorchRec and reads outside of its imports: a module by its path."""
    tree = ast.parse(program.read_text())
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    read |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {(module, name) for module, name, called in imported(program) if called in read}


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.stem for program in PROGRAMS])
@pytest.mark.usefixtures("alias")
@pytest.mark.filterwarnings("ignore")
def test_a_program_of_these_names_runs(program: Path) -> None:
    runpy.run_path(str(program), run_name="__main__")


def test_every_name_is_used_by_a_program() -> None:
    listed = {(module, name) for module, group in USED.items() for name in group}
    used = set().union(*map(uses, PROGRAMS))
    assert listed - used == set()


def test_every_name_is_there() -> None:
    for module, group in USED.items():
        found = import_module(module.replace("torchrec", "shardwise.torchrec", 1))
        assert [name for name in group if name and not hasattr(found, name)] == []


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the list of TorchRec's names is not here")
def test_the_list_has_all_that_programs_import_but_what_comes_later() -> None:
    missing = []
    for line in REFERENCE.read_text().splitlines():
        if (match := re.match(r"- `(torchrec[\w.]*)`: (.*)", line)) and not match[1].startswith(LATER):
            group = [name.replace("(module)", "") for name in re.findall(r"(\(module\)|\w+) \(\d\)", match[2])]
            missing += [(match[1], name) for name in group if name not in USED.get(match[1], [])]
    assert missing == []
