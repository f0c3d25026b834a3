"""Files for tools that do not run here agree with the rest of the tree, and what pages tell to install exists."""

from __future__ import annotations

import ast
import re
import sys

import pytest
from test_layering import ROOT, files

from shardwise._version import _packages, how_to_install

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_workflow_has_the_oldest_and_the_newest_of_make_matrix() -> None:
    pairs = re.findall(r"(\d+\.\d+\.\d+):(\d+\.\d+\.\d+)", (ROOT / "Makefile").read_text())
    pairs.sort(key=lambda pair: numbers(pair[0]))
    jobs = re.findall(r'python: "([\d.]+)", torch: "([\d.]+)", triton: "([\d.]+)"', WORKFLOW)
    assert [(torch, triton) for _, torch, triton in jobs] == [pairs[0], pairs[-1]]
    pythons = [python for python, _, _ in jobs]
    assert f">={pythons[0]}" == PROJECT["project"]["requires-python"] and numbers(pythons[1]) > numbers(pythons[0])
    torch = next(line for line in PROJECT["project"]["dependencies"] if line.startswith("torch>="))
    assert jobs[0][1].startswith(torch.removeprefix("torch>="))


def test_the_workflow_installs_what_the_makefile_does() -> None:
    [extras] = re.findall(r"^EXTRAS \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert f'-e ".[{extras}]"' in WORKFLOW
    assert not re.search(r"\t", WORKFLOW + HOOKS)


def test_hooks_and_constraints_have_one_ruff_and_all_folders() -> None:
    [pinned] = re.findall(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"rev: v{pinned}\n" in HOOKS
    [folders] = re.findall(r"files: \^\((.*)\)/", HOOKS)
    [built] = re.findall(r"^FOLDERS = (\(.*\))$", (ROOT / "setup.py").read_text(), re.M)
    assert sorted(folders.split("|")) == sorted(ast.literal_eval(built))


def test_the_citation_has_our_version() -> None:
    version = re.findall(r'__version__ = "(.*)"', (ROOT / "shardwise/_version.py").read_text())
    assert re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M) == version


def test_security_says_the_limit_that_files_have() -> None:
    from shardwise.untrusted import MAX_BYTES

    assert f"at most {MAX_BYTES // 2**20} MiB" in (ROOT / "SECURITY.md").read_text()


# by name, with or without extras; a checkout is a path
FROM_INDEX = re.compile(r"\bpip3? (?:install|download)\b[^\n#]*(?<!of)[\s'\"]shardwise\b(?!/)|\bshardwise\[[a-z]")
KINDS = ("*.py", "*.md", "*.toml", "*.txt", "Makefile", "run")


def pages() -> dict[str, str]:
    paths = {path for kind in KINDS for path in files(kind)} - {"tests/house/test_habits.py"}
    return {path: (ROOT / path).read_text() for path in sorted(paths)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install shardwise", True), ("pip install 'shardwise[cli]'", True), ("pip install -U \"shardwise\"", True),
        ("needs shardwise[serve]", True), ("pip install torch; cd shardwise", True),
        ("pip install '.[cli]' # of shardwise", False), ("pip install -e '.[dev]'", False),
        ("pip install shardwise/", False), ("shardwise[0]", False), ("import shardwise", False),
    ],
)  # fmt: skip
def test_the_pattern_sees(text: str, found: bool) -> None:
    assert bool(FROM_INDEX.search(text)) == found


def test_nothing_is_installed_from_the_index_by_our_name() -> None:
    """Errors and pages said "pip install shardwise[cli]", which found no such package.

    Once there is a release, pages and this test say so.
    """
    found = []
    for path, text in pages().items():
        for number, line in enumerate(text.splitlines(), 1):
            if FROM_INDEX.search(line) and path != "tests/house/test_habits.py":
                found.append(f"{path}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_the_extras_that_are_named_are_there() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = set()
    for path, text in pages().items():
        # they still ask for click, which comes with shardwise
        if path in ("shardwise/cli/__init__.py", "tests/cli/test_cli.py"):
            continue
        found = re.findall(r"how_to_install\(['\"](\w+)['\"]\)|\bextra `\[?(\w+)\]?`|['\"]\.\[([\w,]+)\]['\"]", text)
        names = {name for groups in found for group in groups for name in group.split(",") if name}
        assert names <= set(extras), path
        named |= names
    assert {"data", "migrate", "perf", "plan", "serve", "cpu"} <= named
    assert how_to_install("cpu") == 'pip install ".[cpu]" in a checkout of shardwise'


def test_no_extra_repeats_what_comes_with_shardwise() -> None:
    project = PROJECT["project"]
    always = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    assert {"click", "rich", "tomli"} <= always
    for extra, lines in project["optional-dependencies"].items():
        assert not always & {re.split(r"[^\w-]", line)[0] for line in lines}, extra


@pytest.mark.parametrize(
    ("requirements", "packages"),
    [
        (["torch>=2.9", 'numba>=0.60; extra == "cpu"', 'scipy>=1.11; extra == "plan"'], ["numba>=0.60"]),
        (["a; extra == 'cpu'", 'b[x]~=1.0 ; python_version < "3.11" and extra == "cpu"'],
         ["a", "b[x]~=1.0; python_version < '3.11'"]),
        (["torch>=2.9", 'numba>=0.60; extra == "cpus"'], []),
    ],
)  # fmt: skip
def test_the_packages_of_an_extra_are_read_from_metadata(requirements: list[str], packages: list[str]) -> None:
    assert _packages(requirements, "cpu") == packages
