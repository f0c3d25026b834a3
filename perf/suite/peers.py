"""Peers to be measured beside us: which can be imported, and the same tables in their hands, over one memory.

All sides of a case look up and update the same rows in turn, so that a case needs the memory of one set of tables, and
none of them has the better pages. Letters as in batches.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels import RULES
from shardwise.kernels.features import DIM, FIRST_ROW, ROWS
from shardwise.perf.suite.batches import Batch
from shardwise.perf.suite.case import Call, Setting, in_a_line
from shardwise.perf.suite.libraries import fbgemm

# how far apart two results may be, in units of the largest number of one of them
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# rows up to so many bytes stay allocated from case to case: the pages of new memory cost more than a measurement
_KEPT_BYTES = 2 << 30
_kept: dict[str, tuple[Tensor, torch.dtype]] = {}
# rule -> FBGEMM's name of it; on the CPU it has the first three
_FBGEMM_RULES = {
    "sgd": "EXACT_SGD", "adagrad": "EXACT_ADAGRAD", "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD", "adam": "ADAM",
    "partial_rowwise_adam": "PARTIAL_ROWWISE_ADAM", "lamb": "LAMB", "partial_rowwise_lamb": "PARTIAL_ROWWISE_LAMB",
    "lars_sgd": "LARS_SGD",
}  # fmt: skip
_FBGEMM_CPU_RULES = ("sgd", "adagrad", "rowwise_adagrad")
_FBGEMM_TYPES = {torch.float32: "FP32", torch.float16: "FP16"}
_FBGEMM_POOLING = {"sum": "SUM", "mean": "MEAN", "sequence": "NONE"}
EPS, LR = 1e-6, 0.01


def peer_calls(
    setting: Setting, builders: Mapping[str, Callable[[], Sequence[Call]]], *, call: bool = True
) -> tuple[dict[str, Sequence[Call]], dict[str, object]]:
    """Calls of each peer that the setting names, and a note for each that could not be set up or (`call`) called.

    A peer that fails on this device must not take ours along.
    """
    calls: dict[str, Sequence[Call]] = {}
    notes: dict[str, object] = {}
    for name, build in builders.items():
        if name not in setting.peers:
            continue
        try:
            made = build()
            if call:
                made[0]()
        except Exception as error:
            notes[f"no {name}"] = in_a_line(error)
        else:
            calls[name] = made
    return calls, notes


def assert_close(got: Tensor, want: Tensor, tolerance: float, subject: str) -> None:
    """Raise AssertionError unless all differences are within `tolerance` of the largest wanted number."""
    assert got.shape == want.shape, f"{subject}: {list(got.shape)} is not {list(want.shape)}"
    if not want.numel():
        return
    assert bool(got.isfinite().all()), f"{subject}: not finite"
    largest = float(want.abs().max().double().clamp(min=1e-30))
    off = float((got.float() - want.float()).abs().max()) / largest
    assert off <= tolerance, f"{subject}: off by {off:.2e} of the largest, {tolerance:g} is allowed"


def assert_peers(got: Tensor, peers: Mapping[str, Sequence[Call]], tolerance: float) -> None:
    """Raise AssertionError unless the first call of each peer gives that, too."""
    for name, calls in peers.items():
        output: Any = calls[0]()
        assert_close(got, output.float(), tolerance, name)


def table_memory(elements: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of numbers between -1 and 1, which cases share one after another where they are not too many."""
    nbytes = elements * dtype.itemsize
    memory, kept_dtype = _kept.get(device, (None, dtype))
    if memory is None or memory.numel() < nbytes or kept_dtype != dtype:
        if memory is None or memory.numel() < nbytes:
            _kept.pop(device, None)
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype).uniform_(
            -1, 1, generator=torch.Generator(device).manual_seed(0)
        )
        if nbytes <= _KEPT_BYTES:
            _kept[device] = memory, dtype
    return memory[:nbytes].view(dtype)


def release() -> None:
    """Give the kept rows back."""
    _kept.clear()


def fbgemm_tables(batch: Batch, *, rule: str = "sgd", start: float = 0.0) -> Any:
    """FBGEMM's table-batched lookup over the batch's own rows, whose states are all `start`.

    Raises:
        NotImplementedError: FBGEMM has no such rule on this device.
    """
    peer, device = fbgemm(), batch.weights.device
    if rule not in (_FBGEMM_RULES if device.type == "cuda" else _FBGEMM_CPU_RULES):
        raise NotImplementedError(f"FBGEMM has no {rule} on {device.type}")
    cuda = device.type == "cuda"
    location = peer.EmbeddingLocation.DEVICE if cuda else peer.EmbeddingLocation.HOST
    compute = peer.ComputeDevice.CUDA if cuda else peer.ComputeDevice.CPU
    more: dict[str, Any] = {}
    if (
        not cuda
        and "preallocated_host_buffers"
        in inspect.signature(peer.SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    ):
        # it would fill as much memory with zeros first
        more["preallocated_host_buffers"] = {"weights": batch.weights.data}
    tables = peer.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, location, compute) for rows, dim in batch.features[:, [ROWS, DIM]].tolist()],
        optimizer=peer.EmbOptimType[_FBGEMM_RULES[rule]], learning_rate=LR, eps=EPS, stochastic_rounding=False,
        weights_precision=peer.SparseType[_FBGEMM_TYPES[batch.weights.dtype]],
        pooling_mode=peer.PoolingMode[_FBGEMM_POOLING[batch.pooling]], device=device, **more,
    )  # fmt: skip
    # the same memory but not the same tensor: autograd must not see that the others change it
    (tables.weights_dev if cuda else tables.weights_host).data = batch.weights.data
    if RULES[rule].kinds:
        for of_table in tables.split_optimizer_states():
            for state in of_table:
                state.fill_(start)
    return tables


def bags_of(batch: Batch) -> list[nn.EmbeddingBag]:
    """A torch.nn.EmbeddingBag for each feature, over the batch's own rows."""
    made = []
    mode = "mean" if batch.pooling == "mean" else "sum"
    for first, rows, dim in batch.features[:, [FIRST_ROW, ROWS, DIM]].tolist():
        table = batch.weights.data.view(-1, dim)[first : first + rows]
        made.append(nn.EmbeddingBag(rows, dim, mode=mode, sparse=True, include_last_offset=True, _weight=table))
    return made


def torch_lookup(bags: Sequence[nn.EmbeddingBag], batch: Batch) -> Callable[[], Tensor]:
    """The lookup of all features with torch's modules, outputs side by side as ours."""
    count = batch.grad.shape[0]
    ends = batch.offsets[::count].tolist()
    parts = []
    for f, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        weights = None if batch.per_id_weights is None else batch.per_id_weights[begin:end].to(batch.weights.dtype)
        offsets = batch.offsets[f * count : (f + 1) * count + 1] - begin
        parts.append((batch.indices[begin:end], offsets, weights))

    def look_up() -> Tensor:
        return torch.cat([bag(*part) for bag, part in zip(bags, parts, strict=True)], 1)

    return look_up


def torch_optimizer(rule: str, bags: Sequence[nn.EmbeddingBag], *, start: float = 0.0) -> torch.optim.Optimizer:
    """torch's optimizer of sparse gradients that does what the rule does.

    Raises:
        NotImplementedError: there is none.
    """
    parameters = [bag.weight for bag in bags]
    if rule == "sgd":
        return torch.optim.SGD(parameters, lr=LR)
    if rule == "adagrad":
        return torch.optim.Adagrad(parameters, lr=LR, eps=EPS, initial_accumulator_value=start)
    if rule == "adam":
        # torch adds eps before it corrects the second moment, we behind: the same at the first step
        return torch.optim.SparseAdam(parameters, lr=LR, eps=EPS * (1 - 0.999) ** 0.5)
    raise NotImplementedError(f"torch.optim has no sparse {rule}")


def stepped(optimizer: Any) -> Callable[[], None]:
    """A step of an optimizer, which leaves no gradients behind."""

    def after() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return after
