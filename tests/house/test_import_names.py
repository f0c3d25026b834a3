"""No module can be imported under two names, and everything but type checkers works in a checkout without links.

Takes 90 s: all of shardwise is imported in three trees, and ranks, commands and tests are run in them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from checkout import ROOT
from trees import FOLDERS, LINKS, checkout, run_in_tree, without_links

IMPORT = """
import importlib, json, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        said = None
    except ImportError as error:
        said = str(error)
    print(json.dumps([name, said]))
"""


@pytest.mark.parametrize("folders", [FOLDERS, ("planner.cost.model", "kernels.lookup", "perf.suite")])
def test_a_folder_alone_says_its_name(folders: tuple[str, ...]) -> None:
    """Where the root is on the path `import kernels` gave a second copy, whose classes were not those of shardwise."""
    for line in run_in_tree(ROOT, "-c", IMPORT, *folders).splitlines():
        name, said = json.loads(line)
        folder = name.split(".")[0]
        assert said == f"import shardwise.{folder}: '{folder}' alone would be a second copy of it"


# whatever lies in a tree, by every name that might find it
IMPORT_ALL = """
import importlib, json, os, sys
from pathlib import Path
folders, root = json.loads(sys.argv[1]), Path.cwd()
paths = [path for folder in ("shardwise", *folders) for path in root.joinpath(folder).rglob("*.py")]
paths = [path.relative_to(root) for path in paths if not any((root / parent).is_symlink() for parent in path.parents)]
# served/ stands for other libraries once they are asked for
paths = [path for path in paths if path.stem not in ("__main__", "conftest", "test_cases")]
paths = [path for path in paths if "served" not in path.parts]
bare = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
right = [name if name.split(".")[0] == "shardwise" else f"shardwise.{name}" for name in bare]
wrong = [name for name in bare if name.split(".")[0] != "shardwise"]
wrong += ["shardwise." + name for name in bare if name.split(".")[0] == "shardwise"]
wrong += ["shardwise.setup", "shardwise.tests", "shardwise.examples.quickstart"]
failed, alone = {}, []
for name in wrong + right + wrong:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
alone = [name for name in wrong if name not in failed]
files = {}
for name, module in list(sys.modules.items()):
    if getattr(module, "__file__", None) and os.path.realpath(module.__file__).startswith(str(root)):
        files.setdefault(os.path.realpath(module.__file__), set()).add(name)
twice = [sorted(names) for names in files.values() if len(names) > 1]
print("\\n" + json.dumps([sum(name not in failed for name in right), len(files), alone, twice,
                         {name: failed[name] for name in right if name in failed}]))
"""


@pytest.mark.full
@pytest.mark.parametrize("links", LINKS)
def test_no_file_is_loaded_under_two_names(links: str, tmp_path: Path) -> None:
    """Without links the whole root was on shardwise's path: `shardwise.shardwise` and `shardwise.tests` were found."""
    tree = without_links(checkout(tmp_path / "tree"), links).resolve()
    printed = run_in_tree(tree, "-W", "ignore", "-c", IMPORT_ALL, json.dumps(FOLDERS))
    imported, files, alone, twice, failed = json.loads(printed.splitlines()[-1])
    assert (alone, twice) == ([], []) and 400 < imported <= files
    # what needs a library that is not here says which
    assert all("No module named" in said or "needs" in said for said in failed.values()), failed


SPAWNED = """
import multiprocessing, sys
from shardwise.kernels import Feature
import shardwise.jagged

def place(_):
    import shardwise.planner.layout
    return shardwise.planner.layout.__file__, Feature.__module__

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        if method in multiprocessing.get_all_start_methods():
            with multiprocessing.get_context(method).Pool(1) as pool:
                print(*pool.map(place, [0])[0])
"""


@pytest.mark.full
@pytest.mark.parametrize("links", LINKS)
def test_processes_commands_and_tests_run_in_every_checkout(
    links: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a new folder would compile its loops anew
    monkeypatch.setenv("SHARDWISE_NUMBA", "0")
    tree = without_links(checkout(tmp_path / "tree"), links)
    (tmp_path / "spawned.py").write_text(SPAWNED)
    lines = run_in_tree(tree, str(tmp_path / "spawned.py")).splitlines()
    assert lines and {line.split()[1] for line in lines} == {"shardwise.kernels.features"}
    assert {Path(line.split()[0]).resolve() for line in lines} == {(tree / "planner" / "layout.py").resolve()}
    assert "shardwise, version" in run_in_tree(tree, "-m", "shardwise", "--version")
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "examples/quickstart.py")
    run_in_tree(tree, *ranks)
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/house/test_facade.py", "-k", "attribute or home")
    assert "2 passed" in run_in_tree(tree, *tests)
    assert " passed" in run_in_tree(tree, "-m", "pytest", "-q", "perf/", "--small", "--only-case", "KJT to_dict")


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize("links", LINKS)
def test_where_types_cannot_be_checked_make_says_why(links: str, tmp_path: Path) -> None:
    """mypy and pyright find a package by its folder alone; they said 76 and 3,808 errors, and none of them why."""
    (tmp_path / "shardwise").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / "shardwise" / folder).symlink_to(f"../{folder}")
    without_links(tmp_path, links)
    done = subprocess.run(["make", "links"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) == (links == "links")
    assert links == "links" or "git config core.symlinks true" in done.stdout
    for folder in FOLDERS if links == "links" else ():
        (tmp_path / "shardwise" / folder).unlink()
        done = subprocess.run(["make", "links"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode and f"need the link shardwise/{folder} -> ../{folder}," in done.stdout
        (tmp_path / "shardwise" / folder).symlink_to(f"../{folder}")
