"""Help and errors of all commands, and groups that load their commands when they are asked for.

Help is click's with colours on a terminal, columns that fold inside the terminal's width, and examples apart: in the
docstring of a command the last paragraphs, from the one that begins with "Examples:", are shown as they stand, after
the options. An error is one line, and of wrong usage a second one says how to get help. With NO_COLOR in the
environment, with --no-color before the command, and outside of terminals nothing is coloured.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

import click
from click.formatting import wrap_text

from .._names import did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_WIDEST = 100
_NOT_ONE_OF = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*") is not (?:one of )?""")
# of an option its names, and what click says of its value in brackets
_NAMES = re.compile(r"(?<![\w|-])--?[a-z][\w-]*")
_FACTS = re.compile(r"\[[^\[\]]*\]$")
_EPILOG = """\b
Status of every command:
  0 fine; 1 the answer is no: differs, fails, is missing;
  2 wrong arguments or files; 130 after Ctrl-C

\b
Completion in bash (zsh: zsh_source):
  eval "$(_SHARDWISE_COMPLETE=bash_source shardwise)"
"""


class _Formatter(click.HelpFormatter):
    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        before = len(self.buffer)
        super().write_usage(prog, args, prefix)
        self.buffer[before:] = ["".join(self.buffer[before:]).replace("Usage:", _heading("Usage"), 1)]

    def write_heading(self, heading: str) -> None:
        self.write(f"{'':>{self.current_indent}}{_heading(heading)}\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Terms and what they mean, side by side where the term is short."""
        rows = [*rows]
        column = max((len(term) for term, _ in rows if len(term) <= col_max), default=0) + col_spacing
        margin, hanging = " " * self.current_indent, " " * (self.current_indent + column)
        for term, meaning in rows:
            *above, last = _folded(term, self.width - self.current_indent)
            self.write("".join(f"{margin}{_coloured(line)}\n" for line in above))
            wrapped = wrap_text(meaning, max(self.width - len(hanging), 10), preserve_paragraphs=True)
            beside = not above and len(last) + col_spacing <= column
            gap = " " * (column - len(last)) if beside else f"\n{hanging}"
            lines = f"\n{hanging}".join(_dimmed(wrapped).splitlines())
            self.write(f"{margin}{_coloured(last)}{gap * bool(lines)}{lines}\n")

    def write_examples(self, text: str) -> None:
        """Lines as they stand, remarks dim."""
        self.write_paragraph()
        self.write_heading("Examples")
        for line in text.splitlines():
            self.write(f"  {click.style(line, dim=True) if line.startswith('#') else line}".rstrip() + "\n")


def _heading(text: str) -> str:
    return click.style(f"{text}:", bold=True)


def _folded(term: str, width: int) -> list[str]:
    """A term of more columns than there are, broken between choices."""
    lines = [""]
    for part in re.split(r"(?<=[|, ])", term):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("    ")
        lines[-1] += part
    return lines


def _coloured(term: str) -> str:
    """A line of options, their names coloured; else a command."""
    if "-" in term or "|" in term:
        return _NAMES.sub(lambda match: click.style(match[0], fg="cyan"), term)
    return click.style(term, fg="cyan")


def _dimmed(meaning: str) -> str:
    return _FACTS.sub(lambda match: "\n".join(click.style(line, dim=True) for line in match[0].split("\n")), meaning)


class Context(click.Context):
    formatter_class = _Formatter


class Command(click.Command):
    """A command whose help has examples apart."""

    context_class = Context

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        text, _ = _parts(self.help)
        if text:
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(text)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _, examples = _parts(self.help)
        if examples and isinstance(formatter, _Formatter):
            formatter.write_examples(examples)
        super().format_epilog(ctx, formatter)


def _parts(text: str | None) -> tuple[str, str]:
    """A docstring's words, and its examples, which end it."""
    description, _, examples = inspect.cleandoc(text or "").partition("\f")[0].partition("Examples:\n")
    # \b, click's mark of a paragraph that is not to be filled
    return description.removesuffix("\b\n").rstrip(), inspect.cleandoc("\n" + examples).replace("\b\n", "")


def first_sentence(command: click.Command) -> str:
    """Of a command's help, without its full stop: some versions of click keep that."""
    return command.get_short_help_str(1000).rstrip(".")


class Group(Command, click.Group):
    """A group of commands; those that it is given, and groups, are of these kinds."""

    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        click.Command.format_options(self, ctx, formatter)
        rows = [*self.short_helps(ctx).items()]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def short_helps(self, ctx: click.Context) -> Mapping[str, str]:
        """The first sentence of each command's help, by its name."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        return {name: first_sentence(command) for name, command in commands.items() if command and not command.hidden}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and self.no_args_is_help and not ctx.resilient_parsing:
            # versions of click differ in the stream and the status
            click.echo(ctx.get_help(), err=True, color=ctx.color)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing and not name.startswith("-"):
            raise click.UsageError(f"no such command {name!r}{self.nearest(ctx, name)}", ctx)
        return super().resolve_command(ctx, args)

    def nearest(self, ctx: click.Context, name: str) -> str:
        """What ends the sentence about a command that there is not."""
        names = self.list_commands(ctx)
        return did_you_mean(name, names) or f": there are {', '.join(names)}"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        helps = self.short_helps(ctx).items()
        items = [CompletionItem(name, help=text) for name, text in helps if name.startswith(incomplete)]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]


# a class has no name in its own body
Group.group_class = Group


class Commands(Group):
    """The root: commands by their names, each loaded from the file of its name at first use."""

    def __init__(self, helps: Mapping[str, str], version: str) -> None:
        colour = False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None
        super().__init__(
            "shardwise",
            help="Sharded embedding tables for PyTorch recommender models.",
            epilog=_EPILOG,
            context_settings={
                "help_option_names": ["-h", "--help"], "max_content_width": _WIDEST, "color": colour,
            },
            params=[
                click.Option(
                    ["--no-color"], is_flag=True, is_eager=True, expose_value=False, callback=_without_colour,
                    help="Print no colours; NO_COLOR in the environment does the same.",
                ),
                click.Option(
                    ["--version"], is_flag=True, is_eager=True, expose_value=False,
                    callback=lambda ctx, _, asked: _say(ctx, version) if asked else None,
                    help="Show the version and exit.",
                ),
            ],
        )  # fmt: skip
        self._helps = helps

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self._helps, *self.commands})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._helps and cmd_name not in self.commands:
            add = getattr(import_module(f".{cmd_name}", __package__), f"add_{cmd_name}")
            add(self)
        return self.commands.get(cmd_name)

    def short_helps(self, ctx: click.Context) -> Mapping[str, str]:
        return self._helps

    def nearest(self, ctx: click.Context, name: str) -> str:
        groups = {command: self.get_command(ctx, command) for command in self.list_commands(ctx)}
        deeper = [
            command for command, group in groups.items() if isinstance(group, click.Group) and name in group.commands
        ]
        return f": did you mean '{deeper[0]} {name}'?" if deeper else super().nearest(ctx, name)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _short_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _short_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nstopped by Ctrl-C", err=True)
            # as a shell has it of a program that Ctrl-C ended
            sys.exit(130)


def _without_colour(ctx: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked:
        ctx.color = False


def _say(ctx: click.Context, text: str) -> None:
    click.echo(text)
    ctx.exit()


class _Short(click.ClickException):
    """An error as one line, and of wrong usage another that says how to get help."""

    def __init__(self, error: click.ClickException) -> None:
        super().__init__(_sentence(error))
        # newer versions of click declare it of the class
        self.exit_code = error.exit_code  # type: ignore[misc,unused-ignore]
        self.context = error.ctx if isinstance(error, click.UsageError) else None

    def show(self, file: IO[Any] | None = None) -> None:
        context = self.context or click.get_current_context(silent=True)
        colour = context.color if context is not None else None
        click.echo(f"{click.style('Error:', fg='red', bold=True)} {self.message}", file, err=True, color=colour)
        if self.context is not None:
            click.echo(f"Try '{self.context.command_path} -h' for help.", file, err=True)


def _sentence(error: click.ClickException) -> str:
    """What is wrong, with the name that was meant if one is near."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and context is not None:
        known = [
            name
            for parameter in context.command.get_params(context)
            for name in (*parameter.opts, *parameter.secondary_opts)
        ]
        return f"no such option {error.option_name!r}{did_you_mean(error.option_name, known)}"
    text = error.format_message()
    if isinstance(error, click.BadParameter) and error.param is not None and isinstance(error.param.type, click.Choice):
        match = _NOT_ONE_OF.match(error.message)
        if match is not None:
            return text.rstrip(".") + did_you_mean(ast.literal_eval(match[1]), map(str, error.param.type.choices))
    return text


@contextmanager
def _short_errors() -> Iterator[None]:
    try:
        yield
    except _Short:
        raise
    except click.ClickException as error:
        raise _Short(error) from error
