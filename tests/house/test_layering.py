"""Who may import whom, read from the syntax tree: also inside functions and under TYPE_CHECKING."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "jagged", "embeddings", "planner", "sharding", "models", "data", "inference", "perf")
MAX_LINES = 500

# what all may import: the standard library is all that it needs
LEAVES = {"_version", "untrusted"}
# folder -> the parts of shardwise it may import, itself and LEAVES apart; "" is the facade
OURS: dict[str, set[str]] = {
    "kernels": set(),
    "jagged": {"kernels"},
    "embeddings": {"jagged", "kernels"},
    "planner": {"sharding.layout", "embeddings.config"},
    "sharding": {"embeddings", "jagged", "kernels"},
    "models": {"", "jagged", "embeddings", "data"},
    "data": {"", "jagged", "embeddings"},
    "inference": {"", "quant", "kernels", "jagged", "embeddings", "sharding", "planner"},
    "perf": {"", *FOLDERS, "torchrec", "quant"},
    "shardwise": {"", *(set(FOLDERS) - {"perf"}), "torchrec", "quant"},
}
# folder -> libraries
THEIRS: dict[str, set[str]] = {
    "kernels": {"torch", "triton", "numba"},
    "jagged": {"torch"},
    "embeddings": {"torch"},
    "planner": {"numpy", "scipy", "tqdm"},
    "sharding": {"torch", "safetensors", "numpy", "tqdm"},
    "models": {"torch", "torchmetrics"},
    "data": {"torch", "numpy", "pyarrow", "tqdm"},
    "inference": {"torch", "numpy", "safetensors"},
    "perf": {"torch", "triton", "numba", "numpy", "scipy", "tqdm", "click", "rich", "pytest", "fbgemm_gpu", "torchrec"},
    "shardwise": {"torch", "click", "rich", "tqdm", "libcst"},
}
COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "isend", "irecv"),
}
# the commands that run it; nothing else imports perf
COMMANDS_OF_PERF = tuple(f"shardwise/cli_{name}.py" for name in ("perf", "counts", "tune", "kernels_run"))
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
            if path.startswith(("sharding/dmp/dmp.py", "sharding/planning/")):
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
        ("sharding/plan/plan.py", "from ..planner import search"),
        ("sharding/plan/plan.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("models/a.py", "from shardwise.kernels.lookup.pooled import pooled"),
        ("data/a.py", "from ..sharding import dmp"),
        ("data/a.py", "import pandas"),
        ("shardwise/cli/main.py", "from . import perf"),
        ("models/a.py", "from shardwise.perf import cases"),
        ("shardwise/cli/plan.py", "from .perf import cases"),
    ],
)  # fmt: skip
def test_the_checker_sees(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/a.py", "import math\nimport triton.language as tl\nfrom torch import Tensor\nfrom . import _op"),
        ("kernels/cpu.py", "import numba\nimport numpy as np"),
        ("planner/a.py", "from ..sharding.layout import Shard\nfrom ..sharding import layout"),
        ("planner/b.py", "import numpy as np\nfrom shardwise.embeddings.config import PoolingType"),
        ("sharding/dmp/dmp.py", "from ..planner import plan\nimport torch.distributed as dist\ndist.get_rank()"),
        ("sharding/comms/exchange.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
        ("models/a.py", "from shardwise import EmbeddingBagCollection\nfrom shardwise.jagged import KeyedTensor"),
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


def test_no_file_is_longer_than_five_hundred_lines() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in files()}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


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
