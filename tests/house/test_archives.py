"""Wheels and source archives from a checkout, from one without links and from an archive are the same; what they say.

Takes 30 s: archives and wheels are built of four trees.
"""

from __future__ import annotations

import re
import subprocess
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from checkout import ROOT
from trees import FOLDERS, LINKS, Trees, archive_of, checkout, in_archive, in_wheel, run_in_tree, run_process, wheel_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    return Trees(tmp_path_factory.mktemp("archives"))


@pytest.mark.full
@pytest.mark.parametrize("kind", [*LINKS[1:], "archive"])
def test_every_tree_gives_the_same_wheel_and_archive(trees: Trees, kind: str) -> None:
    """A checkout by git with core.symlinks=false has text files for links.

    Its wheel had the files of shardwise/ alone, without a word, and failed at the first import. An archive lacked what
    the wheel lacks, tests and documents too.
    """
    for opened, built in ((in_wheel, wheel_of), (in_archive, archive_of)):
        expected, found = opened(built(trees["links"])), opened(built(trees[kind]))
        assert expected.keys() == found.keys()
        assert expected == found


@pytest.mark.full
def test_no_wheel_holds_a_link(trees: Trees) -> None:
    for kind in (*LINKS, "archive"):
        # in_archive refuses what is neither file nor folder
        assert {mode >> 12 for mode, _ in in_wheel(wheel_of(trees[kind])).values()} == {0o10}


def test_the_archive_has_what_git_has_and_no_text_for_links(trees: Trees) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    files = {name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink()}
    found = {name for name in in_archive(archive_of(trees["links"])) if not name.startswith("shardwise.egg-info/")}
    assert found == files | {"PKG-INFO", "setup.cfg"}
    assert not found & {f"shardwise/{folder}" for folder in FOLDERS}


@pytest.mark.full
def test_an_unpacked_archive_is_a_checkout_that_runs_its_tests(trees: Trees) -> None:
    tree = trees["archive"]
    code = "from shardwise._version import in_checkout; print(in_checkout())"
    assert run_in_tree(tree, "-c", code) == "True"
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/house/test_facade.py", "-k", "attribute or home")
    assert "2 passed" in run_in_tree(tree, *command)


METADATA = "import sys, setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"


def metadata(tree: Path, folder: Path) -> Message:
    """What an index is told of a tree."""
    name = run_process("-c", METADATA, str(folder), cwd=tree).splitlines()[-1]
    return Parser().parsestr((folder / name / "METADATA").read_text(encoding="utf-8"))


def of(told: Message, name: str) -> list[str]:
    return [str(value) for value in told.get_all(name) or []]


# [words](place) with a place in the checkout
RELATIVE = re.compile(r"\]\((?!https://|#)[^)]*\)")


def test_an_index_is_told_what_pyproject_says(tmp_path: Path) -> None:
    told = metadata(checkout(tmp_path / "tree"), tmp_path)
    extras = PROJECT["optional-dependencies"]
    assert of(told, "Provides-Extra") == [*extras]
    needed = [*PROJECT["dependencies"], *(f'{one}; extra == "{extra}"' for extra in extras for one in extras[extra])]
    assert [one.replace("'", '"') for one in of(told, "Requires-Dist")] == [one.replace("'", '"') for one in needed]
    assert told["License-Expression"] == "BSD-3-Clause" and of(told, "License-File") == ["LICENSE"]
    assert not [one for one in of(told, "Classifier") if one.startswith("License ::")]
    # the oldest that is required to the newest of the workflow, one by one
    pythons = [one.rpartition(" ")[2] for one in of(told, "Classifier") if re.search(r":: 3\.\d+$", one)]
    newest = max(re.findall(r'python: "3\.(\d+)"', (ROOT / ".github/workflows/ci.yml").read_text()), key=int)
    assert pythons == [f"3.{minor}" for minor in range(10, int(newest) + 1)]
    assert told["Requires-Python"] == f">={pythons[0]}"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"name: {told['Author']}\n" in citation


def test_readme_on_an_index_has_no_link_that_leads_nowhere(tmp_path: Path) -> None:
    """Links to files of the checkout are looked for beside the page, where an index has none of them."""
    tree = checkout(tmp_path / "tree")
    told = metadata(tree, tmp_path)
    assert told["Description-Content-Type"] == "text/markdown"
    page = str(told.get_payload())
    assert "docs/howto/migration.md has the steps" in page and not RELATIVE.search(page) and not of(told, "Project-URL")
    assert "\nPart of the page" in page


def test_readme_on_an_index_leads_to_the_sources_once_they_have_an_address(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree")
    setup = tree / "setup.py"
    text = setup.read_text(encoding="utf-8")
    (line,) = re.findall(r"^REPOSITORY = .*$", text, re.MULTILINE)
    setup.write_text(text.replace(line, 'REPOSITORY = "https://code.example/shardwise"'), encoding="utf-8")
    told = metadata(tree, tmp_path)
    page = str(told.get_payload())
    assert "[docs/howto/migration.md](https://code.example/shardwise/blob/HEAD/docs/howto/migration.md)" in page
    assert not RELATIVE.search(page)
    urls = dict(one.split(", ") for one in of(told, "Project-URL"))
    assert urls["Source"] == "https://code.example/shardwise" and {*urls} == {"Source", "Documentation", "Issues"}
