"""What a user installs: one small wheel that holds every folder, also from a checkout that lost the links.

Takes 25 s: wheels are built, and every command runs from one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from shardwise.perf.suite.cases import package

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDERS = ("data", "embeddings", "inference", "jagged", "kernels", "models", "perf", "planner", "sharding")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LEFT_BEHIND = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")


def checkout(to: Path) -> Path:
    """A copy of what git would archive, links as links."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=LEFT_BEHIND)
    return to


# how the links arrive: git; git with core.symlinks=false and most unpackers of zip files; archives that drop them
LINKS = ("links", "text", "missing")


def without_links(tree: Path, links: str) -> Path:
    for folder in FOLDERS if links != "links" else ():
        (tree / "shardwise" / folder).unlink()
        if links == "text":
            (tree / "shardwise" / folder).write_text(f"../{folder}")
    return tree


def run(*arguments: str, fails: bool = False, **options: Any) -> str:
    """What a Python process prints, which ends well, or `fails`."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, **options)
    printed: str = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, printed
    return printed if fails else done.stdout.strip()


def build(tree: Path, *options: str, fails: bool = False) -> str:
    return run("-m", "build", "--no-isolation", "--outdir", str(tree / "out"), *options, str(tree), fails=fails)


class Trees(dict[str, Path]):
    """A checkout of each kind with the wheel in out/, that of "text" built from a source archive beside it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, links: str) -> Path:
        tree = self[links] = without_links(checkout(self._folder / links), links)
        build(tree, *(["--wheel"] if links != "text" else []))
        return tree


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel(trees: Trees) -> Path:
    return wheel_of(trees["links"])


def wheel_of(tree: Path) -> Path:
    (built,) = (tree / "out").glob("*.whl")
    return built


@pytest.mark.full
@pytest.mark.parametrize("links", LINKS[1:])
def test_a_checkout_without_links_gives_the_same_wheel(trees: Trees, links: str) -> None:
    """A checkout by git with core.symlinks=false has text files for links.

    Its wheel had the files of shardwise/ alone, without a word, and failed at the first import.
    """
    contents = []
    for tree in (trees["links"], trees[links]):
        with zipfile.ZipFile(wheel_of(tree)) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
            contents.append({name: archive.read(name) for name in names})
    assert contents[0].keys() == contents[1].keys()
    assert contents[0] == contents[1]


@pytest.mark.full
def test_no_archive_holds_a_link(trees: Trees) -> None:
    for tree in (trees[links] for links in LINKS):
        with zipfile.ZipFile(wheel_of(tree)) as archive:
            assert {stat.S_IFMT(entry.external_attr >> 16) for entry in archive.infolist()} == {stat.S_IFREG}
    (source,) = (trees["text"] / "out").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        entries = archive.getmembers()
    assert all(entry.isfile() or entry.isdir() for entry in entries)
    # and no text in a link's place
    below = {entry.name.split("/", 1)[1] for entry in entries if entry.isfile()}
    assert {"setup.py", "kernels/lookup/pooled.py", "shardwise/__init__.py"} <= below
    assert not below & {f"shardwise/{folder}" for folder in FOLDERS}


def test_a_tree_that_lacks_a_folder_is_not_built(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree")
    shutil.rmtree(tree / "planner")
    assert "it lacks planner; take a whole checkout" in build(tree, "--wheel", fails=True)
    assert not [*tree.glob("out/*")]


@pytest.mark.parametrize("links", ["links", *(pytest.param(kind, marks=pytest.mark.full) for kind in LINKS[1:])])
def test_an_editable_install_finds_every_folder(trees: Trees, links: str, tmp_path: Path) -> None:
    code = "import sys, setuptools.build_meta as b; b.build_editable(sys.argv[1])"
    run("-c", code, str(tmp_path), cwd=trees[links])
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(tmp_path)
    # without the site packages: shardwise itself may be installed there
    look = "import importlib.util as u, site, sys; site.addsitedir(sys.argv[1])\n"
    look += "for name in sys.argv[2:]: print(u.find_spec(f'shardwise.{name}').origin)"
    found = run("-I", "-S", "-c", look, str(tmp_path), *FOLDERS, "perf.suite.cases", "served")
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


# the library alone takes 1.05 MB of it, the suite and the tuner 0.13, the check-up and its self-test 0.05
MOST_BYTES = 1_300_000


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
    build(tree, "--wheel")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.namelist() == names


@pytest.mark.full
def test_an_unpacked_source_archive_is_no_checkout(trees: Trees, tmp_path: Path) -> None:
    """It has a pyproject.toml, and lacks the rooms that a wheel lacks."""
    (source,) = (trees["text"] / "out").glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    code = "from shardwise._version import in_checkout; print(in_checkout())"
    for folder, expected in ((tree, "False"), (ROOT, "True")):
        assert run("-c", code, cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}) == expected


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
    printed = run(
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
    commands = json.loads(run("-c", SAY, *extras, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}))
    for command, packages in zip(commands, extras.values(), strict=True):
        pip, install, *named = shlex.split(command)
        assert (pip, install) == ("pip", "install")
        assert [*map(Requirement, named)] == [*map(Requirement, packages)]


def test_where_nothing_is_known_of_an_extra_its_name_is_said(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path, [name for name in archive.namelist() if ".dist-info/" not in name])
    # nothing else that is installed has metadata of shardwise
    printed = run("-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SAY}", "cpu", cwd=tmp_path)
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
    return run("-c", code, cwd=path, env={**os.environ, "PYTHONPATH": str(path)})
