"""Policies and backings of users that fail or are none: an error that says so, and rows are never wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks, world_group
from torch import Tensor

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingEnv,
    apply_optimizer_in_backward,
    checkpoint,
    tiered,
)
from shardwise.planner import layout
from shardwise.planner.layout import TableOptions, Tier
from shardwise.sharding import ShardedEmbeddingBagCollection

ROWS, STEPS = 50, 30


def tables() -> Any:
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 4, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    return ebc


def batch(step: int) -> KeyedJaggedTensor:
    ids = torch.randint(ROWS, (8,), generator=torch.Generator().manual_seed(step))
    return KeyedJaggedTensor(["f"], ids, lengths=torch.full((4,), 2))


def train_beside_whole(model: Any) -> list[Exception]:
    """What steps raised, of a model whose other steps have the bits of tables that are on the device as a whole."""
    whole, errors = tables(), []
    for step in range(STEPS):
        try:
            out = model(batch(step)).values()
        except Exception as error:
            # the leases of the step end with its frames
            errors.append(error.with_traceback(None))
            continue
        expected = whole(batch(step)).values()
        assert torch.equal(out, expected), step
        for result in (out, expected):
            result.square().sum().backward()
    rows = checkpoint.full_state_dict(model)["embedding_bags.t.weight"]
    assert torch.equal(rows, whole.embedding_bags["t"].weight)
    return errors


def fail(scores: Tensor, batch: int) -> Tensor:
    raise ValueError("this policy fails")


@pytest.mark.parametrize(
    ("answer", "kind", "match"),
    [
        (fail, ValueError, "this policy fails"),
        (lambda s, b: s[:1], TypeError, r"tables \['t'\]: their policy must give integer scores \[\d\].*int64 \[1\]"),
        (lambda s, b: s.new_zeros(0), TypeError, r"integer scores"),
        (lambda s, b: s.float() + 0.5, TypeError, r"not torch.float32"),
        (lambda s, b: None, TypeError, "not None"),
    ],
    ids=["raises", "too few", "none at all", "floats", "no tensor"],
)  # fmt: skip
def test_a_policy_that_fails_changes_no_row(
    answer: Callable[[Tensor, int], Any], kind: type[Exception], match: str
) -> None:
    """Rows had their slots by then and never came there: later batches looked up what other rows had left.

    Scores that were too few were read past their end, which ended the process.
    """
    calls = 0

    def policy(scores: Tensor, number: int) -> Any:
        nonlocal calls
        calls += 1
        return answer(scores, number) if calls % 5 == 4 else torch.full_like(scores, number)

    errors = train_beside_whole(tiered(tables(), {"t": Tier(10, policy=policy)}))
    assert len(errors) == STEPS // 5
    for error in errors:
        with pytest.raises(kind, match=match):
            raise error


class Dict:
    """The obvious backing: bytes by row. It may have an attribute of any name."""

    def __init__(self, record_bytes: int, records: object = None) -> None:
        self.bytes, self.held, self.records = record_bytes, dict[int, Tensor](), records
        self.fails = False

    def read(self, rows: Tensor, out: Tensor) -> None:
        for place, row in enumerate(rows.tolist()):
            out[place] = self.held.get(row, torch.zeros(self.bytes, dtype=torch.uint8))

    def write(self, rows: Tensor, records: Tensor) -> None:
        if self.fails:
            raise OSError(5, "Input/output error")
        self.held.update(zip(rows.tolist(), records.clone(), strict=True))

    def grow(self, rows: int) -> None:
        """Rows that were never written need no room."""

    def close(self) -> None:
        self.held.clear()


@pytest.mark.parametrize("records", [{}, [], 0, torch.zeros(ROWS, 64, dtype=torch.uint8)], ids=type)
def test_what_a_backing_of_ones_own_calls_records_is_its_own(records: object) -> None:
    """It was taken for rows in memory: moved around `read` and `write`, or an error about the dtype of a dict."""
    made: list[Dict] = []

    def below(table: str, rows: int, record_bytes: int) -> Dict:
        made.append(Dict(record_bytes, records))
        return made[-1]

    assert not train_beside_whole(tiered(tables(), {"t": Tier(10, below=below)}))
    assert len(made[0].held) == ROWS
    assert not isinstance(records, Tensor) or not records.any()


@pytest.mark.parametrize("made", [None, {}, object()], ids=["nothing", "a dict", "an object"])
def test_what_is_no_backing_is_refused_by_name(made: object) -> None:
    """Was an AttributeError that named no table."""
    with pytest.raises(TypeError, match=rf"table 't': what its tier has below makes a {type(made).__name__}, .* read"):
        tiered(tables(), {"t": Tier(10, below=lambda table, rows, record_bytes: made)})


def one_disk_is_full(when: str) -> str:
    """What a rank says of tables whose rows lie nowhere on rank 1; the process group goes on."""

    def below(table: str, rows: int, record_bytes: int) -> Dict:
        backing, fails = Dict(record_bytes), dist.get_rank() == 1
        if fails and when == "made":
            raise OSError(28, "No space left on device")
        backing.fails = fails
        return backing

    options = {"t": TableOptions(tier=Tier(10, max_slots=1.0, below=below))}
    shards = layout.row_wise("t", ROWS, 4, [0, 1])
    said: str = error_of(
        ShardedEmbeddingBagCollection, tables(), shards, ShardingEnv.from_process_group(world_group()),
        torch.device("cpu"), default_optimizer=(torch.optim.SGD, {"lr": 0.1}), options=options,
    )  # fmt: skip
    dist.barrier()
    return said


@pytest.mark.ranks
@pytest.mark.parametrize(("when", "number"), [("made", 28), ("filled", 5)])
def test_rows_that_have_no_place_on_one_rank_are_an_error_of_all(when: str, number: int) -> None:
    """The others waited for its first rows until the group's timeout, half an hour, as long as its process lived."""
    other, failing = run_ranks(2, one_disk_is_full, when, timeout=20.0)
    assert failing == f"OSError: {number}" and other.startswith(f"RuntimeError: rank 1: OSError: [Errno {number}]")
