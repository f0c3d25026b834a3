"""Links between processes and between GPUs, measured: gloo between two processes here, NCCL and peer access of GPUs.

Latency is of an all-to-all of one number to each rank, bandwidth of one of 16 MiB to each; of both the median and the
tenth and ninetieth percentile on rank 0.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ..suite.timing import four_digits
from .findings import NOTE, OK, PROBLEM, Finding

MIB = 1 << 20
# bytes to each rank of the large exchange; calls of each; seconds in which the ranks have to be there and be done
LARGE, CALLS, TIMEOUT_S = 16 * MIB, 30, 30.0


def links(devices: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Of two processes on this machine, then of the GPUs among the devices."""
    if not dist.is_available():
        yield Finding(PROBLEM, "processes", "this torch was built without torch.distributed", "install another torch")
        return
    yield _between("two processes, gloo", "gloo", ["cpu", "cpu"], timeout_s)
    gpus = [torch.device(name) for name in devices if name != "cpu"]
    if len(gpus) > 1:
        yield from _peers(gpus)
        if dist.is_nccl_available():
            yield _between("2 GPUs, NCCL", "nccl", [str(gpu) for gpu in gpus[:2]], timeout_s)
        else:
            yield Finding(PROBLEM, "2 GPUs, NCCL", "this torch was built without NCCL", "install another torch")


def _between(subject: str, backend: str, devices: Sequence[str], timeout_s: float) -> Finding:
    """Times of exchanges between two processes that are started here."""
    try:
        small, large = _measure(backend, devices, timeout_s)
    except (RuntimeError, OSError) as error:
        mend = "export GLOO_SOCKET_IFNAME=lo" if backend == "gloo" else "NCCL_DEBUG=INFO shows why"
        return Finding(PROBLEM, subject, f"{' '.join(str(error).split())[:300]}; sharded models need it", mend)
    low, mid, high = _percentiles([1e6 * s for s in small])
    slow, usual, fast = _percentiles([LARGE / s / 1e9 for s in large])
    text = f"{mid:.3g} us ({low:.3g} to {high:.3g}) an exchange of one number"
    text += f"; {usual:.3g} GB/s ({slow:.3g} to {fast:.3g}) from one to the other, {LARGE // MIB} MiB each way"
    data = {
        "latency_us": mid, "latency_p10": low, "latency_p90": high, "gb_per_s": usual, "gb_per_s_p10": slow,
        "gb_per_s_p90": fast, "backend": backend,
    }  # fmt: skip
    return Finding(OK, subject, text, data=data)


def _measure(backend: str, devices: Sequence[str], timeout_s: float) -> tuple[list[float], list[float]]:
    """Seconds of small and of large exchanges.

    Raises:
        RuntimeError: the processes did not meet in time, or one ended.
    """
    context: Any = torch.multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="doctor") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, backend, [*devices], folder, timeout_s, sender), daemon=True)
            for rank in range(len(devices))
        ]
        for process in ranks:
            process.start()
        sender.close()
        try:
            return _answer(receiver, timeout_s)
        finally:
            # those that answered are about to end by themselves
            for process in ranks:
                process.join(0.5)
                process.kill()
                process.join()


def _answer(conn: Connection, timeout_s: float) -> tuple[list[float], list[float]]:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not conn.poll(0.1):
            continue
        try:
            kind, answer = conn.recv()
        except EOFError:
            raise RuntimeError("the processes ended before they could exchange anything") from None
        if kind == "error":
            raise RuntimeError(f"the processes could not exchange anything: {answer}")
        return answer  # type: ignore[no-any-return]
    raise RuntimeError(f"the processes did not exchange anything within {timeout_s:g} s")


def _rank(rank: int, backend: str, devices: list[str], folder: str, timeout_s: float, conn: Connection) -> None:
    """One process."""
    torch.set_num_threads(1)
    try:
        if devices[rank] != "cpu":
            torch.cuda.set_device(torch.device(devices[rank]))
        dist.init_process_group(
            backend, f"file://{folder}/store", rank=rank, world_size=len(devices),
            timeout=timedelta(seconds=timeout_s),
        )  # fmt: skip
        seconds = tuple(_exchanges(numbers, devices[rank], len(devices)) for numbers in (1, LARGE // 4))
        if rank == 0:
            conn.send(("found", seconds))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        conn.send(("error", " ".join(f"{type(error).__name__}: {error}".split())[:200]))


def _exchanges(numbers: int, device: str, ranks: int) -> list[float]:
    """Seconds of each all-to-all of so many fp32 numbers to each rank."""
    sent = torch.ones(numbers * ranks, device=device)
    received = torch.empty_like(sent)
    taken = []
    for _ in range(3 + CALLS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_to_all_single(received, sent)
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return taken[3:]


def _peers(gpus: Sequence[torch.device]) -> Iterator[Finding]:
    """Which GPUs reach each other's memory without the host."""
    pairs = [(a, b) for a in gpus for b in gpus if a.index < b.index]
    cuda: Any = torch.cuda
    without = [(a.index, b.index) for a, b in pairs if not cuda.can_device_access_peer(a.index, b.index)]
    if without:
        named = ", ".join(f"{a}-{b}" for a, b in without[:6])
        text = f"{len(without)} of {len(pairs)} pairs go through the host: {named}"
        yield Finding(NOTE, "GPUs, peer access", text, "`nvidia-smi topo -m` shows how they are connected")
    else:
        yield Finding(OK, "GPUs, peer access", f"all {len(pairs)} pairs reach each other's memory")
    yield _peer_copy(gpus[0], gpus[1])


def _peer_copy(source_device: torch.device, target_device: torch.device) -> Finding:
    source = torch.ones(4 * LARGE, dtype=torch.uint8, device=source_device)
    to = torch.empty_like(source, device=target_device)
    times = []
    for _ in range(3 + CALLS):
        torch.cuda.synchronize(source_device)
        begin = time.perf_counter()
        to.copy_(source)
        torch.cuda.synchronize(target_device)
        times.append(time.perf_counter() - begin)
    low, mid, high = _percentiles([source.nbytes / s / 1e9 for s in times[3:]])
    text = f"{mid:.3g} GB/s ({low:.3g} to {high:.3g}), copies of {source.nbytes // MIB} MiB"
    return Finding(
        OK,
        f"GPU {source_device.index} to GPU {target_device.index}",
        text,
        data={"gb_per_s": mid, "p10": low, "p90": high},
    )


def _percentiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The tenth percentile, the median and the ninetieth."""
    ordered = sorted(numbers)
    low, mid, high = (four_digits(ordered[round(q * (len(ordered) - 1))]) for q in (0.1, 0.5, 0.9))
    return low, mid, high
