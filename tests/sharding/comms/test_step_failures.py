"""A rank that fails, dies or stands still in a step: its peers raise, say who and where, and are left whole.

Takes most of a minute: a rank that is killed or stands still is waited for, 5 s of a roll call or a `timeout_s`; the
machine is idle meanwhile.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from failing_model import SLEEP_S, TEXT, Fault, build, features_of, train
from lone_ranks import Said, lone_ranks, start_lone_ranks
from torch import Tensor

from shardwise import KeyedJaggedTensor, RankFailure

pytestmark = pytest.mark.ranks

# places that are the model's own code, in the order in which a step comes by them
IN_FORWARD = ("input exchange", "look up", "forward")
IN_BACKWARD = ("loss", "backward", "before the last all-reduce", "optimizer")
# one of each; a rank that fails takes processes of its own, so the others are tried where all is
FEW = ("look up", "backward")
MORE = tuple(place for place in (*IN_FORWARD, *IN_BACKWARD) if place not in FEW)
PLACES = pytest.mark.parametrize(
    "places", [FEW, pytest.param(MORE, marks=pytest.mark.full)], ids=["one of each", "all others"]
)


def worker(fault: Fault, timeout_s: float | None, watched: bool) -> None:
    train(fault, timeout_s=timeout_s, watched=watched)


def fail(
    *faults: Fault, world_size: int = 2, timeout_s: float | None = 60, watched: bool = True, store: str = "file"
) -> list[list[Said]]:
    """What the ranks of each fault's group said. All groups wait at once."""
    groups = [
        start_lone_ranks(
            world_size, worker, fault, timeout_s, watched, store=store,
            stopped=fault.rank if fault.action == "stop" else None,
        )
        for fault in faults
    ]  # fmt: skip
    return [group.said() for group in groups]


def require_named(outcomes: list[Said], rank: int) -> None:
    """All ranks but this one raised RankFailure and name it."""
    for peer, outcome in enumerate(outcomes):
        if peer != rank:
            assert (outcome.error, outcome.ranks) == ("RankFailure", (rank,)), outcome
            assert f"rank {rank} " in outcome.text
            assert f"Rank {peer} was " in outcome.text


@pytest.mark.full
@PLACES
def test_a_killed_rank_ends_its_peers(places: tuple[str, ...]) -> None:
    """Fault 34: a rank killed in forward, backward or input exchange left the others waiting for half an hour."""
    for outcomes in fail(*(Fault(place, "kill") for place in places)):
        assert outcomes[1].killed
        require_named(outcomes, 1)
        assert "rank 1 ended, or does not answer" in outcomes[0].text


@pytest.mark.full
def test_a_rank_that_ends_or_stands_still_before_it_told_its_error_is_named() -> None:
    """All ranks knew by its header that it failed, and waited for the reason until the group's timeout."""
    for outcomes in fail(Fault(TEXT, "kill"), Fault(TEXT, "stop"), timeout_s=6):
        require_named(outcomes, 1)


@pytest.mark.full
def test_a_killed_rank_ends_all_of_four() -> None:
    places = ("look up", "backward", "before the last all-reduce")
    for outcomes in fail(*(Fault(place, "kill", rank=2) for place in places), world_size=4):
        require_named(outcomes, 2)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@PLACES
def test_an_exception_of_one_rank_is_told_to_all(places: tuple[str, ...], world_size: int) -> None:
    for outcomes in fail(*(Fault(place, "raise") for place in places), world_size=world_size):
        assert (outcomes[1].error, outcomes[1].text) == ("ZeroDivisionError", "the loader's seventh batch")
        require_named(outcomes, 1)
        for outcome in (outcomes[0], *outcomes[2:]):
            assert "rank 1 failed " in outcome.text
            assert "ZeroDivisionError: the loader's seventh batch" in outcome.text


def test_memory_that_runs_out_on_one_rank_is_told() -> None:
    """Out of memory in a lookup: the tables of all ranks are as before the step, on the failing rank too."""
    (outcomes,) = fail(Fault("look up", "memory"))
    assert (outcomes[1].error, outcomes[1].text) == ("OutOfMemoryError", "tried to allocate 40.00 GiB")
    require_named(outcomes, 1)
    assert "OutOfMemoryError: tried to allocate 40.00 GiB" in outcomes[0].text


def test_ctrl_c_on_one_rank_ends_the_others() -> None:
    for outcomes in fail(Fault("look up", "interrupt"), Fault("loss", "interrupt")):
        assert outcomes[1].error == "KeyboardInterrupt"
        require_named(outcomes, 1)
        assert "KeyboardInterrupt" in outcomes[0].text


def interrupted() -> float:
    """How long Ctrl-C takes on a rank that waits for another."""
    fault = Fault("input exchange", "sleep")
    model = build(fault)
    if dist.get_rank() == 0:
        # while the other one sleeps
        threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    try:
        train(fault, model=model)
    except KeyboardInterrupt:
        return time.monotonic() - start
    return -1.0


@pytest.mark.full
def test_ctrl_c_on_a_rank_that_waits_for_another_is_served() -> None:
    """A wait in C++ lets no signal handler run: Ctrl-C came through when the other rank did, or never."""
    first, second = lone_ranks(2, interrupted)
    assert 0 < first.value < SLEEP_S
    assert (second.error, second.ranks) == ("RankFailure", (0,))


@pytest.mark.full
def test_a_rank_that_stands_still_is_named_after_timeout_s() -> None:
    """SIGSTOP: its connections stay open, so nothing but time tells."""
    for outcomes in fail(Fault("input exchange", "stop"), Fault("backward", "stop"), timeout_s=6):
        assert outcomes[1].hung
        require_named(outcomes, 1)
        assert "(timeout_s)" in outcomes[0].text


@pytest.mark.full
def test_a_rank_that_is_late_is_named_with_what_it_does() -> None:
    (outcomes,) = fail(Fault("loss", "sleep"), timeout_s=4)
    for outcome in outcomes:
        assert (outcome.error, outcome.ranks) == ("RankFailure", (1,))
    assert "rank 1 did not come: it is in its own code after the exchange of rows of 'tables'" in outcomes[0].text
    assert "I waited for 4 s (timeout_s)" in outcomes[0].text


@pytest.mark.full
def test_a_rank_that_takes_the_store_with_it_is_named() -> None:
    """Without a launcher the store of the process group is kept by rank 0, which may be the one that fails."""
    faults = (Fault("backward", action, rank=0) for action in ("raise", "kill", "stop"))
    for outcomes in fail(*faults, timeout_s=6, store="tcp"):
        require_named(outcomes, 0)


@pytest.mark.full
def test_tables_in_the_backward_and_the_forward_tell_without_a_block() -> None:
    faults = (Fault(place, action) for place in ("look up", "backward") for action in ("raise", "kill"))
    for outcomes in fail(*faults, watched=False):
        require_named(outcomes, 1)


def timeouts() -> list[timedelta]:
    def of_group() -> timedelta:
        value: timedelta = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout
        return value

    before = of_group()
    try:
        train(Fault("forward", "raise"), timeout_s=5)
    except (RankFailure, ZeroDivisionError):
        return [before, of_group()]
    return []


def test_the_options_of_the_process_group_stay_as_they_are() -> None:
    for outcome in lone_ranks(2, timeouts):
        assert outcome.value == [timedelta(minutes=30)] * 2


def survive(place: str, store_path: str) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after a failure, and of a new group that goes on from there."""
    fault = Fault(place, "raise")
    model = build(fault)
    with suppress(RankFailure, ZeroDivisionError):
        train(fault, model=model)
    params = [param.detach().clone() for param in model.parameters()]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store_path}", rank=rank, world_size=world_size)
    train(Fault("nowhere", "raise"), steps=2)
    return params, two_steps()


def two_steps() -> list[Tensor]:
    model = build(Fault("nowhere", "raise"))
    train(Fault("nowhere", "raise"), model=model, steps=2)
    return [param.detach().clone() for param in model.parameters()]


def test_nothing_is_lost_and_a_new_group_goes_on(tmp_path: Path) -> None:
    """The failure came in the third step: parameters of all ranks are those of two."""
    groups = [start_lone_ranks(2, survive, place, str(tmp_path / place)) for place in ("look up", "backward")]
    for outcome in (outcome for group in groups for outcome in group.said()):
        params, expected = outcome.value
        for param, expected_param in zip(params, expected, strict=True):
            assert torch.equal(param, expected_param)


def agreed_errors() -> list[str]:
    """What all ranks raise together leaves the group in use."""
    model = build(Fault("nowhere", "raise"))
    bad, good = features_of(0, 0), features_of(1, dist.get_rank())
    bad = KeyedJaggedTensor(bad.keys(), bad.values() + 100 * dist.get_rank(), lengths=bad.lengths())
    errors = []
    for _ in range(2):
        with model.watched(), suppress(IndexError):
            model(bad)
        try:
            with model.watched():
                model(bad)
        except IndexError as error:
            errors.append(str(error))
        model(good).backward()
    return errors


def test_4_a_bad_id_is_no_failure_and_the_group_goes_on() -> None:
    """Fault 4: one bad id on one rank only: all raise in that step, and train on after it."""
    for outcome in lone_ranks(2, agreed_errors):
        assert [text.split(":")[0] for text in outcome.value] == ["rank 1", "rank 1"]


def exhausted() -> int:
    """A loader's end inside the block is the end of the loop, on all ranks in their own time."""
    model = build(Fault("nowhere", "raise"))
    batches, steps = iter([features_of(step, dist.get_rank()) for step in range(2)]), 0
    while True:
        try:
            with model.watched():
                model(next(batches)).backward()
        except StopIteration:
            break
        steps += 1
    model(features_of(9, dist.get_rank())).backward()
    return steps


def test_the_end_of_the_data_is_no_failure() -> None:
    assert [outcome.value for outcome in lone_ranks(2, exhausted)] == [2, 2]


def copies() -> list[bool]:
    """A watched model is copied, its process forks, and its group ends, all as before."""
    model = build(Fault("nowhere", "raise"))
    copied = model.copy("cpu")
    copied(features_of(0, dist.get_rank())).backward()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    threads = [thread for thread in threading.enumerate() if thread.name == "shardwise watch"]
    dist.barrier()
    dist.destroy_process_group()
    for thread in threads:
        thread.join(20)
    return [len(threads) == 1, status == 0, not any(thread.is_alive() for thread in threads)]


def test_a_watch_ends_with_its_process_group_and_hinders_neither_copies_nor_forks() -> None:
    assert [outcome.value for outcome in lone_ranks(2, copies)] == [[True] * 3] * 2
