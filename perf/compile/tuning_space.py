"""The tuner's space, and what files of it say, as cases for the compiler: the launches that show them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ...kernels import configs
from ...kernels._op import next_power_of_2
from ...kernels.configs import Config, Key
from ...kernels.quantized.pooled_lookup import unit_count
from ...kernels.row_formats import row_format
from ..tune.candidates import DTYPES, KERNELS, QUANTIZED, candidates
from . import cases as launched
from .cases import Batch, Case


def cases_of(key: Key, config: Config) -> list[Case]:
    """Cases of the launches with this config."""
    run = partial(_run_forced, _launch_of(key.kernel, key.dtype, key.dim), key.kernel, config)
    words = " ".join(f"{name}={value}" for name, value in config.items())
    rows = f"{key.kernel.split()[-1]} D={key.dim} {key.dtype}" if key.kernel.startswith("update ") else ""
    label = f"{key.kernel.removeprefix('update ')} " if rows else ""
    label += f"D={key.dim} {key.dtype} tuned {words}"
    cases = launched.launches(run, label, rows)
    return [case for case in cases if case.kernel_name == key.kernel.split()[0]]


def tuned_cases() -> Iterator[Case]:
    """Of every entry of the files that come with shardwise."""
    for path in sorted(configs.FOLDER.glob("*.json")):
        for key, config in configs.read(path).entries.items():
            yield from cases_of(key, config) if config else ()


def candidate_cases() -> Iterator[Case]:
    """Of candidates of every kernel, at the dims and dtypes that are tuned most."""
    for kernel in KERNELS:
        quantized = kernel in QUANTIZED
        for dtype in ("int8", "int4") if quantized else ("fp32", "fp16"):
            for dim in (32, 64, 128, 256):
                width = next_power_of_2(unit_count(dim, row_format(dtype))) if quantized else dim
                for config in candidates(kernel, dtype, width):
                    # programs of a grid are an argument: the code is the same
                    if "programs" not in config:
                        yield from cases_of(Key(kernel, dtype, width, 1, ""), config)


def _run_forced(run: Callable[[], object], kernel: str, config: Config) -> None:
    with configs.forced({kernel: config}):
        run()


def _launch_of(kernel: str, dtype: str, dim: int) -> Callable[[], object]:
    """A launch of the kernel on rows of this class."""
    from . import cases_jagged as launched_jagged, cases_quantized as launched_quantized

    if kernel in QUANTIZED:
        kind = row_format(dtype)
        return partial(launched_quantized._look_up, dtype, dim * max(1, 8 // kind.bits) if kind.parts else dim)
    batch = Batch(dim, DTYPES[dtype])
    if kernel.startswith("update "):
        return partial(launched.step, batch, kernel.removeprefix("update "))
    if kernel in ("to_padded", "to_jagged"):
        # a row of the padded is all values of a bag, four of them there
        columns = max(1, dim // 4) if kernel == "to_padded" else dim
        call, _, _ = launched_jagged._padded_run(columns, DTYPES[dtype])
        return call
    shape = (8, dim)
    runs: dict[str, Callable[[], object]] = {
        "pooled_lookup": partial(launched.look_up, batch),
        "gather": partial(launched.look_up_sequence, batch),
        "segment_rows": partial(launched_jagged._move_and_sum, shape, DTYPES[dtype]),
        "index_add": partial(launched_jagged._add_bags, shape, DTYPES[dtype]),
    }
    return runs[kernel]
