"""Functions on ranks by TorchRec's test base: values come back, and a rank that fails fails the test at once."""

from __future__ import annotations

import os
import random
import time
import unittest
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import start_fork_server
from torch import nn

from shardwise.sharding.comms.env import intra_and_cross_node_pg
from shardwise.sharding.testing import environment
from shardwise.sharding.testing.environment import (
    assert_state_buffers_parameters_equal,
    cuda_device_count,
    get_free_port,
    seed_and_log,
    skip_if_asan,
    skip_if_asan_class,
)
from shardwise.sharding.testing.processes import (
    MultiProcessContext,
    MultiProcessTestBase,
    RanksFailed,
    SingleProcessContext,
    run_local_multi_process_func,
    run_multi_process_func,
    run_single_process_func,
)


class OnRanks(MultiProcessTestBase):
    """A test case as programs write them."""

    def runTest(self) -> None:
        """Nothing: the methods are called by the tests below."""


@pytest.fixture
def on_ranks() -> Any:
    # its children have torch already
    start_fork_server()
    case = OnRanks()
    case.setUp()
    yield case
    case.tearDown()
    assert not torch.are_deterministic_algorithms_enabled() and "GLOO_DEVICE_TRANSPORT" not in os.environ


def sum_over_ranks(rank: int, world_size: int, expected: int, local_size: int | None = None) -> None:
    with MultiProcessContext(rank, world_size, local_size=local_size) as context:
        assert torch.are_deterministic_algorithms_enabled()
        assert context.device == torch.device("cpu") and context.pg is dist.group.WORLD
        total = torch.tensor(rank + 1)
        dist.all_reduce(total, group=context.pg)
        assert total.item() == expected
        assert os.environ["LOCAL_WORLD_SIZE"] == str(local_size or world_size)
        if local_size == 1:
            # hosts of one rank: the groups across are all ranks
            _, across = intra_and_cross_node_pg(context.device)
            assert dist.get_world_size(across) == world_size
    assert not dist.is_initialized() and not torch.are_deterministic_algorithms_enabled()


def wait_for_the_others(rank: int, world_size: int, failing: int, exits: bool = False) -> None:
    with MultiProcessContext(rank, world_size):
        if rank == failing:
            if exits:
                os._exit(3)
            raise ValueError("the table is on fire")
        time.sleep(60)


def name_of_rank(rank: int, world_size: int, prefix: str, ctx: SingleProcessContext | None = None) -> str:
    if ctx is not None:
        assert (ctx.rank, ctx.world_size, ctx.local_rank) == (rank, world_size, rank)
        assert dist.get_rank(ctx.pg) == rank and ctx.device == torch.device("cpu")
    return f"{prefix}{rank}/{world_size}"


def test_every_rank_is_called_with_its_number(on_ranks: OnRanks) -> None:
    on_ranks._run_multi_process_test(callable=sum_over_ranks, world_size=2, expected=3)
    on_ranks._run_multi_process_test_per_rank(
        callable=sum_over_ranks, world_size=2, kwargs_per_rank=[{"expected": 3}, {"expected": 3, "local_size": 2}]
    )
    on_ranks._run_multi_process_test(callable=sum_over_ranks, world_size=2, expected=3, local_size=1)


@pytest.mark.parametrize("exits", [False, True])
def test_a_failing_rank_fails_the_test_with_its_traceback(on_ranks: OnRanks, exits: bool) -> None:
    """TorchRec's waits for the other ranks, which wait for the failed one: half an hour, until gloo gives up."""
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="Detected at least one unsuccessful run") as failed:
        on_ranks._run_multi_process_test(callable=wait_for_the_others, world_size=2, failing=1, exits=exits)
    assert time.monotonic() - begin < 50
    text = str(failed.value)
    assert "rank 1 of 2:" in text and "ranks [0] were still running" in text
    if exits:
        assert "its process ended with exit code 3" in text
    else:
        assert "Worker raised ValueError: the table is on fire" in text and "in wait_for_the_others" in text


def test_values_of_the_ranks_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    start_fork_server()
    before = dict(os.environ)
    assert run_multi_process_func(name_of_rank, "forkserver", prefix="r") == ["r0/2", "r1/2"]
    assert run_multi_process_func(name_of_rank, world_size=1, prefix="r") == ["r0/1"]
    torch.use_deterministic_algorithms(False)
    names = run_local_multi_process_func(name_of_rank, multiprocessing_method="forkserver", prefix="s")
    assert names == ["s0/2", "s1/2"]
    assert run_local_multi_process_func(name_of_rank, world_size=1, prefix="s") == ["s0/1"]
    with pytest.raises(RanksFailed, match="got an unexpected keyword argument 'colour'"):
        run_multi_process_func(name_of_rank, "forkserver", prefix="r", colour="red")
    torch.use_deterministic_algorithms(False)
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(RuntimeError, match=r"torchrun's variables are missing: \['LOCAL_RANK'\]"):
        run_single_process_func(name_of_rank, prefix="s")
    for name in set(os.environ) - set(before):
        del os.environ[name]


def test_a_free_port_can_be_listened_on() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", get_free_port()))
        server.listen()


def test_a_free_port_is_none_that_a_connection_is_given_nor_one_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    # of Linux, unless somebody sets net.ipv4.ip_local_port_range
    assert all(1024 < get_free_port() < 32768 for _ in range(100))
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        taken = server.getsockname()[1]
        monkeypatch.setattr(environment, "_PORTS", (taken, taken + 1))
        with pytest.raises(OSError, match=f"no free port of this host was found between {taken} and {taken + 1}"):
            get_free_port()


def test_a_sanitizer_skips_what_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert skip_if_asan(len)([1, 2]) == 2
    case = type("Case", (unittest.TestCase,), {"test_it": lambda self: None})
    assert skip_if_asan_class(case) is case and not hasattr(case, "__unittest_skip__")
    monkeypatch.setattr(environment, "is_asan", lambda: True)
    with pytest.raises(unittest.SkipTest, match="ASAN mode"):
        skip_if_asan(len)([1, 2])
    skipped = skip_if_asan_class(case)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(skipped).run(result)
    assert len(result.skipped) == result.testsRun == 1


def test_devices_are_counted_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert cuda_device_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " ")
    assert cuda_device_count() == 0


def test_a_seed_is_printed_and_makes_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    draw = seed_and_log(lambda: (torch.rand(1).item(), random.random(), float(np.random.rand())))
    drawn = draw()
    seed = int(capsys.readouterr().out.rsplit(" ", 1)[1])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    assert drawn == (torch.rand(1).item(), random.random(), float(np.random.rand()))


def test_models_whose_names_differ_are_told_apart() -> None:
    plain = nn.Linear(2, 2)
    assert_state_buffers_parameters_equal(plain, nn.Linear(2, 2))
    with pytest.raises(AssertionError, match=r"named parameter keys are not the same: only the first has \['bias'\]"):
        assert_state_buffers_parameters_equal(plain, nn.Linear(2, 2, bias=False))
    with pytest.raises(AssertionError, match="named buffers keys are not the same"):
        assert_state_buffers_parameters_equal(nn.BatchNorm1d(2), nn.LayerNorm(2), check_named_parameters=False)
    assert_state_buffers_parameters_equal(
        nn.BatchNorm1d(2), nn.LayerNorm(2), check_named_buffers=False, check_state_dict=False
    )


def test_torchrecs_modules_have_them() -> None:
    assert import_module("shardwise.torchrec.test_utils").get_free_port is get_free_port
    multi_process = import_module("shardwise.torchrec.distributed.test_utils.multi_process")
    assert multi_process.MultiProcessTestBase is MultiProcessTestBase
    runner = import_module("shardwise.torchrec.distributed.test_utils.process_runner")
    assert runner.run_single_process_func is run_single_process_func
