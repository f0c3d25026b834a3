"""What lies in the place of a file and is none (a pipe, a socket, a device, a folder, a link to itself) is refused.

A timer ends a test that waits, so that none can stop the suite.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import MIX, saved
from click.testing import CliRunner
from sharding_mixes import build

from shardwise import ShardingPlan, checkpoint, cli, untrusted
from shardwise.checkpoint import CheckpointDamaged
from shardwise.data import Criteo, MovieLens
from shardwise.inference import ModelFacts, load_program, read_tables
from shardwise.inference.folder import ModelDamaged, file_facts, read_facts, write_facts
from shardwise.kernels import configs
from shardwise.planner.constants_measured import Constants
from shardwise.planner.plan.files import read_constraints, read_tables as planned_tables
from shardwise.planner.plan.plan_files import read_plan

SECONDS = 30
MANIFEST, FILE = "manifest.json", "rank-00000.safetensors"


@pytest.fixture(autouse=True)
def no_waiting() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def socket_at(path: Path) -> None:
    # the name of a socket has room for 108 bytes, and relative ones are short
    here = os.getcwd()
    os.chdir(path.parent)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(path.name)
    os.chdir(here)


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30)


# what is put in the place of a file; a device is reached by a link, as making one needs rights
KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "named pipe"),
    "socket": (socket_at, "socket"),
    "device": (lambda path: path.symlink_to("/dev/null"), "character device|symbolic link"),
    "folder": (Path.mkdir, "folder"),
    "link to itself": (lambda path: path.symlink_to(path.name), "[Tt]oo many levels|symbolic link"),
    "huge": (huge, f"has {2**30} bytes"),
}


def put(kind: str, path: Path) -> str:
    """Put it where a file was, if any; what an error says of it."""
    path.unlink(missing_ok=True)
    make, message = KINDS[kind]
    make(path)
    return message


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("untrusted"))


@pytest.mark.parametrize("name", [MANIFEST, FILE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_with_something_in_the_place_of_a_file_is_refused(
    kind: str, name: str, written: Path, tmp_path: Path
) -> None:
    """A FIFO in the place of a manifest stopped `latest`, `verify` and `load` for ever."""
    path = Path(shutil.copytree(written, tmp_path / written.name))
    message = put(kind, path / name)
    errors = checkpoint.verify(path)
    assert len(errors) == 1
    with pytest.raises(CheckpointDamaged, match=f"{name}.*({message})"):
        checkpoint.load(path, build(MIX, "adam"))
    assert checkpoint.latest(tmp_path) is None and checkpoint.steps(tmp_path) == [path]
    for read in (checkpoint.full_state_dict, checkpoint.read_manifest):
        if name == MANIFEST or read is checkpoint.full_state_dict:
            with pytest.raises(CheckpointDamaged, match=f"{name}.*({message})"):
                read(path)
    for command in ("show", "verify", "export"):
        result = CliRunner().invoke(
            cli.commands(), ["ckpt", command, str(path), *([str(tmp_path / "out")] if command == "export" else [])]
        )
        # what verify is asked is whether it is whole
        bad = 1 if command == "verify" else 2
        assert result.exit_code == (0 if (command, name) == ("show", FILE) else bad)
        assert result.exit_code == 0 or name in result.output + result.stderr
    # a save clears it away as it does what is cut off
    resaved = checkpoint.save(tmp_path, build(MIX, "adam"), step=1).path
    assert checkpoint.steps(tmp_path) == [resaved] and checkpoint.verify(resaved) == []


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to itself"])
def test_a_folder_of_steps_with_something_among_them_is_still_read(kind: str, written: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(written, tmp_path / written.name))
    put(kind, tmp_path / "step-000000000009")
    assert checkpoint.latest(tmp_path) == path and checkpoint.steps(tmp_path) == [path]
    put(kind, tmp_path / ".lock")
    with pytest.raises(OSError, match=r"\.lock"):
        checkpoint.save(tmp_path, build(MIX, "adam"), step=2)


def test_a_pipe_in_a_folder_of_torch_distributed_checkpoint_is_refused(written: Path, tmp_path: Path) -> None:
    folder = checkpoint.to_dcp(written, tmp_path / "dcp")
    put("pipe", next(folder.glob("*.distcp")))
    with pytest.raises(OSError, match=r"named pipe.*distcp"):
        checkpoint.from_dcp_trusted(folder, tmp_path / "steps")


def model_folder(folder: Path) -> ModelFacts:
    """A folder whose sizes and checksums are right, with nothing in its files."""
    folder.mkdir()
    for name in ("tables.safetensors", "program.pt2"):
        (folder / name).write_bytes(name.encode())
    files = tuple(file_facts(folder / name) for name in ("tables.safetensors", "program.pt2"))
    facts = ModelFacts(1, {"shardwise": "é"}, ("age",), (), False, (), (), (), files)
    write_facts(folder, facts)
    return facts


@pytest.mark.parametrize("name", ["model.json", "tables.safetensors", "program.pt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_with_something_in_the_place_of_a_file_is_refused(
    kind: str, name: str, tmp_path: Path
) -> None:
    model_folder(tmp_path / "model")
    message = put(kind, tmp_path / "model" / name)
    with pytest.raises(ModelDamaged, match=f"{name}.*({message})"):
        load_program(tmp_path / "model")
    if name != "program.pt2":
        with pytest.raises(ModelDamaged, match=f"{name}.*({message})"):
            read_tables(tmp_path / "model")


READERS: dict[str, Callable[[Path], object]] = {
    "plan": ShardingPlan.load,
    "plan of the planner": read_plan,
    "tables": planned_tables,
    "constraints": read_constraints,
    "constants": Constants.load,
    "tuned configs": configs.read,
    "Criteo": lambda path: next(iter(Criteo([path]).train(2))),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_a_user_names_is_a_regular_one(kind: str, reader: str, tmp_path: Path) -> None:
    if (kind, reader) == ("huge", "Criteo"):
        pytest.skip("logs of clicks are large, and read a line at a time")
    message = put(kind, tmp_path / "named.json")
    with pytest.raises((OSError, ValueError), match=message):
        READERS[reader](tmp_path / "named.json")


def test_data_in_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("ratings.csv", "movies.csv"):
        put("pipe", tmp_path / name)
    with pytest.raises(FileNotFoundError, match="needs ratings.csv|needs movies.csv"):
        MovieLens(tmp_path)


@pytest.mark.parametrize("command", ["plan explain", "plan --world-size 2 --card h100 --tables", "migrate"])
def test_the_command_line_does_not_wait_for_a_pipe(command: str, tmp_path: Path) -> None:
    put("pipe", tmp_path / "piped.py")
    result = CliRunner().invoke(cli.commands(), [*command.split(), str(tmp_path / "piped.py")])
    assert result.exit_code != 0 and "piped.py" in result.output + result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_what_is_replaced_between_the_look_and_the_open_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("pipe", tmp_path / "one")
    monkeypatch.setattr(untrusted, "require_regular", lambda path, *, follow: None)
    with pytest.raises(OSError, match="named pipe"):
        untrusted.read_regular(tmp_path / "one")


def test_a_link_is_followed_where_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("file")
    assert untrusted.read_regular(tmp_path / "link", max_bytes=4) == b"1234"
    with pytest.raises(OSError, match="symbolic link"):
        untrusted.read_regular(tmp_path / "link", follow=False)
    with pytest.raises(ValueError, match="link has 4 bytes, at most 3"):
        untrusted.read_regular(tmp_path / "link", max_bytes=3)
    with pytest.raises(FileNotFoundError):
        untrusted.read_regular(tmp_path / "nowhere")
    # files of the kernel have no size, and bytes
    assert untrusted.read_regular("/proc/self/status").startswith(b"Name:")


def test_no_flipped_bit_of_model_json_reads_as_another_model(tmp_path: Path) -> None:
    """The neighbour of a checkpoint's manifest: its checksum is of what it says, so that flips in spaces may pass."""
    facts = model_folder(tmp_path / "model")
    facts = replace(facts, dense=("age", "hour"), weighted=True)
    write_facts(tmp_path / "model", facts)
    file = tmp_path / "model" / "model.json"
    good = file.read_bytes()
    refused = 0
    for bit in random.Random(7).sample(range(8 * len(good)), 400):
        file.write_bytes(good[: bit // 8] + bytes([good[bit // 8] ^ (1 << bit % 8)]) + good[bit // 8 + 1 :])
        try:
            assert read_facts(tmp_path / "model") == facts
        except ModelDamaged as error:
            assert "model.json" in str(error)
            refused += 1
    assert refused > 350


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "shardwise-plan", "plan": {"": {}, "": {}}}', "key '' is there twice"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_json_that_no_writer_of_ours_writes_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """Of a table that stood twice in a plan's file the first was lost without a word."""
    (tmp_path / "named.json").write_text(text)
    for reader in ("plan", "plan of the planner", "tables", "constraints", "constants", "tuned configs"):
        with pytest.raises(ValueError, match=message):
            READERS[reader](tmp_path / "named.json")
    model_folder(tmp_path / "model")
    (tmp_path / "model" / "model.json").write_text(text)
    with pytest.raises(ModelDamaged, match=message):
        read_facts(tmp_path / "model")


def test_an_infinite_number_in_a_plan_is_still_read(tmp_path: Path) -> None:
    """Python writes Infinity, and what a planner says about its bound may be that."""
    plan = {"format": "shardwise-plan", "version": 1, "plan": {}, "about": {"predicted": {"bound_ms": float("inf")}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    loaded_plan: Any = read_plan(tmp_path / "plan.json")
    assert loaded_plan["about"]["predicted"]["bound_ms"] == float("inf")
