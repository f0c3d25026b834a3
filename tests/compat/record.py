"""The lists of what shardwise promises: written, compared, frozen. docs/project/versions.md says what they are for.

    python tests/compat/record.py                  what the code has otherwise than current/; status 1 if anything
    python tests/compat/record.py --write          write current/ anew: the reviewer reads its diff
    python tests/compat/record.py --freeze         before a release: frozen/<version>/, which later versions extend

What is gone or changed since a frozen list has to stand in changes.json with a reason, and, where that version was
released, with the release that warned of it. `--write` does not write that file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from comparing import PARTS, Difference, differences

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CURRENT, FROZEN, CHANGES = HERE / "current", HERE / "frozen", HERE / "changes.json"
COMMAND = "python tests/compat/record.py --write"
Promises = dict[str, dict[str, Any]]


def main() -> None:
    # this checkout, wherever an editable install points
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description="What shardwise promises, beside what is recorded.")
    parser.add_argument("--write", action="store_true", help="Write current/ anew.")
    parser.add_argument("--freeze", action="store_true", help="Write frozen/<version>/ from current/.")
    arguments = parser.parse_args()
    if arguments.freeze:
        freeze(CURRENT, FROZEN, version_of_tree(), json.loads(CHANGES.read_text())["deprecated"])
        return
    now, before = read_code(), read(CURRENT)
    found = differences(before, now)
    print("\n".join(map(str, found)) or "nothing differs")
    if arguments.write:
        write(now, CURRENT)
    sys.exit(1 if found and not arguments.write else 0)


def read_code(*, without: Collection[str] = ()) -> Promises:
    """All promises as the code has them; `without` are commands that this environment cannot run."""
    import promised_outputs
    import promised_states
    import promises

    from shardwise.kernels import _op

    # keys are those of loops of numba, which take minutes to compile once
    with tempfile.TemporaryDirectory() as folder, patch.object(_op, "NUMBA", False):
        with promised_outputs.prepared(Path(folder)):
            printed = promised_outputs.outputs(without=without)
            files = promised_outputs.files()
        return {
            "names": promises.names(), "ops": promises.ops(), "commands": promises.commands(),
            "states": promised_states.states(), "outputs": printed, "files": files,
        }  # fmt: skip


def read(folder: Path) -> Promises:
    """What is recorded; nothing of a part that is not there."""
    paths = {part: folder / f"{part}.json" for part in PARTS}
    return {part: json.loads(path.read_text(encoding="utf-8")) for part, path in paths.items() if path.exists()}


def write(promises: Mapping[str, Any], folder: Path) -> None:
    """A file for each part, a line for each fact."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        text = json.dumps(promises[part], indent=1, sort_keys=True, ensure_ascii=False)
        (folder / f"{part}.json").write_text(f"{text}\n", encoding="utf-8")


def version_of_tree() -> str:
    """The version that the tree becomes."""
    from shardwise import __version__

    return __version__


def checksum(folder: Path) -> str:
    """Of the files of a frozen list: one edited by hand is seen."""
    return hashlib.sha256(b"\0".join((folder / f"{part}.json").read_bytes() for part in PARTS)).hexdigest()


def freeze(current: Path, frozen: Path, version: str, deprecated: Sequence[Mapping[str, str]]) -> None:
    """Copy the current lists as those of `version`, with what it warns of.

    Raises:
        SystemExit: that version was released, and its lists stay.
    """
    folder = frozen / version
    if folder.exists() and json.loads((folder / "about.json").read_text())["released"]:
        raise SystemExit(f"{folder} is of a release: its lists are never written again")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(current, folder)
    about = {"version": version, "released": None, "deprecated": list(deprecated), "sha256": checksum(folder)}
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:3])


def problems(
    now: Mapping[str, Any],
    frozen: Path,
    changes: Mapping[str, Sequence[Mapping[str, str]]],
    version: str,
    *,
    exists: Callable[[str], bool] = lambda test: (ROOT / test.partition("::")[0]).is_file(),
) -> list[str]:
    """What is wrong by the policy with a tree of `version` that promises `now`, in words; none if nothing is."""
    abouts = {folder.name: json.loads((folder / "about.json").read_text()) for folder in sorted(frozen.glob("*.*.*"))}
    listed = {entry["break"]: entry for entry in changes["breaks"]}
    used: set[str] = set()
    found = []
    for old, about in abouts.items():
        if about["sha256"] != checksum(frozen / old):
            found.append(f"frozen/{old} was changed after it was written: take it back")
        for difference in differences(read(frozen / old), now):
            if difference.breaks:
                used.add(difference.key)
                found += _of_break(difference, listed.get(difference.key), old, abouts, version)
    found += [f"changes.json lists {key!r}, and nothing of the kind changed" for key in listed.keys() - used]
    for entry in changes["deprecated"]:
        if not exists(entry["test"]):
            found.append(f"changes.json: {entry['what']!r} is deprecated, and {entry['test']} is not there to show it")
    return found


def _of_break(
    difference: Difference, entry: Mapping[str, str] | None, old: str, abouts: Mapping[str, Any], version: str
) -> list[str]:
    """What the policy lacks of one break of what `old` promised."""
    if entry is None:
        return [f"{difference}\n  is a promise of {old}: changes.json has no entry {difference.key!r}"]
    if len(entry.get("reason", "")) < 20:
        return [f"{difference}\n  its entry in changes.json has no reason"]
    if not abouts[old]["released"] or entry.get("urgent") in ("security", "wrong results"):
        return []
    warned = abouts.get(entry.get("deprecated_in", ""))
    if warned is None or not warned["released"]:
        return [f"{difference}\n  was released in {old}: 'deprecated_in' must name a release that warned of it"]
    if _numbers(warned["version"])[:2] >= _numbers(version)[:2]:
        return [
            f"{difference}\n  goes one minor version after {warned['version']}, which warned of it, at the earliest"
        ]
    if difference.what not in {each["what"] for each in warned["deprecated"]}:
        return [f"{difference}\n  {warned['version']} did not list it among what it deprecates"]
    return []


if __name__ == "__main__":
    main()
