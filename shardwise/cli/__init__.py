"""The command line, `shardwise` or `python -m shardwise`. Needs click and rich, the extra `cli`.

`kernels` is about the Triton kernels, which it compiles, executes and times (kernels.py, tune.py). `ckpt` looks
at checkpoints and writes them anew (ckpt.py). `export` writes models that serve (export.py). `migrate` reports
on programs written for TorchRec (migrate.py). `perf` measures and compares (perf.py). `plan` plans where tables
go (plan.py).
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .._version import __version__, how_to_install

if TYPE_CHECKING:
    import click


def main() -> None:
    """Run the command that the arguments of the process name."""
    missing = [library for library in ("click", "rich") if find_spec(library) is None]
    if missing:
        sys.exit(f"shardwise: the command line needs {' and '.join(missing)}: {how_to_install('cli')}")
    commands()(prog_name="shardwise")


def commands() -> click.Group:
    """The commands, for click to run."""
    import click

    from .ckpt import add_ckpt
    from .export import add_export
    from .kernels import add_kernels
    from .migrate import add_migrate
    from .perf import add_perf
    from .plan import add_plan

    @click.group(context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(__version__)
    def shardwise() -> None:
        """Sharded embedding tables for PyTorch recommender models."""

    add_kernels(shardwise)
    add_ckpt(shardwise)
    add_export(shardwise)
    add_migrate(shardwise)
    add_perf(shardwise)
    add_plan(shardwise)
    return shardwise
