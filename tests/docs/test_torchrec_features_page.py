"""docs/reference/torchrec_features.md has a row for each feature of TorchRec, and a test for each that works."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

from checkout import ROOT

PAGE = (ROOT / "docs/reference/torchrec_features.md").read_text()
# how many features the inventory of TorchRec 1.8 has, and how many of each level
LEVELS = {"core": 109, "common": 72, "niche": 70, "meta": 12}
# the words of the sentence that counts, by state
COUNTED = {
    "works": "work", "part": "work in part", "later": "come later", "refused": "are refused by name",
    "Meta": "are Meta's own",
}  # fmt: skip
# fewer than these never work again
LEAST = 210


@dataclass(frozen=True)
class Row:
    """A feature: its number, level and state, the tests that prove it, and the words beside them."""

    number: int
    level: str
    state: str
    proofs: tuple[str, ...]
    words: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.splitlines():
        if match := re.match(r"\| (\d+) \| .+? \| (\w+) \| (\w+) \| (.*) \|$", line):
            proofs = tuple(re.findall(r"`tests/([\w/]+\.py::\w+)`", match[4]))
            words = re.sub(r"`tests/[\w/]+\.py::\w+`(, )?", "", match[4])
            found.append(Row(int(match[1]), match[2], match[3], proofs, words))
    return found


@cache
def functions_of(path: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def never_runs(test: ast.FunctionDef) -> bool:
    """Whether a mark skips it whatever there is: a condition on the machine is none."""
    marks = [ast.unparse(mark) for mark in test.decorator_list]
    return any(re.match(r"pytest\.mark\.(skip\b(?!if)|xfail)", mark) for mark in marks)


def test_every_feature_has_a_row() -> None:
    assert [row.number for row in rows()] == list(range(1, sum(LEVELS.values()) + 1))
    assert Counter(row.level for row in rows()) == LEVELS
    assert all((row.level == "meta") == (row.state == "Meta") for row in rows())


def test_the_sentence_counts_the_rows() -> None:
    counts = Counter(row.state for row in rows())
    assert counts.keys() == COUNTED.keys()
    sentence = ", ".join(f"{counts[state]} {words}" for state, words in COUNTED.items())
    assert f"{sentence}." in re.sub(r"\s+", " ", PAGE)
    assert counts["works"] >= LEAST


def test_every_proof_is_a_test_that_runs() -> None:
    gone = []
    for row in rows():
        for proof in row.proofs:
            path, _, name = proof.partition("::")
            test = functions_of(path).get(name) if (ROOT / "tests" / path).is_file() else None
            if test is None or never_runs(test):
                gone.append((row.number, proof))
    assert gone == []


def test_what_works_is_proven_and_what_does_not_has_words() -> None:
    for row in rows():
        if row.state in ("works", "part"):
            assert row.proofs, row
        if row.state != "works":
            assert len(row.words) > 10, row


def test_a_mark_that_skips_is_seen() -> None:
    skipped, conditional = ast.parse(
        "@pytest.mark.skip(reason='x')\ndef test_a(): ...\n@pytest.mark.skipif(True, reason='x')\ndef test_b(): ..."
    ).body
    assert isinstance(skipped, ast.FunctionDef) and never_runs(skipped)
    assert isinstance(conditional, ast.FunctionDef) and not never_runs(conditional)
