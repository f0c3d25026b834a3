"""The constants of the cost model of `cost/shardwise.py`: a machine's speeds, each with a unit and a source.

`shardwise plan calibrate` measures them and writes JSON that `Constants.load` reads. The presets here are not measured:
they are peaks from vendors' data sheets times an efficiency that is stated with each, and overheads that are guesses.
GB/s are 1e9 bytes a second.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwise._names import did_you_mean
from shardwise.untrusted import parse_json, read_regular

FORMAT = "shardwise planner constants 1"
# the cost models by name: ours, which has these constants, and TorchRec's
COSTS = ("shardwise", "torchrec")


@dataclass(frozen=True)
class Constants:
    """How fast ranks compute and talk; `source` says where the numbers come from.

    Args:
        copy_gb_s: reading and writing memory in order, both counted.
        fresh_gb_s: the same where the memory was just allocated, as rows of ids are moved in every step.
        row_gb_s: reading or writing rows that lie anywhere and were not used just before.
        again_gb_s: reading rows that this batch used before.
        id_ns: an id on the rank that looks it up: received, brought in order, its row found.
        sent_id_ns: an id on the rank that it comes from: checked and packed.
        cut_id_ns: an id of a table that is cut by rows, there too: divided among row ranges.
        bag_ns: a bag of a stream on the rank that pools it: its length, its offset, the begin of its loop.
        update_id_ns: an id in the backward: sorted by row, its gradient found.
        update_row_ns: a row that an update changes.
        feature_us: a feature on the rank that it comes from, forward and backward.
        stream_us: a feature's ids on a rank that looks them up in one shard, forward and backward.
        intra_gb_s, inter_gb_s: what a rank receives from others of its host, and from other hosts.
        exchange_us: an exchange of nothing among all ranks.
        step_us: a collection's forward and backward besides all these.
        source: where the numbers come from.

    Raises:
        ValueError: a number is not positive (a bandwidth), negative or not finite.
    """

    copy_gb_s: float
    fresh_gb_s: float
    row_gb_s: float
    again_gb_s: float
    id_ns: float
    sent_id_ns: float
    cut_id_ns: float
    bag_ns: float
    update_id_ns: float
    update_row_ns: float
    feature_us: float
    stream_us: float
    intra_gb_s: float
    inter_gb_s: float
    exchange_us: float
    step_us: float
    source: str = ""

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"constant {name} must be a finite number, got {value!r}")
            if value < 0 or (name.endswith("_gb_s") and value == 0):
                raise ValueError(f"constant {name} must be {'positive' if value == 0 else '0 or more'}, got {value!r}")

    def with_(self, **changes: float) -> Constants:
        """The same but for some."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """As `from_json` takes them."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Constants:
        """Constants from what `to_json` made.

        Raises:
            ValueError: a constant is missing, unknown or no good.
        """
        if given.get("format") != FORMAT:
            raise ValueError(
                f"these are no constants of the planner: format is {given.get('format')!r}, not {FORMAT!r}"
            )
        numbers = {name: value for name, value in given.items() if name not in ("format", "measured")}
        known = {field.name for field in fields(cls)}
        missing, unknown = sorted(set(NUMBERS) - set(numbers)), sorted(set(numbers) - known)
        if missing or unknown:
            raise ValueError(f"constants of the planner: missing {missing}, unknown {unknown}")
        return cls(**numbers)

    def save(self, path: str | Path, measured: Mapping[str, Any] | None = None) -> None:
        """Write JSON; `measured` may hold what the numbers were made of."""
        text = self.to_json() | ({} if measured is None else {"measured": dict(measured)})
        Path(path).write_text(json.dumps(text, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Constants:
        """Read what `save` wrote. Raises as `from_json`; OSError where there is no regular file."""
        try:
            return cls.from_json(parse_json(read_regular(path), allow_nan=True))
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path}: {error}") from error


# the constants that are numbers
NUMBERS = tuple(field.name for field in fields(Constants) if field.name != "source")


@dataclass(frozen=True)
class Card:
    """A device and its usual host: memory in GiB, and the constants that its data sheet suggests.

    `target` is the architecture that kernels are compiled for, "" where they are for none: of a CPU, and of a card that
    is known for the sake of plans that were made for it, and not offered.
    """

    name: str
    memory_gib: float
    constants: Constants
    target: str = ""


def _card(
    name: str, target: str, memory_gib: float, memory_gb_s: float, link_gb_s: float, network_gb_s: float, of: str
) -> Card:
    """A GPU by its peaks: memory, links to other GPUs of the host each way, the network each way per GPU.

    Efficiencies: 0.9 of the memory's peak for copies (a copy of ours reached 0.90 on an H200), 0.65 for rows (FBGEMM's
    pooled forward on Meta's shape reaches 64.7 %), 1.5 x the peak for rows of the same batch (in the L2 cache), 0.75 of
    links and 0.8 of the network. An id costs 1/50 ns of a forward and as much again of the sort, a launch 10 us.
    """
    return Card(
        name,
        memory_gib,
        Constants(
            copy_gb_s=0.9 * memory_gb_s,
            fresh_gb_s=0.9 * memory_gb_s,
            row_gb_s=0.65 * memory_gb_s,
            again_gb_s=1.5 * memory_gb_s,
            id_ns=0.02,
            sent_id_ns=0.02,
            cut_id_ns=0.02,
            bag_ns=0.02,
            update_id_ns=0.08,
            update_row_ns=0.02,
            feature_us=2.0,
            stream_us=2.0,
            intra_gb_s=0.75 * link_gb_s,
            inter_gb_s=0.8 * network_gb_s,
            exchange_us=50.0,
            step_us=1500.0,
            source=f"{of}; efficiencies are estimates, nothing was measured on this card",
        ),
        target,
    )


# memory in GiB as the driver shows it, peaks in GB/s each way, where data sheets add up both directions. Cards
# that nothing else joins have PCIe, 64 GB/s both ways of a Gen4 x16
_CARDS = (
    _card("b200", "sm_100", 178.3, 8000, 900, 50, "NVIDIA HGX B200 data sheet, 400 Gb/s a GPU to other hosts"),
    _card("gh200", "sm_90", 94.5, 4000, 450, 50, "NVIDIA GH200 96GB data sheet, 400 Gb/s a GPU to other hosts"),
    _card("h200", "sm_90", 139.8, 4800, 450, 50, "NVIDIA H200 SXM data sheet, 400 Gb/s a GPU to other hosts"),
    _card("h100", "sm_90", 79.6, 3350, 450, 50, "NVIDIA H100 SXM data sheet, 400 Gb/s a GPU to other hosts"),
    _card("a100-80", "sm_80", 79.3, 2039, 300, 25, "NVIDIA A100 80GB SXM data sheet, 200 Gb/s a GPU to other hosts"),
    _card("a100-40", "sm_80", 39.6, 1555, 300, 25, "NVIDIA A100 40GB SXM data sheet, 200 Gb/s a GPU to other hosts"),
    _card(
        "a100-80-pcie", "sm_80", 79.3, 1935, 32, 25, "NVIDIA A100 80GB PCIe data sheet, 200 Gb/s a GPU to other hosts"
    ),
    _card(
        "a100-40-pcie", "sm_80", 39.4, 1555, 32, 25, "NVIDIA A100 40GB PCIe data sheet, 200 Gb/s a GPU to other hosts"
    ),
    _card("l40s", "sm_89", 44.4, 864, 32, 25, "NVIDIA L40S data sheet, 200 Gb/s a GPU to other hosts"),
    _card("l4", "sm_89", 22.0, 300, 32, 12.5, "NVIDIA L4 data sheet, 100 Gb/s a GPU to other hosts"),
    _card("a10", "sm_86", 22.0, 600, 32, 12.5, "NVIDIA A10 data sheet, 100 Gb/s a GPU to other hosts"),
    _card("v100-32", "", 31.7, 900, 150, 12.5, "NVIDIA V100 32GB SXM2 data sheet, 100 Gb/s a GPU to other hosts"),
    _card("mi355x", "gfx950", 287.9, 8000, 537.6, 50, "AMD Instinct MI355X data sheet, 400 Gb/s a GPU to other hosts"),
    _card("mi325x", "gfx942", 255.9, 6000, 448, 50, "AMD Instinct MI325X data sheet, 400 Gb/s a GPU to other hosts"),
    _card("mi300x", "gfx942", 191.5, 5300, 448, 50, "AMD Instinct MI300X data sheet, 400 Gb/s a GPU to other hosts"),
)
# one thread of a server's CPU: the order of magnitude that `calibrate` finds with gloo
_CPU = Card(
    "cpu",
    128.0,
    Constants(
        copy_gb_s=8.0,
        fresh_gb_s=5.0,
        row_gb_s=3.0,
        again_gb_s=12.0,
        id_ns=10.0,
        sent_id_ns=4.0,
        cut_id_ns=12.0,
        bag_ns=15.0,
        update_id_ns=25.0,
        update_row_ns=25.0,
        feature_us=8.0,
        stream_us=12.0,
        intra_gb_s=1.5,
        inter_gb_s=1.0,
        exchange_us=150.0,
        step_us=1500.0,
        source="orders of magnitude of one CPU thread with gloo; run `shardwise plan calibrate`",
    ),
)
CARDS: Mapping[str, Card] = {card.name: card for card in (*_CARDS, _CPU)}


# the cards that kernels are compiled for, by name
OFFERED = tuple(card.name for card in _CARDS if card.target)


def card_named(name: str) -> Card:
    """A card by its name, in any case.

    Raises:
        ValueError: there is none of this name; says which was meant, or which there are.
    """
    card = CARDS.get(name.lower())
    if card is None:
        raise ValueError(f"card {name!r} is unknown{meant_card(name)}")
    return card


def meant_card(name: str) -> str:
    """The end of a sentence about a card that is unknown: its kinds, the one that is alike, or all that there are."""
    kinds = [card for card in OFFERED if card.partition("-")[0] == name.lower()]
    return f": say which, {', '.join(kinds)}" if kinds else did_you_mean(name, OFFERED) or ": " + ", ".join(OFFERED)
