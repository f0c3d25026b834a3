"""The variants that an A/B on a GPU times beside the default, as data: what each forces, and on which shapes.

`settings` are those of `kernels.configs.SETTINGS`, `tiles` what `kernels.configs.forced` takes. A variant that forces
what is the default anyway shows how far two measurements of one thing are apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from shardwise.kernels import configs
from shardwise.kernels.configs import Config, Setting

SHAPES = ("A", "C", "FBGEMM", "L=1")
LOOKUPS = (*SHAPES, "A fp16")


@dataclass(frozen=True)
class Variant:
    """What is forced on every launch of a call ("forward", "backward" or "module"), and where it is timed."""

    name: str
    call: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    tiles: Mapping[str, Config] = field(default_factory=dict)
    shapes: tuple[str, ...] = SHAPES

    @contextmanager
    def forced(self) -> Iterator[None]:
        """In the context launches are the variant's."""
        with configs.forced(self.tiles), configs.variant(self.settings):
            yield

    @property
    def unread(self) -> list[str]:
        """Settings that no launch in the last context asked for: a name that is wired to nothing decides nothing."""
        return sorted(set(self.settings) - configs.settings_read())


def _lookup(rows: int, warps: int, columns: int = 128) -> Variant:
    name = f"{rows} rows x {columns} on {warps} warps"
    return Variant(name, "forward", {}, {"pooled_lookup": {"rows": rows, "columns": columns, "warps": warps}}, LOOKUPS)


def _registers(most: int) -> str:
    return f"at most {most} registers" if most else "registers without a bound"


VARIANTS: tuple[Variant, ...] = (
    # how far the default is from itself
    Variant("the default again", "forward", shapes=LOOKUPS),
    Variant("the default again", "backward"),
    *(Variant(_registers(n), "forward", {"lookup.registers": n}, shapes=LOOKUPS) for n in (0, 48, 56, 64, 96)),
    # default: 4 rows on 4 warps
    *(_lookup(*tile) for tile in ((1, 1), (2, 2), (8, 8), (4, 2), (8, 4))),
    *(Variant(_registers(n), "backward", {"update.registers": n}) for n in (0, 48, 56, 64, 96)),
    Variant("rows prefetched to L2", "backward", {"update.prefetch": True}),
    Variant("rows not prefetched", "backward", {"update.prefetch": False}),
    Variant("next entries loaded ahead", "backward", {"update.next_entries": True}),
    Variant("next entries not loaded ahead", "backward", {"update.next_entries": False}),
    *(
        Variant(f"{_registers(n)}, no prefetch", "backward", {"update.registers": n, "update.prefetch": False})
        for n in (0, 56, 96)
    ),
    *(Variant(f"{n} programs", "backward", {"update.programs": n}) for n in (1056, 1320, 2112, 4224, 8448, 24576)),
    *(Variant(f"programs for {n} waves", "backward", {"update.waves": n}) for n in (1, 2, 4)),
    Variant("one wave, contiguous parts", "backward", {"update.waves": 1, "update.contiguous": True}),
    Variant("prefetched to L2 and next entries", "backward", {"update.prefetch": True, "update.next_entries": True}),
    Variant("contiguous parts", "backward", {"update.contiguous": True}),
    # default: 4 chunks on 4 warps, a row of 128 columns to a warp
    *(
        Variant(f"{chunks} chunks on {warps} warps", "backward", {"update.tile": (chunks, warps)})
        for chunks, warps in ((4, 4), (8, 8), (8, 4), (4, 2), (2, 2), (1, 1))
    ),
    # one id a thread; default: 256
    *(Variant(f"index of {block} ids a program", "backward", {"index.block": block}) for block in (128, 256, 512)),
    # what a collection decides
    Variant("the default again", "module", shapes=("A", "C", "L=1")),
    Variant("long bags first", "module", {"lookup.long_bags_first": True}, shapes=("C",)),
    Variant("index in forward", "module", {"index.in_forward": True}, shapes=("A", "C", "L=1")),
)
