"""What shardwise promises is what is recorded, and extends what was frozen; the comparison sees each kind of break.

Takes 15 s: every command that prints JSON runs once. docs/project/versions.md is the policy.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import record
from checkout import run_python
from comparing import ADDED, CHANGED, REMOVED, RETYPED, Difference, differences, of_signatures
from optional import need
from promised_outputs import COMMANDS, UNPROMISED

RECORDED = record.read(record.CURRENT)


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    need("libcst")
    need("scipy")
    # in a process of its own: other tests define ops and wrap names
    code = "import json, sys; sys.path[:0] = sys.argv[1:]; import record; print('<<' + json.dumps(record.read_code()))"
    printed = run_python("-W", "ignore", "-c", code, record.HERE, record.ROOT).stdout
    promises: dict[str, Any] = json.loads(printed.rpartition("<<")[2])
    return promises


def test_what_the_code_promises_is_what_is_recorded(now: dict[str, Any]) -> None:
    found = differences(RECORDED, now)
    breaks = [str(difference) for difference in found if difference.breaks]
    added = [str(difference) for difference in found if not difference.breaks]
    assert not found, "\n".join(
        ["this is not what tests/compat/current/ records.", *breaks, *added, f"If all of it is meant: {record.COMMAND}"]
        + ["What is removed or changed breaks programs: docs/project/versions.md says how that is done."] * bool(breaks)
    )


def test_what_was_frozen_is_kept_or_its_break_is_listed(now: dict[str, Any]) -> None:
    changes = json.loads(record.CHANGES.read_text())
    wrong = record.problems(now, record.FROZEN, changes, record.version_of_tree())
    assert not wrong, "\n".join([*wrong, "docs/project/versions.md says how a break is made"])
    assert any(record.FROZEN.iterdir())


def test_every_command_that_prints_json_is_promised_or_named_as_not() -> None:
    names = RECORDED["commands"].keys() - {"shardwise"}
    # a group without options of its own prints its help
    groups = {name for name in names if any(other.startswith(f"{name} ") for other in names)} - {"shardwise plan"}
    assert {name.removeprefix("shardwise ") for name in names - groups} == COMMANDS.keys() | UNPROMISED


def changed(change: Callable[[Any], Any]) -> list[Difference]:
    """The differences after a change of what is recorded."""
    after = copy.deepcopy(RECORDED)
    change(after)
    return differences(RECORDED, after)


def replace(part: str, name: str, *path: str, old: str = "", new: str = "") -> Callable[[Any], Any]:
    """A change of the text at a path, or of the name of its last key."""

    def change(promises: Any) -> None:
        facts = promises[part][name]
        for key in path[:-1]:
            facts = facts[key]
        last = path[-1]
        if old and last in facts and isinstance(facts[last], str):
            assert old in facts[last]
            facts[last] = facts[last].replace(old, new)
        else:
            value = facts.pop(last)
            if new:
                facts[new] = value

    return change


STATES = "DistributedModelParallel.fused_optimizer RowWiseAdagrad"
MUTATIONS = {
    "a parameter gets another name": (
        replace("names", "shardwise.DLRM", "call", old="dense_in_features", new="in_features"),
        "removed  names shardwise.DLRM(dense_in_features): parameter 'dense_in_features' is 'in_features' now",
    ),
    "a default changes": (
        replace("names", "shardwise.DLRM", "call", old="dense_device=None", new="dense_device='cpu'"),
        "changed  names shardwise.DLRM(dense_device): default None -> 'cpu'",
    ),
    "a parameter of a method must be given": (
        replace("names", "shardwise.Batch", "members", "to", old="non_blocking=False", new="non_blocking"),
        "changed  names shardwise.Batch.to(non_blocking): default False -> none, it must be given",
    ),
    "a method goes": (
        replace("names", "shardwise.Batch", "members", "pin_memory"),
        "removed  names shardwise.Batch.pin_memory: () -> Batch",
    ),
    "a value of an enum changes": (
        replace("names", "shardwise.PoolingType", "values", "MEAN", old="MEAN", new="AVERAGE"),
        "changed  names shardwise.PoolingType.MEAN: 'MEAN' -> 'AVERAGE'",
    ),
    "a name goes": (
        lambda promises: promises["names"].pop("shardwise.checkpoint.verify"),
        "removed  names shardwise.checkpoint.verify",
    ),
    "an alias of TorchRec's goes": (
        lambda promises: promises["names"].pop("torchrec.distributed.DistributedModelParallel"),
        "removed  names torchrec.distributed.DistributedModelParallel",
    ),
    "an alias becomes another thing": (
        lambda promises: promises["names"].update({"torchrec.optim.RowWiseAdagrad": "= shardwise.LarsSGD"}),
        "changed  names torchrec.optim.RowWiseAdagrad: = shardwise.RowWiseAdagrad -> = shardwise.LarsSGD, which is"
        " something else",
    ),
    "an error is no longer caught by the name that caught it": (
        replace("names", "shardwise.checkpoint.CheckpointDamaged", "bases", old="ValueError", new="RuntimeError"),
        "removed  names shardwise.checkpoint.CheckpointDamaged ValueError: isinstance and except no longer say so",
    ),
    "another error is raised": (
        replace("names", "shardwise.checkpoint.load", "raises", "", old="CheckpointMismatch", new="Mismatch"),
        "changed  names shardwise.checkpoint.load raises: Mismatch(ValueError), and raised"
        " CheckpointMismatch(ValueError)",
    ),
    "brackets no longer work": (
        replace("names", "shardwise.KeyedTensor", "special", old="__getitem__", new=""),
        "removed  names shardwise.KeyedTensor __getitem__: no longer",
    ),
    "a default that a factory makes changes": (
        replace("names", "shardwise.ParameterConstraints", "call", old="[1.0]", new="[2.0]"),
        "changed  names shardwise.ParameterConstraints(pooling_factors): default [1.0] -> [2.0]",
    ),
    "a variable of the environment gets another name": (
        replace("names", "environment", "keys", "SHARDWISE_NUMBA", new="SHARDWISE_LOOPS"),
        "removed  names environment [SHARDWISE_NUMBA]: variable",
    ),
    "arguments of a command change places": (
        replace("commands", "shardwise plan diff", "options", "a", old="number 1", new="number 2"),
        "changed  commands shardwise plan diff a: argument file required number 1 -> argument file required number 2",
    ),
    "a status changes": (
        replace("outputs", "plan diff", "status", old="1", new="0"),
        "changed  outputs plan diff exit status: 1 -> 0",
    ),
    "a state loses its key": (
        replace("states", STATES, "states", "state / tables.embedding_bags.t0.weight / t0.momentum1"),
        f"removed  states {STATES} [state / tables.embedding_bags.t0.weight / t0.momentum1]: sharded float32 [40],"
        " shards [0][40]",
    ),
    "a state is new": (
        lambda promises: promises["states"]["DLRM"]["states"].update(bias="float32 [1]"),
        "changed  states DLRM [bias]: new: float32 [1], which what was written before lacks",
    ),
    "an op gets an argument": (
        replace("ops", "shardwise::batched_unary_embeddings", "schema", old="(", new="(int extra, "),
        "changed  ops shardwise::batched_unary_embeddings(extra): new, int extra: without a default, programs that were"
        " exported lack it",
    ),
    "a key of JSON gets another name": (
        replace("outputs", "ckpt show", "keys", "world_size", new="ranks"),
        "removed  outputs ckpt show [world_size]: number",
    ),
    "a key of a file goes": (
        replace("files", "exported model", "keys", "model.json: format_version"),
        "removed  files exported model [model.json: format_version]: number",
    ),
    "an option goes": (
        replace("commands", "shardwise plan", "options", "--batch-size"),
        "removed  commands shardwise plan --batch-size: option integer in [1, 2147483648] default 512",
    ),
    "a choice goes": (
        replace("commands", "shardwise cache simulate", "options", "--policy", old="|lru", new=""),
        "removed  commands shardwise cache simulate --policy=lru",
    ),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_planted_break_is_told_in_words(what: str) -> None:
    change, words = MUTATIONS[what]
    found = changed(change)
    assert words in [str(difference) for difference in found if difference.breaks], found


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        ("(a)", "(a, b=1)", [ADDED]),
        ("(a)", "(a, *, b=1)", [ADDED]),
        ("(a)", "(a, b)", [CHANGED]),
        ("(a, c=2)", "(a, b=1, c=2)", [CHANGED, ADDED]),
        ("(a, b=1)", "(a, *, b=1)", [CHANGED]),
        ("(a, *, b=1)", "(a, b=1)", []),
        ("(a, /)", "(a)", []),
        ("(a)", "(a=3)", [ADDED]),
        ("(a, b)", "(b, a)", [CHANGED, CHANGED]),
        ("(a, **more)", "(a)", [REMOVED]),
        ("(*, b, a=1)", "(*, a=1, b)", []),
        ("(a) -> int", "(a, b=1) -> str", [ADDED, RETYPED]),
    ],
)
def test_signatures_may_only_grow_at_their_end(old: str, new: str, kinds: list[str]) -> None:
    assert [difference.kind for difference in of_signatures("f", old, new)] == kinds


def test_what_is_new_is_no_break() -> None:
    def grow(promises: Any) -> None:
        promises["names"]["shardwise.New"] = {"kind": "class"}
        promises["outputs"]["env"]["keys"]["new"] = "text"
        promises["commands"]["shardwise env"]["options"]["--new"] = "option flag"

    assert [difference.kind for difference in changed(grow)] == [ADDED] * 3


def test_a_name_that_moves_to_the_facade_keeps_its_facts() -> None:
    """The facts stand at the shortest name, and moved there when it was new: that is no break."""
    before = {"names": {"shardwise.models.X": {"kind": "class", "call": "(a)"}}}
    moved = {"names": {"shardwise.X": {"kind": "class", "call": "(a)"}, "shardwise.models.X": "= shardwise.X"}}
    assert [str(difference) for difference in differences(before, moved)] == ["added    names shardwise.X"]
    moved["names"]["shardwise.X"] = {"kind": "class", "call": "(b)"}
    assert any(difference.breaks for difference in differences(before, moved))


@pytest.mark.parametrize(
    ("fact", "old", "new", "kinds"),
    [
        ("members", {"x": "property -> int"}, {"x": "settable property -> int"}, [ADDED]),
        ("members", {"x": "settable property -> int"}, {"x": "property -> int"}, [REMOVED]),
        ("members", {"x": "property -> int"}, {"x": "() -> int"}, [CHANGED]),
        ("members", {"x": "property -> int"}, {"x": "property -> str"}, [RETYPED]),
        ("value", "['a', 'b']", "['a', 'b', 'c']", [ADDED]),
        ("value", "['a', 'b']", "['b', 'a']", [CHANGED]),
        ("value", "Layout(alignment=16)", "Layout(alignment=8)", [CHANGED]),
        ("raises", {"": "ValueError"}, {"": "ModelDamaged(ValueError)"}, [ADDED]),
        ("raises", {"": "ValueError"}, {"": "RuntimeError"}, [CHANGED]),
        ("raises", {"": "ValueError"}, {}, [ADDED]),
    ],
)
def test_what_holds_what_was_promised_is_no_break(fact: str, old: Any, new: Any, kinds: list[str]) -> None:
    before, after = ({"names": {"shardwise.X": {"kind": "class", fact: each}}} for each in (old, new))
    assert [difference.kind for difference in differences(before, after)] == kinds


BEFORE = {part: {} for part in record.PARTS} | {"names": {"shardwise.f": {"kind": "function", "call": "(a, b=1)"}}}
AFTER = {**BEFORE, "names": {"shardwise.f": {"kind": "function", "call": "(a)"}}}
BREAK = {"break": "removed names shardwise.f(b)", "reason": "b never had any effect on anything"}


def released(folder: Path, version: str, *, promises: Any = BEFORE, warns: tuple[str, ...] = ()) -> None:
    """Freeze a list as that of a release."""
    record.write(promises, folder / "current")
    frozen = folder / "frozen"
    record.freeze(folder / "current", frozen, version, [{"what": what} for what in warns])
    about = json.loads((frozen / version / "about.json").read_text())
    (frozen / version / "about.json").write_text(json.dumps({**about, "released": "2027-01-01"}))


def wrong(folder: Path, version: str, *entries: dict[str, str], now: Any = AFTER) -> str:
    changes = {"breaks": entries, "deprecated": ()}
    return "\n".join(record.problems(now, folder / "frozen", changes, version))


def test_no_listing_makes_up_for_a_release_that_warned(tmp_path: Path) -> None:
    released(tmp_path, "0.1.0")
    assert "has no entry 'removed names shardwise.f(b)'" in wrong(tmp_path, "0.2.0")
    assert "has no reason" in wrong(tmp_path, "0.2.0", {**BREAK, "reason": "no"})
    assert "must name a release that warned" in wrong(tmp_path, "0.2.0", BREAK)
    assert "must name a release that warned" in wrong(tmp_path, "0.2.0", {**BREAK, "deprecated_in": "0.2.0"})
    assert "did not list it" in wrong(tmp_path, "0.2.0", {**BREAK, "deprecated_in": "0.1.0"})
    assert wrong(tmp_path, "0.2.0", {**BREAK, "urgent": "security"}) == ""
    assert "nothing of the kind changed" in wrong(tmp_path, "0.2.0", BREAK, now=BEFORE)


def test_what_a_release_warned_of_may_go_one_minor_version_later(tmp_path: Path) -> None:
    released(tmp_path, "0.1.0")
    released(tmp_path, "0.2.0", warns=("names shardwise.f(b)",))
    entry = {**BREAK, "deprecated_in": "0.2.0"}
    assert "at the earliest" in wrong(tmp_path, "0.2.1", entry)
    assert wrong(tmp_path, "0.3.0", entry) == ""


def test_lists_of_a_release_are_never_written_again(tmp_path: Path) -> None:
    released(tmp_path, "0.1.0")
    with pytest.raises(SystemExit, match="never written again"):
        record.freeze(tmp_path / "current", tmp_path / "frozen", "0.1.0", ())
    record.write(AFTER, tmp_path / "frozen" / "0.1.0")
    assert "was changed after it was written" in wrong(tmp_path, "0.2.0")


def test_a_version_that_is_not_released_needs_a_reason_alone(tmp_path: Path) -> None:
    record.write(BEFORE, tmp_path / "current")
    record.freeze(tmp_path / "current", tmp_path / "frozen", "0.1.0", ())
    assert "has no entry" in wrong(tmp_path, "0.1.0")
    assert wrong(tmp_path, "0.1.0", BREAK) == ""
