"""A test's surroundings by TorchRec's names: a free port, the process group of a rank, a seed, sanitizers."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import time
import unittest
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

# above those of well-known services, below Linux's net.ipv4.ip_local_port_range
_PORTS = (20000, 32000)
_SANITIZED = "Skipping test run since we are in ASAN mode."


def get_free_port() -> int:
    """A TCP port of this host that nobody listens on now; another process may take it before it is used.

    It lies below the ports that Linux gives to connections: one of those may be taken again by whatever connects within
    the seconds that a rank needs to start.

    Raises:
        OSError: a hundred ports drawn at random are all taken.
    """
    draw = random.SystemRandom()
    for _ in range(100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", draw.randrange(*_PORTS)))
            return int(probe.getsockname()[1])
    raise OSError(f"no free port of this host was found between {_PORTS[0]} and {_PORTS[1]}")


def serve_store() -> TCPStore:
    """A store in which ranks meet that this process starts; it outlives them, and listens before its port is told.

    The ranks need torchrun's variables, MASTER_PORT of `store.port`, and TORCHELASTIC_USE_AGENT_STORE=True: otherwise
    rank 0 makes a store of its own, which ends with it while another rank may still ask.
    """
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def is_asan() -> bool:
    """Whether this process runs with the address sanitizer."""
    return hasattr(ctypes.CDLL(None), "__asan_init")


def is_tsan() -> bool:
    """Whether this process runs with the thread sanitizer."""
    return hasattr(ctypes.CDLL(None), "__tsan_init")


def is_asan_or_tsan() -> bool:
    """Whether this process runs with either sanitizer."""
    return is_asan() or is_tsan()


def skip_if_asan(func: Callable[P, R]) -> Callable[P, R]:
    """A test that skips itself where a sanitizer would make it too slow, or find fault with others' libraries."""

    @wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_asan_or_tsan():
            raise unittest.SkipTest(_SANITIZED)
        return func(*args, **kwargs)

    return wrapper


def skip_if_asan_class(cls: C) -> C:
    """A test case all of whose tests skip themselves, as `skip_if_asan` has it."""
    return unittest.skip(_SANITIZED)(cls) if is_asan_or_tsan() else cls


def cuda_device_count() -> int:
    """CUDA devices of this process; where the driver cannot be asked, those that CUDA_VISIBLE_DEVICES lists."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    return torch.cuda.device_count() or (len(listed.split(",")) if listed else 0)


def init_distributed_single_host(
    rank: int, world_size: int, backend: str, local_size: int | None = None
) -> dist.ProcessGroup:
    """The process group of this rank's process, instead of one that it had; hosts of `local_size` ranks are feigned.

    MASTER_ADDR and MASTER_PORT say where ranks meet. LOCAL_WORLD_SIZE and LOCAL_RANK are set: of one host, unless
    `local_size` is given.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(local_size or world_size)
    os.environ["LOCAL_RANK"] = str(rank % local_size if local_size else rank)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(rank=rank, world_size=world_size, backend=backend)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def seed_and_log(wrapped_func: Callable[P, R]) -> Callable[P, R]:
    """The function, called after torch, numpy and random are seeded with the clock; the seed is printed."""

    @wraps(wrapped_func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        seed = int(time.time() * 1000) % (1 << 31)
        print(f"Using random seed: {seed}")
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return wrapped_func(*args, **kwargs)

    return wrapper


def get_state_buffers_parameters(model: nn.Module) -> dict[str, Any]:
    """A model's `state_dict`, `named_buffers` and `named_parameters`, each by name."""
    return {
        "state_dict": model.state_dict(),
        "named_buffers": dict(model.named_buffers()),
        "named_parameters": dict(model.named_parameters()),
    }


def assert_state_buffers_parameters_equal(
    model_1: nn.Module,
    model_2: nn.Module,
    check_named_buffers: bool = True,
    check_named_parameters: bool = True,
    check_state_dict: bool = True,
) -> None:
    """AssertionError unless two models have the same names of buffers, parameters and entries of the state dict."""
    first, second = get_state_buffers_parameters(model_1), get_state_buffers_parameters(model_2)
    for what, checked, words in (
        ("named_buffers", check_named_buffers, "named buffers keys"),
        ("named_parameters", check_named_parameters, "named parameter keys"),
        ("state_dict", check_state_dict, "state dict key"),
    ):
        if checked and first[what].keys() != second[what].keys():
            only = [sorted({*a[what]} - {*b[what]}) for a, b in ((first, second), (second, first))]
            raise AssertionError(f"{words} are not the same: only the first has {only[0]}, only the second {only[1]}")
