"""What all commands have in common: what they import, how help and errors look, widths, completion."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import click
import pytest
from checkout import ROOT, run_python
from click.testing import CliRunner, Result

from shardwise import __version__, cli
from shardwise.cli.help import first_sentence
from shardwise.cli.output import console, print_table, table_of

# what commands load when they run
HEAVY = ("torch", "numpy", "rich", "scipy", "numba", "triton", "libcst", "safetensors", "tqdm", "aiohttp")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.commands(), arguments)


def every_command() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Each command and group with the words that name it."""
    waiting: list[tuple[tuple[str, ...], click.Command]] = [((), cli.commands())]
    while waiting:
        words, command = waiting.pop()
        yield words, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                subcommand = command.get_command(context, name)
                assert subcommand is not None
                waiting.append(((*words, name), subcommand))


PATHS = [words for words, _ in every_command()]

PROBE = """
import contextlib, io, json, os, sys
heavy, asked = json.loads(sys.argv[1])
imported, now = {}, None

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            imported.setdefault(now, name)

sys.meta_path.insert(0, Recorder())
from shardwise.cli import main
printed = {}
for now, (words, typed) in enumerate(asked):
    sys.argv[1:] = words
    if typed is not None:
        os.environ.update(
            _SHARDWISE_COMPLETE="bash_complete", COMP_WORDS=" ".join(["shardwise", *typed]), COMP_CWORD=str(len(typed))
        )
    out = io.TextIOWrapper(io.BytesIO())
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main()
    out.flush()
    printed[now] = out.buffer.getvalue().decode()
    os.environ.pop("_SHARDWISE_COMPLETE", None)
print(json.dumps([printed, imported, "click" in sys.modules]))
"""


def probed(asked: list[tuple[list[str], list[str] | None]]) -> tuple[list[str], dict[int, str], bool]:
    """What commands print, or what a shell gets that completes words; what heavy each imports; whether click is."""
    printed, imported, clicked = json.loads(run_python("-c", PROBE, json.dumps([HEAVY, asked])).stdout)
    return [*printed.values()], {int(place): name for place, name in imported.items()}, clicked


def test_the_version_costs_no_import_of_click() -> None:
    printed, imported, clicked = probed([(["--version"], None)])
    assert printed == [f"shardwise, version {__version__}\n"] and not imported and not clicked
    # what click has of it, between other options
    assert run("--no-color", "--version").output == printed[0]


@pytest.mark.parametrize("top", sorted({words[:1] for words in PATHS}), ids=" ".join)
def test_help_and_completion_import_nothing_heavy(top: tuple[str, ...]) -> None:
    asked: list[tuple[list[str], list[str] | None]] = []
    for words, command in every_command():
        if words[:1] == top:
            asked += [([*words, "--help"], None), ([], [*words, ""]), ([], [*words, "-"])]
            asked += [([], [*words, option.opts[0], ""]) for option in _with_choices(command)]
    _, imported, _ = probed(asked)
    assert {" ".join(asked[place][0] or asked[place][1] or ()): name for place, name in imported.items()} == {}


def _with_choices(command: click.Command) -> list[click.Option]:
    options = [option for option in command.params if isinstance(option, click.Option)]
    return [option for option in options if isinstance(option.type, click.Choice)]


def completed(*typed: str) -> set[str]:
    [printed], _, _ = probed([([], [*typed])])
    return {line.partition(",")[2] for line in printed.splitlines()}


def test_words_of_every_depth_are_completed() -> None:
    assert completed("p") == {"perf", "plan"} and completed("") == set(cli.COMMANDS)
    assert completed("kernels", "r") == {"registers", "run"}
    assert completed("perf", "run", "--li") == {"--limit-s", "--list"}
    assert completed("perf", "run", "--device", "") == {"cpu", "cuda"}
    assert completed("export", "--dtype", "fp") == {"fp8", "fp16", "fp32"}


def test_the_root_knows_the_first_sentence_of_each_command() -> None:
    tops = {words[0]: first_sentence(command) for words, command in every_command() if len(words) == 1}
    assert tops == cli.COMMANDS


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_all_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    printed, _, _ = probed([([*words, asked], None) for words in PATHS for asked in ("-h", "--help")])
    assert printed[::2] == printed[1::2] and all(page.startswith("Usage: shardwise") for page in printed)
    assert [line for page in printed for line in page.splitlines() if len(line) > columns] == []


def test_options_stand_in_one_column() -> None:
    lines = run("perf", "compare", "-h").output.splitlines()
    begins = [re.match(r"  (-\S+( \S+)?)  +(?=\S)", line) for line in lines]
    assert len({match.end() for match in begins if match}) == 1


@click.command(cls=cli.commands().command_class)
@click.option("--card", type=click.Choice([f"card-{n}" for n in range(40)]), default="card-3", show_default=True)
def example(card: str) -> None:
    """Do a thing. Of more than one word.

    Its second paragraph.

    Examples:
      # a remark
      shardwise example --card card-1

      shardwise example   # as it stands
    """


def test_examples_come_last_as_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(example, ["--help"], prog_name="shardwise example").output.splitlines()
    assert lines[2:5] == ["  Do a thing. Of more than one word.", "", "  Its second paragraph."]
    assert lines[-5:] == [
        "Examples:", "  # a remark", "  shardwise example --card card-1", "", "  shardwise example   # as it stands",
    ]  # fmt: skip
    folded = lines[lines.index("Options:") + 1 : lines.index("Examples:") - 1]
    assert folded[0].startswith("  --card [card-0|card-1|") and max(map(len, folded)) <= 80
    assert "".join(line.strip() for line in folded).count("card-") == 41


def on_terminal(*arguments: str, columns: int = 80, **environment: str) -> str:
    """What a command prints on a terminal of so many columns, its lines ended as there."""
    import fcntl
    import struct
    import termios

    main_fd, child_fd = pty.openpty()
    fcntl.ioctl(child_fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    env |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment}
    command = [sys.executable, "-m", "shardwise", *arguments]
    process = subprocess.Popen(command, stdin=child_fd, stdout=child_fd, stderr=child_fd, env=env)
    os.close(child_fd)
    printed = b""
    while True:
        try:
            # EIO: nobody writes any more
            part = os.read(main_fd, 65536)
        except OSError:
            break
        if not part:
            break
        printed += part
    process.wait()
    os.close(main_fd)
    return printed.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colours_unless_it_wants_none() -> None:
    coloured = on_terminal("perf", "run", "-h")
    assert "\x1b[1mUsage:\x1b[0m shardwise perf run" in coloured and "\x1b[36m--device\x1b[0m" in coloured
    plain = run_python("-m", "shardwise", "perf", "run", "-h", COLUMNS="80").stdout
    assert "\x1b" not in plain
    assert on_terminal("perf", "run", "-h", NO_COLOR="1") == on_terminal("perf", "run", "-h", TERM="dumb") == plain
    assert on_terminal("--no-color", "perf", "run", "-h") == plain
    assert re.sub(r"\x1b\[\d*m", "", coloured) == plain
    wrong = on_terminal("perf", "rum")
    assert wrong == "\x1b[31m\x1b[1mError:\x1b[0m no such command 'rum': did you mean 'run'?\n" + (
        "Try 'shardwise perf -h' for help.\n"
    )
    assert "\x1b" not in on_terminal("--no-color", "perf", "rum")


@pytest.mark.parametrize(
    ("words", "line", "helps"),
    [
        ("pref", "no such command 'pref': did you mean 'perf'?", "shardwise"),
        ("xyzzy", f"no such command 'xyzzy': there are {', '.join(sorted(cli.COMMANDS))}", "shardwise"),
        ("reshard", "no such command 'reshard': did you mean 'ckpt reshard'?", "shardwise"),
        ("kernels chekc", "no such command 'chekc': did you mean 'check'?", "shardwise kernels"),
        ("perf run --devcie cpu", "no such option '--devcie': did you mean '--device'?", "shardwise perf run"),
        ("perf run --qqqq", "no such option '--qqqq'", "shardwise perf run"),
        ("--verison", "no such option '--verison': did you mean '--version'?", "shardwise"),
        (
            "perf run --device cdua",
            "Invalid value for '--device': 'cdua' is not one of 'cpu', 'cuda': did you mean 'cuda'?",
            "shardwise perf run",
        ),
        (
            "export there --model m:f --output-dtype FP-32",
            "Invalid value for '--output-dtype': 'FP-32' is not one of 'fp32', 'fp16', 'bf16': did you mean 'fp32'?",
            "shardwise export",
        ),
        ("perf run --laps 0", "Invalid value for '--laps': 0 is not in the range x>=1.", "shardwise perf run"),
        ("ckpt show", "Missing argument 'PATH'.", "shardwise ckpt show"),
        ("ckpt show a b c", None, "shardwise ckpt show"),
    ],
)
def test_wrong_usage_is_a_line_and_one_that_says_how_to_get_help(words: str, line: str | None, helps: str) -> None:
    result = run(*words.split())
    first, second = result.stderr.splitlines()
    assert result.exit_code == 2 and result.stdout == ""
    assert first == f"Error: {line}" or line is None and first.startswith("Error: ")
    assert second == f"Try '{helps} -h' for help."


def test_groups_without_a_command_show_help_on_stderr() -> None:
    for words in ([], ["ckpt"], ["kernels"], ["perf"]):
        result = run(*words)
        assert result.exit_code == 2 and result.stdout == "" and result.stderr == run(*words, "-h").stdout


def test_ctrl_c_ends_a_command_with_status_130() -> None:
    group = cli.commands()

    @group.command()
    def stop() -> None:
        raise KeyboardInterrupt

    result = CliRunner().invoke(group, ["stop"])
    assert result.exit_code == 130 and result.stderr.strip() == "stopped by Ctrl-C"


@cache
def table() -> Any:
    made = table_of("name", "kind", right=("rows",), last=("remark",))
    made.add_row("a_table_of_a_name_that_is_longer_than_most_terminals_are_wide" * 2, "[bold]", "1,000,000", "a " * 60)
    made.add_row("[red]", ":smile:", "7", "")
    return made


@pytest.mark.parametrize("columns", [40, 80, 100, 160])
def test_tables_fold_inside_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(table())
    printed = capsys.readouterr()
    assert max(map(len, printed.out.splitlines())) <= columns and printed.err == ""
    letters = "".join(line.split("  ")[0].strip() for line in printed.out.splitlines())
    assert "a_table_of_a_name_that_is_longer_than" in letters
    # neither is markup, and numbers are whole
    assert "[red]" in printed.out and ":smile:" in printed.out and "1,000,000" in printed.out


def test_columns_that_have_no_room_go_and_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(columns: int) -> tuple[str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        made = table_of("name", right=("first", "second"), last=("words",))
        made.add_row("n" * 30, "1" * 12, "2" * 12, "w" * 12)
        print_table(made, drop=("second", "words"))
        captured = capsys.readouterr()
        assert max(map(len, captured.out.splitlines())) <= columns
        return captured.out, captured.err

    whole, nothing = printed(80)
    assert "2" * 12 in whole and "w" * 12 in whole and nothing == ""
    fewer, notice = printed(50)
    assert "2" not in fewer and "w" * 12 in fewer
    assert notice == "columns left out, for there is no room: second; COLUMNS=160 shows more\n"
    assert printed(30)[1].startswith("columns left out, for there is no room: second, words;")


def test_files_and_pipes_are_160_columns_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width == 160
    monkeypatch.setenv("COLUMNS", "90")
    assert console().width == 90 and console(stderr=True).width == 90
