"""What the interpreter's record shows: no races, no order among programs, no false hints, no bytes beyond the declared.

Each check is shown to find its fault in a small kernel made wrong on purpose, then runs over the library's kernels.

Takes 25 s: every access of the kernels is recorded in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_inputs import (
    CASES,
    DEFINED,
    RULES,
    Case,
    Inputs,
    assert_same_bits,
    full_if,
    inputs,
    optimizer,
    torch_device,
    update_args,
    upstream,
)
from recorded_calls import Call, assert_sound, assert_within, by_kind
from torch import Tensor

from shardwise.kernels import (
    check_gradient,
    check_ids,
    fused_update,
    launch_plans,
    new_guard,
    per_id_weight_gradient,
    persistent_grid,
    pooled_lookup,
    sequence_lookup,
)
from shardwise.kernels._op import multiple, tl, triton
from shardwise.kernels.lookup import pooled, sequence, weight_gradient
from shardwise.kernels.update import update
from shardwise.perf.compile.recorded import (
    SECTOR,
    Fault,
    races,
    recorded,
    sectors,
)
from shardwise.perf.suite import declared
from shardwise.perf.suite.declared import Traffic

interpreted = pytest.mark.interpreted


# Kernels with a fault.


@triton.jit
def blocks_kernel(X, Y, N, WIDTH: tl.constexpr, REACH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program p writes the p-th WIDTH elements of Y, and as many more as REACH is larger."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, REACH)
    tl.store(Y + at, 2 * tl.load(X + at, mask=at < N, other=0.0), mask=at < N)


@triton.jit
def neighbours_kernel(Y, N):  # type: ignore[no-untyped-def]
    p = tl.program_id(0)
    tl.store(Y + p, 1.0 + tl.load(Y + p + 1, mask=p + 1 < N, other=0.0))


@triton.jit
def halves_kernel(Y):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 4)
    tl.store(Y + 2 * tl.program_id(0) + at // 2, at.to(tl.float32))


@triton.jit
def count_kernel(Y, PLAIN: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.atomic_add(Y, 1.0)
    if PLAIN and tl.program_id(0) == 2:
        tl.store(Y, 0.0)


@triton.jit
def read_rows_kernel(W, I, Y, D: tl.constexpr, TIMES: tl.constexpr):  # type: ignore[no-untyped-def]
    p = tl.program_id(0)
    d = tl.arange(0, D)
    row = tl.load(I + p)
    total = tl.zeros((D,), tl.float32)
    for _ in tl.static_range(TIMES):
        total += tl.load(W + row * D + d)
    tl.store(Y + p * D + d, total)


@triton.jit
def hints_kernel(X, Y, N, ALIGN: tl.constexpr, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    if BY == "tile":
        at = tl.multiple_of(tl.load(X + tl.arange(0, 4)), ALIGN)
        tl.store(Y + tl.arange(0, 4), at)
    elif BY == "value":
        tl.store(Y, tl.multiple_of(tl.load(X + 2), ALIGN))
    else:
        tl.store(Y, multiple(N, ALIGN))


@interpreted
@pytest.mark.parametrize(("reach", "expected"), [(4, []), (8, ["(0, 0, 0) and (1, 0, 0)", "(1, 0, 0) and (2, 0, 0)"])])
def test_programs_that_write_the_same_element_race(reach: int, expected: list[str]) -> None:
    x, y = torch.arange(12.0), torch.zeros(12)
    with recorded() as launches:
        blocks_kernel[(3,)](x, y, 12, 4, reach)
    got = races(launches[0])
    assert ["{} and {}".format(*race.programs) for race in got] == expected
    assert all(race.kernel == "blocks_kernel" and race.kinds == ("write", "write") for race in got)
    assert [race.place for race in got] == ["Y[4]", "Y[8]"][: len(expected)]


@interpreted
def test_a_program_that_reads_what_another_writes_races() -> None:
    with recorded() as launches:
        neighbours_kernel[(3,)](torch.zeros(3), 3)
    got = races(launches[0])
    assert [(race.place, race.kinds) for race in got] == [("Y[1]", ("read", "write")), ("Y[2]", ("read", "write"))]
    assert got[0].programs == ((0, 0, 0), (1, 0, 0))


@interpreted
@pytest.mark.parametrize(("plain", "kinds"), [(False, []), (True, [("atomic", "write")])])
def test_atomics_race_plain_writes_only(plain: bool, kinds: list[tuple[str, str]]) -> None:
    with recorded() as launches:
        count_kernel[(4,)](torch.zeros(1), plain)
    assert [race.kinds for race in races(launches[0])] == kinds


@interpreted
def test_a_store_that_writes_an_element_twice_races_with_itself() -> None:
    with recorded() as launches:
        halves_kernel[(2,)](torch.zeros(4))
    got = races(launches[0])
    assert [(race.place, race.programs) for race in got] == [("Y[0]", ((0, 0, 0),) * 2), ("Y[2]", ((1, 0, 0),) * 2)]


@interpreted
def test_an_access_outside_the_arguments_is_an_error_before_it_happens() -> None:
    x, y = torch.arange(12.0), torch.full((12,), -1.0)
    message = r"blocks_kernel, program \(2, 0, 0\): write from Y\[8\] to 0x\w+ in no argument"
    with pytest.raises(Fault, match=message), recorded():
        blocks_kernel[(3,)](x, y[:10], 12, 4, 4)
    assert y.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, -1, -1, -1, -1]


@interpreted
def test_a_result_that_depends_on_the_order_of_programs_changes() -> None:
    results = []
    for order in (None, 0, 0):
        y = torch.zeros(5)
        with recorded(order):
            neighbours_kernel[(4,)](y, 5)
        results.append(y)
    assert not torch.equal(results[0], results[1])
    assert_same_bits(results[1], results[2])


@interpreted
@pytest.mark.parametrize("grid", [(3,), (2**31 - 1,), (1, 2, 3)])
def test_a_list_names_the_programs_that_run(grid: tuple[int, ...]) -> None:
    x, y = torch.arange(12.0), torch.zeros(12)
    with recorded(order=[1, -1]) as launches:
        blocks_kernel[grid](x, y, 12, 4, 4)
    last = tuple(n - 1 for n in (*grid, 1, 1)[:3])
    second = (0, 0, 1) if len(grid) == 3 else (1, 0, 0)
    assert launches[0].programs == [second, last]
    written = {place for program, *_ in launches[0].programs for place in range(4 * program, min(4 * program + 4, 12))}
    assert y.nonzero().flatten().tolist() == sorted(written - {0})


@interpreted
@pytest.mark.parametrize(
    ("by", "align", "message"),
    [
        ("value", 16, "tl.multiple_of says a multiple of 16, but the value is 24"),
        ("tile", 8, "tl.multiple_of says a multiple of 8, but the value is 12"),
        ("argument", 4, "multiple says a multiple of 4, but the value is 6"),
    ],
)
def test_a_false_hint_is_an_error_and_a_true_one_is_not(by: str, align: int, message: str) -> None:
    x, y = torch.tensor([0, 12, 24, 36]), torch.zeros(4, dtype=torch.int64)
    with recorded() as launches:
        hints_kernel[(1,)](x, y, 6, 2, by)
        with pytest.raises(Fault) as caught:
            hints_kernel[(1,)](x, y, 6, align, by)
    assert str(caught.value) == f"hints_kernel, program (0, 0, 0): {message}"
    assert len(launches) == 2


@interpreted
@pytest.mark.parametrize(("times", "programs"), [(2, 6), (1, 12)], ids=["by one program", "by two programs"])
def test_rows_read_twice_are_more_than_declared(times: int, programs: int) -> None:
    weights, ids, out = torch.randn(9, 128), torch.tensor([3, 1, 4, 1, 5, 0] * 2), torch.zeros(12, 128)
    traffic = Traffic({"W": 6 * 512, "I": 6 * 8}, {"Y": programs * 512})
    memory = {"W": weights, "I": ids, "Y": out}
    with recorded() as launches:
        read_rows_kernel[(6,)](weights, ids, out, 128, 1)
        read_rows_kernel[(programs,)](weights, ids, out, 128, times)
    assert_within(launches[:1], traffic, memory)
    with pytest.raises(AssertionError, match="W: 6144 bytes to read, 3072 declared"):
        assert_within(launches[1:], traffic, memory)


def test_without_the_interpreter_nothing_is_recorded() -> None:
    torch_device("cpu")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), recorded():
        pass


# The kernels of the library.


def pooled_call(batch: Inputs) -> Call:
    out = pooled_lookup(*batch.lookup)
    traffic = declared.pooled_lookup_bytes(
        batch.weights, batch.indices, batch.offsets, batch.per_id_weights, batch.features, sector=SECTOR
    )
    return Call([out], traffic, {**index_of(batch), "W": batch.weights, "Y": out})


def sequence_call(batch: Inputs) -> Call:
    out = sequence_lookup(batch.weights, batch.indices, batch.offsets, batch.features, batch.dims[0], batch.segments)
    traffic = declared.sequence_lookup_bytes(batch.weights, batch.indices, batch.offsets, batch.features, sector=SECTOR)
    return Call([out], traffic, {**index_of(batch), "W": batch.weights, "Y": out}, "IO", *searching(batch))


def ids_call(batch: Inputs) -> Call:
    guard = new_guard()
    check_ids(batch.indices, batch.offsets, batch.features, guard, names=batch.names)
    traffic = declared.check_ids_bytes(batch.indices, batch.offsets)
    return Call([guard], traffic, index_of(batch), "IO", *searching(batch))


def gradient_check_call(batch: Inputs) -> Call:
    guard, grad = new_guard(), upstream(batch)
    grad[0, -1] = grad[-1, 0] = float("nan")
    check_gradient(grad, guard)
    return Call([guard], declared.check_gradient_bytes(grad), {"G": grad}, "G")


def weight_gradient_call(batch: Inputs) -> Call:
    grad = upstream(batch)
    out = per_id_weight_gradient(grad, batch.weights, batch.indices, batch.offsets, batch.features, batch.dims)
    traffic = declared.weight_gradient_bytes(batch.weights, batch.indices, batch.offsets, batch.features, sector=SECTOR)
    memory = {**index_of(batch), "W": batch.weights, "G": grad, "Q": out}
    return Call([out], traffic, memory, "IOPGQ")


def backward_call(batch: Inputs) -> Call:
    wanted = [batch.weights.requires_grad_()]
    if batch.per_id_weights is not None:
        wanted.append(batch.per_id_weights.requires_grad_())
    return Call(list(torch.autograd.grad(pooled_lookup(*batch.lookup), wanted, upstream(batch))))


def update_call(rule: str) -> Callable[[Inputs], Call]:
    def call(batch: Inputs) -> Call:
        state, grad = optimizer(rule, batch), upstream(batch)
        fused_update(*update_args(batch.weights, state, grad, batch))
        traffic = declared.fused_update_bytes(
            batch.weights, batch.indices, batch.offsets, batch.features, DEFINED[rule].kinds, batch.pooling,
            sector=SECTOR,
        )  # fmt: skip
        states = {f"S{i}": tensor for i, tensor in enumerate(state.states)}
        return Call([batch.weights, *state.states], traffic, {"W": batch.weights, "G": grad, **states}, rest=16)

    return call


def index_of(batch: Inputs) -> dict[str, Tensor]:
    scales = {} if batch.per_id_weights is None else {"P": batch.per_id_weights}
    return {"I": batch.indices, "O": batch.offsets, **scales}


def searching(batch: Inputs) -> tuple[int, int]:
    """Sectors a program may touch besides its own parts: a search looks at all features."""
    return 2 + len(batch.dims), 2 + 2 * len(batch.dims)


CALLS: dict[str, Callable[[Inputs], Call]] = {
    "pooled_lookup": pooled_call,
    "sequence_lookup": sequence_call,
    "check_ids": ids_call,
    "check_gradient": gradient_check_call,
    "weight_gradient": weight_gradient_call,
    "backward": backward_call,
    **{rule: update_call(rule) for rule in RULES},
}
WIDE = Case("dim 128, distinct ids", tables=((3000, 128),), batch=9, lengths=(1, 4))
NAMES = ("dim 5", "mixed dims", "shared table", "int32 both", "bf16 table", "hot row 3000")
SOME = {case.name: case for case in CASES if case.name in NAMES} | {WIDE.name: WIDE}
# the other rules differ in nothing but their formulas
RULES_OVER_ALL = ("sgd", "rowwise_adagrad", "adam")
# of a row that many ids hit the update of another rule says as much
REPEATS = ("backward", "sgd", "adam")
PAIRS = [
    pytest.param(
        call, case, marks=[interpreted, *full_if(call in REPEATS and "hot" in case.name)], id=f"{call}-{case.name}"
    )
    for call in CALLS
    for case in SOME.values()
    if not (call == "sequence_lookup" and len({dim for _, dim in case.tables}) > 1)
    and not (call in RULES and call not in RULES_OVER_ALL and case.name != "mixed dims")
]


@pytest.fixture(autouse=True)
def _a_program_for_each_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid too small for its tiles would hide races between tiles of one program."""
    monkeypatch.setattr(persistent_grid, "PERSISTENT_PROGRAMS", 10**6)


@pytest.mark.parametrize(("call", "case"), PAIRS)
def test_programs_do_not_race_in_any_order_and_move_the_declared_bytes(call: str, case: Case) -> None:
    assert_sound(lambda: CALLS[call](inputs(case)), orders=(1, 2))


@interpreted
@pytest.mark.parametrize("call", ["pooled_lookup", "sequence_lookup", "adam"])
def test_rows_of_whole_sectors_move_exactly_the_declared_bytes(call: str) -> None:
    with recorded() as launches:
        done = CALLS[call](inputs(WIDE))
    assert done.traffic is not None
    for kind, parts in by_kind(done.traffic):
        for letter in set(parts) & {"W", "Y", "S0", "S1"}:
            counts = [sectors(launch, kind, done.memory[letter]) for launch in launches]
            assert sum(count.requested for count in counts) * SECTOR == parts[letter]


@interpreted
@pytest.mark.parametrize("call", ["pooled_lookup", "sequence_lookup", "weight_gradient", "sgd"])
def test_an_alignment_that_a_launch_gets_wrong_is_found(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # plans that were kept have the right one, and nobody may keep the wrong one
    for module, name in ((pooled, "lookup_plan"), (weight_gradient, "gradient_plan"), (update, "source_alignment")):
        monkeypatch.setattr(module, name, getattr(launch_plans, name).__wrapped__)
    for module in (launch_plans, sequence, update):
        monkeypatch.setattr(module, "row_alignment", lambda dim, itemsize: 4)
    with pytest.raises(Fault, match="a multiple of 4, but the value is 5$"), recorded():
        CALLS[call](inputs(SOME["dim 5"]))


@interpreted
@pytest.mark.parametrize("seed", [1, 2])
def test_the_first_bad_id_is_found_in_any_order_of_programs(seed: int) -> None:
    batch = inputs(SOME["hot row 3000"])
    batch.indices[[1000, 1001, 2000, 2999]] = torch.tensor([41, 42, 43, 44])
    with pytest.raises(IndexError, match="sample 33: id 41 is outside"), recorded(order=seed):
        check_ids(batch.indices, batch.offsets, batch.features, new_guard(), names=batch.names)


def test_whole_calls_declare_what_their_modules_say() -> None:
    """Without rounding to sectors: N * D rows, the index and the output; touched rows there and back."""
    batch = inputs(SOME["dim 5"])
    n, touched = batch.indices.shape[0], len(batch.indices.unique())
    lookup = declared.pooled_lookup_bytes(batch.weights, batch.indices, batch.offsets, None, batch.features)
    assert lookup.bytes_moved == n * 5 * 4 + n * 8 + (3 + 1) * 8 + 3 * 5 * 4
    step = declared.fused_update_bytes(
        batch.weights, batch.indices, batch.offsets, batch.features, ("element", "row"), "sum"
    )  # fmt: skip
    assert step.bytes_moved == n * 5 * 4 + 2 * touched * (5 * 4 + 5 * 4 + 4) + 96 * n
