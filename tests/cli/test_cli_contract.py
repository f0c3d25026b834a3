"""What every command keeps to: `--json` as a flag, a status for each ending, the nearest name to one unknown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from test_cli_frame import every_command, run

from shardwise import checkpoint
from shardwise.cli.help import Command
from shardwise.cli.output import Writing, load_torch, print_json, waiting
from shardwise.kernels import _op

COMMANDS = {" ".join(words): command for words, command in every_command() if not isinstance(command, click.Group)}
NEEDS_TRITON = pytest.mark.skipif(
    not _op.HAS_TRITON or _op.INTERPRETED, reason="the command asks for a Triton that compiles"
)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_json_is_a_flag_of_every_command_and_out_is_where_files_go(name: str) -> None:
    """`perf run --json` took a file where `plan --json` printed, and `export`, `kernels check` and others had none."""
    options = {option: parameter for parameter in COMMANDS[name].params for option in parameter.opts}
    if name not in ("plan calibrate", "plan env", "env"):
        json_option = options["--json"]
        assert isinstance(json_option, click.Option) and json_option.is_flag and json_option.name == "as_json"
    if "--out" in options:
        assert isinstance(options["--out"].type, click.Path) and not options["--out"].type.dir_okay


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--json", "a.json"], (False, "a.json")),
        (["--json=a.json"], (False, "a.json")),
        (["--out", "a.json", "--json"], (True, "a.json")),
        (["--json", "--out", "a.json"], (True, "a.json")),
        (["--json"], (True, None)),
    ],
)
def test_scripts_may_name_the_file_behind_json(words: list[str], asked: tuple[bool, str | None]) -> None:
    assert {name for name, entry in COMMANDS.items() if isinstance(entry, Writing)} == {
        "kernels run", "perf counts", "perf run",
    }  # fmt: skip
    options: list[click.Parameter] = [click.Option(["--out"]), click.Option(["--json", "as_json"], is_flag=True)]
    context = Writing("a", params=options).make_context("a", [*words])
    assert (context.params["as_json"], context.params["out"]) == asked


def test_json_of_nan_and_infinity_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": -float("inf")}, "d": Path("x")})

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed == {"a": [None, [None, 1.5]], "b": {"c": None}, "d": "x"}


class _Model(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), value))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good and bad files under the names that the table below has."""
    place = tmp_path_factory.mktemp("place")
    for name, value in (("good", 1.0), ("other", 2.0)):
        checkpoint.save(place / name, _Model(value), step=1).wait()
    (place / "no_folder").mkdir()
    (place / "no.json").write_text("[1, 2")
    (place / "no.npz").write_text("[1, 2")
    (place / "tables.json").write_text('[{"name": "t", "num_embeddings": 100, "embedding_dim": 4}]')
    (place / "empty.json").touch()
    (place / "none.py").write_text("def (")
    (place / "good.py").write_text("import torch\ndef make(): return 3\n")
    (place / "gone.py").write_text("from torchrec.nowhere import Nothing\n")
    for name, text in (("damaged", "[1, 2"), ("blank", "")):
        (place / name).mkdir()
        (place / name / "manifest.json").write_text(text)
    bits = checkpoint.save(place / "flipped", _Model(1.0), step=1)
    bits.wait()
    (file,) = (place / "flipped").rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    return place


# status, what is asked, words of the error; what is said of a file has its name
ENDINGS: Sequence[tuple[int, str, str]] = (
    (0, "ckpt show good", ""),
    (2, "ckpt show missing", "missing"),
    (2, "ckpt show no.json", "no.json is no checkpoint"),
    (2, "ckpt show no_folder", "no_folder is no checkpoint"),
    (2, "ckpt show damaged", "manifest.json"),
    (2, "ckpt show blank", "manifest.json"),
    (0, "ckpt verify good", ""),
    (1, "ckpt verify flipped", ""),
    (1, "ckpt verify damaged", ""),
    (2, "ckpt verify no_folder", "no_folder is no checkpoint"),
    (2, "ckpt verify empty.json", "empty.json is no checkpoint"),
    (0, "ckpt diff good good", ""),
    (1, "ckpt diff good other", ""),
    (2, "ckpt diff good no.json", "no.json is no checkpoint"),
    (2, "ckpt diff good damaged", "manifest.json"),
    (2, "ckpt diff missing good", "missing"),
    (0, "ckpt reshard good new", ""),
    (2, "ckpt reshard good no.json", "no.json"),
    (2, "ckpt reshard good good", "has the checkpoint itself"),
    (2, "ckpt reshard good no.json/new", "no.json"),
    (2, "ckpt reshard damaged new", "manifest.json"),
    (2, "ckpt reshard good new --plan row_wide", "did you mean 'row_wise'?"),
    (0, "ckpt export good new.safetensors", ""),
    (2, "ckpt export good no_folder", "no_folder"),
    (2, "ckpt export good nowhere/new.safetensors", "nowhere/new.safetensors cannot be written"),
    (2, "ckpt export no_folder a.safetensors", "no_folder is no checkpoint"),
    (2, "export no.json --model good.py:make", "no.json"),
    (2, "export served --model nowhere.py:make", "nowhere.py"),
    (2, "export served --model none.py:make", "SyntaxError"),
    (2, "export served --model good.py:maek", "did you mean 'make'?"),
    (2, "export served --model godo.py:make", "did you mean 'good.py'?"),
    (2, "export served --model good.py:make", "returned int"),
    (2, "export served --model good.py:make --checkpoint no_folder", "no_folder is no checkpoint"),
    (2, "export served --model good.py:make --table-dtype a=in8", "did you mean 'int8'?"),
    (2, "cache record t.npz --loader good.py:make --tables no.json", "no.json"),
    (2, "cache record t.npz --loader good.py:maek --tables tables.json", "did you mean 'make'?"),
    (2, "cache record no_folder --loader good.py:make --tables no.json", "no_folder"),
    (2, "cache simulate missing.npz", "missing.npz"),
    (2, "cache simulate no.npz", "no.npz: no trace that can be read"),
    (0, "cache simulate --tables tables.json", ""),
    (0, "migrate good.py", ""),
    (1, "migrate gone.py", ""),
    (2, "migrate missing.py", "missing.py"),
    (2, "migrate none.py", "none.py"),
    (2, "migrate no_folder", "no_folder"),
    (2, "perf report missing.json", "missing.json"),
    (2, "perf report no.json", "no.json is no JSON"),
    (2, "perf report empty.json", "empty.json is no JSON"),
    (2, "perf report no_folder", "no_folder"),
    (2, "perf compare no.json no.json", "no.json is no JSON"),
    (2, "perf run --list --only nothing.like.it", "no case for cpu has"),
    (2, "perf run --list --suite cppu", "did you mean 'cpu'?"),
    (2, "perf run --list --only quantised", "did you mean 'quantized'?"),
    (2, "perf run --list --only (", "is no regular expression"),
    (2, "perf run --out nowhere/new.json --only package", "nowhere/new.json cannot be written"),
    (2, "perf counts --baseline no.json", "no.json"),
    (2, "perf counts --baseline empty.json", "empty.json"),
    (2, "perf counts --only pipelinde", "did you mean 'pipelined'?"),
    (2, "kernels autotune --device cpu --workload no.json --dry-run", "no.json"),
    (2, "kernels autotune --device cpu --workload empty.json --dry-run", "empty.json"),
    (2, "kernels autotune --dry-run --dtypes int9", "did you mean 'int8'?"),
    (2, "kernels autotune --dry-run --kernel poled_lookup", "did you mean 'pooled_lookup'?"),
    (2, "kernels check --target sm_91", "did you mean 'sm_90'?"),
    (2, "kernels registers --target sm90", "did you mean 'sm_90'?"),
    (2, "kernels run --out nowhere/new.json", "nowhere/new.json cannot be written"),
    (2, "doctor --device gpu", "is no device"),
    (2, "doctor --quick --device cuda:99", "no device 'cuda:99'"),
)


@pytest.mark.parametrize(("status", "words", "message"), ENDINGS, ids=[f"{words}: {n}" for n, words, _ in ENDINGS])
def test_statuses(status: int, words: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that could not be read ended with 1, which `ckpt diff` has for checkpoints that differ."""
    monkeypatch.chdir(place)
    if words.startswith("migrate"):
        pytest.importorskip("libcst")
    result = run(*words.split())
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output and (result.exception is None or isinstance(result.exception, SystemExit))
    if status == 2 and not words.startswith("migrate"):
        assert result.stdout == ""
        first, *more = result.stderr.splitlines()[-2:] if len(result.stderr.splitlines()) > 1 else [result.stderr]
        assert message in result.stderr and len(more) <= 1 and ".part" not in first


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kernels run --kernel poled", "did you mean 'pooled'?"),
        ("kernels check --kernel quantised_pooled_lookup", "did you mean 'quantized_pooled_lookup'?"),
    ],
)
def test_kernels_of_other_names(words: str, message: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2 and message in result.stderr, result.output


def test_every_command_is_in_the_table_of_statuses() -> None:
    asked = {words for _, words, _ in ENDINGS}
    missing = {name for name in COMMANDS if not any(f"{words} ".startswith(f"{name} ") for words in asked)}
    # the planner's have a table of their own
    assert {name for name in missing if name.split()[0] not in ("plan", "env")} == set()


def test_a_torch_that_does_not_import_is_a_line_of_any_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libcudart.so: cannot open\nshared object file")

    monkeypatch.delitem(__import__("sys").modules, "torch")
    monkeypatch.setattr("shardwise.cli.output.import_module", broken)
    with pytest.raises(click.ClickException, match="torch does not import: libcudart.so: cannot open shared") as caught:
        load_torch()
    assert caught.value.exit_code == 2


def test_what_is_waited_for_is_said_on_terminals_alone_and_goes_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with waiting("importing torch"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with waiting("importing torch"):
        pass
    assert capsys.readouterr().err == f"importing torch ...\r{'':19}\r"


def test_commands_share_one_class() -> None:
    assert all(isinstance(entry, Command) for entry in COMMANDS.values())
