"""Compile the kernels of the GPU script for a GPU that is not there, into a cache that is carried to one that is.

    python -m shardwise.perf.gpu_scripts.gpu_precompile --out FOLDER

The library's own launches run on tensors without values (counts/fake_cuda.py) with Triton's driver replaced by one that
only names the target, so what is compiled is what will be asked for: nothing but the launch is left out. On the device
`use(FOLDER)` makes it Triton's cache. Triton names an entry by a hash over its own shared library, which differs
between builds for two versions of Python, and writes down absolute paths; both are mended here. Another version of
Triton finds nothing in the folder and compiles. Needs triton, no GPU, no TRITON_INTERPRET.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shardwise.kernels import configs
from shardwise.kernels._op import triton
from shardwise.perf.counts.fake_cuda import FakeCudaTensor, use_fake_cuda
from shardwise.perf.counts.launches import CUDA, Counted
from shardwise.perf.gpu_scripts import gpu_kernels, gpu_ops, gpu_yardsticks
from shardwise.perf.gpu_scripts.gpu_shapes import (
    SHAPES,
    Shape,
    hollow,
    hollow_call,
    sized,
)
from shardwise.perf.gpu_scripts.gpu_sizes import GPU
from shardwise.perf.gpu_scripts.gpu_variants import VARIANTS
from shardwise.perf.suite import machine
from shardwise.perf.suite.batches import Batch, Optimizer
from shardwise.perf.suite.case import in_a_line
from shardwise.perf.suite.options import FLAG, Options, parser_of
from shardwise.perf.suite.workloads import equal

# of a card: what tables are cut to is the same from here on
MEMORY_BYTES = 80 << 30
# files of an entry without which it serves: intermediate code is several times as large
KEPT = (".cubin", ".hsaco", ".json")


class Driver:
    """Stands in for Triton's driver where there is no device: says what to compile for."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self) -> Any:
        """The target of the one device."""
        compiler = importlib.import_module("triton.backends.compiler")
        return compiler.GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        """The first."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one; nothing is put on it."""
        return 0


def portable_key() -> str:
    """In the place of Triton's hash over its own files: its version. A release is built from one set of sources."""
    return f"{triton.__version__} of a release"


@contextmanager
def keyed_by_version() -> Iterator[None]:
    """In the context entries of Triton's cache are named by its version, not by how it was built."""
    with patch.object(importlib.import_module("triton.runtime.cache"), "triton_key", portable_key):
        yield


def use(folder: Path) -> int:
    """Make a folder, wherever it was filled, the cache of Triton in this process and those it starts; its entries.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder of compiled kernels at {folder}")
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())
    cache: Any = importlib.import_module("triton.runtime.cache")
    cache.triton_key = portable_key
    return relocate(folder)


def relocate(folder: Path) -> int:
    """Write into each entry where its files are now; how many entries there are."""
    groups = list(folder.resolve().glob("*/__grp__*.json"))
    for group in groups:
        names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
        here = {name: str(group.parent / name) for name in names if (group.parent / name).exists()}
        text = json.dumps({"child_paths": here})
        if group.read_text(encoding="utf-8") != text:
            # another process may be reading it
            other = group.with_name(f"{group.name}.{os.getpid()}")
            other.write_text(text, encoding="utf-8")
            other.replace(group)
    return len(groups)


def strip(folder: Path) -> int:
    """Leave of each entry what a launch needs; bytes of the folder."""
    for entry in folder.iterdir():
        if not any(entry.glob("__grp__*.json")):
            # a compiler that failed left it
            shutil.rmtree(entry)
            continue
        for file in entry.iterdir():
            if file.suffix not in KEPT:
                file.unlink()
    relocate(folder)
    return bytes_of(folder)


def bytes_of(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Compiled:
    """What happened in `compiling`.

    Attributes:
        launches: of kernels.
        kernels: names of kernels that were compiled.
        hits: entries that the cache had.
        failed: kernels whose compiler raised, and the error.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.kernels: list[str] = []
        self.hits = 0
        self.failed: dict[str, str] = {}


@contextmanager
def compiling(folder: Path, architecture: int, jobs: int) -> Iterator[Compiled]:
    """Launches in the context, on tensors of a device that is not there, are compiled into the folder and not run."""
    folder.mkdir(parents=True, exist_ok=True)
    done, runtime = Compiled(), importlib.import_module("triton.runtime")
    asynchronous = importlib.import_module("triton.runtime._async_compile")
    knobs, jit = importlib.import_module("triton.knobs"), importlib.import_module("triton.runtime.jit").JITFunction
    launch, seen = jit.run, dict[int, Any]()

    def compiled(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        done.launches += 1
        if id(kernel) not in seen:
            # what this process has of it may be of another target
            seen[id(kernel)] = kernel
            kernel.device_caches.clear()
        options["warmup"] = True
        launch(kernel, *args, grid=grid, **options)

    def listened(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            done.hits += 1
        else:
            done.kernels.append(src.name)

    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"TRITON_CACHE_DIR": str(folder.resolve())}))
        stack.enter_context(keyed_by_version())
        stack.enter_context(use_fake_cuda(Counted()))
        stack.enter_context(patch.object(jit, "run", compiled))
        stack.callback(lambda: [kernel.device_caches.clear() for kernel in seen.values()])
        stack.enter_context(patch.object(knobs.compilation, "listener", listened))
        stack.enter_context(patch.object(runtime.driver, "_active", Driver(architecture)))
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        mode = asynchronous.AsyncCompileMode(pool, ignore_errors=True)
        stack.enter_context(mode)
        yield done
        for kernel in mode.future_kernels.values():
            if error := kernel.future.exception():
                done.failed[str(error)[:200]] = type(error).__name__


class _HostGenerator(torch.Generator):
    """A generator of the host, whatever device it is asked for."""

    def __new__(cls, device: object = None) -> _HostGenerator:
        return super().__new__(cls)


def _checks() -> Iterator[tuple[str, Callable[[], object]]]:
    """Sections of checks, on the device that is not there: their values are the CPU's, their launches are compiled."""
    sizes, place = replace(GPU, race_repeats=1), str(CUDA)
    for dtype in gpu_kernels.DTYPES:
        yield f"correctness {dtype}", partial(gpu_kernels.correctness, place, sizes, dtype)
    yield "quantized_correctness", partial(gpu_kernels.quantized_correctness, place, sizes)
    yield "jagged_correctness", partial(gpu_ops.jagged_correctness, place, sizes)


def compile_checks() -> list[str]:
    """Ask for every kernel that the checks against references launch; what went wrong, of itself no reason to stop."""
    refused = []
    # modules that are imported only now may name the class
    importlib.import_module("torch.distributed.tensor")
    with patch.object(torch, "Generator", _HostGenerator):
        for name, check in _checks():
            try:
                check()
            except Exception as error:
                refused.append(f"{name}: {in_a_line(error)}")
    return refused


def _repeated() -> list[Shape]:
    """What `same_bits` repeats: as many ids, about, so as many levels."""
    return [Shape(f"D={dim}", "", equal(f"D={dim}", 2, 100_000, dim, GPU.batch, GPU.length)) for dim in GPU.dims[:2]]


def compile_all(
    shapes: Sequence[Shape], folder: Path, architecture: int, jobs: int, *, checks: bool = False
) -> tuple[Compiled, list[str]]:
    """Compile what the yardsticks, the profile and the A/B launch on these shapes; and which variants were refused.

    And what the checks launch, some hundreds of kernels, if `checks`.
    """
    # what is made inside would be taken for tensors of the device, with values
    made = [(shape, *hollow(shape, FakeCudaTensor)) for shape in shapes]
    repeated = (
        [hollow(shape, FakeCudaTensor, rule) for shape in _repeated() for rule in gpu_kernels.RULES] if checks else []
    )
    links, at = (FakeCudaTensor(torch.empty(n, dtype=torch.int64, device="meta")) for n in (gpu_yardsticks.LINE, 1))
    refused: list[str] = []
    with compiling(folder, architecture, jobs) as done:
        gpu_yardsticks.chase(links, at, 2)
        for shape, batch, state in made:
            refused += _compile_variants(shape, batch, state)
        for batch, state in repeated:
            hollow_call(batch, state, "step")
        if checks:
            refused += compile_checks()
    return done, refused


def _compile_variants(shape: Shape, batch: Batch, state: Optimizer) -> list[str]:
    refused = []
    hollow_call(batch, state, "step")
    for variant in VARIANTS:
        # what a collection launches are the same kernels
        if shape.name not in variant.shapes or variant.call == "module":
            continue
        try:
            with variant.forced():
                hollow_call(batch, state, variant.call)
        # a tile that no launch takes; the A/B says so again where it is timed
        except Exception as error:
            refused.append(f"{shape.name}, {variant.name}: {type(error).__name__}: {error}"[:300])
    return refused


def _with_triton(folder: Path, argv: list[str]) -> int:
    """The command again, with the Triton of a folder before the installed one; its exit status."""
    if not (folder / "triton").is_dir():
        print(f"gpu_precompile: no triton in {folder}")
        return 2
    # the parser takes the last value of an option: the folder must not be asked for again
    place = next(n for n, argument in enumerate(argv) if argument.split("=")[0] == "--triton")
    rest = argv[:place] + argv[place + (1 if "=" in argv[place] else 2) :]
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "shardwise.perf.gpu_scripts.gpu_precompile", *rest]
    return subprocess.call(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


OPTIONS: Options = {
    "--out": {"type": Path, "required": True, "help": "the folder, as --compiled of gpu_check takes it"},
    "--architecture": {"type": int, "default": 90, "help": "of the device: 90 is sm_90 (the default)"},
    "--shapes": {"nargs": "+", "choices": list(SHAPES), "default": list(SHAPES)},
    "--checks": {**FLAG, "help": "also what the checks launch: minutes"},
    "--whole": {**FLAG, "help": "leave intermediate code: others may be compiling"},
    "--jobs": {"type": int, "default": machine.cores()},
    "--triton": {"type": Path, "help": "a folder that holds another version of Triton to compile with"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Compile and strip; prints what the folder holds."""
    arguments = parser_of(OPTIONS, "gpu_precompile", (__doc__ or "").split("\n")[0]).parse_args(argv)
    if arguments.triton is not None:
        return _with_triton(arguments.triton, list(sys.argv[1:] if argv is None else argv))
    start = time.perf_counter()
    shapes = [sized(SHAPES[name], MEMORY_BYTES) for name in arguments.shapes]
    done, refused = compile_all(shapes, arguments.out, arguments.architecture, arguments.jobs, checks=arguments.checks)
    size = bytes_of(arguments.out) if arguments.whole else strip(arguments.out)
    for line in (*refused, *done.failed):
        print(f"not compiled: {line}")
    print(
        f"triton {configs.triton_version()}, sm_{arguments.architecture}: {len(done.kernels)} kernels compiled,"
        f" {done.hits} were there, {done.launches} launches, {size / 2**20:.1f} MiB in {arguments.out},"
        f" {time.perf_counter() - start:.0f} s"
    )
    return 1 if done.failed else 0


if __name__ == "__main__":
    sys.exit(main())
