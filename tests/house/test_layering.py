"""Who may import whom, read from the syntax tree: folders, rooms within them, and files; lazy imports count too."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from checkout import ROOT

FOLDERS = ("kernels", "jagged", "embeddings", "fbgemm", "planner", "sharding", "models", "data", "inference", "perf")
# a file past 500 lines asks whether it is two things, past 800 it is
MAX_LINES = 800
# Python modules side by side in a folder
MAX_MODULES = 20

# what all may import: the standard library is all that it needs
LEAVES = {"_installed", "_names", "errors", "_version", "untrusted"}
# folder -> the parts of shardwise it may import, itself and LEAVES apart; "" is the facade
OURS: dict[str, set[str]] = {
    "kernels": set(),
    "jagged": {"kernels"},
    "embeddings": {"jagged", "kernels"},
    "fbgemm": {"embeddings", "jagged", "kernels"},
    "planner": {"embeddings.config"},
    # of the planner the plain data about where tables go; its planning and `DistributedModelParallel` ask the planner
    "sharding": {"embeddings", "jagged", "kernels", "planner.layout", "planner.tiers"},
    "models": {"jagged", "embeddings", "data"},
    "data": {"kernels", "jagged", "embeddings"},
    "inference": {"kernels", "jagged", "embeddings", "sharding", "planner"},
    "perf": {"", *FOLDERS, "torchrec", "quant"},
    "shardwise": {"", *(set(FOLDERS) - {"perf"}), "torchrec", "quant"},
}
# folder -> libraries
THEIRS: dict[str, set[str]] = {
    "kernels": {"torch", "triton", "numba"},
    "jagged": {"torch"},
    "embeddings": {"torch"},
    "fbgemm": {"torch"},
    "planner": {"numpy", "scipy", "tqdm"},
    "sharding": {"torch", "safetensors", "numpy", "tqdm", "fsspec"},
    "models": {"torch", "torchmetrics"},
    "data": {"torch", "numpy", "numba", "pyarrow", "tqdm"},
    "inference": {"torch", "numpy", "safetensors"},
    "perf": {
        *("torch", "triton", "numba", "numpy", "scipy", "tqdm", "click", "rich", "pytest", "safetensors"),
        *("fbgemm_gpu", "torchrec", "pyarrow"),
    },
    "shardwise": {"torch", "click", "rich", "tqdm", "libcst"},
}
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_reduce"),
    *("all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "isend", "irecv"),
}
# the commands that run it; nothing else imports perf
COMMANDS_OF_PERF = tuple(f"shardwise/cli/{name}.py" for name in ("doctor", "env", "perf", "tune", "kernels"))
# perf drives the facade as users do, and its commands load it when they are called
LAZY_PAIRS = {("perf", "shardwise")}
# room -> the rooms of the same folder that it may import; a room is a folder, and the face of a top folder (which may
# show all that lies below it, and which nothing below it imports) is one by itself
ROOMS: dict[str, set[str]] = {
    "data/torchrec": {"data"},
    "embeddings/collections": {"embeddings", "embeddings/optim", "embeddings/tables"},
    "embeddings/managed_collision": {"embeddings", "embeddings/collections", "embeddings/tables"},
    "embeddings/optim": {"embeddings", "embeddings/tables"},
    "embeddings/pools": set(),
    "embeddings/pruning": {"embeddings", "embeddings/collections"},
    "embeddings/quant": {"embeddings", "embeddings/collections", "embeddings/managed_collision", "embeddings/tables"},
    "embeddings/tables": {"embeddings"},
    "embeddings/tiers": {"embeddings/tables"},
    "embeddings/torchrec": {"embeddings/tables"},
    "fbgemm/tables": {"fbgemm"},
    "jagged/compiled": {"jagged"},
    "kernels/cpu": {"kernels"},
    "kernels/files": {"kernels", "kernels/cpu"},
    "kernels/jagged": {"kernels", "kernels/cpu", "kernels/lookup"},
    "kernels/lookup": {"kernels", "kernels/cpu"},
    "kernels/quantized": {"kernels", "kernels/cpu"},
    "kernels/rows": {"kernels", "kernels/cpu"},
    "kernels/update": {"kernels", "kernels/cpu", "kernels/lookup"},
    "perf": {"perf/suite", "perf/suite/cases"},
    "perf/compile": {"perf/selftest", "perf/tune"},
    "perf/counts": {"perf/suite"},
    "perf/doctor": {"perf/selftest", "perf/suite"},
    "perf/evidence": {"perf/counts", "perf/suite", "perf/suite/cases", "perf/suite/operations"},
    "perf/evidence/canary": {"perf/evidence", "perf/suite"},
    "perf/evidence/clicks": {"perf/evidence", "perf/suite", "perf/suite/cases"},
    "perf/evidence/fbgemm": {"perf/counts", "perf/evidence", "perf/evidence/fbgemm/calls", "perf/suite"},
    "perf/evidence/modules": {"perf/evidence", "perf/suite"},
    "perf/evidence/nodes": {"perf/evidence", "perf/suite", "sharding/testing"},
    "perf/evidence/same_bits": {"perf/counts", "perf/evidence", "perf/suite"},
    "perf/evidence/tiers": {"perf/evidence", "perf/evidence/same_bits", "perf/suite"},
    "perf/gpu/cases": {"perf/gpu", "perf/selftest", "perf/suite"},
    "perf/gpu_scripts": {"perf/counts", "perf/suite", "perf/suite/cases", "perf/suite/operations", "perf/tune"},
    "perf/selftest": {"perf/suite"},
    "perf/suite/cases": {"perf/suite", "perf/suite/operations"},
    "perf/tune": {"perf/suite", "perf/suite/cases"},
    "planner/cost": {"planner", "planner/search", "planner/torchrec"},
    "planner/plan": {"planner", "planner/cost", "planner/search"},
    "planner/reports": {"planner", "planner/plan", "planner/search"},
    "planner/torchrec": {"planner", "planner/search"},
    "sharding/calibration": {"sharding/comms", "sharding/dmp", "sharding/engine", "sharding/modules", "sharding/plan"},
    "sharding/checkpoint": {"sharding/comms", "sharding/dmp", "sharding/engine", "sharding/plan", "sharding/pools"},
    "sharding/compiled": {"sharding/comms"},
    "sharding/dmp": {
        "sharding/comms",
        "sharding/compiled",
        "sharding/engine",
        "sharding/modules",
        "sharding/plan",
        "sharding/planning",
    },
    "sharding/engine": {"sharding/comms", "sharding/compiled", "sharding/plan"},
    "sharding/modules": {
        "sharding/comms",
        "sharding/compiled",
        "sharding/engine",
        "sharding/plan",
        "sharding/quant",
    },
    "sharding/pipeline": {
        "sharding/comms",
        "sharding/dmp",
        "sharding/engine",
        "sharding/modules",
        "sharding/plan",
        "sharding/quant",
    },
    "sharding/plan": {"sharding/comms"},
    "sharding/planning": {"sharding/comms", "sharding/modules", "sharding/plan", "sharding/quant"},
    "sharding/pools": {"sharding/comms", "sharding/engine", "sharding/plan"},
    "sharding/quant": {"sharding/comms", "sharding/plan"},
    "sharding/testing": {"sharding/comms", "sharding/dmp", "sharding/modules", "sharding/plan"},
    "sharding/torchrec": {"sharding/comms", "sharding/engine", "sharding/modules", "sharding/plan", "sharding/quant"},
    "shardwise/__main__.py": {"shardwise/cli"},
    "shardwise/cli": {"shardwise/checkpoint.py", "shardwise/migration"},
    "shardwise/migration": {"shardwise/__init__.py"},
    "shardwise/migration/canary": set(),
    "shardwise/served": {"shardwise/migration"},
    "shardwise/torchrec.py": {"shardwise/migration"},
}
ABSOLUTE = re.compile(r"(?<![\w.$}~])/(?:work|root|home|Users|tmp|opt|mnt)/")


def violations(path: str, source: str) -> list[str]:
    """What `source`, the file at `path` below the root, imports or calls that its place in the house forbids."""
    folder = path.split("/")[0]
    found = []
    tree = ast.parse(source)
    imported = list(_imports(path, tree))
    libraries = {name.split(".")[0] for _, name in imported}
    for line, name in imported:
        top, _, part = name.partition(".")
        if top == "shardwise":
            allowed = OURS[folder] | {folder, *LEAVES}
            if path.startswith(("sharding/dmp/dmp.py", "sharding/planning/", "sharding/calibration/")):
                allowed = allowed | {"planner"}
            if path in COMMANDS_OF_PERF:
                allowed = allowed | {"perf"}
            # a name taken from the facade itself comes as "shardwise.<name>"
            if part.split(".")[0] not in {*FOLDERS, "torchrec", "quant", *LEAVES}:
                part = ""
            if not any(part == area or (area and part.startswith(f"{area}.")) for area in allowed):
                found.append(f"{path}:{line}: {folder} may not import {name}")
        elif top in FOLDERS:
            found.append(f"{path}:{line}: {name} is another package; import shardwise.{name}")
        elif name.startswith("torch.distributed") and folder not in ("sharding", "perf"):
            found.append(f"{path}:{line}: only sharding may import {name}")
        elif top == "numpy" and folder == "kernels" and ("numba" in libraries or path == "kernels/rule.py"):
            # a numba loop works on numpy arrays, and numpy's square root is rounded correctly where torch's is not
            continue
        elif top not in THEIRS[folder] and top not in sys.stdlib_module_names:
            found.append(f"{path}:{line}: {folder} may not import the library {name}")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        dotted = ast.unparse(node)
        if dotted == "torch.distributed" and folder not in ("sharding", "perf"):
            found.append(f"{path}:{node.lineno}: only sharding may use {dotted}")
        owner, _, name = dotted.rpartition(".")
        # perf drives peers as well, which have collectives of their own
        elsewhere = path != "sharding/comms/exchange.py" and folder != "perf"
        if owner in ("dist", "torch.distributed") and name in COLLECTIVES and elsewhere:
            found.append(f"{path}:{node.lineno}: {dotted} belongs in sharding/comms/exchange.py")
    return found


def _imports(path: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything `path` imports; `from a import b` counts as a.b."""
    package = [*(() if path.startswith("shardwise/") else ("shardwise",)), *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # names of libraries do not matter, but those of shardwise and torch may be modules
            whole = base.split(".")[0] in ("shardwise", "torch")
            yield from ((node.lineno, f"{base}.{alias.name}" if whole else base) for alias in node.names)


def files(pattern: str = "*.py") -> list[str]:
    places = [ROOT / folder for folder in (*FOLDERS, "shardwise", "tests", "examples", "docs", ".ci")]
    # the links in shardwise/ are not followed
    below = [file for place in places for file in place.rglob(pattern) if not _linked(file)]
    return sorted(str(file.relative_to(ROOT)) for file in [*below, *ROOT.glob(pattern)] if file.is_file())


def _linked(file: Path) -> bool:
    return any((ROOT / parent).is_symlink() for parent in file.relative_to(ROOT).parents)


@pytest.mark.parametrize("folder", [*FOLDERS, "shardwise"])
def test_imports_stay_within_the_layers(folder: str) -> None:
    own = [path for path in files() if path.startswith(f"{folder}/")]
    assert own, f"{folder} is empty"
    found = [message for path in own for message in violations(path, (ROOT / path).read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/a.py", "from shardwise.jagged import KeyedJaggedTensor"),
        ("kernels/a.py", "import numpy as np"),
        ("kernels/a.py", "def f():\n    from ..embeddings import config"),
        ("kernels/a.py", "from kernels import bounds"),
        ("jagged/a.py", "from .. import embeddings"),
        ("jagged/a.py", "import shardwise"),
        ("jagged/a.py", "import triton"),
        ("jagged/deep/a.py", "from ...sharding import layout"),
        ("embeddings/a.py", "if TYPE_CHECKING:\n    from ..sharding.plan import ShardingPlan"),
        ("embeddings/a.py", "import torch.distributed as dist"),
        ("embeddings/a.py", "from torch import distributed"),
        ("embeddings/a.py", "import torch\n\ndef f():\n    return torch.distributed.get_rank()"),
        ("planner/a.py", "import torch"),
        ("planner/a.py", "from ..sharding import exchange"),
        ("planner/a.py", "from ..sharding.layouts import x"),
        ("planner/a.py", "from ..embeddings import EmbeddingBagCollection"),
        ("sharding/plan/plan.py", "from ...planner import search"),
        ("sharding/plan/plan.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("models/a.py", "from shardwise.kernels.lookup.pooled import pooled"),
        ("data/a.py", "from ..sharding import dmp"),
        ("data/a.py", "import pandas"),
        ("shardwise/cli/__init__.py", "from .. import perf"),
        ("models/a.py", "from shardwise.perf import cases"),
        ("shardwise/cli/plan.py", "from ..perf import suite"),
    ],
)  # fmt: skip
def test_the_checker_sees(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/a.py", "import math\nimport triton.language as tl\nfrom torch import Tensor\nfrom . import _op"),
        ("kernels/cpu.py", "import numba\nimport numpy as np"),
        ("sharding/plan/plan.py", "from ...planner.layout import Shard\nfrom ...planner import layout"),
        ("planner/b.py", "import numpy as np\nfrom shardwise.embeddings.config import PoolingType"),
        ("sharding/dmp/dmp.py", "from ..planner import plan\nimport torch.distributed as dist\ndist.get_rank()"),
        ("sharding/comms/exchange.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        (
            "models/a.py",
            "from shardwise.embeddings import EmbeddingBagCollection\nfrom shardwise.jagged import KeyedTensor",
        ),
        ("perf/a.py", "from shardwise.sharding import dmp\nimport torch.distributed"),
        ("shardwise/__init__.py", "from ._version import __version__\nfrom .jagged import JaggedTensor"),
        ("shardwise/cli/perf.py", "def f():\n    from .perf.cases import CASES"),
    ],
)  # fmt: skip
def test_the_checker_lets_pass(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_a_leaf_imports_nothing_of_ours_and_no_library() -> None:
    for leaf in LEAVES:
        path = f"shardwise/{leaf}.py"
        tops = {name.split(".")[0] for _, name in _imports(path, ast.parse((ROOT / path).read_text()))}
        assert tops <= set(sys.stdlib_module_names), f"{path} imports {tops}"


def room_of(path: str) -> str:
    """The room of a file: its folder. The face of a top folder is a room by itself: its `__init__.py`, and each of the
    files that lie in shardwise/ itself."""
    folder, _, name = path.rpartition("/")
    return path if folder == "shardwise" or (name == "__init__.py" and folder in FOLDERS) else folder


def imported_files(sources: dict[str, str], *, typing: bool = True) -> dict[str, set[str]]:
    """Path -> paths of our own files that it imports, also lazily; `typing=False` leaves TYPE_CHECKING out."""
    modules = {_module(path): path for path in sources}
    leaves = {f"shardwise/{leaf}.py" for leaf in LEAVES}
    arrows: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = {name if name in modules else name.rpartition(".")[0] for name in _names_in(path, source, typing)}
        arrows[path] = {modules[name] for name in names & modules.keys()} - {path} - leaves
    return arrows


@cache
def _names_in(path: str, source: str, typing: bool) -> frozenset[str]:
    tree = ast.parse(source)
    if not typing:
        _drop_type_checking(tree)
    return frozenset(name for _, name in _imports(path, tree))


def _module(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if path.startswith("shardwise/") else f"shardwise.{name}"


def _drop_type_checking(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            node.body = [ast.Pass()]


def room_faults(arrows: dict[str, set[str]]) -> list[str]:
    """Arrows between rooms that ROOMS does not allow."""
    broken = []
    for path, targets in sorted(arrows.items()):
        room = room_of(path)
        top = path.split("/")[0]
        for target in sorted(targets):
            other = room_of(target)
            # arrows between top folders are held by OURS; a face shows what lies below it
            if other == room or target.split("/")[0] != top or path == room:
                continue
            if other not in ROOMS.get(room, set()):
                broken.append(f"{path} imports {target}: {room} may not import {other}")
    return broken


def two_way(arrows: dict[str, set[str]]) -> list[str]:
    """Pairs of rooms, and of top folders, that import each other."""
    pairs = {(room_of(path), room_of(target)) for path, targets in arrows.items() for target in targets}
    pairs |= {(path.split("/")[0], target.split("/")[0]) for path, targets in arrows.items() for target in targets}
    return sorted(f"{a} <-> {b}" for a, b in pairs if a < b and (b, a) in pairs and (a, b) not in LAZY_PAIRS)


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Files that import each other in a circle."""
    known: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(path: str) -> None:
        known[path] = low[path] = len(known)
        stack.append(path)
        for target in arrows.get(path, ()):
            if target not in known:
                visit(target)
            if target in stack:
                low[path] = min(low[path], low[target])
        if low[path] == known[path]:
            circle = stack[stack.index(path) :]
            del stack[stack.index(path) :]
            if len(circle) > 1:
                circles.append(sorted(circle))

    for path in sorted(arrows):
        if path not in known:
            visit(path)
    return circles


@cache
def product() -> dict[str, str]:
    return {path: (ROOT / path).read_text() for path in files() if path.split("/")[0] in (*FOLDERS, "shardwise")}


def test_rooms_import_as_the_table_allows() -> None:
    broken = room_faults(imported_files(product()))
    assert not broken, "\n".join(broken)


def test_the_table_of_rooms_has_no_arrow_too_many() -> None:
    arrows = imported_files(product())
    used = {(room_of(path), room_of(target)) for path, targets in arrows.items() for target in targets}
    assert [
        f"{room} -> {other}" for room, others in ROOMS.items() for other in others if (room, other) not in used
    ] == []


def test_no_two_rooms_and_no_two_folders_import_each_other() -> None:
    assert two_way(imported_files(product())) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert cycles(imported_files(product(), typing=False)) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kernels/cpu/lookup.py", "from ..lookup import pooled"),
        ("sharding/comms/env.py", "def f():\n    from ..engine import route"),
        ("planner/search/solve.py", "from ..cost import shardwise"),
        ("planner/search/problem.py", "from ..torchrec import options"),
        ("sharding/engine/collection.py", "if TYPE_CHECKING:\n    from ..torchrec import comm_ops"),
        ("perf/suite/case.py", "from ..evidence import parity"),
    ],
)
def test_a_planted_arrow_back_fails(path: str, line: str) -> None:
    sources = product()
    assert path in sources
    arrows = imported_files({**sources, path: f"{sources[path]}\n{line}\n"})
    assert room_faults(arrows) and two_way(arrows)


def test_a_planted_circle_fails() -> None:
    sources = {"data/a.py": "from . import b", "data/b.py": "def f():\n    from .a import x"}
    assert cycles(imported_files(sources)) == [["data/a.py", "data/b.py"]]
    back = {"data/a.py": "from ..jagged import c", "jagged/c.py": "from ..data.a import x"}
    assert two_way(imported_files(back)) == ["data <-> jagged"]
    hidden = {"data/a.py": "from . import b", "data/b.py": "if TYPE_CHECKING:\n    from .a import x"}
    assert cycles(imported_files(hidden, typing=False)) == []


def test_kernels_are_reached_through_the_faces_of_their_rooms() -> None:
    rooms = {room for room in ROOMS if room.startswith("kernels/")}
    deep = [
        f"{path} imports {target}"
        for path, targets in imported_files(product()).items()
        # perf compiles, counts and executes the kernels themselves
        if path.split("/")[0] not in ("kernels", "perf")
        for target in sorted(targets)
        if room_of(target) in rooms and not target.endswith("/__init__.py")
    ]
    assert deep == []


def test_no_file_is_longer_than_eight_hundred_lines() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in files()}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_no_folder_has_more_than_twenty_modules_side_by_side() -> None:
    folders = Counter(path.rpartition("/")[0] for path in files() if not path.endswith("__init__.py"))
    assert {folder: count for folder, count in folders.items() if count > MAX_MODULES} == {}


def test_no_file_names_a_place_on_one_machine() -> None:
    found = []
    for pattern in ("*.py", "*.md", "*.toml", "*.txt", "*.yml", "*.yaml", "*.sh", "Makefile", "run"):
        for path in files(pattern):
            for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
                if ABSOLUTE.search(line):
                    found.append(f"{path}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_no_public_name_is_listed_twice() -> None:
    found = {}
    for path in files("__init__.py"):
        for node in ast.parse((ROOT / path).read_text()).body:
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "__all__"
                and "*" not in (text := ast.unparse(node.value))
            ):
                found[path] = ast.literal_eval(text)
    assert len(found) > 5
    assert {path: names for path, names in found.items() if len(names) != len({*names})} == {}
