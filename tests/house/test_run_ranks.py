"""The helper that gives tests real ranks: values come back in order, failures surface at once, nothing hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankEnded, RankTraceback, run_ranks
from torch import Tensor

pytestmark = pytest.mark.ranks

kept: list[Tensor] = []


class TwoArguments(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def summed(start: int) -> tuple[int, Tensor]:
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    return int(os.environ["RANK"]), total


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has an opinion")
    dist.barrier()


def fail_oddly() -> None:
    raise TwoArguments(1, 2)


def end_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def return_lambda() -> object:
    return lambda: None


def keep_what_is_sent() -> None:
    # at the top, ranks that are given a second would import it too
    from shardwise.sharding.comms.exchange import Exchange, Pending

    pending = Pending(torch.zeros(2, 3), Exchange(None), lambda *tensors, **_: None)
    # refers to it from C++, as a collective does
    kept.append(pending._aliases[0][:1])


def draw() -> Tensor:
    return torch.rand(3)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_returns_its_value_in_rank_order(world_size: int) -> None:
    results = run_ranks(world_size, summed, 10)
    assert [rank for rank, _ in results] == list(range(world_size))
    expected = sum(10 + rank for rank in range(world_size))
    assert all(total.item() == expected for _, total in results)


def test_the_next_call_finds_the_same_processes_and_the_same_seeds() -> None:
    first, pids = run_ranks(2, draw), run_ranks(2, os.getpid)
    assert torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, run_ranks(2, draw), strict=True))
    assert pids == run_ranks(2, os.getpid)
    assert os.getpid() not in pids


def test_an_exception_surfaces_while_the_others_wait_in_a_collective() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 has an opinion") as caught:
        run_ranks(2, fail_on, 1)
    assert time.monotonic() - start < 30
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "in fail_on" in str(caught.value.__cause__)
    assert len(run_ranks(2, summed, 0)) == 2


def test_an_exception_that_cannot_travel_keeps_its_name_and_message() -> None:
    with pytest.raises(RuntimeError, match="TwoArguments: 1 and 2"):
        run_ranks(2, fail_oddly)


def test_a_value_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(Exception, match="pickle"):
        run_ranks(1, return_lambda)


def test_a_call_that_leaves_a_collective_fails_itself() -> None:
    """test_exchange failed after any test that had left some, in a process that both were given."""
    with pytest.raises(RuntimeError, match=r"after the call; their shapes by rank: \{0: \[\(2, 3\)\]\}"):
        run_ranks(1, keep_what_is_sent)
    assert len(run_ranks(2, summed, 0)) == 2


def test_a_process_that_ends_is_reported_with_its_exit_code() -> None:
    with pytest.raises(RankEnded, match="exit code 3"):
        run_ranks(2, end_on, 0)


def test_a_timeout_kills_all_ranks_and_shows_where_they_were() -> None:
    pids = run_ranks(2, os.getpid)
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 did not finish(.|\n)*in sleep_on"):
        run_ranks(2, sleep_on, 0, timeout=1.0)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
