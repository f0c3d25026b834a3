"""The facade: every public name resolves, importing it costs nothing, and optional libraries stay optional."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap

import pytest
from checkout import ROOT

import shardwise

FACADE = ROOT / "shardwise" / "__init__.py"

LOOKUP = """
import torch
from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
table = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
collection = EmbeddingBagCollection(tables=[table])
kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 0, 1]))
pooled = collection(kjt)["f"]
weight = next(iter(collection.parameters()))
assert torch.allclose(pooled, torch.stack([weight[1] + weight[2], torch.zeros(4), weight[1]]))
pooled.sum().backward()
"""

# a machine without triton, as far as Python can tell
WITHOUT_TRITON = """
import sys, warnings
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util
find_spec = importlib.util.find_spec
def find_no_triton(name, package=None):
    return None if name.split(".")[0] == "triton" else find_spec(name, package)
importlib.util.find_spec = find_no_triton
sys.meta_path.insert(0, NoTriton())
import torch
"""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_all_home_and_the_imports_for_type_checkers_agree() -> None:
    tree = ast.parse(FACADE.read_text())
    checked = {
        alias.asname or alias.name: node.module
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert checked == shardwise._HOME
    assert sorted(shardwise.__all__) == sorted([*shardwise._HOME, "__version__"])


@pytest.mark.parametrize("name", shardwise.__all__)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(shardwise, name)
    assert name in dir(shardwise)
    if isinstance(value, type):
        assert value.__module__.startswith("shardwise.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Mystery'"):
        _ = shardwise.Mystery


def test_importing_shardwise_imports_nothing_else() -> None:
    out = run("import sys, torch; old = set(sys.modules); import shardwise; print(*sorted(set(sys.modules) - old))")
    assert out.split() == ["shardwise", "shardwise._version"]


def test_shardwise_does_not_import_torch_by_itself() -> None:
    assert run("import sys, shardwise; print('torch' in sys.modules)").strip() == "False"


@pytest.mark.full
def test_a_step_imports_no_optional_library_but_triton_and_numba() -> None:
    out = run(f"import sys, torch; old = set(sys.modules)\n{LOOKUP}\nprint(*sorted(set(sys.modules) - old))")
    # what a C extension of torch or triton registers has no file and no package
    tops = {name.split(".")[0] for name in out.split()}
    # numba itself takes scipy where it is installed
    optional = {"click", "rich", "pyarrow", "torchmetrics", "pandas", "safetensors"}
    assert not tops & optional


def test_everything_resolves_and_runs_without_triton_and_without_a_warning() -> None:
    run(
        WITHOUT_TRITON
        + textwrap.dedent("""
        import shardwise
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for name in shardwise.__all__:
                getattr(shardwise, name)
        """)
        + textwrap.indent(LOOKUP, "    ").lstrip("\n")
        + "assert not caught, [str(entry.message) for entry in caught]\nassert 'triton' not in sys.modules\n"
    )
