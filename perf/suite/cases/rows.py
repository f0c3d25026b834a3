"""Cases of the suite: rows that move between slots and records, victims of a cache, first values of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise.kernels import Feature, initial_rows, lowest, move_rows, pack_features
from shardwise.kernels.rows import LRU, Lookups, Marks, Scoring, SlotTables, make_rows, want
from shardwise.kernels.rows.first_rows import make_rows_ref
from shardwise.kernels.rows.initial_rows import initial_rows_ref
from shardwise.kernels.rows.lowest import lowest_ref
from shardwise.kernels.rows.move_rows import layout_of, move_rows_ref
from shardwise.kernels.rows.slots import release_slots
from shardwise.perf.suite.case import Call, Case, Ready, Setting
from shardwise.perf.suite.cases.lookup import CUDA, EVERY, INPUTS
from shardwise.perf.suite.declared_rows import (
    cache_batch_bytes,
    initial_rows_bytes,
    lowest_bytes,
    make_rows_bytes,
    move_rows_bytes,
)
from shardwise.perf.suite.peers import peer_calls

DIM = 128
# slots, records and moves
MOVED = {"small": (40, 100, 12), "cpu": (50_000, 200_000, 6500), "cuda": (1_000_000, 4_000_000, 100_000)}
SLOTS = {"small": 300, "cpu": 1_000_000, "cuda": 10_000_000}
# what a row has beside its weights: element states, numbers of the row
STATES = {"sgd": (0, 0), "rowwise_adagrad": (0, 1), "adam": (2, 0)}


def _size(setting: Setting) -> str:
    return "small" if setting.small else setting.device


def _ready(
    setting: Setting,
    ours: Sequence[Call],
    theirs: Callable[[], Sequence[Call]],
    check: Call,
    nbytes: float,
    floor: str,
    notes: dict[str, object],
    graph: bool = True,
) -> Ready:
    peers, trouble = peer_calls(setting, {"torch": theirs})
    return Ready(ours, check, nbytes, floor, peers, graph=graph, notes={**notes, **trouble})


def _move(setting: Setting, optimizer: str, ways: str) -> Ready:
    slots, records, count = MOVED[_size(setting)]
    generator = torch.Generator().manual_seed(0)
    elements, numbers = STATES[optimizer]

    def made(slots: int, records: int, device: str) -> tuple[list[Tensor], Tensor]:
        parts = [torch.randn(slots, DIM, generator=generator) for _ in range(1 + elements)]
        parts += [torch.randn(slots, generator=generator) for _ in range(numbers)]
        held = torch.zeros(records, layout_of(parts).nbytes, dtype=torch.uint8)
        # beside a GPU they are where a table's other rows are
        return [part.to(device) for part in parts], held.pin_memory() if device == "cuda" else held

    def drawn(slots: int, records: int, count: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
        places, nothing = torch.randperm(records, generator=generator), torch.full((count,), -1)
        saves = places[:count] if ways != "load" else nothing
        loads = places[count : 2 * count] if ways != "save" else nothing
        return torch.randperm(slots, generator=generator)[:count].to(device), saves.to(device), loads.to(device)

    parts, held = made(slots, records, setting.device)
    inputs = [drawn(slots, records, count, setting.device) for _ in range(INPUTS)]

    def check() -> None:
        few, kept = made(*MOVED["small"][:2], setting.device)
        numbers = drawn(*MOVED["small"], setting.device)
        other, expected = [part.cpu() if part.is_cuda else part.clone() for part in few], kept.clone()
        move_rows(few, kept, *numbers)
        if setting.device == "cuda":
            torch.cuda.synchronize()
        slot, save, load = (number.cpu() for number in numbers)
        move_rows_ref(other, expected, slot, save, load)
        assert torch.equal(kept, expected), "records differ from the reference's"
        assert all(torch.equal(a.cpu(), b) for a, b in zip(few, other, strict=True)), "rows differ from the reference's"

    traffic = move_rows_bytes(parts, *inputs[0])
    return _ready(
        setting, [partial(move_rows, parts, held, *numbers) for numbers in inputs],
        lambda: [partial(move_rows_ref, parts, held, *numbers) for numbers in inputs], check, traffic.bytes_moved,
        "every moved row read and written", {"slots": slots, "records": records, "moves": count},
    )  # fmt: skip


def _lowest(setting: Setting, keys: str) -> Ready:
    slots = SLOTS[_size(setting)]

    def drawn(slots: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        generator = torch.Generator().manual_seed(seed)
        top = {"ages": 2**20, "counts": 64}[keys]
        made = torch.randint(0, top, (slots,), generator=generator, dtype=torch.int32)
        held = (torch.rand(slots, generator=generator) < 0.02).int()
        # two tables, of which a twentieth goes
        borders, counts = torch.tensor([0, slots // 4, slots]), torch.tensor([slots // 80, slots // 30])
        return made.to(device), held.to(device), borders.to(device), counts.to(device), int(counts.sum())

    inputs = [drawn(slots, seed, setting.device) for seed in range(INPUTS)]

    def check() -> None:
        expected = lowest_ref(*drawn(SLOTS["small"], 9, "cpu"))
        assert torch.equal(lowest(*drawn(SLOTS["small"], 9, setting.device)).cpu(), expected), "other victims"

    # what has to be read; a GPU's kernels do so six times
    traffic = lowest_bytes(inputs[0][0], inputs[0][4], 1)
    return _ready(
        setting, [partial(lowest, *given) for given in inputs],
        lambda: [partial(lowest_ref, *given) for given in inputs], check, traffic.bytes_moved,
        "keys and holders once", {"slots": slots, "picked": inputs[0][4]},
    )  # fmt: skip


def _initial(setting: Setting, kind: str) -> Ready:
    count = MOVED[_size(setting)][2]
    seed = torch.tensor([7], device=setting.device)
    inputs = [
        torch.randint(0, 2**62, (count,), generator=torch.Generator().manual_seed(i)).to(setting.device)
        for i in range(INPUTS)
    ]
    rest = (0, DIM, kind, -0.1, 0.1, torch.float32)

    def check() -> None:
        rows = inputs[0][:9]
        expected = initial_rows_ref(rows.cpu(), seed.cpu(), *rest)
        assert torch.equal(initial_rows(rows, seed, *rest).cpu(), expected), "other values"

    traffic = initial_rows_bytes(inputs[0], torch.empty(count, DIM, device="meta"))
    return _ready(
        setting, [partial(initial_rows, rows, seed, *rest) for rows in inputs],
        lambda: [partial(initial_rows_ref, rows, seed, *rest) for rows in inputs], check, traffic.bytes_moved,
        "rows' numbers and their values once", {"rows": count},
    )  # fmt: skip


def _made(setting: Setting) -> Ready:
    """Rows of two halves of which one is fresh, made in their slots beside rowwise Adagrad's state."""
    slots, _, count = MOVED[_size(setting)]
    generator = torch.Generator().manual_seed(0)

    def make(by: Callable[..., None], parts: Sequence[Tensor], *numbers: Tensor) -> None:
        by(parts, *numbers, 0, 0, 7, 0, "uniform", -0.1, 0.1, [0.5])

    def drawn(count: int, slots: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        parts = [torch.zeros(slots, DIM, device=setting.device), torch.zeros(slots, device=setting.device)]
        rows = torch.randint(0, 2**40, (count,), generator=generator)
        places = torch.randperm(slots, generator=generator)[:count]
        return parts, places.to(setting.device), rows.to(setting.device), (rows % 2 == 0).to(setting.device)

    inputs = [drawn(count, slots) for _ in range(INPUTS)]

    def check() -> None:
        parts, *numbers = drawn(9, 40)
        expected = [part.cpu().clone() for part in parts]
        make(make_rows, parts, *numbers)
        make(make_rows_ref, expected, *(some.cpu() for some in numbers))
        assert all(torch.equal(part.cpu(), other) for part, other in zip(parts, expected, strict=True)), "other rows"

    fresh = int(inputs[0][3].sum())
    traffic = make_rows_bytes(inputs[0][0], count, fresh)
    return _ready(
        setting, [partial(make, make_rows, *given) for given in inputs],
        lambda: [partial(make, make_rows_ref, *given) for given in inputs], check, traffic.bytes_moved,
        "rows' numbers, and those that are fresh once", {"rows": count, "fresh": fresh}, graph=False,
    )  # fmt: skip


# rows, slots and ids of a batch
CACHE = {"small": (400, 90, 60), "cpu": (1_000_000, 200_000, 40_000), "cuda": (100_000_000, 10_000_000, 1_000_000)}


def _batch(setting: Setting) -> Ready:
    """A batch of a cache: rows found, victims picked, slots taken and let go. Half of the slots have rows at first."""
    rows, slots, count = CACHE[_size(setting)]
    device = torch.device(setting.device)

    def made() -> SlotTables:
        slot_of = torch.full((rows,), -1, dtype=torch.int32, device=device)
        slot_of[: slots // 2] = torch.arange(slots // 2, dtype=torch.int32, device=device)
        row_of = torch.where(torch.arange(slots, device=device) < slots // 2, torch.arange(slots, device=device), -1)
        held, key = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(2))
        flags = torch.zeros(slots, dtype=torch.bool, device=device)
        borders = [torch.tensor([0, end], device=device) for end in (rows, slots)]
        return SlotTables(slot_of, row_of, held, flags, flags.clone(), row_of.clone().zero_(), key, *borders)

    def drawn(seed: int) -> Tensor:
        draw = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        # few rows are in most batches
        return (rows * draw**3).long().to(device)

    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    lookups = Lookups(pack_features([Feature(0, rows, 1, 0)]).to(device), nothing, nothing)
    offsets, numbers = torch.tensor([0, count], device=device), iter(range(1, 1 << 30))

    def run(state: SlotTables, marks: Marks, ids: Tensor) -> Tensor:
        wanted = want(state, marks, ids, offsets, lookups, Scoring(LRU, next(numbers), 0), keeps=False)
        release_slots(wanted.slots, state.held, state.dirty, True)
        return wanted.counts

    def by_torch(state: SlotTables, ids: Tensor) -> Tensor:
        """Decisions alone, which wait for the device: distinct rows, those without a slot, and slots for these."""
        distinct = torch.unique(ids)
        found = state.slot_of[distinct]
        return torch.topk(state.key, int((found < 0).sum()), largest=False).indices

    def check() -> None:
        state, ids = made(), drawn(0)
        distinct = torch.unique(ids)
        missing = int((state.slot_of[distinct] < 0).sum())
        hits, missed, fresh, saved = run(state, Marks(state), ids).flatten().tolist()
        assert (hits, missed, fresh, saved) == (distinct.numel() - missing, missing, 0, 0), "other rows were missing"
        assert bool((state.row_of[state.slot_of[distinct].long()] == distinct).all()), "rows are not in their slots"

    state, inputs = made(), [drawn(seed) for seed in range(INPUTS)]
    marks, distinct = Marks(state), torch.unique(inputs[0])
    missing = int((state.slot_of[distinct] < 0).sum())
    traffic = cache_batch_bytes(inputs[0], rows, slots, distinct.numel() - missing, missing)
    return _ready(
        setting, [partial(run, state, marks, ids) for ids in inputs],
        lambda: [partial(by_torch, state, ids) for ids in inputs], check, traffic.bytes_moved,
        "ids, slots and marks once", {"rows": rows, "slots": slots, "ids": count}, graph=False,
    )  # fmt: skip


CASES: Sequence[Case] = (
    *(
        Case(
            f"move_rows, {optimizer}, {words}", "rows", partial(_move, optimizer=optimizer, ways=ways),
            EVERY if optimizer != "sgd" and ways == "both" else CUDA,
        )
        for optimizer in STATES
        for ways, words in (("both", "both ways"), ("save", "out"), ("load", "in"))
    ),
    *(Case(f"lowest, {keys}", "rows", partial(_lowest, keys=keys), EVERY) for keys in ("ages", "counts")),
    *(Case(f"initial_rows, {kind}", "rows", partial(_initial, kind=kind), EVERY) for kind in ("uniform", "normal")),
    Case("make_rows, half of them fresh", "rows", _made, CUDA),
    Case("a batch of a cache", "rows", _batch, CUDA),
)  # fmt: skip
