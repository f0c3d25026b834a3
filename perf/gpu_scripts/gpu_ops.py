"""The part of gpu_check.py about jagged ops, whole collections and graphs.

A jagged op on the device is held against the same function on CPU tensors, which is its torch twin or its numba loop
and is held against its reference by the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import shardwise.jagged
import shardwise.kernels
from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
)
from shardwise.perf.gpu_scripts.gpu_sizes import Sizes
from shardwise.perf.suite.libraries import Library
from shardwise.perf.suite.operations.jagged_ops import OPERATIONS
from shardwise.perf.suite.operations.operation import Size, difference
from shardwise.perf.suite.timing import graphs_of

OURS = Library("shardwise", [shardwise.jagged, shardwise.kernels])
# of the largest value of a tensor; gradients are sums of products of what was rounded
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def jagged_correctness(device: str, sizes: Sizes) -> dict[str, Any]:
    """Every jagged op, and its backward, on ragged bags: against the CPU in each dtype, and the same bits each time."""
    differences, refused = {}, []
    for size in (Size(1, sizes.checked_batch), Size(sizes.checked_tables, sizes.checked_batch)):
        for case in OPERATIONS:
            for dtype, tolerance in TOLERANCES.items():
                state = _cast(case.make(OURS, size), dtype)
                floats = any(isinstance(leaf, Tensor) and leaf.dtype is dtype for leaf, _ in state)
                if dtype is not torch.float32 and not floats:
                    # ids alone have been compared
                    continue
                name = f"{case.name}, {size}, {str(dtype).removeprefix('torch.')}"
                try:
                    expected = case.read(case.call(OURS, _fresh(state, "cpu")))
                except (RuntimeError, TypeError, ValueError) as error:
                    refused.append(f"{name}: {str(error).splitlines()[0][:80]}")
                    continue
                got = [case.read(case.call(OURS, _fresh(state, device))) for _ in range(sizes.race_repeats)]
                unlike = difference(_on_host(got[0]), _on_host(expected), max(tolerance, case.tolerance))
                if unlike:
                    differences[name] = unlike
                elif any(difference(_on_host(other), _on_host(got[0]), 0.0) for other in got[1:]):
                    differences[name] = f"other bits in one of {sizes.race_repeats} runs"
    assert not differences, differences
    return {"ops": len(OPERATIONS), "repeats": sizes.race_repeats, "refused_on_the_cpu_too": refused}


def _cast(state: Any, dtype: torch.dtype) -> Any:
    """The inputs of an op with their fp32 tensors in another dtype."""

    def cast(leaf: Any) -> Any:
        return leaf.detach().to(dtype) if isinstance(leaf, Tensor) and leaf.dtype is torch.float32 else leaf

    return tree_map(cast, [(leaf, isinstance(leaf, Tensor) and leaf.requires_grad) for leaf in state])


def _fresh(state: Sequence[tuple[Any, bool]], device: str) -> list[Any]:
    """The inputs as new tensors on a device, those with gradients as leaves."""

    def moved(leaf: Any) -> Any:
        return leaf.detach().clone().to(device) if isinstance(leaf, Tensor) else leaf

    inputs = [tree_map(moved, leaf) for leaf, _ in state]
    for leaf, (_, trained) in zip(inputs, state, strict=True):
        if trained:
            leaf.requires_grad_()
    return inputs


def _on_host(result: Any) -> Any:
    parts = list(result) if isinstance(result, tuple) else result
    return tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, parts)


def collections(device: str, sizes: Sizes) -> dict[str, Any]:
    """A collection trains on the device as on the CPU, and survives a bad id: nothing of that batch is written."""
    on_device, on_host = _collection(device), _collection("cpu")
    for seed in range(4):
        for model, where in ((on_device, device), (on_host, "cpu")):
            model(_batch(seed, where)).values().square().sum().backward()
    before = {name: tensor.cpu().clone() for name, tensor in on_device.state_dict().items()}
    unlike = {
        name: difference(before[name], tensor, 1e-5) for name, tensor in on_host.state_dict().items()
    }  # fmt: skip
    assert not any(unlike.values()), unlike
    bad = _batch(0, device)
    bad.values()[3] = 10**6
    try:
        on_device(bad).values().sum().backward()
        on_device.check()
        raise AssertionError("a bad id raised nothing")
    except IndexError as error:
        message = str(error)
        assert "1000000" in message, message
    after = {name: tensor.cpu() for name, tensor in on_device.state_dict().items()}
    assert all(torch.equal(before[name], after[name]) for name in before), "a bad batch changed a table"
    on_device(_batch(5, device)).values().sum().backward()
    on_device.check()
    changed = any(not torch.equal(before[name], tensor.cpu()) for name, tensor in on_device.state_dict().items())
    assert changed, "nothing was trained after a bad batch"
    return {"message": message}


def graph_capture(device: str, sizes: Sizes) -> dict[str, Any]:
    """A step recorded once as a CUDA graph gives the bits of eager steps on other ids; without CUDA eager twice."""
    eager, recorded = _collection(device), _collection(device)
    batch = _batch(0, device)
    ids = batch.values().clone()
    static_batch = KeyedJaggedTensor(batch.keys(), ids, lengths=batch.lengths(), offsets=batch.offsets())
    out = torch.zeros(batch.stride(), sum(config.embedding_dim for config in TABLES), device=device)

    def step() -> None:
        pooled = recorded(static_batch).values()
        out.copy_(pooled.detach())
        pooled.backward(torch.full_like(pooled, 0.5))

    start = {name: tensor.clone() for name, tensor in recorded.state_dict().items()}
    (replay,) = graphs_of([step]) if device == "cuda" else [step]
    # what the recording itself trained
    recorded.load_state_dict(start)
    for group in recorded._groups:
        for state in group.states:
            state.zero_()
        group.step.zero_()
    for seed in range(3):
        ids.copy_(_ids(seed, batch.lengths()).to(device))
        replay()
        now = KeyedJaggedTensor(batch.keys(), ids.clone(), lengths=batch.lengths())
        pooled = eager(now).values()
        pooled.backward(torch.full_like(pooled, 0.5))
        assert torch.equal(out, pooled.detach()), f"lookup {seed} of the graph has other bits"
    unlike = [
        name for name, tensor in eager.state_dict().items() if not torch.equal(recorded.state_dict()[name], tensor)
    ]
    assert not unlike, f"other bits after the graph's steps: {unlike}"
    return {"replays": 3, "captured": device == "cuda"}


TABLES = [
    EmbeddingBagConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{t}"])
    for t, (rows, dim) in enumerate([(40, 16), (3, 16), (70, 8), (50, 64)])
]


def _collection(device: str) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    # made on the CPU: a device draws other numbers
    made = EmbeddingBagCollection(TABLES)
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.05})
    return made.to(device)


def _ids(seed: int, lengths: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    counts = lengths.cpu().view(len(TABLES), -1).sum(1).tolist()
    drawn = [
        torch.randint(0, table.num_embeddings, (count,), generator=generator)
        for table, count in zip(TABLES, counts, strict=True)
    ]
    return torch.cat(drawn)


def _batch(seed: int, device: str, samples: int = 7) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 5, (len(TABLES) * samples,), generator=torch.Generator().manual_seed(seed + 100))
    lengths[0] = 4
    keys = [table.feature_names[0] for table in TABLES]
    return KeyedJaggedTensor(keys, _ids(seed, lengths), lengths=lengths).to(torch.device(device))


SECTIONS: dict[str, Callable[[str, Sizes], dict[str, Any]]] = {
    "jagged_correctness": jagged_correctness,
    "collections": collections,
    "graph_capture": graph_capture,
}
