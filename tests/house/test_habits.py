"""Files for tools that do not run here: their versions, marks and folders are those of the rest of the tree."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
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


def test_without_processes_leaves_every_mark_out() -> None:
    marks = {mark.split(":")[0] for mark in PROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    [quick] = re.findall(r"^ +QUICK: (.*)$", WORKFLOW, re.M)
    assert set(quick.split(" and ")) == {f"not {mark}" for mark in marks}


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
