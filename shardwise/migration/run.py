"""`python -m shardwise.torchrec script.py args…`: run a script of TorchRec's that knows nothing of shardwise.

Processes that the script starts must be served as well, and nobody can call `install()` in them: a spawned child
imports what it unpickles, and the main script, by itself. So the folder `served` goes on `sys.path`, which
multiprocessing (and `multiprocess`, and forkserver) hands to its children, and on PYTHONPATH for other subprocesses. A
child's first `import torchrec` finds `served/torchrec.py` there, ahead of site-packages, which installs the mirror and
makes way for it. The script stays an ordinary `__main__` with its own `__file__` and no `__spec__`, as under `python
script.py`, so a child finds it by its path. (A `sitecustomize` would do the same, but would hide the machine's own.)
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from importlib.util import module_from_spec
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import shardwise

from .._installed import STAND_INS, installed_fbgemm
from .mirror import TAKEN, Finder, install

USAGE = "usage: python -m shardwise.torchrec script.py [args…]\n       python -m shardwise.torchrec -m module [args…]"
# what a shell says of a command that was used wrongly, and python of a script that is not there
_MISUSED = 2


def main() -> None:
    """Run the script or module that `sys.argv` names, with the rest as its arguments."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    arguments = arguments[as_module:]
    if not arguments or arguments[0].startswith("-"):
        _refuse(USAGE)
    target = arguments[0]
    if not as_module and not (target and Path(target).exists()):
        _refuse(f"python -m shardwise.torchrec: can't open file {target!r}: there is no such file")
    install()
    sys.argv = arguments
    if not as_module:
        sys.path[0] = str(Path(target).resolve().parent)
    places = [str(STAND_INS)]
    if _shardwise_path() != shardwise.__file__:
        # we were found by the working folder, where a child of the script would not look
        places.append(str(Path(shardwise.__file__).parents[1]))
    # a module's first entry is the working folder, which may be a checkout of TorchRec
    first = 0 if as_module else 1
    sys.path[first:first] = places
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        if as_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        error.__traceback__ = _of_the_script(error.__traceback__)
        if isinstance(error, ImportError) and error.__traceback__ is None:
            # runpy found nothing to run
            _refuse(f"python -m shardwise.torchrec: {error}")
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        if names := os.environ.get("SHARDWISE_NAMES_TAKEN"):
            # for `shardwise migrate --run`
            Path(names).write_text(json.dumps(sorted(TAKEN)))


def take_over(name: str) -> None:
    """Put the mirror, or the real FBGEMM, in the place of the stand-in that is being imported as `name`."""
    stand_in = sys.modules.pop(name)
    try:
        install()
        spec = Finder().find_spec(name) if name in Finder.roots else installed_fbgemm()
        assert spec is not None and spec.loader is not None, f"nothing stands behind {name}"
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules[name] = stand_in
        raise


def _shardwise_path() -> str | None:
    """Which shardwise a process with this `sys.path` would import."""
    specs = (finder.find_spec("shardwise", None) for finder in sys.meta_path)
    return next((spec.origin for spec in specs if spec is not None), None)


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without this file's frames and runpy's, which the user did not write."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _refuse(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(_MISUSED)
