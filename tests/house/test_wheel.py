"""What a user installs: one small wheel that holds every folder, also from a checkout that lost the links.

Takes 25 s: wheels are built, and every command runs from one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from checkout import ROOT
from trees import FOLDERS, LINKS, Trees, build_tree, checkout, run_in_tree, run_process, wheel_of

from shardwise.perf.suite.cases import package

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(trees: Trees) -> Path:
    return wheel_of(trees["links"])


def test_a_tree_that_lacks_a_folder_is_not_built(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree")
    shutil.rmtree(tree / "planner")
    assert "it lacks planner; take a whole checkout" in build_tree(tree, "--wheel", fails=True)
    assert not [*tree.glob("out/*")]


@pytest.mark.parametrize("mode", ["lenient", pytest.param("strict", marks=pytest.mark.full)])
@pytest.mark.parametrize("links", ["links", *(pytest.param(kind, marks=pytest.mark.full) for kind in LINKS[1:])])
def test_an_editable_install_finds_every_folder(trees: Trees, links: str, mode: str, tmp_path: Path) -> None:
    code = "import sys, setuptools.build_meta as b; b.build_editable(sys.argv[1], {'editable_mode': sys.argv[2]})"
    run_process("-c", code, str(tmp_path), mode, cwd=trees[links])
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path)
    # without the site packages: shardwise itself may be installed there
    look = "import importlib.util as u, site, sys; site.addsitedir(sys.argv[1])\n"
    look += "for name in sys.argv[2:]: print(u.find_spec(f'shardwise.{name}').origin)"
    found = run_process("-I", "-S", "-c", look, str(tmp_path), *FOLDERS, "perf.suite.cases", "served")
    places = [str(Path(place).resolve().parent) for place in found.split()]
    assert places == [str(trees[links] / folder) for folder in (*FOLDERS, "perf/suite/cases", "shardwise/served")]


def test_the_wheel_holds_every_folder_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"shardwise"}
    assert {name.split("/")[1] for name in names if name.count("/") > 1} == {*FOLDERS, "cli", "migration", "served"}
    sources = {
        *(f"shardwise/{path.name}" for path in (ROOT / "shardwise").glob("*.py")),
        *(
            f"shardwise/{path.relative_to(ROOT / 'shardwise')}"
            for room in ("cli", "migration", "served")
            for path in (ROOT / "shardwise" / room).rglob("*.py")
        ),
        *(f"shardwise/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")),
        *(f"shardwise/{path.relative_to(ROOT)}" for path in (ROOT / "kernels" / "tuned").glob("*.json")),
        *("shardwise/py.typed", "shardwise/migration/differences.json"),
    }
    assert set(names) == {name for name in sources if not name.removeprefix("shardwise/").startswith(package.LEFT_OUT)}


# the library alone takes 1.5 MB of it, of which FBGEMM's ops and tables by name have 0.1, the suite and the tuner 0.13,
# the check-up and its self-test 0.05, checkpoints in stores, streaming metrics and the reader of Criteo 0.03
MOST_BYTES = 1_910_000


def test_the_wheel_is_small_and_pure_python(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_leaves_the_rooms_out_that_are_named_alike(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert not [name for name in names if name.startswith(tuple(f"shardwise/{room}" for room in package.LEFT_OUT))]
    (named,) = re.findall(
        r"^LEFT_OUT = \($.*?^\)$", (ROOT / "setup.py").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert eval(named.removeprefix("LEFT_OUT = ")) == package.LEFT_OUT


def test_what_an_older_build_left_is_in_no_wheel(trees: Trees, wheel: Path) -> None:
    tree = trees["links"]
    for stale in ("cli_old.py", "perf/counts/counts.py", "kernels/lookup.py"):
        path = tree / "build" / "lib" / "shardwise" / stale
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    build_tree(tree, "--wheel")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == names


# what needs nothing but the wheel, and what says that it needs a checkout
COMMANDS: list[tuple[list[str], int, str]] = [
    *(([*words, "--help"], 0, "Usage: ") for words in (
        ["kernels", "check"], ["kernels", "registers"], ["kernels", "run"], ["kernels", "autotune"], ["perf", "run"],
        ["perf", "compare"], ["perf", "report"], ["perf", "counts"], ["plan"], ["ckpt"], ["export"], ["migrate"],
    )),
    (["kernels", "autotune", "--dry-run", "--device", "cpu", "--small"], 0, ""),
    (["perf", "run", "--list"], 0, "lookup: pooled_lookup, fbgemm default"),
    (["perf", "run", "--small", "--only", "KJT to_dict|wheel size", "--json", "a.json"], 0, "wheel size"),
    (["perf", "report", "a.json", "--html", "a.html"], 0, "wheel size"),
    (["perf", "compare", "a.json", "a.json", "--at-least", "1000"], 0, ""),
    *((words, 2, f"`shardwise {words[0]} {words[1]}` works on a checkout of shardwise") for words in (
        ["perf", "counts"], ["kernels", "check"], ["kernels", "check", "--target", "sm_90"], ["kernels", "registers"],
        ["kernels", "run"],
    )),
]  # fmt: skip
RUN_THEM = """
import json, sys
from click.testing import CliRunner
from shardwise.cli import commands
found = []
for words in json.loads(sys.argv[1]):
    done = CliRunner().invoke(commands(), words)
    found.append((done.exit_code, done.output + repr(done.exception)))
print("\\n" + json.dumps(found))
"""


@pytest.mark.full
def test_every_command_of_an_installed_wheel_works_or_asks_for_a_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    printed = run_process(
        "-c", RUN_THEM, json.dumps([words for words, _, _ in COMMANDS]), cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
    )  # fmt: skip
    for (words, status, text), (found, output) in zip(COMMANDS, json.loads(printed.splitlines()[-1]), strict=True):
        assert found == status and text in output, (words, found, output[-2000:])


def test_the_unpacked_wheel_imports_from_itself(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert imported_from(tmp_path) == str(tmp_path / "shardwise" / "jagged" / "__init__.py")


SAY = """
import json, sys
from shardwise._version import how_to_install
print(json.dumps([how_to_install(extra) for extra in sys.argv[1:]]))
"""


def test_from_a_wheel_an_extra_is_installed_by_the_names_of_its_packages(wheel: Path, tmp_path: Path) -> None:
    """Errors told everyone to `pip install '.[cpu]'`, which needs a checkout that users of a wheel do not have."""
    from packaging.requirements import Requirement

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    extras = PROJECT["project"]["optional-dependencies"]
    commands = json.loads(run_in_tree(tmp_path, "-c", SAY, *extras))
    for command, packages in zip(commands, extras.values(), strict=True):
        pip, install, *named = shlex.split(command)
        assert (pip, install) == ("pip", "install")
        assert [*map(Requirement, named)] == [*map(Requirement, packages)]


def test_where_nothing_is_known_of_an_extra_its_name_is_said(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if ".dist-info/" not in name])
    # nothing else that is installed has metadata of shardwise
    printed = run_process(
        "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SAY}", "cpu", cwd=tmp_path
    )
    assert json.loads(printed) == ["install what the extra 'cpu' of shardwise names"]


@pytest.mark.parametrize("gone", [FOLDERS, pytest.param(("jagged",), marks=pytest.mark.full)], ids=["all", "one"])
def test_a_checkout_without_links_imports_through_the_root(tmp_path: Path, gone: tuple[str, ...]) -> None:
    tree = checkout(tmp_path / "tree")
    for folder in gone:
        (tree / "shardwise" / folder).unlink()
    assert imported_from(tree) == str(tree / "jagged" / "__init__.py")


def imported_from(path: Path) -> str:
    """Where `shardwise.jagged` lies for a process that starts with `path` on its PYTHONPATH."""
    code = "import shardwise, shardwise.jagged; shardwise.KeyedJaggedTensor; print(shardwise.jagged.__file__)"
    return run_in_tree(path, "-c", code)
