"""What the tuner may try in place of the heuristics of tiles: lists of configs, and the launches that show them.

A tile's candidates differ from the heuristic's in rows, columns and warps of a program; a thread holds as many elements
or twice as many, and of rows that become fp32 and are summed as many or half of them. An update's candidates differ in
its chunks, with the warps that belong to them, and in the programs of its persistent grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ...kernels import configs
from ...kernels._op import gather_tile, next_power_of_2
from ...kernels.configs import Config, Key, Tile
from ...kernels.features import row_alignment
from ...kernels.quantized.pooled_lookup import tile as quantized_tile
from ...kernels.quantized.pooled_lookup import unit_count
from ...kernels.row_formats import row_format
from ...kernels.update.update import update_tile
from . import cases as launched
from .cases import Batch, Case

QUANTIZED = ("quantized_pooled_lookup", "gather_values")
# every kernel that is tuned, an update by its rule
KERNELS = (*(name for name in configs.FIELDS if name != "update"), *(f"update {rule}" for rule in launched.MAIN_RULES))
PROGRAMS = (512, 1024, 4096, 8192)
_DTYPES = {name: dtype for dtype, name in configs.DTYPES.items()}
# rows, columns and warps of a candidate over those of the heuristic: as many elements a thread
_SCALES = ((0.25, 1, 0.25), (0.5, 1, 0.5), (2, 1, 2), (0.5, 2, 1))
# twice as many; and half of them where a thread that holds twice as many spills or waits at more barriers
_DOUBLED = ((1, 1, 0.5), (2, 1, 1), (0.5, 2, 0.5))
_HALVED = ((0.5, 1, 1), (1, 1, 2))


def heuristic(kernel: str, dtype: str, dim: int) -> Tile:
    """The tile of rows of this class without a config; dim counts units where rows are quantized."""
    if kernel.startswith("update "):
        return update_tile(dim)
    if kernel in QUANTIZED:
        kind = row_format(dtype)
        return quantized_tile(dim, kind, min(next_power_of_2(dim), 16 // (1 if kind.parts else kind.bits // 8)))
    itemsize = _DTYPES[dtype].itemsize
    return gather_tile(dim, itemsize, row_alignment(dim, itemsize))


def candidates(kernel: str, dtype: str, dim: int) -> list[Config]:
    """Configs to try beside the heuristic's."""
    rows, columns, warps = heuristic(kernel, dtype, dim)
    if kernel.startswith("update "):
        chunks = [2**n for n in range(5) if _fits(dim, 2**n) and 2**n != rows]
        return [*({"chunks": n} for n in chunks), *({"programs": n} for n in PROGRAMS)]
    found: list[Config] = []
    crowded = kernel == "quantized_pooled_lookup" or (kernel == "pooled_lookup" and _DTYPES[dtype].itemsize == 2)
    for by_rows, by_columns, by_warps in (*_SCALES, *(_HALVED if crowded else _DOUBLED)):
        tile = rows * by_rows, columns * by_columns, warps * by_warps
        config: Config = {"rows": int(tile[0]), "columns": int(tile[1]), "warps": int(tile[2])}
        whole = all(one >= 1 and one == int(one) for one in tile)
        # more rows make one warp pass ids around through shared memory; wider blocks than the row are idle
        if whole and config["rows"] <= 32 and config["columns"] <= dim and config["warps"] <= 8 and config not in found:
            found.append(config)
    return found


def _fits(dim: int, chunks: int) -> bool:
    with configs.forced({"update ": {"chunks": chunks}}):
        place = torch.device("cpu")
        tile = configs.update_tile("", update_tile(dim), 1, torch.float32, row_alignment(dim, 4), place)
    return tile[0] == chunks


def cases_of(key: Key, config: Config) -> list[Case]:
    """What launches with this config ask of the compiler."""
    run = partial(_run_forced, _launch_of(key.kernel, key.dtype, key.dim), key.kernel, config)
    words = " ".join(f"{name}={value}" for name, value in config.items())
    rows = f"{key.kernel.split()[-1]} D={key.dim} {key.dtype}" if key.kernel.startswith("update ") else ""
    label = f"{key.kernel.removeprefix('update ')} " if rows else ""
    label += f"D={key.dim} {key.dtype} tuned {words}"
    found = launched.launches(run, label, rows)
    return [case for case in found if case.kernel_name == key.kernel.split()[0]]


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
    from . import cases_jagged as launched_jagged
    from . import cases_quantized as launched_quantized

    if kernel in QUANTIZED:
        kind = row_format(dtype)
        return partial(launched_quantized._look_up, dtype, dim * max(1, 8 // kind.bits) if kind.parts else dim)
    batch = Batch(dim, _DTYPES[dtype])
    if kernel.startswith("update "):
        return partial(launched.step, batch, kernel.removeprefix("update "))
    if kernel in ("to_padded", "to_jagged"):
        # a row of the padded is all values of a bag, four of them there
        columns = max(1, dim // 4) if kernel == "to_padded" else dim
        call, _, _ = launched_jagged._padded_run(columns, _DTYPES[dtype])
        return call
    shape = (8, dim)
    runs: dict[str, Callable[[], object]] = {
        "pooled_lookup": partial(launched.look_up, batch),
        "gather": partial(launched.look_up_sequence, batch),
        "segment_rows": partial(launched_jagged._move_and_sum, shape, _DTYPES[dtype]),
        "index_add": partial(launched_jagged._add_bags, shape, _DTYPES[dtype]),
    }
    return runs[kernel]
