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


def documented() -> Iterator[tuple[str, Any, str]]:
    """Path, object and docstring of each public class and function, and of the public methods that a class defines."""
    for path, value in public().items():
        if inspect.isclass(value):
            yield path, value, own_docstring(value)
            for name, member in vars(value).items():
                if not name.startswith("_") and inspect.isfunction(member):
                    yield f"{path}.{name}", member, inspect.cleandoc(member.__doc__ or "")
        else:
            yield path, value, inspect.cleandoc(value.__doc__ or "")


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
    """Errors that the body of a function raises by name and its docstring does not name."""
    if not inspect.isfunction(value):
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    raised = {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    # a name in lower case is a function that makes the error
    for error in sorted(name for name in raised if name[0].isupper() and name not in _OURS):
        if error not in text and error.removeprefix("Refused") not in text:
            yield f"{path} raises {error}, and its docstring does not say so"


@cache
def documents() -> dict[str, str]:
    """Path -> docstring of what has an example."""
    return {path: text for path, _, text in documented() if ">>> " in text}


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
        "malformed": [line for path, value, text in documented() for line in malformed(path, value, text)],
        "unsaid": [line for path, value, text in documented() for line in unsaid(path, value, text)],
    }
    return json.dumps(faults)


def test_every_public_class_and_function_has_a_docstring() -> None:
    assert [path for path, value in public().items() if not own_docstring(value)] == []


def test_sections_name_arguments_and_errors_that_there_are(faults: dict[str, list[str]]) -> None:
    assert faults["malformed"] == []


def test_errors_that_a_public_function_raises_are_in_its_docstring(faults: dict[str, list[str]]) -> None:
    assert faults["unsaid"] == []


def take(rows: int) -> int:
    """A function whose docstring is wrong.

    Args:
        columns: there are none.
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
    assert [*unsaid("take", take, text)] == ["take raises ValueError, and its docstring does not say so"]


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
