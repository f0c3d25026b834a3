"""Bad ids and offsets: what is said, about which one, and that the guard and the process stay usable.

Numbers in ids of the tests are those of reference/faults.md.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_inputs import (
    CASES,
    DEVICES,
    Case,
    Inputs,
    inputs,
    optimizer,
    per_device,
    torch_device,
    update_args,
    upstream,
)
from torch import Tensor

from shardwise.kernels import (
    Feature,
    check_ids,
    fused_update,
    new_guard,
    pack_features,
    raise_from_guard,
)
from shardwise.kernels.lookup import bounds
from shardwise.kernels.lookup.bounds import OK

# two features of three samples: bags [0:2], [2:2], [2:4] and [4:5], [5:8], [8:8]
CASE = Case("bounds", tables=((6, 4), (3, 4)), features=((0, False), (1, False)), batch=3)
IDS = [5, 0, 1, 2, 2, 0, 1, 2]
OFFSETS = [0, 2, 2, 4, 5, 8, 8]


def batch_with(
    device: str,
    ids: list[int] | None = None,
    offsets: list[int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> Inputs:
    where = torch_device(device)
    indices = torch.tensor(IDS if ids is None else ids, dtype=dtype)
    ends = torch.tensor(OFFSETS if offsets is None else offsets, dtype=dtype)
    return replace(inputs(CASE), indices=indices, offsets=ends).to(where)


def check(batch: Inputs, guard: Tensor, fatal: bool = True) -> None:
    """Check a batch and raise in this step wherever it runs."""
    check_ids(batch.indices, batch.offsets, batch.features, guard, names=batch.names, fatal=fatal)
    raise_from_guard(guard, batch.indices, batch.offsets, batch.features, batch.names, fatal=fatal)


def with_id(position: int, bad: int) -> list[int]:
    return [bad if i == position else value for i, value in enumerate(IDS)]


BAD_IDS = {
    "1 num_embeddings": (0, 6, "feature 'f0' of table 't0', sample 0: id 6 is outside [0, 6)"),
    "1 of another table": (7, 3, "feature 'f1' of table 't1', sample 1: id 3 is outside [0, 3)"),
    "2 minus one": (3, -1, "feature 'f0' of table 't0', sample 2: id -1 is outside [0, 6)"),
    "2 lowest": (4, -(2**63), "feature 'f1' of table 't1', sample 0: id -9223372036854775808 is outside [0, 3)"),
    "3 above int32": (5, 2**31 + 1, "feature 'f1' of table 't1', sample 1: id 2147483649 is outside [0, 3)"),
    "3 zero in its low half": (5, 2**32, "feature 'f1' of table 't1', sample 1: id 4294967296 is outside [0, 3)"),
}
BAD_OFFSETS = {
    "6 start": ([1, 2, 2, 4, 5, 8, 8], "offsets must start at 0, got 1"),
    "6 negative": ([-1, 2, 2, 4, 5, 8, 8], "offsets must start at 0, got -1"),
    "7 decreasing": (
        [0, 2, 1, 4, 5, 8, 8],
        "feature 'f0' of table 't0', sample 1: offsets must not decrease, got 2 and then 1",
    ),
    "7 between features": (
        [0, 2, 2, 4, 3, 8, 8],
        "feature 'f1' of table 't1', sample 0: offsets must not decrease, got 4 and then 3",
    ),
    "7 last": (
        [0, 2, 2, 4, 5, 8, 7],
        "feature 'f1' of table 't1', sample 2: offsets must not decrease, got 8 and then 7",
    ),
    "8 short": (
        [0, 2, 2, 4, 5, 7, 7],
        "offsets end at 7 but there are 8 ids (last feature: feature 'f1' of table 't1'); if the rest is padding, say"
        " so: KeyedJaggedTensor(..., capacity=8)",
    ),
    "8 long": (
        [0, 2, 2, 4, 5, 8, 9],
        "offsets end at 9 but there are 8 ids (last feature: feature 'f1' of table 't1')",
    ),
}


@pytest.mark.parametrize(("device", "case"), per_device(CASES))
def test_good_batches_pass(device: str, case: Case) -> None:
    batch, guard = inputs(case, torch_device(device)), new_guard(torch_device(device))
    check(batch, guard)
    assert guard.tolist() == [OK, OK, OK]


@pytest.mark.parametrize(("position", "bad", "message"), BAD_IDS.values(), ids=BAD_IDS.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_a_bad_id_is_named_and_the_guard_is_clean_again(device: str, position: int, bad: int, message: str) -> None:
    batch, guard = batch_with(device, with_id(position, bad)), new_guard(torch_device(device))
    with pytest.raises(IndexError) as caught:
        check(batch, guard)
    assert str(caught.value) == message
    assert guard.tolist() == [OK, OK, OK]
    check(batch_with(device), guard)


@pytest.mark.parametrize("device", DEVICES)
def test_int32_ids_and_offsets_are_checked_alike(device: str) -> None:
    guard = new_guard(torch_device(device))
    check(batch_with(device, dtype=torch.int32), guard)
    for bad in (6, -1, 2**31 - 1, -(2**31)):
        with pytest.raises(IndexError, match=f"sample 2: id {bad} is outside"):
            check(batch_with(device, with_id(3, bad), dtype=torch.int32), guard)
    with pytest.raises(ValueError, match="got 2 and then 1"):
        check(batch_with(device, offsets=[0, 2, 1, 4, 5, 8, 8], dtype=torch.int32), guard)


@pytest.mark.parametrize("what", ["feature ids", "offsets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.int16, torch.uint8])
@pytest.mark.parametrize("device", DEVICES)
def test_ids_and_offsets_of_other_types_are_refused(device: str, dtype: torch.dtype, what: str) -> None:
    """Fault 5."""
    batch = batch_with(device)
    name = "indices" if what == "feature ids" else "offsets"
    batch = replace(batch, **{name: getattr(batch, name).to(dtype)})
    expected = f"{what} must be int32 or int64, got {str(dtype).split('.')[1]}"
    with pytest.raises(TypeError) as caught:
        check(batch, new_guard(torch_device(device)))
    assert str(caught.value) == expected


@pytest.mark.parametrize(("offsets", "message"), BAD_OFFSETS.values(), ids=BAD_OFFSETS.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_bad_offsets_are_named(device: str, offsets: list[int], message: str) -> None:
    guard = new_guard(torch_device(device))
    with pytest.raises(ValueError) as caught:
        check(batch_with(device, offsets=offsets), guard)
    assert str(caught.value) == message
    assert guard.tolist() == [OK, OK, OK]


@pytest.mark.parametrize("device", DEVICES)
def test_ids_without_samples_are_refused(device: str) -> None:
    """The torch path took offsets [0] with ids for an empty batch; the kernel said that offsets must start at 0."""
    guard = new_guard(torch_device(device))
    with pytest.raises(ValueError, match=r"^offsets hold no samples but there are 8 ids$"):
        check(batch_with(device, offsets=[0]), guard)
    check(batch_with(device, ids=[], offsets=[0]), guard)


@pytest.mark.parametrize("device", DEVICES)
def test_offsets_that_do_not_divide_among_the_features_are_refused(device: str) -> None:
    for offsets in ([0, 4, 8, 8], []):
        with pytest.raises(ValueError, match=f"{len(offsets)} offsets do not divide among 2 features"):
            check(batch_with(device, offsets=offsets), new_guard(torch_device(device)))


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_offender_is_reported_and_offsets_go_before_ids(device: str) -> None:
    guard = new_guard(torch_device(device))
    with pytest.raises(IndexError, match="sample 0: id -7 is outside"):
        check(batch_with(device, [5, -7, 9, 2, 77, 0, -3, 2]), guard)
    with pytest.raises(ValueError, match="sample 1: offsets must not decrease, got 2 and then 1"):
        check(batch_with(device, [-1] * 8, [0, 2, 1, 0, 5, 4, 9]), guard)


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_offender_is_found_far_into_a_long_batch(device: str) -> None:
    """Several programs of the kernel find one each; an atomic minimum keeps the first."""
    batch = inputs(Case("long", tables=((9, 4),), batch=400, lengths=(3, 3)), torch_device(device))
    batch.indices[[1100, 777, 778, 1199]] = 9
    with pytest.raises(IndexError, match="sample 259: id 9 is outside"):
        check(batch, new_guard(torch_device(device)))


@pytest.mark.parametrize("device", DEVICES)
def test_without_fatal_an_id_warns_and_offsets_still_raise(device: str) -> None:
    guard = new_guard(torch_device(device))
    with pytest.warns(UserWarning, match=r"^feature 'f0' of table 't0', sample 0: id 6 is outside \[0, 6\); it counts"):
        check(batch_with(device, with_id(0, 6)), guard, fatal=False)
    assert guard.tolist() == [OK, OK, OK]
    with pytest.raises(ValueError, match="must start at 0"):
        check(batch_with(device, offsets=[1, *OFFSETS[1:]]), guard, fatal=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(batch_with(device), guard, fatal=False)


@pytest.mark.parametrize("device", DEVICES)
def test_ids_and_offsets_need_not_be_contiguous(device: str) -> None:
    batch = batch_with(device, with_id(0, 6))
    strided = torch.stack([batch.indices, batch.indices * 0], 1)[:, 0]
    with pytest.raises(IndexError, match="sample 0: id 6"):
        check(replace(batch, indices=strided), new_guard(torch_device(device)))
    ends = torch.stack([batch.offsets, batch.offsets * 0 + 99], 1)[:, 0]
    check(replace(batch_with(device), offsets=ends), new_guard(torch_device(device)))


@pytest.mark.gpu
def test_on_a_gpu_the_fault_waits_in_the_guard() -> None:
    batch, guard = batch_with("cuda", with_id(3, -1)), new_guard("cuda")
    check_ids(batch.indices, batch.offsets, batch.features, guard, names=batch.names)
    assert guard.tolist() == [3, OK, OK]


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_guard_holds_the_first_fault_that_a_naive_search_finds(device: str, data: st.DataObject) -> None:
    where = torch_device(device)
    count, batch = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    rows = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=count * batch, max_size=count * batch))
    ids = data.draw(st.lists(st.integers(-1, 4), min_size=sum(lengths), max_size=sum(lengths)))
    bag_of = [bag for bag, length in enumerate(lengths) for _ in range(length)]
    expected = min((i for i, row in enumerate(ids) if not 0 <= row < rows[bag_of[i] // batch]), default=OK)

    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], device=where)
    features = pack_features([Feature(0, n, 4, 0) for n in rows], where)
    names = [f"feature {f}" for f in range(count)]
    # what is raised from: on the CPU a guard of the call's own
    guards = [new_guard(where)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "raise_from_guard", lambda fault, *args, **kwargs: guards.append(fault))
        check_ids(torch.tensor(ids, dtype=torch.int64, device=where), offsets, features, guards[0], names=names)
    assert guards[-1].tolist() == [expected, OK, OK]


def test_a_bad_second_batch_stops_the_update_of_the_first_and_is_raised_by_name() -> None:
    """Two lookups before a backward share the step's guard on CUDA: no table trains until the bad id is raised."""
    good, step = inputs(CASES[0]), new_guard()
    ids = good.indices.clone()
    ids[0] = 10**6
    first, second = new_guard(), new_guard()
    for guard, indices in ((first, good.indices), (second, ids)):
        bounds.check_ids_ref(indices, good.offsets, good.features, guard, step_guard=step)
    weights, state = good.weights.clone(), optimizer("sgd", good)
    state.guard.copy_(step)
    fused_update(*update_args(weights, state, upstream(good), good))
    assert torch.equal(weights, good.weights)
    # its own guard says of each batch what was wrong with it
    raise_from_guard(first, good.indices, good.offsets, good.features, good.names)
    with pytest.raises(IndexError, match="id 1000000 is outside"):
        raise_from_guard(second, ids, good.offsets, good.features, good.names)
    # raised, the guard is cleared, and the next batch trains
    state.guard.copy_(new_guard())
    fused_update(*update_args(weights, state, upstream(good), good))
    assert not torch.equal(weights, good.weights)
