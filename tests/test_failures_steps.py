"""A rank that fails, dies or stands still in a step: its peers raise, say who and where, and are left whole."""

from __future__ import annotations

import pytest
from failing_model import Fault, train
from lone_ranks import Said, lone_ranks

pytestmark = pytest.mark.ranks

# places that are the model's own code, in the order in which a step comes by them
IN_FORWARD = ("input exchange", "look up", "forward")
IN_BACKWARD = ("loss", "backward", "before the last all-reduce", "optimizer")


def worker(fault: Fault, timeout_s: float | None, watched: bool) -> None:
    train(fault, timeout_s=timeout_s, watched=watched)


def fail(
    fault: Fault, *, world_size: int = 2, timeout_s: float | None = 60, watched: bool = True, store: str = "file"
) -> list[Said]:
    return lone_ranks(world_size, worker, fault, timeout_s, watched, store=store)


def require_named(found: list[Said], rank: int) -> None:
    """All ranks but this one raised RankFailure and name it."""
    for other, said in enumerate(found):
        if other != rank:
            assert (said.error, said.ranks) == ("RankFailure", (rank,)), said
            assert f"rank {rank} " in said.text
            assert f"Rank {other} was " in said.text


@pytest.mark.parametrize("place", [*IN_FORWARD, *IN_BACKWARD])
def test_a_killed_rank_ends_its_peers(place: str) -> None:
    """Fault 34: a rank killed in forward, backward or input exchange left the others waiting for half an hour."""
    found = fail(Fault(place, "kill"))
    assert found[1].killed
    require_named(found, 1)
    assert "rank 1 ended, or does not answer" in found[0].text


@pytest.mark.parametrize("place", ["look up", "backward", "before the last all-reduce"])
def test_a_killed_rank_ends_all_of_four(place: str) -> None:
    found = fail(Fault(place, "kill", rank=2), world_size=4)
    require_named(found, 2)


@pytest.mark.parametrize("place", [*IN_FORWARD, *IN_BACKWARD])
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_exception_of_one_rank_is_told_to_all(place: str, world_size: int) -> None:
    found = fail(Fault(place, "raise"), world_size=world_size)
    assert (found[1].error, found[1].text) == ("ZeroDivisionError", "the loader's seventh batch")
    require_named(found, 1)
    for said in (found[0], *found[2:]):
        assert "rank 1 failed " in said.text
        assert "ZeroDivisionError: the loader's seventh batch" in said.text
