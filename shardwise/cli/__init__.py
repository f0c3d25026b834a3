"""The command line, `shardwise` or `python -m shardwise`.

This file knows the commands by name and loads what one needs when it runs: `--version` imports nothing besides, help
and completion import click alone (help.py). A command is the function `add_<name>` of the file of its name, which
gives a group of commands one more; files of commands import the standard library, click and each other at their top,
and all else where it is used. `kernels` has a part in tune.py. What commands have in common is in output.py.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .._version import __version__

if TYPE_CHECKING:
    import click

# the first sentence of each command's help, for help and completion of them all
COMMANDS = {
    "cache": "Record which rows a loader's batches want, and simulate caches of tables larger than the device",
    "ckpt": "Look at checkpoints, compare them, and write them anew",
    "doctor": "Check this machine: versions, devices, bandwidths, links, every family of ops, what is tuned",
    "env": "What shardwise runs on here: versions, devices, environment; to paste into an issue",
    "export": "Quantize a model's tables and write it into the folder OUT_DIR, which serves it",
    "kernels": "Compile, run and tune the Triton kernels",
    "migrate": "What the programs PATHS take from TorchRec: what works, behaves otherwise, or is missing",
    "perf": "Measure shardwise on this machine, and compare what was measured",
    "plan": "Plan where tables go, or look at plans",
}
VERSION = f"shardwise, version {__version__}"


def main() -> None:
    """Run the command that the arguments of the process name."""
    if sys.argv[1:] == ["--version"]:
        # importing click takes as long as starting Python
        print(VERSION)
        return
    commands()(prog_name="shardwise")


def commands() -> click.Group:
    """The commands, for click to run."""
    from .help import Commands

    return Commands(COMMANDS, VERSION)
