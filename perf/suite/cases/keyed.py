"""Cases of the suite: what a model does with keyed batches, by TorchRec's names, so that both run it.

A KeyedJaggedTensor keeps what it has computed, so that each call begins with one that has computed nothing: making it
is part of the call, on both sides. Sizes: F keys x B bags of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.perf.suite.case import (
    Call,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.cases.lookup import CUDA, EVERY, INPUTS
from shardwise.perf.suite.libraries import ours, torchrec
from shardwise.perf.suite.operations import jagged_types
from shardwise.perf.suite.operations.inputs import (
    batch,
    columns,
    dims,
    groups,
    pieces,
)
from shardwise.perf.suite.operations.operation import Size, contents, difference
from shardwise.perf.suite.peers import peer_calls

SIZES = (Size(26, 64), Size(26, 8192))
SMALL = Size(3, 4)
FLOOR = "tensors: every input and every output once"
_CALLS = {operation.name: operation.call for operation in jagged_types.OPERATIONS}


@dataclass(frozen=True)
class Tensors:
    """The tensors of a batch and of two KeyedTensors, on the device."""

    size: Size
    keys: list[str]
    values: Tensor
    lengths: Tensor
    columns: list[Tensor]

    def kjt(self, lib: Any, prefix: str = "") -> Any:
        """A KeyedJaggedTensor that has computed nothing."""
        keys = [prefix + key for key in self.keys] if prefix else self.keys
        return lib.KeyedJaggedTensor(keys, self.values, None, self.lengths)

    def kts(self, lib: Any) -> list[Any]:
        """Two KeyedTensors."""
        widths = dims(self.size)
        names = [[f"{letter}{f}" for f in range(self.size.keys)] for letter in "fg"]
        return [lib.KeyedTensor(keys, widths, values) for keys, values in zip(names, self.columns, strict=True)]


def _tensors(size: Size, device: str) -> Tensors:
    made = batch(size)
    placed = [x.clone().to(device) for x in (made.values, made.lengths, columns(size, 0), columns(size, 1))]
    return Tensors(size, made.keys, placed[0], placed[1], placed[2:])


@dataclass(frozen=True)
class Operation:
    """An operation of jagged_types.py: what it is given, and the keys of its result in order, "g" those of a second."""

    name: str
    state: Callable[[Any, Tensors], Any]
    keys: Callable[[list[str]], list[str]]


def _itself(keys: list[str]) -> list[str]:
    return keys


def _each(t: Tensors) -> list[int]:
    return [1] * t.size.keys


def _reversed(t: Tensors) -> list[int]:
    return list(range(t.size.keys))[::-1]


_OF_BATCHES = (
    Operation("KJT from_..._sync", lambda lib, t: (t.keys, t.values, t.lengths, None, {}), _itself),
    Operation("KJT split in two", lambda lib, t: (t.kjt(lib), jagged_types._halves(t.size)), _itself),
    Operation("KJT split by key", lambda lib, t: (t.kjt(lib), _each(t)), _itself),
    Operation("KJT permute, reversed", lambda lib, t: (t.kjt(lib), _reversed(t)), lambda keys: keys[::-1]),
    Operation(
        "KJT permute, every other key", lambda lib, t: (t.kjt(lib), _reversed(t)[::-2][: -(-t.size.keys // 2)]),
        lambda keys: keys[::2],
    ),
    Operation("KJT to_dict", lambda lib, t: t.kjt(lib), _itself),
    Operation("KJT [key] of all keys", lambda lib, t: t.kjt(lib), _itself),
    Operation(
        "KJT concat of two", lambda lib, t: [t.kjt(lib), t.kjt(lib, "g")],
        lambda keys: [*keys, *(f"g{key}" for key in keys)],
    ),
)  # fmt: skip


# not in the short suite of a CPU: they do about what others of it do
_SIBLINGS = ("KJT split in two", "KJT permute, every other key", "KJT [key] of all keys")


def _bags(result: Any) -> list[tuple[Tensor, Tensor]]:
    """Values and lengths of each key of a result: a batch, several of them, or JaggedTensors."""
    if isinstance(result, (list, tuple)):
        return [pair for part in result for pair in _bags(part)]
    if isinstance(result, dict):
        return _bags(list(result.values()))
    lengths = result.lengths()
    if not hasattr(result, "keys"):
        return [(result.values(), lengths)]
    of_keys = lengths.view(len(result.keys()), -1)
    counts = of_keys.sum(1).tolist()
    return list(zip(torch.split(result.values(), counts), of_keys, strict=True))


def _nbytes(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.nbytes
    return sum(map(_nbytes, result.values() if isinstance(result, dict) else result))


def _of_batch(setting: Setting, operation: Operation, size: Size) -> Ready:
    size = SMALL if setting.small else size
    inputs = [_tensors(size, setting.device) for _ in range(INPUTS)]

    def run(lib: Any, t: Tensors) -> Any:
        return _CALLS[operation.name](lib, operation.state(lib, t))

    def calls(lib: Any) -> Sequence[Call]:
        return [partial(run, lib, t) for t in inputs]

    peers, trouble = peer_calls(setting, {"torchrec": lambda: calls(torchrec())})

    def check() -> None:
        result = run(ours(), inputs[0])
        known = {prefix + key: (values, lengths) for key, values, _, lengths in pieces(size) for prefix in ("", "g")}
        bags = [(values.cpu(), lengths.cpu()) for values, lengths in _bags(result)]
        assert len(bags) == len(operation.keys(inputs[0].keys)), f"{operation.name}: {len(bags)} keys"
        for key, (values, lengths) in zip(operation.keys(inputs[0].keys), bags, strict=True):
            assert torch.equal(values, known[key][0]) and torch.equal(lengths, known[key][1]), key
        for name, others in peers.items():
            unlike = difference(contents(result), contents(others[0]()))
            assert not unlike, f"{operation.name}, {name}: {unlike}"

    return Ready(calls(ours()), check, peers=peers, graph=False, notes={"size": str(size), **trouble})


def _regroup(setting: Setting, name: str, size: Size, both_ways: bool = False) -> Ready:
    size = SMALL if setting.small else size
    inputs, wanted = [_tensors(size, setting.device) for _ in range(INPUTS)], groups(size)
    if both_ways:
        for t in inputs:
            for x in t.columns:
                x.requires_grad_()

    def calls(lib: Any) -> Sequence[Call]:
        if name != "KTRegroupAsDict":
            return [partial(_CALLS[name], lib, (t.kts(lib), wanted)) for t in inputs]
        module = lib.KTRegroupAsDict(wanted, jagged_types._names(wanted))
        return [partial(module, t.kts(lib)) for t in inputs]

    def grouped(t: Tensors) -> list[Tensor]:
        parts = dict[str, Tensor]()
        for letter, values in zip("fg", t.columns, strict=True):
            split = torch.split(values, dims(size), 1)
            parts |= {f"{letter}{f}": part for f, part in enumerate(split)}
        return [torch.cat([parts[key] for key in group], 1) for group in wanted]

    def plain(t: Tensors) -> Any:
        out = grouped(t)
        return torch.autograd.grad(out, t.columns, [x.detach() for x in out]) if both_ways else out

    peers, trouble = peer_calls(
        setting, {"torchrec": lambda: calls(torchrec()), "torch": lambda: [partial(plain, t) for t in inputs]}
    )

    def check() -> None:
        result = contents(calls(ours())[0]())
        listed = list(result.values()) if isinstance(result, dict) else result
        # each column is copied, and a gradient is a copy or, of keys in one group, the gradient itself
        unlike = difference(listed, contents(plain(inputs[0])))
        assert not unlike, f"{name}: {unlike}"
        for peer, others in peers.items():
            peer_contents = contents(others[0]())
            unlike = difference(
                listed, list(peer_contents.values()) if isinstance(peer_contents, dict) else peer_contents
            )
            assert not unlike, f"{name}, {peer}: {unlike}"

    moved = 2 * _nbytes(inputs[0].columns) * (2 if both_ways else 1)
    return Ready(calls(ours()), check, moved, FLOOR, peers, notes={"size": str(size), **trouble})


def _to_device(setting: Setting, size: Size) -> Ready:
    """A batch from the host to the device, without waiting for it."""
    size = SMALL if setting.small else size
    inputs = [_tensors(size, "cpu") for _ in range(INPUTS)]
    device, pinned = torch.device(setting.device), setting.device == "cuda"

    def calls(lib: Any) -> Sequence[Call]:
        made = [t.kjt(lib).pin_memory() if pinned else t.kjt(lib) for t in inputs]
        return [partial(kjt.to, device, non_blocking=True) for kjt in made]

    peers, trouble = peer_calls(setting, {"torchrec": lambda: calls(torchrec())})

    def check() -> None:
        moved: Any = calls(ours())[0]()
        assert moved.values().device.type == device.type
        assert torch.equal(moved.values().cpu(), inputs[0].values)
        assert torch.equal(moved.lengths().cpu(), inputs[0].lengths)

    moved = _nbytes([inputs[0].values, inputs[0].lengths])
    return Ready(
        calls(ours()), check, moved, "ids and lengths once", peers, graph=False, notes={"size": str(size), **trouble}
    )  # fmt: skip


CASES: Sequence[Case] = (
    *(
        Case(
            # pytest puts names into brackets
            f"{operation.name.replace('[', 'by ').replace(']', '')}, {size}",
            "keyed",
            partial(_of_batch, operation=operation, size=size),
            CUDA if operation.name in _SIBLINGS else EVERY,
        )
        for operation in _OF_BATCHES
        for size in SIZES
    ),
    *(
        Case(
            f"{name}, {size}", "keyed", partial(_regroup, name=name, size=size, both_ways=both_ways),
            CUDA if size == SIZES[-1] and name != "KT regroup" else EVERY, slow=size == SIZES[-1],
        )
        for name, both_ways in (
            ("KT regroup", False), ("KT regroup, forward and backward", True), ("KTRegroupAsDict", False),
        )
        for size in SIZES
    ),
    *(
        Case(
            f"KJT to the device, {size}", "keyed", partial(_to_device, size=size),
            frozenset({"cuda", "full"}), devices=frozenset({"cuda"}),
        )
        for size in SIZES
    ),
)  # fmt: skip
