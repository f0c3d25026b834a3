"""Docstrings of public names: there for each, with sections that say what the code does, and examples that run."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import json
import re
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from checkout import ROOT, run_python
from torch import Tensor

import shardwise

# the names that examples, tests and pages use most, each with an example in its docstring
MOST_USED = (
    *("shardwise.EmbeddingBagCollection", "shardwise.EmbeddingBagConfig", "shardwise.EmbeddingCollection"),
    *("shardwise.EmbeddingConfig", "shardwise.KeyedJaggedTensor", "shardwise.JaggedTensor", "shardwise.KeyedTensor"),
    *("shardwise.DistributedModelParallel", "shardwise.ShardingEnv", "shardwise.ShardingPlan", "shardwise.Batch"),
    *("shardwise.apply_optimizer_in_backward", "shardwise.RowWiseAdagrad", "shardwise.EmbeddingShardingPlanner"),
    *("shardwise.ParameterConstraints", "shardwise.Topology", "shardwise.construct_module_sharding_plan"),
    *("shardwise.TrainPipelineSparseDist", "shardwise.DLRM", "shardwise.checkpoint.save", "shardwise.checkpoint.load"),
    *("shardwise.inference.quantize_inference_model", "shardwise.sharding.table_wise", "shardwise.sharding.row_wise"),
)
# "[B, D]", or words in its place
SHAPE = re.compile(r"\[[^\]]*\]|any shape|same shape|0-dim|1-D")
PLACES = ("", "tests", "tests/support", "tests/docs")
# what nobody who calls the function can act on
_OURS = ("AssertionError", "NotImplementedError")
# of a section's entries: `name: text`, `a, b: text`, and its further lines, which are indented
ENTRY = re.compile(r"[\w`\[\]., *()|]+:( .*)?")


@cache
def public() -> dict[str, Any]:
    """Path -> value of each public class and function."""
    spec = importlib.util.spec_from_file_location("api_pages", ROOT / "docs" / "site" / "api_pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = {}
    for name in module.public_names():
        holder, _, attribute = name.path.rpartition(".")
        value = getattr(importlib.import_module(holder), attribute)
        if inspect.isclass(value) or inspect.isfunction(value):
            values[name.path] = value
    return values


def own_docstring(value: Any) -> str:
    """That of a function, or of a class, not of its parent, nor the signature that dataclass writes in place of one."""
    text = (vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__) or ""
    return "" if text.startswith(f"{value.__name__}(") else inspect.cleandoc(text)


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each section of a docstring in Google's style, without their indentation."""
    found: dict[str, list[str]] = {}
    for title, body in re.findall(r"^([A-Z]\w+):\n((?:(?: {4}.*)?(?:\n|\Z))+)", text, re.MULTILINE):
        found[title] = [line[4:] for line in body.splitlines() if line.strip()]
    return found


def malformed(path: str, value: Any, text: str) -> Iterator[str]:
    """What the sections of a docstring say that cannot be: entries without a name, arguments that there are not."""
    parts = sections(text)
    for title in ("Args", "Raises"):
        entries = [line for line in parts.get(title, []) if not line.startswith(" ")]
        yield from (f"{path}: {title}: {entry!r} names nothing" for entry in entries if not ENTRY.fullmatch(entry))
    arguments = [line.partition(":")[0] for line in parts.get("Args", []) if not line.startswith(" ")]
    names = [name for argument in arguments for name in argument.split(", ")]
    try:
        known = {*inspect.signature(value).parameters}
    except (TypeError, ValueError):
        return
    unknown = [name for name in names if name.strip("* `") not in known and name != "..."]
    if unknown and not {"args", "kwargs"} & known:
        yield f"{path}: Args: there is no {', '.join(unknown)}"


def unsaid(path: str, value: Any, text: str) -> Iterator[str]:
    """Errors that the body of a function raises by name and no section "Raises" of these docstrings names."""
    if not inspect.isfunction(value):
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    raised = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    named = " ".join(re.findall(r"^Raises:\n((?: {4}.*\n?|\n)+)", text, re.MULTILINE))
    # a name in lower case is a function that makes the error
    for error in sorted(name for name in raised if name[0].isupper() and name not in _OURS):
        if error not in named and error.removeprefix("Refused") not in named:
            yield f"{path} raises {error}, and no section Raises says so"


def members() -> Iterator[tuple[str, Any, str, str]]:
    """Path, function, docstring, and that of its class, of each public function, class, method and property.

    What makes an instance counts as a method too.
    """
    for path, value in public().items():
        if not inspect.isclass(value):
            yield path, value, inspect.cleandoc(value.__doc__ or ""), ""
            continue
        of_class = own_docstring(value)
        yield path, value, of_class, ""
        for name, member in vars(value).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            # not what typing and dataclasses write
            made = name in ("__init__", "__post_init__") and "shardwise" in member.__code__.co_filename
            if (made or not name.startswith("_")) and inspect.isfunction(function):
                yield f"{path}.{name}", function, inspect.cleandoc(function.__doc__ or ""), of_class


def shapeless(path: str, value: Any, text: str, of_class: str) -> Iterator[str]:
    """Tensors that a function takes or gives and whose shape neither its docstring nor that of its class says."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return
    given = {name: str(each.annotation) for name, each in signature.parameters.items()}
    if path.endswith(("__init__", "__post_init__")):
        # as the class is called
        return
    if not inspect.isclass(value):
        given["what it returns"] = str(signature.return_annotation)
    entries = entries_of(text)
    for name, annotation in given.items():
        # of a function that is given, the docstring that says what it is called with says enough
        if re.search(r"\bTensor\b", re.sub(r"Callable\[.*\]", "", annotation)):
            said = entries.get(name, f"{text}\n{of_class}")
            if not SHAPE.search(said):
                yield f"{path}: no shape of {name}"


def entries_of(text: str) -> dict[str, str]:
    """Argument -> its entry under "Args", with the lines that go on."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in sections(text).get("Args", []):
        if not line.startswith(" "):
            names = re.findall(r"\w+", line.partition(":")[0])
        found.update({name: f"{found.get(name, '')} {line}" for name in names})
    return found


@cache
def documents() -> dict[str, str]:
    """Path -> docstring of what has an example."""
    return {path: text for path, _, text, _ in members() if ">>> " in text}


def run_examples(path: str, text: str) -> str:
    """What doctest says of the examples of a docstring that sees the public names and those of its own module."""
    value = public().get(path) or public()[path.rpartition(".")[0]]
    names = {each.rpartition(".")[2]: value for each, value in public().items()}
    names |= {name: getattr(shardwise, name) for name in shardwise.__all__}
    rooms = {name: importlib.import_module(f"shardwise.{name}") for name in ("checkpoint", "sharding")}
    names |= {**vars(importlib.import_module(value.__module__)), **rooms, "torch": torch, "__name__": path}
    test = doctest.DocTestParser().get_doctest(text, names, path, None, None)
    printed = io.StringIO()
    # what is tested is what is printed, not that a library warns of a world of one
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(test, out=printed.write)
    return printed.getvalue()


@pytest.fixture(scope="module")
def faults() -> dict[str, list[str]]:
    """What is wrong with docstrings, in a process of its own: other tests wrap names."""
    code = "import sys; sys.path[:0] = sys.argv[1:]; import test_docstrings as t; print('<<' + t.all_faults())"
    printed = run_python("-W", "ignore", "-c", code, *(str(ROOT / place) for place in PLACES)).stdout
    found: dict[str, list[str]] = json.loads(printed.rpartition("<<")[2])
    return found


def all_faults() -> str:
    """What is said wrongly, and what is not said, as JSON."""
    faults = {
        "malformed": [line for path, value, text, _ in members() for line in malformed(path, value, text)],
        "unsaid": [line for path, value, text, of in members() for line in unsaid(path, value, f"{text}\n{of}")],
        "shapeless": [line for member in members() for line in shapeless(*member)],
    }
    return json.dumps(faults)


def test_every_public_class_and_function_has_a_docstring() -> None:
    assert [path for path, value in public().items() if not own_docstring(value)] == []


def test_sections_name_arguments_and_errors_that_there_are(faults: dict[str, list[str]]) -> None:
    assert faults["malformed"] == []


def test_errors_that_a_public_function_raises_are_in_its_docstring(faults: dict[str, list[str]]) -> None:
    assert faults["unsaid"] == []


def test_shapes_of_tensors_are_in_docstrings(faults: dict[str, list[str]]) -> None:
    assert faults["shapeless"] == []


def take(rows: int, values: Tensor, out: Tensor | None = None) -> int:
    """A function whose docstring is wrong.

    Args:
        columns: there are none.
        values: of any number of rows.
        out: [rows].
        words without a name
    """
    if rows < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    return rows


def test_a_wrong_docstring_is_seen() -> None:
    text = inspect.cleandoc(take.__doc__ or "")
    assert [line.partition(": ")[2] for line in malformed("take", take, text)] == [
        "Args: 'words without a name' names nothing",
        "Args: there is no columns, words without a name",
    ]
    assert [*shapeless("take", take, text, "")] == ["take: no shape of values"]
    assert [*unsaid("take", take, text)] == ["take raises ValueError, and no section Raises says so"]


@pytest.mark.parametrize("path", MOST_USED)
def test_the_example_of_a_much_used_name_runs_and_gives_what_it_says(path: str) -> None:
    text = documents()[path]
    assert "Example" in sections(text)
    report = run_examples(path, text)
    assert report == ""


def test_all_other_examples_run_too() -> None:
    others = [path for path in documents() if path not in MOST_USED]
    assert len(others) > 10
    assert [report for path in others if (report := run_examples(path, documents()[path]))] == []


def test_an_example_that_says_something_else_is_seen() -> None:
    assert "Expected:\n    3\nGot:\n    2" in run_examples("shardwise.DLRM", "Example:\n    >>> 1 + 1\n    3\n")
