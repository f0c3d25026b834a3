"""The engine and its collectives are functions of a size that a reader can hold.

A private function of a few statements with one caller belongs inside that caller; a function past a screen and a half,
or a class past some two dozen methods, is two things.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import pytest
from test_layering import ROOT

FOLDERS = ("sharding/engine", "sharding/comms")
FEWEST_STATEMENTS, MOST_LINES, MOST_METHODS = 5, 80, 25
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# files of the tree that may call a function of the folders
CALLERS = (
    *("data", "embeddings", "examples", "fbgemm", "inference", "jagged", "kernels", "models", "perf"),
    *("planner", "sharding"),
    *("shardwise", "tests"),
)


def statements(function: ast.AST) -> int:
    """Statements of a function's body, without docstrings."""
    inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    documented = [node for node in inside if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and ast.get_docstring(node)]
    return len(inside) - len(documented) - 1


class Mentions(NamedTuple):
    """Of a file: how often each name is read, by itself or as an attribute; names it imports; members of its classes.

    A name that is read is called, or handed over as a function.
    """

    read: Counter[str]
    imported: set[str]
    members: Counter[str]


@cache
def mentions(source: str) -> Mentions:
    found = Mentions(Counter(), set(), Counter())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            found.imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            found.members.update(getattr(member, "name", None) or "" for member in node.body)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            found.read[node.id if isinstance(node, ast.Name) else node.attr] += 1
    return found


def too_small_or_too_large(sources: Mapping[str, str], folders: tuple[str, ...] = FOLDERS) -> list[str]:
    """What of the sources of a tree, by their paths, has another size than it should in these folders."""
    found = []
    for path, source in sources.items():
        nodes = list(ast.walk(ast.parse(source))) if path.startswith(folders) else []
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        methods = {id(member) for node in classes for member in node.body}
        for node in classes:
            count = sum(isinstance(member, FUNCTIONS) for member in node.body)
            if count > MOST_METHODS:
                found.append(f"{path}:{node.lineno}: class {node.name} has {count} methods")
        for node in nodes:
            if not isinstance(node, FUNCTIONS):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
            # what is decorated is called by who decorates
            private = node.name.startswith("_") and not node.name.startswith("__") and not node.decorator_list
            if not private or statements(node) >= FEWEST_STATEMENTS:
                continue
            others = {other: mentions(text) for other, text in sources.items() if node.name in text}
            if id(node) in methods:
                # several classes have it: a protocol, or a method and what overrides it
                of_one = sum(each.members[node.name] for each in others.values()) == 1
                callers = sum(each.read[node.name] for each in others.values()) if of_one else 0
            else:
                callers = sum(
                    each.read[node.name] for at, each in others.items() if at == path or node.name in each.imported
                )
            if callers == 1:
                found.append(f"{path}:{node.lineno}: {node.name} is short and has one caller: join it in")
    return found


@cache
def sources_of_this_checkout() -> dict[str, str]:
    """Python files by their paths; each once, as links of the package to its folders are not followed."""
    paths = [path for folder in CALLERS for path in sorted((ROOT / folder).rglob("*.py"))]
    own = [path for path in paths if path.resolve().relative_to(ROOT.resolve()) == path.relative_to(ROOT)]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in own}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_function_is_a_fragment_and_none_is_two_things(folder: str) -> None:
    assert not too_small_or_too_large(sources_of_this_checkout(), (folder,))


CLEAN = '''
def shown(values):
    """Public, so others may call it."""
    return _first(values) + _first(values[1:])


def _first(values):
    return values[0]


class Store:
    def __len__(self):
        return self._count()

    def _count(self):
        total = 0
        for size in self.sizes:
            if size:
                total += size
        return total
'''


PLANTED = {
    "_last is short": """
def _last(values):
    return values[-1]


def f(values):
    return _last(values)
""",
    # handed over by name is a use as well
    "_key is short": """
def _key(value):
    return -value


def f(values):
    return sorted(values, key=_key)
""",
    "_g is short": """
class C:
    def f(self):
        return self._g()

    def _g(self):
        return 1
""",
    f"long has {MOST_LINES + 1} lines": "\ndef long(x):\n" + "    x += 1\n" * MOST_LINES,
    f"class Wide has {MOST_METHODS + 1} methods": "\nclass Wide:\n"
    + "".join(f"    def m{n}(self): ...\n" for n in range(MOST_METHODS + 1)),
}


@pytest.mark.parametrize("told", PLANTED)
def test_a_planted_violation_is_told(told: str) -> None:
    clean = {
        "sharding/comms/a.py": CLEAN,
        "tests/test_a.py": "from shardwise.sharding.comms.a import shown\n\nshown([1])\n",
    }
    assert too_small_or_too_large(clean) == []
    planted = CLEAN + PLANTED[told]
    [text] = too_small_or_too_large({**clean, "sharding/comms/a.py": planted})
    assert text.startswith("sharding/comms/a.py:") and told in text
    # other folders have sizes of their own
    assert too_small_or_too_large({**clean, "models/a.py": planted}) == []


def test_a_second_caller_elsewhere_counts_and_so_does_a_protocol() -> None:
    private = "def _last(values):\n    return values[-1]\n\n\ndef f(values):\n    return _last(values)\n"
    called = {"sharding/comms/a.py": private, "sharding/engine/b.py": "from ..comms.a import _last\n\nx = _last([1])\n"}
    assert too_small_or_too_large(called) == []
    # another module's function of that name is none of ours
    named_alike = {"sharding/comms/a.py": private, "models/b.py": "def _last(x): ...\n\n\n_last(1)\n_last(2)\n"}
    assert len(too_small_or_too_large(named_alike)) == 1
    of_class = "class {}:\n    def wait(self):\n        return self._wait()\n\n    def _wait(self):\n        return 1\n"
    protocol = {"sharding/comms/a.py": of_class.format("A") + "\n\n" + of_class.format("B")}
    assert too_small_or_too_large(protocol) == []
