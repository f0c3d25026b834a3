"""What a cache decides, against dictionaries and sorted lists: which rows go, where others come, what is moved.

2,000 random histories take most of the time of this file.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from kernel_inputs import torch_device
from torch import Tensor

from shardwise.embeddings.tiers.policies import AgedLfu, Policy, lfu, lru, policy_named
from shardwise.embeddings.tiers.residency import Announced, Lease, Residency, Span, TooFewSlots
from shardwise.embeddings.tiers.turns import Turns
from shardwise.kernels import Feature, pack_features
from shardwise.kernels.rows import lowest as lowest_module, residency as steps
from shardwise.kernels.rows.residency import Lookups

HISTORIES, TORCH_HISTORIES, KERNEL_HISTORIES, EVENTS = 2000, 300, 12, 14


@pytest.fixture
def without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the references of its kernels, or in the interpreter the kernels, on every machine."""
    for module in (steps, lowest_module):
        monkeypatch.setattr(module, "loops", lambda: None)


@dataclass(eq=False)
class Held:
    """A lease of the model: its slots, by table, counted within it."""

    slots: list[tuple[int, int]]


@dataclass
class Model:
    """The obvious cache: rows by (table, row), slots by (table, slot)."""

    rows: list[int]
    slots: list[int]
    score_of: Callable[[int, int], int]
    slot_of: dict[tuple[int, int], int] = field(default_factory=dict)
    row_in: dict[tuple[int, int], int] = field(default_factory=dict)
    scores: dict[tuple[int, int], int] = field(default_factory=dict)
    leases: list[Held] = field(default_factory=list)
    dirty: set[tuple[int, int]] = field(default_factory=set)
    below: set[tuple[int, int]] = field(default_factory=set)
    window: list[set[tuple[int, int]]] = field(default_factory=list)
    batch: int = 0

    def held(self, table: int) -> set[int]:
        return {slot for lease in self.leases for t, slot in lease.slots if t == table}

    def next_use(self, row: tuple[int, int]) -> int | None:
        return next((n for n, rows in enumerate(self.window) if row in rows), None)

    def order(self, table: int, slot: int) -> tuple[int, int, int]:
        """Slots with the least of these go first."""
        if (table, slot) not in self.row_in:
            return 0, 0, slot
        row = table, self.row_in[table, slot]
        following = self.next_use(row)
        return (1, self.scores[row], slot) if following is None else (2, -following, slot)

    def want(
        self, wanted: set[tuple[int, int]], announced: set[tuple[int, int]] | None
    ) -> tuple[Held, list[tuple[int, int, int, bool]]] | dict[int, int]:
        """A lease and what moves, as (table, slot, row that is saved or -1, whether fresh); or the slots needed."""
        victims: dict[int, list[int]] = {}
        needed = {}
        for t in range(len(self.rows)):
            here = self.held(t) | {self.slot_of[row] for row in wanted if row[0] == t and row in self.slot_of}
            missing = [row for row in wanted if row[0] == t and row not in self.slot_of]
            if len(here) + len(missing) > self.slots[t]:
                needed[t] = len(here) + len(missing)
            free = sorted((slot for slot in range(self.slots[t]) if slot not in here), key=lambda s: self.order(t, s))
            victims[t] = sorted(free[: len(missing)])
        if needed:
            return needed
        self.batch += 1
        if announced is not None:
            assert self.window.pop(0) is announced
        moves = []
        for t, slots in victims.items():
            missing = sorted(row for row in wanted if row[0] == t and row not in self.slot_of)
            for slot, row in zip(slots, missing, strict=True):
                old, saved = self.row_in.get((t, slot)), -1
                if old is not None:
                    if (t, old) in self.dirty:
                        saved = old
                        self.below.add((t, old))
                    self.dirty.discard((t, old))
                    del self.slot_of[t, old], self.scores[t, old]
                self.row_in[t, slot], self.slot_of[row] = row[1], slot
                moves.append((t, slot, saved, row not in self.below))
        for row in wanted:
            self.scores[row] = self.score_of(self.scores.get(row, 0), self.batch)
        lease = Held([(row[0], self.slot_of[row]) for row in wanted])
        self.leases.append(lease)
        return lease, moves

    def release(self, lease: Held, changed: bool) -> None:
        self.leases.remove(lease)
        if changed:
            self.dirty.update((t, self.row_in[t, slot]) for t, slot in lease.slots)


def aged(half_life: int) -> Callable[[int, int], int]:
    """The rule of `AgedLfu`, number by number."""

    def score(before: int, batch: int) -> int:
        now = 1024 * batch // half_life + 1
        if not before:
            return now
        return max(before, now) + round(1024 * math.log2(1 + 2 ** (-abs(before - now) / 1024)))

    return score


POLICIES: list[tuple[Policy, Callable[[int, int], int]]] = [
    (lru, lambda score, batch: batch),
    (lfu, lambda score, batch: score + 1),
    (AgedLfu(3), aged(3)),
    (lambda scores, batch: (scores * 5 + batch) % 11, lambda score, batch: (score * 5 + batch) % 11),
]


def without_none(numbers: Tensor) -> list[int]:
    """Those from 0 on, behind which a device that decides by itself may have -1."""
    live = int((numbers >= 0).sum())
    assert (numbers[live:] == -1).all()
    return numbers[:live].tolist()


class History:
    """A residency and its model through random events."""

    def __init__(
        self,
        seed: int,
        policy: tuple[Policy, Callable[[int, int], int]] | None = None,
        first_batch: int = 0,
        jump: int = 0,
    ) -> None:
        self.random = rng = random.Random(seed)
        self.jump = jump
        rows = [rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
        rule, score_of = policy or POLICIES[seed % len(POLICIES)]
        self.model = Model(rows, [rng.randint(1, n) for n in rows], score_of)
        self.first_row = [sum(rows[:t]) for t in range(len(rows))]
        spans, first = [], 0
        for t, count in enumerate(self.model.slots):
            spans.append(Span(f"t{t}", self.first_row[t], rows[t], first, count))
            first += count
        self.residency = Residency(spans, rule)
        self.residency.batch = self.model.batch = first_batch
        self.lookups = self._lookups()
        if rng.random() < 0.5:
            for t in range(len(rows)):
                self.residency.store_all(t)
                self.model.below.update((t, r) for r in range(rows[t]))
        self.leases: list[tuple[Lease, Held]] = []
        self.announced: list[tuple[Announced, set[tuple[int, int]]]] = []

    def _lookups(self) -> Lookups:
        tables = [*range(len(self.model.rows)), 0]
        features = [Feature(0, self.model.rows[t], 1, self.first_row[t]) for t in tables]
        first = [self.residency.tables[t].first_slot for t in tables]
        return Lookups(pack_features(features, torch.device("cpu")), torch.tensor(first), torch.tensor(tables))

    def run(self) -> None:
        events = [self.want, self.want, self.want, self.release, self.release, self.announce, self.withdraw, self.grow]
        for _ in range(EVENTS):
            self.random.choice(events)()
            self.agree()

    def rows(self) -> set[tuple[int, int]]:
        rng = self.random
        size = rng.randint(0, 5)
        return {(t, rng.randrange(self.model.rows[t])) for t in rng.choices(range(len(self.model.rows)), k=size)}

    def numbers(self, rows: set[tuple[int, int]]) -> Tensor:
        return torch.tensor(sorted(self.first_row[t] + r for t, r in rows), dtype=torch.int64)

    def batch(self, rows: set[tuple[int, int]]) -> tuple[Tensor, Tensor, list[int]]:
        """The rows as a batch of ids, some of them twice, out of their tables or past the end; and their tables."""
        rng, ids, tables, offsets = self.random, list[int](), list[int](), [0]
        for f, t in enumerate([*range(len(self.model.rows)), 0]):
            # the last feature looks the first table up as well
            own = [r for table, r in rows if table == t]
            own = (own if f < len(self.model.rows) else own[:1]) + rng.choices(own, k=rng.randint(0, 2) if own else 0)
            own += rng.choices([-1, -7, self.model.rows[t], 2**31 - 1], k=rng.randint(0, 1))
            rng.shuffle(own)
            cut = rng.randint(0, len(own))
            offsets += [len(ids) + cut, len(ids) + len(own)]
            ids, tables = ids + own, tables + [t] * len(own)
        spare = rng.randint(0, 2)
        kind = rng.choice([torch.int32, torch.int64])
        numbers = torch.tensor(ids + [0] * spare, dtype=kind)
        return numbers, torch.tensor(offsets, dtype=rng.choice([torch.int32, torch.int64])), tables + [-1] * spare

    def announce(self) -> None:
        rows = self.rows()
        if self.random.random() < 0.5:
            announced = self.residency.announce(self.numbers(rows))
        else:
            announced = self.residency.announce_ids(*self.batch(rows)[:2], self.lookups)
        assert without_none(announced.rows) == self.numbers(rows).tolist()
        # sets that are equal are not the same batch
        rows = set(rows)
        self.model.window.append(rows)
        self.announced.append((announced, rows))

    def withdraw(self) -> None:
        if self.announced:
            announced, rows = self.announced.pop(self.random.randrange(len(self.announced)))
            self.residency.withdraw(announced)
            place = next(n for n, one in enumerate(self.model.window) if one is rows)
            del self.model.window[place]

    def want(self) -> None:
        comes = bool(self.announced) and self.random.random() < 0.7
        announced, rows = self.announced[0] if comes else (None, self.rows())
        before = self.model.leases.copy()
        passed = self.random.randint(0, self.jump)
        self.residency.batch, self.model.batch = self.residency.batch + passed, self.model.batch + passed
        if comes:
            assert self.model.window[0] is rows
        expected = self.model.want(rows, rows if comes else None)
        tables: list[int] = []
        places = ids = None
        try:
            if self.random.random() < 0.5:
                lease = self.residency.want(self.numbers(rows), announced)
            else:
                ids, offsets, tables = self.batch(rows)
                places, lease = self.residency.want_ids(ids, offsets, self.lookups, announced)
        except TooFewSlots as error:
            assert error.needed == expected and self.model.leases == before
            return
        assert not isinstance(expected, dict)
        held, moves = expected
        if comes:
            self.announced.pop(0)
        first = [span.first_slot for span in self.residency.tables]
        came = [self.first_row[t] + self.model.row_in[t, slot] for t, slot, _, _ in moves]
        assert without_none(lease.moves.loads) == came
        assert without_none(lease.moves.slots) == [first[t] + slot for t, slot, _, _ in moves]
        old = [-1 if old < 0 else self.first_row[t] + old for t, _, old, _ in moves]
        assert lease.moves.saves.tolist() == old + [-1] * (len(lease.moves.saves) - len(old))
        fresh = [fresh for _, _, _, fresh in moves]
        assert lease.moves.fresh.tolist() == fresh + [False] * (len(lease.moves.fresh) - len(fresh))
        assert sorted(lease.held().tolist()) == sorted(first[t] + slot for t, slot in held.slots)
        for t, counts in enumerate(lease.counts.tolist()):
            here = [move for move in moves if move[0] == t]
            wanted = sum(table == t for table, _ in rows)
            assert counts == [wanted - len(here), len(here), sum(m[3] for m in here), sum(m[2] >= 0 for m in here)]
        if places is not None and ids is not None:
            expected_places = [
                self.model.slot_of.get((t, id), -1) if t >= 0 else -1
                for t, id in zip(tables, ids.tolist(), strict=True)
            ]
            assert places.tolist() == expected_places
        self.leases.append((lease, held))

    def release(self) -> None:
        if self.leases:
            lease, held = self.leases.pop(self.random.randrange(len(self.leases)))
            # an evaluation changes nothing
            changed = self.random.random() < 0.6
            self.residency.release(lease, changed=changed)
            self.model.release(held, changed)

    def grow(self) -> None:
        if self.random.random() < 0.4:
            t = self.random.randrange(len(self.model.rows))
            self.model.slots[t] = self.random.randint(self.model.slots[t], self.model.rows[t])
            self.residency.grow({t: self.model.slots[t]})
            self.lookups = self._lookups()

    def agree(self) -> None:
        """Rows lie where the model has them, with the keys that follow from it."""
        model, residency = self.model, self.residency
        for t, span in enumerate(residency.tables):
            for slot in range(span.slots):
                row = model.row_in.get((t, slot), -1)
                at = span.first_slot + slot
                assert int(residency.row_of[at]) == (row if row < 0 else row + span.first_row)
                assert int(residency.held[at]) == sum((t, slot) in lease.slots for lease in model.leases)
                if row >= 0:
                    assert bool(residency.dirty[at]) == ((t, row) in model.dirty)
            for row in range(span.rows):
                absent = -1 if (t, row) in model.below else -2
                slot = model.slot_of.get((t, row))
                at = int(residency.slot_of[span.first_row + row])
                assert at == (absent if slot is None else span.first_slot + slot)


@pytest.mark.parametrize("part", range(4))
def test_victims_slots_and_moves_are_those_of_dictionaries(part: int) -> None:
    for seed in range(part * HISTORIES // 4, (part + 1) * HISTORIES // 4):
        History(seed).run()


def test_a_device_decides_as_the_loops_do(without_loops: None) -> None:
    for seed in range(TORCH_HISTORIES):
        History(seed).run()


@pytest.mark.interpreted
def test_kernels_decide_as_the_loops_do(without_loops: None) -> None:
    torch_device("interpreted")
    for seed in range(KERNEL_HISTORIES):
        History(seed).run()


# scores pass 2^30 within these histories, or passed it long ago
@pytest.mark.parametrize("first_batch", [1_030_000, 10**7])
@pytest.mark.parametrize("policy", [(AgedLfu(1), aged(1)), (lambda s, b: s * 0 + b * 1024, lambda s, b: b * 1024)])
def test_scores_never_overflow(first_batch: int, policy: tuple[Policy, Callable[[int, int], int]]) -> None:
    for seed in range(60):
        History(seed, policy, first_batch, jump=5_000).run()


@pytest.mark.parametrize("by_ids", [False, True])
def test_a_row_of_a_withdrawn_batch_has_the_next_use_of_one_that_is_announced_after_it(by_ids: bool) -> None:
    """What was announced after a withdrawal was noted behind the place of the batch that was gone."""
    residency = Residency([Span("t", 0, 4, 0, 2)], lru)
    lookups = Lookups(pack_features([Feature(0, 4, 1, 0)], torch.device("cpu")), *torch.zeros(2, 1, dtype=torch.int64))
    for row in (0, 1):
        residency.release(residency.want(torch.tensor([row])), changed=True)
    residency.announce(torch.tensor([2]))
    residency.withdraw(residency.announce(torch.tensor([0])))
    if by_ids:
        residency.announce_ids(torch.tensor([0]), torch.tensor([0, 1]), lookups)
    else:
        residency.announce(torch.tensor([0]))
    # row 0 was used first, but is needed
    assert residency.want(torch.tensor([3])).moves.saves.tolist() == [1]


def trace(seed: int, rows: int, batches: int, *, skewed: bool) -> list[list[int]]:
    rng = random.Random(seed)
    weights = [1 / (n + 1) if skewed else 1.0 for n in range(rows)]
    return [sorted(set(rng.choices(range(rows), weights, k=12))) for _ in range(batches)]


def belady(batches: list[list[int]], slots: int) -> int:
    """Hits of the cache that lets the rows go that come again last, by sets."""
    uses: dict[int, list[int]] = {}
    for number, rows in enumerate(batches):
        for row in rows:
            uses.setdefault(row, []).append(number)
    here: set[int] = set()
    hits = 0
    for number, rows in enumerate(batches):
        hits += len(here & set(rows))
        excess = max(0, len(here | set(rows)) - slots)
        others = sorted(
            here - set(rows), key=lambda row: next((n for n in uses[row] if n > number), len(batches)), reverse=True
        )
        here = (here | set(rows)) - set(others[:excess])
    return hits


def hits_of(batches: list[list[int]], slots: int, rows: int, ahead: int, policy: Policy) -> int:
    residency = Residency([Span("t", 0, rows, 0, slots)], policy)
    window: list[Announced] = []
    hits = coming = 0
    for number, batch in enumerate(batches):
        while coming < min(len(batches), number + ahead):
            window.append(residency.announce(torch.tensor(batches[coming])))
            coming += 1
        lease = residency.want(torch.tensor(batch), window.pop(0) if window else None)
        hits += int(lease.counts[0, 0])
        residency.release(lease, changed=True)
    return hits


@pytest.mark.parametrize("skewed", [False, True], ids=["uniform", "zipf"])
def test_with_all_batches_announced_hits_are_belady_s(skewed: bool) -> None:
    for seed in range(20):
        batches, slots = trace(seed, 60, 50, skewed=skewed), 12 + 2 * seed
        best = belady(batches, slots)
        assert hits_of(batches, slots, 60, len(batches), POLICIES[seed % len(POLICIES)][0]) == best
        alone = [hits_of(batches, slots, 60, 0, policy) for policy, _ in POLICIES]
        assert max(alone) <= best


def test_a_window_of_more_batches_is_no_worse_in_sum() -> None:
    sums = []
    for ahead in (0, 4, 16, 50):
        sums.append(sum(hits_of(trace(seed, 60, 50, skewed=True), 20, 60, ahead, lru) for seed in range(10)))
    assert sums == sorted(sums)


def test_an_aged_score_is_the_logarithm_of_uses_that_halve() -> None:
    """To half a part of 1024 a use."""
    policy, rng = AgedLfu(16), random.Random(0)
    score, uses = torch.zeros(1, dtype=torch.int64), list[int]()
    for batch in range(1, 400):
        if rng.random() < 0.2:
            score = policy(score, batch)
            uses.append(batch)
            exact = 1024 * math.log2(sum(2 ** (use / 16) for use in uses))
            assert abs(int(score) - exact) <= 2 + len(uses) / 2


def test_policies_have_names() -> None:
    assert policy_named("lru") is lru and policy_named("lfu") is lfu
    named = policy_named("aged_lfu", 7)
    assert isinstance(named, AgedLfu) and named.half_life == 7
    assert policy_named(lru) is lru
    with pytest.raises(ValueError, match="unknown cache policy 'mru': expected aged_lfu, lru, lfu or a function"):
        policy_named("mru")


def test_what_ends_in_the_middle_of_a_turn_waits_for_its_end() -> None:
    """A lease that the collector found inside of a decision would have let its slots go there, in any thread."""
    turns, done = Turns(torch.device("cpu")), list[str]()
    with turns.turn():
        with turns.turn():
            turns.soon(lambda: done.append("same thread"))
            other = threading.Thread(target=turns.soon, args=(lambda: done.append("other thread"),))
            other.start()
            other.join(10)
        assert done == [] and not other.is_alive()
    assert done == ["same thread", "other thread"]
    turns.soon(lambda: done.append("at once"))
    assert done[2:] == ["at once"]


@pytest.mark.parametrize("batches", [1, 8])
def test_queues_of_victims_decide_as_a_look_at_all_slots(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """Of tables of any size, filled for one batch or for eight."""
    monkeypatch.setattr(steps, "MANY_SLOTS", 1)
    monkeypatch.setattr(steps, "BATCHES_OF_QUEUE", batches)
    for seed in range(HISTORIES // 4):
        History(seed).run()
    for seed in range(4):
        trace_of = trace(seed, 60, 50, skewed=True)
        assert hits_of(trace_of, 20, 60, len(trace_of), lru) == belady(trace_of, 20)
