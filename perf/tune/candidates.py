"""Candidates of the tuner in place of the heuristics of tiles: lists of configs.

A tile's candidates differ from the heuristic's in rows, columns and warps of a program; a thread holds as many elements
or twice as many, and of rows that become fp32 and are summed as many or half of them. An update's candidates differ in
its chunks, with the warps that belong to them, and in the programs of its persistent grid. perf/compile/tuning_space.py
has the launches that show them to a compiler.
"""

from __future__ import annotations

import torch

from shardwise.kernels import configs
from shardwise.kernels._op import gather_tile, next_power_of_2
from shardwise.kernels.configs import Config, Tile
from shardwise.kernels.features import row_alignment
from shardwise.kernels.quantized.pooled_lookup import tile as quantized_tile
from shardwise.kernels.row_formats import row_format
from shardwise.kernels.update.update import update_tile

QUANTIZED = ("quantized_pooled_lookup", "gather_values")
# the rules whose updates are tuned
RULES = ("sgd", "rowwise_adagrad", "adam")
# every kernel that is tuned, an update by its rule
KERNELS = (*(name for name in configs.FIELDS if name != "update"), *(f"update {rule}" for rule in RULES))
PROGRAMS = (512, 1024, 4096, 8192)
DTYPES = {name: dtype for dtype, name in configs.DTYPES.items()}
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
    itemsize = DTYPES[dtype].itemsize
    return gather_tile(dim, itemsize, row_alignment(dim, itemsize))


def candidates(kernel: str, dtype: str, dim: int) -> list[Config]:
    """Configs to try beside the heuristic's."""
    rows, columns, warps = heuristic(kernel, dtype, dim)
    if kernel.startswith("update "):
        chunks = [2**n for n in range(5) if _fits(dim, 2**n) and 2**n != rows]
        return [*({"chunks": n} for n in chunks), *({"programs": n} for n in PROGRAMS)]
    tiles: list[Config] = []
    crowded = kernel == "quantized_pooled_lookup" or (kernel == "pooled_lookup" and DTYPES[dtype].itemsize == 2)
    for by_rows, by_columns, by_warps in (*_SCALES, *(_HALVED if crowded else _DOUBLED)):
        tile = rows * by_rows, columns * by_columns, warps * by_warps
        config: Config = {"rows": int(tile[0]), "columns": int(tile[1]), "warps": int(tile[2])}
        whole = all(side >= 1 and side == int(side) for side in tile)
        # more rows make one warp pass ids around through shared memory; wider blocks than the row are idle
        if whole and config["rows"] <= 32 and config["columns"] <= dim and config["warps"] <= 8 and config not in tiles:
            tiles.append(config)
    return tiles


def _fits(dim: int, chunks: int) -> bool:
    with configs.forced({"update ": {"chunks": chunks}}):
        place = torch.device("cpu")
        tile = configs.update_tile("", update_tile(dim), 1, torch.float32, row_alignment(dim, 4), place)
    return tile[0] == chunks
